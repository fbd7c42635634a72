"""What the ranks of one engine answer, and what that says of the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from vllm.distributed.parallel_state import get_world_group

from roll.weight_sync.messages import Checksum

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class RankFailure:
    """A rank's answer in place of an exception: vLLM would forget the type, and which rank it was."""

    rank: int
    is_value_error: bool
    text: str


def answering(method: Callable[..., _Result]) -> Callable[..., _Result | RankFailure]:
    """A method for ``collective_rpc`` that always answers."""

    @wraps(method)
    def answer(*args: Any, **kwargs: Any) -> _Result | RankFailure:
        try:
            return method(*args, **kwargs)
        except Exception as error:  # raised again in the engine's process
            return RankFailure(get_world_group().rank, isinstance(error, ValueError), str(error))

    return answer


def check_answers(answers: Sequence[Any]) -> None:
    """Raise what the ranks that failed have to say.

    Raises:
        ValueError: a rank refused a value. RuntimeError: a rank failed otherwise.
    """
    failures = [answer for answer in answers if isinstance(answer, RankFailure)]
    if not failures:
        return
    texts = [failure.text if len(answers) == 1 else f"rank {failure.rank}: {failure.text}" for failure in failures]
    kind = ValueError if all(failure.is_value_error for failure in failures) else RuntimeError
    raise kind("; ".join(texts))


def joined_checksums(by_rank: Sequence[Mapping[str, int]]) -> dict[str, Checksum]:
    """One checksum of each tensor where all ranks that have a part of it agree, else theirs, by rank."""
    found: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for rank, checksums in enumerate(by_rank):
        for name, checksum in checksums.items():
            found[name][rank] = checksum
    return {name: held if len(set(held.values())) > 1 else next(iter(held.values())) for name, held in found.items()}
