"""Scorers that give log-probs of given tokens and nothing else: an engine's, and those of a service at a URL
(``prompt_logprobs`` of an OpenAI-compatible server: vLLM's, ``roll serve``).

Both report, for every position of a sequence, the log-prob of the token there and the most probable tokens in its
place, at temperature 1. Position t of a report is about token t given the tokens before it; the columns of a batch are
laid out the same way, so nothing is shifted.
"""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from roll.config.strategies.engines import RemoteStrategyConfig
from roll.models.layouts import TopTokens
from roll.protocol.metrics import RankInfo
from roll.protocol.vision import IMAGES
from roll.strategies.base import (
    ALL_WEIGHTS,
    Comparisons,
    ModelStrategy,
    Output,
    Outputs,
    StateKind,
    TensorBatch,
    WeightSelection,
    create_generation_strategy,
)
from roll.strategies.engines.requests import PromptScore

ALL = -1  # number of most probable tokens that means the whole vocabulary
LEAST_MASS = 1e-38  # smallest positive number of float32


class ScoringStrategy(ModelStrategy):
    """Columns of a batch from :class:`PromptScore` of its rows. Ranks share rows and nothing else."""

    @abstractmethod
    def scores(self, prompts: Sequence[Sequence[int]], top: int) -> list[PromptScore]:
        """One score a prompt, with the ``top`` most probable tokens, descending (:data:`ALL`: every token)."""

    def shutdown(self) -> None:
        """Free what the strategy holds."""

    @property
    def rank_info(self) -> RankInfo:
        return RankInfo()

    def forward(
        self, batch: TensorBatch, outputs: Outputs, temperature: float = 1.0, comparisons: Comparisons = ()
    ) -> TensorBatch:
        """Log-probs of the response tokens, at temperature 1 only."""
        assert set(outputs) <= {Output.LOG_PROBS} and not comparisons and temperature == 1.0, (outputs, temperature)
        log_probs = torch.zeros(batch["response_mask"].shape)
        for row, (positions, score) in enumerate(self._scored(batch, 0)):
            log_probs[row, positions] = torch.tensor([score.log_probs[at - 1] for at in positions.tolist()])
        return {str(Output.LOG_PROBS): log_probs}

    def forward_top_tokens(self, batch: TensorBatch, wanted: TopTokens, temperature: float = 1.0) -> TensorBatch:
        """Like :meth:`ModelStrategy.forward_top_tokens`; another temperature than 1 with the whole vocabulary only. The
        tail is one minus the listed mass. Raises ValueError: fewer tokens than requested, for instance where the most
        probable ones have ids that the student does not know."""
        assert temperature == 1.0 or not wanted.count, (wanted, temperature)
        mask = batch["response_mask"]
        scored = self._scored(batch, wanted.count or ALL)
        places = [score.top[at - 1] for positions, score in scored for at in positions.tolist()]
        parts = [listed_tokens(entries, wanted, temperature) for entries in places]
        width = len(parts[0][0]) if parts else 0
        columns = {
            "top_log_probs": torch.zeros(*mask.shape, width),
            "top_ids": torch.zeros(*mask.shape, width, dtype=torch.int32),
            "tail_log_prob": torch.zeros(mask.shape),
        }
        if parts:
            log_probs, ids, tails = zip(*parts, strict=True)
            columns["top_log_probs"][mask] = torch.from_numpy(np.stack(log_probs)).float()
            columns["top_ids"][mask] = torch.from_numpy(np.stack(ids)).int()
            columns["tail_log_prob"][mask] = torch.tensor(tails, dtype=torch.float32)
        return columns

    def _scored(self, batch: TensorBatch, top: int) -> Iterator[tuple[torch.Tensor, PromptScore]]:
        """Yield each row's response positions and its score; nothing after the last of them is computed."""
        images = batch.get(IMAGES)
        if images is not None and any(one is not None for one in images):
            raise ValueError(
                f"{self.role.name}: {self.role.strategy_args.strategy_name} scores token ids here, and takes no images"
            )
        places = [own.nonzero()[:, 0] for own in batch["response_mask"]]
        prompts = [
            row[: int(own.max()) + 1].tolist() for row, own in zip(batch["input_ids"], places, strict=True) if len(own)
        ]
        scores = iter(self.scores(prompts, top) if prompts else ())
        for own in places:
            yield own, next(scores) if len(own) else PromptScore([], [])

    def named_full_weights(
        self, bucket_bytes: int, selection: WeightSelection = ALL_WEIGHTS
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        raise AssertionError("a scorer gives no weights")

    def save_hf(self, path: object) -> None:
        raise AssertionError("a scorer gives no weights")

    def _device_tensors(self, kind: StateKind) -> list[torch.Tensor]:
        return []


def listed_tokens(
    entries: Sequence[tuple[int, float]], wanted: TopTokens, temperature: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Log-probs (k,), descending, ids (k,), and the log of the mass of all other tokens. ``entries``: id and log-prob
    of the most probable tokens; of all of them where ``temperature`` is not 1."""
    ids = np.fromiter((token for token, _ in entries), dtype=np.int64, count=len(entries))
    log_probs = np.fromiter((value for _, value in entries), dtype=np.float64, count=len(entries))
    if temperature != 1.0:
        tempered = log_probs / temperature
        highest = float(tempered.max())
        log_probs = tempered - highest - np.log(np.exp(tempered - highest).sum())
    order = np.argsort(np.negative(log_probs), kind="stable")
    order = order[ids[order] < wanted.limit]
    size = min(wanted.count or len(order), wanted.limit)
    if len(order) < size:
        raise ValueError(
            f"{len(order)} of {size} most probable tokens have an id below {wanted.limit}; the student has no others"
        )
    order = order[:size]
    # Rounding may make the listed mass more than 1.
    rest = max(0.0, 1.0 - float(np.exp(log_probs[order]).sum()))
    return log_probs[order], ids[order], math.log(max(rest, LEAST_MASS))


class EngineScoring(ScoringStrategy):
    """A generation engine in this worker's process that only scores given tokens."""

    def _configure(self) -> None:
        arguments = self.role.strategy_args
        own = arguments.strategy_config.get("engine_args") or {}
        options = {**arguments.strategy_config, "engine_args": {"max_logprobs": ALL, **own}}
        sized = replace(self.role, strategy_args=replace(arguments, strategy_config=options))
        self._engine = create_generation_strategy(sized, self.seed)

    def initialize(self, num_training_steps: int = 0) -> None:
        self._refuse_steps(num_training_steps)
        self._engine.initialize()

    def scores(self, prompts: Sequence[Sequence[int]], top: int) -> list[PromptScore]:
        return self._engine.prompt_scores(prompts, top)

    def offload_states(self, include: Collection[StateKind]) -> None:
        self._engine.sleep()

    def load_states(self, include: Collection[StateKind]) -> None:
        self._engine.wake()

    def shutdown(self) -> None:
        self._engine.shutdown()


MAX_REPLY = 512 * 2**20  # bytes of an answer: about 70 for each token that is listed
LOOKUP_SECONDS = 10.0  # limit for the list of models
REQUEST_SECONDS = 120.0  # limit for one try of a request
TOTAL_SECONDS = 900.0
"""Longest outage of a service that a run waits for: as long as the start of a large engine takes."""


class ServiceRefused(RuntimeError):
    """The service does not answer, or its reply is unusable; the message quotes it."""


class RemoteService:
    """An OpenAI-compatible service.

    Args:
        path: of the requests, below ``base_url``.
        total_seconds: of a request, with all its tries.
        request_seconds: of one try.

    Raises:
        ServiceRefused: it cannot be reached, or the name of its model cannot be determined.
    """

    def __init__(
        self,
        options: RemoteStrategyConfig,
        path: str = "completions",
        total_seconds: float = TOTAL_SECONDS,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        # Here, as the class is also that of workers whose scorer is no service.
        import httpx2

        from roll.rewards.http_reward import LOOPBACK, JsonClient, ServiceOptions

        self._base_url = options.base_url.rstrip("/")
        self._key = os.environ.get(options.api_key_env, "") if options.api_key_env else ""
        service = ServiceOptions(
            timeout=total_seconds,
            request_timeout=request_seconds,
            max_retries=options.max_retries,
            concurrency=options.concurrency,
        )
        url = f"{self._base_url}/models"
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # A proxy of the environment cannot reach this host's own loopback.
        trust = httpx2.URL(url).host not in LOOPBACK
        try:
            with httpx2.Client(timeout=LOOKUP_SECONDS, trust_env=trust, headers=headers) as client:
                response = client.get(url)
            response.raise_for_status()
            found = {str(entry["id"]): entry for entry in response.json()["data"]}
        except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ServiceRefused(f"{url}: {type(error).__name__}: {error}") from error
        names = list(found) if options.model is None else [options.model]
        if len(names) != 1 or names[0] not in found:
            raise ServiceRefused(
                f"{url} lists {', '.join(sorted(found)) or 'no model'}; strategy_config.model names one"
            )
        self.model = names[0]
        length = found[self.model].get("max_model_len")
        # Tokens that the model takes; not every server says so.
        self.max_model_len: int | None = length if isinstance(length, int) else None
        self._client = JsonClient(f"{self._base_url}/{path}", service, self._key, MAX_REPLY)
        self.close = self._client.close

    def post(self, bodies: Sequence[Any]) -> list[Any]:
        """The answer to each body; ServiceRefused if one is not answered."""
        replies = self._client.post(bodies)
        if errors := [reply.error for reply in replies if reply.error is not None]:
            raise ServiceRefused(errors[0])
        return [reply.body for reply in replies]


class PromptLogProbs(RemoteService):
    """A service that gives log-probs of prompts."""

    def ask(self, prompts: Sequence[Sequence[int]], top: int) -> list[list[Mapping[str, Any] | None]]:
        """``prompt_logprobs`` of each prompt: by position an object of id to ``logprob``, ``rank`` and
        ``decoded_token``; ServiceRefused if one is not answered."""
        shared = {"model": self.model, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top}
        answers = self.post([shared | {"prompt": list(prompt)} for prompt in prompts])
        found = []
        for prompt, body in zip(prompts, answers, strict=True):
            try:
                rows: Any = body["choices"][0]["prompt_logprobs"]
            except (KeyError, IndexError, TypeError):
                rows = None
            if not isinstance(rows, list):
                raise ServiceRefused(f"{self._base_url}: the answer has no prompt_logprobs")
            if len(rows) != len(prompt):
                raise ServiceRefused(
                    f"{self._base_url}: prompt_logprobs has {len(rows)} positions for a prompt of {len(prompt)} tokens"
                )
            for place, (row, token) in enumerate(zip(rows[1:], prompt[1:], strict=True), start=1):
                if not isinstance(row, Mapping) or str(token) not in row:
                    raise ServiceRefused(
                        f"{self._base_url}: position {place} of prompt_logprobs is not about token {token}, which is "
                        "there"
                    )
            found.append(rows)
        return found


class RemoteScoring(ScoringStrategy):
    """A model that is served elsewhere."""

    config: RemoteStrategyConfig
    _service: PromptLogProbs | None = None

    def initialize(self, num_training_steps: int = 0) -> None:
        """Find the service; ServiceRefused if it does not answer."""
        self._refuse_steps(num_training_steps)
        self._service = PromptLogProbs(self.config)

    def scores(self, prompts: Sequence[Sequence[int]], top: int) -> list[PromptScore]:
        """See the base class; ServiceRefused for no answer, or a log-prob that is none."""
        assert self._service is not None, "initialize() comes first"
        scores = []
        for rows, prompt in zip(self._service.ask(prompts, top), prompts, strict=True):
            score = PromptScore([], [], [])
            for token, row in zip(prompt[1:], rows[1:], strict=True):
                assert row is not None
                try:
                    entries = [(int(key), float(entry["logprob"])) for key, entry in row.items()]
                    rank = row[str(token)].get("rank")
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise ServiceRefused(f"prompt_logprobs: {type(error).__name__}: {error}") from error
                if not all(math.isfinite(value) for _, value in entries):
                    raise ServiceRefused("prompt_logprobs has log-probs that are not finite")
                # The prompt's own token is listed as well; it is the last where it is none of the most probable.
                entries.sort(key=lambda entry: -entry[1])
                score.top.append(entries if top == ALL else entries[:top])
                score.log_probs.append(float(row[str(token)]["logprob"]))
                score.ranks.append(rank if isinstance(rank, int) else 0)
            scores.append(score)
        return scores

    def shutdown(self) -> None:
        if self._service is not None:
            self._service.close()
