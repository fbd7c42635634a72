"""SGLang's engine, one scheduler process a rank, and the sampler inside these.

SGLang reports log-probs from before top-k, top-p and min-p, leaves the prompt out of the repetition penalty, and seeds
samples only in a mode that also exchanges its kernels. So a request brings its settings as ``custom_params``, SGLang's
own stay neutral, and the sampler below takes the place of one of its own: log-probs are those of the distribution that
the token was drawn from, and token t of a sample draws number t of the sample's stream.
"""

from __future__ import annotations

import atexit
import multiprocessing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from roll.strategies.engines.sampling import RowSettings, penalise_repetition

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

BACKEND = "pytorch"
"""SGLang's sampler backend that is replaced by this one: the one that exists on every platform."""


class Row:
    """One sample of a batch: its settings, and the tokens it has seen if it has a repetition penalty."""

    def __init__(self, request: Req, vocab_size: int, device: str) -> None:
        settings = request.sampling_params.custom_params or {}
        # SGLang's own requests (it warms up with some) bring no settings: they are greedy.
        self.temperature = float(settings.get("temperature", 0.0))
        self.top_k = int(settings.get("top_k", 0))
        self.top_p = float(settings.get("top_p", 1.0))
        self.min_p = float(settings.get("min_p", 0.0))
        self.penalty = float(settings.get("repetition_penalty", 1.0))
        self.min_new = int(settings.get("min_new_tokens", 0))
        self.stream_key = int(settings.get("stream_key", "0"), 16)
        self.num_prompt = int(settings.get("num_prompt", len(request.origin_input_ids)))
        self.banned = list(settings.get("end_token_ids", ()))
        self.seen: torch.Tensor | None = None
        if self.penalty != 1:
            context = torch.tensor([*request.origin_input_ids, *request.output_ids], dtype=torch.int64)
            self.seen = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, context, True).to(device)


class Settings(RowSettings):
    """The settings of a batch on the device."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows = rows
        temperature, top_p, min_p, penalty = (
            np.array([getattr(row, name) for row in rows], dtype=np.float32)
            for name in ("temperature", "top_p", "min_p", "penalty")
        )
        super().__init__(temperature, np.array([row.top_k for row in rows], np.int64), top_p, min_p, penalty, device)
        self.stream_keys = np.array([row.stream_key for row in rows], dtype=np.uint64)
        self.num_prompt = np.array([row.num_prompt for row in rows], dtype=np.int64)


class DistributionSampler(Sampler):
    """Draws a token for each row and reports the distribution that it was drawn from."""

    _settings: Settings | None = None

    def forward(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: torch.Tensor,
        *,
        logprob_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens, int64 (B,). SGLang's own signature; ``positions`` (B,) are those of the last token of each row's
        context."""
        logits = logits_output.next_token_logits.float()
        rows = sampling_info.custom_params
        if self._settings is None or self._settings.rows is not rows:
            self._settings = Settings(rows, logits.device)
        generated = positions[: len(rows)].cpu().numpy() + 1 - self._settings.num_prompt
        tokens, log_probs = draw(logits, self._settings, generated)
        if return_logprob:
            self.output_logprob_processor.compute_logprobs(
                log_probs, top_logprobs_nums, token_ids_logprobs, tokens
            ).write_output_to(logits_output)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def draw(logits: torch.Tensor, settings: Settings, generated: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """A token a row, int64 (B,), and the log-probs (B, V) of the distribution it comes from, -inf for what could not be
    drawn. ``logits``: float32 (B, V); may be overwritten. ``generated``: int64 (B,), tokens that each response has."""
    rows = settings.rows
    if settings.penalty is not None:
        nothing = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        seen = torch.stack([nothing if row.seen is None else row.seen for row in rows])
        logits = penalise_repetition(logits, seen, settings.penalty)
    for index, row in enumerate(rows):
        if generated[index] < row.min_new and row.banned:
            logits[index, row.banned] = -torch.inf
    scaled = settings.filtered(logits)
    log_probs = scaled.log_softmax(-1)
    if settings.all_greedy:
        tokens = logits.argmax(-1)
    else:
        tokens = settings.drawn(logits, scaled.softmax(-1), settings.stream_keys, generated)
    for index, row in enumerate(rows):
        if row.seen is not None:
            row.seen[tokens[index]] = True
    return tokens, log_probs


def _begin(self: SamplingBatchInfo, batch: ScheduleBatch, vocab_size: int) -> None:
    self.custom_params = [Row(request, vocab_size, batch.device) for request in batch.reqs]


def _keep(self: SamplingBatchInfo, keep_indices: list[int], keep_indices_device: torch.Tensor) -> None:
    self.custom_params = [self.custom_params[index] for index in keep_indices]


def _append(self: SamplingBatchInfo, other: SamplingBatchInfo) -> None:
    self.custom_params = [*self.custom_params, *other.custom_params]


def install() -> None:
    """Make this the sampler of the SGLang in this process, and let its batches carry rows."""
    register_sampler_backend(BACKEND, DistributionSampler)
    # In SGLang these three methods are empty hooks, called as a batch is made, filtered and merged.
    SamplingBatchInfo.adjusted_from_schedule_batch = _begin
    SamplingBatchInfo.adjusted_filter_batch = _keep
    SamplingBatchInfo.adjusted_merge_batch = _append


_SECONDS_TO_END = 10.0


def run_scheduler(*arguments: object, **keywords: object) -> None:
    """SGLang's scheduler process, with the sampler of this project."""
    install()
    run_scheduler_process(*arguments, **keywords)


class TokenEngine(Engine):
    """An engine without a detokenizer: token ids are all that goes in and comes out."""

    send_to_rpc: Any
    run_scheduler_process_func = staticmethod(run_scheduler)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *_: object, **__: object) -> tuple[list[Any], list[str]]:
        return [], []

    def shutdown(self) -> None:
        """End the schedulers and wait for them. SGLang's own would end every child of this process."""
        atexit.unregister(self.shutdown)
        if (watchdog := getattr(self.tokenizer_manager, "_subprocess_watchdog", None)) is not None:
            watchdog.stop()
        own = set(self.get_all_child_pids())
        schedulers = [process for process in multiprocessing.active_children() if process.pid in own]
        for process in schedulers:
            process.kill()
        for process in schedulers:
            process.join(_SECONDS_TO_END)
        socket, self.send_to_rpc = self.send_to_rpc, None
        if socket is not None:
            socket.close(linger=0)
