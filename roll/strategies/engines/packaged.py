"""Parts of engines that are packages of their own: the version and arguments of the installed one, the device memory
that it can free, and the watch over its ranks."""

from __future__ import annotations

import logging
import os
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
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
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from packaging.version import Version

from roll.config.reading.errors import did_you_mean
from roll.config.reading.schema import Mismatch, convert
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import Backend
from roll.platforms import current_platform
from roll.strategies.engines.base import GenerationStrategy

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)


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
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads, head_dim


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
