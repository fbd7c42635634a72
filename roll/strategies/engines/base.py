"""The interface of generation engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from roll.config.roles import WorkerConfig
from roll.config.strategies.engines import EngineConfig
from roll.config.strategies.registry import typed_strategy_config
from roll.models.build import checked_config
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, PromptScore, longest_sequence
from roll.weight_sync.encoding import Checksum, tensor_checksum

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

MID_UPDATE = "step() between start_weight_update and finish_weight_update"


class GenerationStrategy(ABC):
    """An engine driven by repeated :meth:`step` calls from one thread."""

    _config: EngineConfig
    takes_adapters = False
    """True for an engine that computes with separate LoRA adapters (:meth:`update_adapter`)."""

    def __init__(self, role: WorkerConfig, seed: int = 42) -> None:
        self.role = role
        self.seed = seed
        self._name = role.strategy_args.strategy_name
        config = typed_strategy_config(role.strategy_args)
        assert isinstance(config, EngineConfig), config
        self._config = config
        self._failures: dict[str, str] = {}
        self._version = 0  # version of the weights that tokens are sampled with
        self._new_version: int | None = None  # version of the update in progress

    def _read_model_folder(self, max_model_len: int | None) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
        """The model's Hugging Face configuration and its tokenizer; sets the longest sequence and the end tokens."""
        from transformers import AutoTokenizer, GenerationConfig

        args = self.role.model_args
        config, path = checked_config(args, "causal_lm"), str(args.model_name_or_path)
        self._max_model_len = longest_sequence(max_model_len, config, path)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code)
        try:
            generation_config = GenerationConfig.from_pretrained(path)
        except OSError:  # a folder without one
            generation_config = None
        # The generation config (or else the model's) and the tokenizer differ where a chat model was made from a base
        # model; each knows one way to end.
        ends: list[int] = []
        for source in (generation_config, config.get_text_config()):
            eos = getattr(source, "eos_token_id", None)
            if eos is not None and not ends:
                ends += eos if isinstance(eos, list | tuple) else [eos]
        if tokenizer.eos_token_id is not None:
            ends.append(tokenizer.eos_token_id)
        self._end_token_ids = tuple(dict.fromkeys(int(token) for token in ends))
        return config, cast("PreTrainedTokenizerBase", tokenizer)

    @abstractmethod
    def initialize(self) -> None:
        """Load the model of ``role`` and allocate the KV cache."""

    @abstractmethod
    def add_requests(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue the unfinished samples of requests, first come first served; partial samples are continued. Raises
        ValueError: a prompt that leaves no room for a new token, parameters outside their range, or a partial sample
        that has nothing left to generate."""

    @abstractmethod
    def step(self) -> list[GenerationOutput]:
        """Advance every running sample by one token (admitting queued ones first); return those that finished."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Samples queued or running."""

    @abstractmethod
    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """Stop the given requests (None: all); return their unfinished samples with what they have so far, the tokens
        that they came with included."""

    def take_failures(self) -> dict[str, str]:
        """Return the requests that have failed by themselves since the last call: reasons by request id. They are no
        longer unfinished, and the others continue as if they had never been there."""
        failures, self._failures = self._failures, {}
        return failures

    def _without_failed(
        self, outputs: Sequence[GenerationOutput], failed: Mapping[str, str] | None = None
    ) -> list[GenerationOutput]:
        """Outputs of the requests that have not failed. Those in ``failed``, and those whose log-probs are not all
        finite, are aborted."""
        reasons = dict(failed or {})
        for output in outputs:
            finite = np.isfinite(output.log_probs)
            if not finite.all():
                why = f"sample {output.sample_index}: the log-probs of token {int(finite.argmin())} are not finite"
                reasons.setdefault(output.request_id, why)
        if reasons:
            self.abort(reasons)
            self._failures |= reasons
        return [output for output in outputs if output.request_id not in reasons]

    def recover(self) -> list[GenerationOutput]:
        """After :meth:`step` has raised: drop all samples and everything computed for them, so that the next requests
        find a clean engine; return what the samples had. An engine that cannot do this raises."""
        return self.abort()

    def running(self, request_ids: Iterable[str]) -> list[GenerationOutput]:
        """Outputs so far of the unfinished samples of these requests, queued ones included, as :meth:`abort` would
        return them, without stopping them; empty from an engine that keeps no such record."""
        return []

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts since the start, those that the engine keeps: ``prompt_tokens`` of all prompts, and ``reused_tokens``,
        which a prefix cache had; ``drafts`` of speculation, their ``drafted_tokens``, and the ``accepted_tokens``."""
        return {}

    def prompt_scores(self, prompts: Sequence[Sequence[int]], top: int) -> list[PromptScore]:
        """Log-probs of each prompt's own tokens, and the ``top`` most probable at each position (-1: all), descending.
        Raises ValueError: an engine that gives none."""
        raise ValueError(
            f"{type(self).__name__} gives no log-probs of prompts (echo, prompt_logprobs); hf_infer and vllm do"
        )

    def start_weight_update(self, version: int) -> None:
        """Begin an update, in which :meth:`step` is refused; RuntimeError if another is in progress."""
        if self._new_version is not None:
            raise RuntimeError(f"{self._name}: the update to version {self._new_version} is not finished")
        self._new_version = version

    def _updating(self, method: str) -> int:
        """The version of the update in progress, which ``method`` is a part of; RuntimeError without one."""
        if self._new_version is None:
            where = "without start_weight_update"
            if method != "finish_weight_update":
                where = "outside of start_weight_update and finish_weight_update"
            raise RuntimeError(f"{self._name}: {method} {where}")
        return self._new_version

    def _check_no_update(self) -> None:
        # Tokens of a step during an update would be sampled with a mixture of weights.
        if self._new_version is not None:
            raise RuntimeError(f"{self._name}: {MID_UPDATE}")

    def _check_idle(self) -> None:
        if self.num_unfinished:
            raise RuntimeError(f"{self._name}: sleep with {self.num_unfinished} unfinished samples; abort them first")

    @abstractmethod
    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load full tensors by Hugging Face name. They may be read-only shared memory: copy, never keep."""

    @abstractmethod
    def finish_weight_update(self) -> Mapping[str, Checksum]:
        """Make the new weights current; return a checksum per tensor of what the engine now holds
        (:func:`roll.weight_sync.encoding.tensor_checksum`), by rank where ranks of it disagree.

        Running samples continue with the new weights. The keys and values of their earlier tokens are recomputed or
        kept, as ``in_flight_update`` says.
        """

    def held_weights(self) -> Mapping[str, torch.Tensor] | None:
        """Tensors that the engine computes with, by Hugging Face name, where single elements may be changed in place
        during an update; None: every update must bring whole layers."""
        return None

    def held_checksums(self, names: Sequence[str]) -> Mapping[str, Checksum]:
        """Checksums of tensors that earlier updates have brought, as the engine computes with them now."""
        held = self.held_weights()
        assert held is not None, "an engine that takes whole models only is sent all tensors"
        return {name: tensor_checksum(held[name]) for name in names if name in held}

    def update_adapter(self, tensors: Mapping[str, torch.Tensor], scalings: Mapping[str, float]) -> None:
        """During an update: compute ``W x + scaling * B (A x)`` from now on, in place of the last adapter. ``tensors``:
        A (r, in) and B (out, r) by the name of W with ``#lora_A`` or ``#lora_B`` appended. ``scalings``: by the name of
        W."""
        raise RuntimeError(f"{type(self).__name__} takes no adapters")

    def sleep(self) -> None:
        """Release device memory (KV cache, weights) where the platform can, while idle; undone by :meth:`wake`."""

    def wake(self, weights_only: bool = False) -> None:
        """Undo :meth:`sleep`; with ``weights_only`` as far as a weight update needs it, the rest by another call."""

    def shutdown(self) -> None:
        """Free everything; the engine is not used again."""
