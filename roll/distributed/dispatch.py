"""Spreading a call's arguments over the ranks of a cluster, and joining what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from roll.distributed.worker import Dispatch, Registration
from roll.protocol import DataProto
from roll.protocol.metrics import RankInfo, merge_metrics

_INLINE = (type(None), bool, int, float, str, ray.ObjectRef)
"""Arguments that travel in the call itself, as do tuples of them; others go to the object store, once for all ranks
that share them."""


@dataclass(frozen=True)
class RankArguments:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """A call as it goes out: arguments by rank, and how the answers by rank become one result."""

    arguments: dict[int, RankArguments]
    collect: Callable[[dict[int, Any]], Any]


def spread(
    registration: Registration,
    world_size: int,
    rank_infos: Callable[[], Sequence[RankInfo]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Spread:
    """Prepare a call.

    Args:
        rank_infos: Asked only by the modes that need to know where ranks stand.

    Raises:
        ValueError: arguments that do not fit the mode (list lengths, DataProtos of different lengths).
    """
    match registration.dispatch:
        case Dispatch.ONE_TO_ALL:
            shared = RankArguments(*_shared(args, kwargs, world_size))
            return Spread(dict.fromkeys(range(world_size), shared), _in_rank_order)
        case Dispatch.RANK_ZERO:
            return Spread({0: RankArguments(args, dict(kwargs))}, lambda answers: answers[0])
        case Dispatch.ALL_TO_ALL:
            _check_lists(args, kwargs, world_size)
            ranks = range(world_size)
            each = {r: RankArguments(tuple(a[r] for a in args), {k: v[r] for k, v in kwargs.items()}) for r in ranks}
            return Spread(each, _in_rank_order)
        case Dispatch.DP_MP_COMPUTE | Dispatch.DP_MP_DISPATCH_FIRST:
            return _spread_data(registration, list(rank_infos()), args, kwargs)


def _in_rank_order(answers: dict[int, Any]) -> list[Any]:
    return [answers[rank] for rank in sorted(answers)]


def _check_lists(args: tuple[Any, ...], kwargs: Mapping[str, Any], world_size: int) -> None:
    for name, value in [*((f"argument {i}", a) for i, a in enumerate(args)), *kwargs.items()]:
        if not isinstance(value, (list, tuple)) or len(value) != world_size:
            found = f"{len(value)} entries" if isinstance(value, (list, tuple)) else type(value).__name__
            raise ValueError(
                f"{name}: an all-to-all call takes a list with one entry for each of {world_size} ranks, got {found}"
            )


def _shared(args: tuple[Any, ...], kwargs: Mapping[str, Any], users: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(_put(a, users) for a in args), {k: _put(v, users) for k, v in kwargs.items()}


def _put(value: Any, users: int) -> Any:
    small = isinstance(value, _INLINE) or (isinstance(value, tuple) and all(isinstance(v, _INLINE) for v in value))
    return value if users == 1 or small else ray.put(value)


def _spread_data(
    registration: Registration, infos: list[RankInfo], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Spread:
    dp_size = infos[0].dp_size
    batches = [v for v in (*args, *kwargs.values()) if isinstance(v, DataProto)]
    lengths = {len(batch) for batch in batches}
    if len(lengths) > 1:
        raise ValueError(f"batches of one call must have the same number of rows, got {sorted(lengths)}")
    rows = lengths.pop() if lengths else 0
    first_only = registration.dispatch is Dispatch.DP_MP_DISPATCH_FIRST
    users = 1 if first_only else len(infos) // dp_size

    def by_rank(value: Any) -> list[Any]:
        if not isinstance(value, DataProto):
            return [_put(value, len(infos))] * len(infos)
        chunks = [_put(chunk, users) for chunk in chunked(_declared(value, registration.columns), dp_size)]
        nothing = value.select([], []) if first_only else None
        return [nothing if first_only and not info.is_first_of_replica else chunks[info.dp_rank] for info in infos]

    spread_args = [by_rank(value) for value in args]
    spread_kwargs = {key: by_rank(value) for key, value in kwargs.items()}
    arguments = {
        info.rank: RankArguments(
            tuple(values[i] for values in spread_args), {key: values[i] for key, values in spread_kwargs.items()}
        )
        for i, info in enumerate(infos)
    }
    sources = sorted((info for info in infos if info.is_data_source), key=lambda info: info.dp_rank)
    padding = -rows % dp_size

    def collect(answers: dict[int, Any]) -> Any:
        return joined([answers[info.rank] for info in sources], rows + padding, padding)

    return Spread(arguments, collect)


def _declared(batch: DataProto, columns: tuple[str, ...] | None) -> DataProto:
    if columns is None:
        return batch
    return batch.select(
        [name for name in columns if name in batch.batch.keys()],  # noqa: SIM118 (keys() unpacks no column)
        [name for name in columns if name in batch.non_tensor_batch],
    )


def chunked(batch: DataProto, chunks: int) -> list[DataProto]:
    """Equal consecutive chunks.

    Where rows do not divide, rows are repeated from the start of the batch with every mask but ``attention_mask`` (a
    model needs a token to attend to) False, so that they weigh nothing.
    """
    padded, added = batch.pad_to_divisor(chunks)
    if added:
        for name in [name for name in padded.batch.keys() if name.endswith("_mask") and name != "attention_mask"]:  # noqa: SIM118
            mask = padded.batch[name].clone()
            mask[-added:] = 0
            padded.batch[name] = mask
    return padded.chunk(chunks)


def joined(results: list[Any], rows: int, padding: int) -> Any:
    """The results of the data-parallel replicas, in order, as one.

    DataProtos are concatenated and lists chained, both without the ``padding`` rows when they have one entry for each
    of the ``rows`` padded rows; metrics are merged; a tuple is joined part by part; None stays None; anything else
    becomes a list with one entry a replica.
    """
    first = results[0]
    if all(result is None for result in results):
        return None
    if isinstance(first, DataProto):
        whole = DataProto.concat(results) if len(results) > 1 else first
        return whole.unpad(padding) if padding and len(whole) == rows else whole
    if isinstance(first, tuple):
        return tuple(joined([result[i] for result in results], rows, padding) for i in range(len(first)))
    if isinstance(first, list):
        chain = [entry for result in results for entry in result]
        return chain[: len(chain) - padding] if padding and len(chain) == rows else chain
    if all(_is_metrics(result) for result in results):
        return merge_metrics(results)
    return results


def _is_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(hasattr(v, "merge") and hasattr(v, "value") for v in value.values())
