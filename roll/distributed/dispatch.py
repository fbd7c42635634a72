"""A call's arguments spread over the ranks of a cluster, and what comes back joined (:class:`Dispatch`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from roll.distributed.worker import Dispatch, Registration
from roll.protocol import DataProto
from roll.protocol.metrics import RankInfo, merge_metrics

_INLINE = (type(None), bool, int, float, str, ray.ObjectRef)
"""Arguments that travel in the call itself, as do tuples of them; others go to the object store, once for all ranks
that share them."""


RankArguments = tuple[tuple[Any, ...], dict[str, Any]]  # of one rank: positional and by name
Collect = Callable[[dict[int, Any]], Any]  # builds the result of a call from the answers by rank


def spread(
    registration: Registration,
    world_size: int,
    rank_infos: Callable[[], Sequence[RankInfo]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[dict[int, RankArguments], Collect]:
    """Prepare a call: its arguments by rank, and how the answers by rank become one result. ``rank_infos``: Read only
    by the modes that need to know the place of every rank. Raises ``ValueError``: arguments that do not fit the mode
    (list lengths, DataProtos of different lengths)."""
    match registration.dispatch:
        case Dispatch.ONE_TO_ALL:
            placed = {name: _put(value, world_size) for name, value in kwargs.items()}
            shared = tuple(_put(value, world_size) for value in args), placed
            return dict.fromkeys(range(world_size), shared), in_rank_order
        case Dispatch.RANK_ZERO:
            return {0: (args, dict(kwargs))}, lambda answers: answers[0]
        case Dispatch.ALL_TO_ALL:
            for name, value in [*((f"argument {i}", a) for i, a in enumerate(args)), *kwargs.items()]:
                if not isinstance(value, list | tuple) or len(value) != world_size:
                    found = f"{len(value)} entries" if isinstance(value, list | tuple) else type(value).__name__
                    raise ValueError(
                        f"{name}: an all-to-all call takes a list with one entry for each of {world_size} ranks, "
                        f"got {found}"
                    )
            ranks = range(world_size)
            each = {r: (tuple(a[r] for a in args), {k: v[r] for k, v in kwargs.items()}) for r in ranks}
            return each, in_rank_order
        case Dispatch.DP_MP_COMPUTE | Dispatch.DP_MP_DISPATCH_FIRST:
            return _spread_data(registration, list(rank_infos()), args, kwargs)


def in_rank_order(answers: dict[int, Any]) -> list[Any]:
    return [answers[rank] for rank in sorted(answers)]


def _put(value: object, users: int) -> object:
    small = isinstance(value, _INLINE) or (isinstance(value, tuple) and all(isinstance(v, _INLINE) for v in value))
    # A value with a single user goes with the call itself; one that several ranks share would be serialised for each of
    # them.
    return value if users == 1 or small else ray.put(value)


def _spread_data(
    registration: Registration, infos: list[RankInfo], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[int, RankArguments], Collect]:
    dp_size = infos[0].dp_size
    batches = [v for v in (*args, *kwargs.values()) if isinstance(v, DataProto)]
    lengths = {len(batch) for batch in batches}
    if len(lengths) > 1:
        raise ValueError(f"batches of one call must have the same number of rows, got {sorted(lengths)}")
    rows = lengths.pop() if lengths else 0
    columns = registration.columns(*args, **kwargs) if callable(registration.columns) else registration.columns
    first_only = registration.dispatch is Dispatch.DP_MP_DISPATCH_FIRST
    users = 1 if first_only else len(infos) // dp_size

    def by_rank(value: object) -> list[object]:
        if not isinstance(value, DataProto):
            return [_put(value, len(infos))] * len(infos)
        if columns is not None:  # keys(): a look into the batch itself would unpack columns
            wanted = [name for name in columns if name in value.batch.keys()]  # noqa: SIM118
            value = value.select(wanted, [name for name in columns if name in value.non_tensor_batch])
        chunks = [_put(chunk, users) for chunk in (chunked(value, dp_size) if dp_size > 1 else [value])]
        nothing = value.select([], []) if first_only else None
        return [nothing if first_only and not info.is_first_of_replica else chunks[info.dp_rank] for info in infos]

    spread_args = [by_rank(value) for value in args]
    spread_kwargs = {key: by_rank(value) for key, value in kwargs.items()}
    arguments = {
        info.rank: (tuple(own[i] for own in spread_args), {key: own[i] for key, own in spread_kwargs.items()})
        for i, info in enumerate(infos)
    }
    # One source per replica: its tensor- and pipeline-parallel ranks computed the same rows, which must count once.
    sources = sorted((info for info in infos if info.is_data_source), key=lambda info: info.dp_rank)
    padding = -rows % dp_size
    return arguments, lambda answers: joined([answers[info.rank] for info in sources], rows + padding, padding)


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
        # Padding rows were appended at the end of the batch, so they are the last of the last replica. A list of
        # another length has no entry per row, and keeps all.
        return chain[: len(chain) - padding] if padding and len(chain) == rows else chain
    metrics = [value for result in results if isinstance(result, dict) for value in result.values()]
    if all(isinstance(result, dict) for result in results) and all(hasattr(one, "merge") for one in metrics):
        return merge_metrics(results)
    return results
