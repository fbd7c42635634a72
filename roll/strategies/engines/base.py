"""The interface of generation engines, and what those have in common that are packages of their own: version and
arguments of the installed one, device memory that it can free, and the watch over its ranks."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import reduce
from inspect import signature
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from operator import or_
from threading import Event, Thread
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import torch
from packaging.version import Version

from roll.config.reading.errors import did_you_mean
from roll.config.reading.schema import Mismatch, convert
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import Backend
from roll.config.strategies.engines import EngineConfig
from roll.config.strategies.registry import typed_strategy_config
from roll.models.build import checked_config
from roll.models.layout_setup import head_dim
from roll.platforms import current_platform
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, PromptScore, longest_sequence
from roll.weight_sync.encoding import Checksum, tensor_checksum

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

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


class PackagedEngine(GenerationStrategy):
    """An engine that is a package of its own and can free parts of its device memory."""

    def __init__(self, role: WorkerConfig, seed: int = 42) -> None:
        super().__init__(role, seed)
        self._asleep: list[str] = []  # parts that have left the device: `weights`, `kv_cache`

    @abstractmethod
    def _release(self) -> bool:
        """Free the KV cache, and move or drop the weights; False where the engine was started without that."""

    @abstractmethod
    def _resume(self, parts: list[str]) -> None:
        """Undo a part of :meth:`_release`."""

    def sleep(self) -> None:
        self._check_idle()
        if current_platform().device_type != "cpu" and not self._asleep and self._release():
            self._asleep = ["weights", "kv_cache"]

    def wake(self, weights_only: bool = False) -> None:
        if wanted := [part for part in self._asleep if part == "weights" or not weights_only]:
            self._resume(wanted)
            self._asleep = [part for part in self._asleep if part not in wanted]


def cache_numbers(config: PretrainedConfig) -> tuple[int, int]:
    """Key-value heads of a layer, and the numbers of a head's key, from the config of the language model."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads, head_dim(config)


def check_version(backend: Backend, version: str, allow_untested: bool) -> None:
    """ValueError for a version outside ``backend.package.tested``, unless ``allow_untested``."""
    package = backend.package
    assert package is not None, "an engine that comes with the base install has no version of its own"
    low, high = map(Version, package.tested)
    # The base version: 0.32.0+cpu and 0.32.0rc1 are 0.32.0 here.
    if low <= Version(Version(version).base_version) < high:
        return
    text = f"{package.title} {version} is outside the tested versions (at least {low}, below {high})"
    if not allow_untested:
        raise ValueError(
            f"{text}; install one of them, or set strategy_config.allow_untested_version: true to try this one"
        )
    logger.warning("%s", text)


def typed_arguments(arguments: Mapping[str, Any], declared: type, role: str) -> dict[str, Any]:
    """``engine_args`` of a role with the types of their fields in ``declared``, the engine's own class. Raises
    ValueError: no such field, or a value of another type. Types of the engine's own making are left to it."""
    declarations = {name: argument.annotation for name, argument in signature(declared).parameters.items()}
    typed = dict(arguments)
    for key, value in arguments.items():
        path = f"{role}.strategy_args.strategy_config.engine_args.{key}"
        if key not in declarations:
            hint = did_you_mean(key, declarations, "; did you mean {!r}?")
            raise ValueError(f"{path} = {value!r}: the installed engine's {declared.__name__} has no such field{hint}")
        one = type("One", (), {"__annotations__": {key: declarations[key]}, "__module__": declared.__module__})
        try:
            plain = _plain(get_type_hints(one)[key])
        except NameError:  # a type that is only there for type checkers
            continue
        try:
            typed[key] = value if plain is None else convert(value, plain)
        except Mismatch as error:
            raise ValueError(f"{path} = {value!r}: {error.rule}; for example {key}: {error.example}") from None
    return typed


def _plain(hint: object) -> Any:
    """The type in terms that ``convert`` reads; None where it is made of others."""
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return Literal[tuple(int(member) for member in hint)]
    if hint in (bool, int, float, str, NoneType) or get_origin(hint) is Literal:
        return hint
    if get_origin(hint) in (Union, UnionType):
        parts = [_plain(part) for part in get_args(hint)]
        return None if None in parts else reduce(or_, parts)
    return None


_NOTICE_SECONDS = 2.0
"""Seconds to wait for a rank's process to end after an error: a peer often reports the broken connection first."""
_END_SECONDS = 10.0  # limit for killed ranks to be gone


class RankWatch:
    """Ends this process when a rank of its engine has died, and the other ranks first.

    A model without one of its shards computes nothing, and a peer that waits for that shard may wait forever. So the
    death of any rank becomes the death of the engine, which its driver handles. ``ranks``: child processes; none for an
    engine that has no rank outside of this process.
    """

    def __init__(self, ranks: Sequence[BaseProcess]) -> None:
        self._ranks = {rank.sentinel: rank for rank in ranks}
        self._is_over = Event()
        self.close = self._is_over.set  # from now on ranks may end
        self._thread = Thread(target=self._watch, daemon=True, name="roll-rank-watch")
        if ranks:
            # At a normal exit the ranks end first.
            Finalize(None, self.close, exitpriority=0)
            self._thread.start()

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Guard work that ranks take part in: if it fails because one has died, the process ends instead of raising."""
        try:
            yield
        except Exception:
            if self._ranks and wait(list(self._ranks), _NOTICE_SECONDS):
                self._thread.join()
            raise

    def _watch(self) -> None:
        dead = wait(list(self._ranks))
        if self._is_over.is_set():
            return
        for number, (sentinel, rank) in enumerate(self._ranks.items()):
            if sentinel in dead:
                logger.error("rank %d of the engine (pid %d) has died, and the engine ends with it", number, rank.pid)
        # A replacement of this engine gets the same devices, which are free only when every rank is gone.
        for rank in self._ranks.values():
            rank.kill()
        left, give_up = set(self._ranks), time.monotonic() + _END_SECONDS
        while left and time.monotonic() < give_up:
            left -= set(wait(list(left), give_up - time.monotonic()))
        logging.shutdown()
        # From a thread, while the main one may be stuck inside a collective: sys.exit() would end this thread only.
        os._exit(1)
