"""Counts what a piece of PyTorch code allocates, computes, moves and communicates, operation by operation.

A :class:`Tracker` sees every operation of autograd, of FSDP and of the optimizer.  Under it a
:class:`~torch._subclasses.FakeTensorMode` gives results their shapes and no memory.

PyTorch's own trackers (``torch.distributed._tools``) follow modules and tensors; this one follows storages, for three
reasons.  FSDP2 resizes the storages of gathered parameters without an operation.  A flat optimizer state is not a
tensor of any module.  And memory at a peak is to be reported in a recipe's terms (gradients, activations, gathered
parameters), not in PyTorch's.

Operations on real tensors only (the batch, which decides about micro-batches) are really computed; as soon as one of
its inputs is fake, so is a result.  ``item()`` of a fake tensor is 1.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roll.rehearsal.host import Heap, Kernel, kernel_of

if TYPE_CHECKING:
    from torch._ops import OpOverload

aten, c10d = torch.ops.aten, torch.ops.c10d


class Kind(StrEnum):
    """Contents of a rank's memory, in the order in which they are shown."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer states"
    GATHERED = "gathered parameters"
    COMMUNICATION = "buffers of collectives"
    ACTIVATIONS = "activations"


@dataclass(frozen=True)
class Operation:
    """Arithmetic and memory traffic of one call of a kernel."""

    flops: int
    num_bytes: int
    dtype: torch.dtype
    kernel: Kernel | None = None  # the call itself, where it is to be timed


@dataclass(frozen=True)
class Collective:
    """One collective operation as a rank sees it."""

    name: str  # `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast`, `gather`
    ranks: tuple[int, ...]  # global ranks of its group
    num_bytes: int  # bytes of the whole tensor: what an all-gather gives, what a reduce-scatter is given


@dataclass
class Tally:
    """Counts since a point in time."""

    operations: Counter[Operation] = field(default_factory=Counter)
    collectives: Counter[Collective] = field(default_factory=Counter)
    peak: dict[Kind, int] = field(default_factory=dict)  # bytes by kind when most was held

    @property
    def flops(self) -> int:
        return sum(operation.flops * count for operation, count in self.operations.items())


Operand = Tensor | tuple[int, int]  # A tensor, or so many bytes of a storage


class MemoryTraffic:
    """A cache of so many bytes (the last level of a device), and what goes past it: what kernels move, at least.

    What a kernel reads may be in the cache, where an earlier one has left it, and what it writes need not leave the
    cache if it is freed before.  It keeps what was used last, by storage and up to its size: of a tensor that is too
    large for what is left, a part.  Reads of what is there and writes of what is freed in time cost nothing.
    """

    def __init__(self, cache: int) -> None:
        self._cache, self._used = cache, 0
        # Bytes of a storage in the cache, and how many of them memory does not have; what was used last at the end.
        self._there: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def move(self, reads: Iterable[Operand], writes: Iterable[Operand]) -> int:
        """Bytes to and from memory of one kernel."""
        moved = 0
        for operand, is_read in (*((one, True) for one in reads), *((one, False) for one in writes)):
            key, size = operand if isinstance(operand, tuple) else (id_of(operand), num_bytes(operand))
            there, unsaved = self._there.pop(key, (0, 0))
            held = min(size, self._cache)
            moved += max(0, size - there) if is_read else size - held
            self._there[key] = max(there, held), unsaved if is_read else max(unsaved, held)
            self._used += max(there, held) - there
        # What was used longest ago makes room: what memory does not have of it is written there.
        while self._used > self._cache:
            key, (there, unsaved) = next(iter(self._there.items()))
            gone = min(there, self._used - self._cache)
            saved = max(0, unsaved - (there - gone))  # what memory has goes first
            moved += saved
            self._used -= gone
            if gone == there:
                del self._there[key]
            else:
                self._there[key] = there - gone, unsaved - saved
        return moved

    def forget(self, key: int) -> None:
        """The storage is freed."""
        self._used -= self._there.pop(key, (0, 0))[0]


def num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor; what is repeated without a copy (``expand``) counts once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def id_of(held: Tensor | torch.UntypedStorage) -> int:
    """The identity of a storage, the same for all Python objects that refer to it."""
    storage = held.untyped_storage() if isinstance(held, Tensor) else held
    return int(storage._cdata)


class Tracker(TorchDispatchMode):
    """Counts everything that happens while it is entered.

    Args:
        granularity: bytes to which the allocator of the device rounds up: 512 on CUDA, 64 on a CPU.
        cache: bytes of the last level of the device's cache.
        on_host: keep the calls of kernels, to be timed on this host.
    """

    heap: Heap | None = None  # blocks asked of malloc, from :meth:`follow_heap` on

    def __init__(self, granularity: int, cache: int = 0, on_host: bool = False) -> None:
        super().__init__()
        self.granularity, self.on_host = granularity, on_host
        self._traffic = MemoryTraffic(cache)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.live: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self.tally = Tally()
        self._held: dict[int, tuple[Kind, int]] = {}
        self._total = self._peak = 0
        self._resize: Callable[..., Any] | None = None

    def __enter__(self) -> Self:
        self.fake.__enter__()
        self._resize = original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            original(storage, size)
            if (key := id_of(storage)) in self._held:
                # FSDP2 gathers parameters into a storage that it shrinks to nothing afterwards.
                self._set(key, Kind.GATHERED if size else self._held[key][0], size)
            return storage

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign, assignment]
        self.fake.__exit__(kind, error, traceback)

    @contextmanager
    def counting(self) -> Iterator[Tally]:
        """Counts of the block, and the peak of what is held meanwhile; it counts for blocks around it too."""
        outer, inner = self.tally, Tally(peak=dict(self.live))
        peak, self._peak, self.tally = self._peak, self._total, inner
        try:
            yield inner
        finally:
            outer.operations += inner.operations
            outer.collectives += inner.collectives
            if self._peak > peak:
                outer.peak = dict(inner.peak)
            self.tally, self._peak = outer, max(peak, self._peak)

    def add_kernel(self, flops: int, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Count a kernel for which there is a stand-in."""
        self.tally.operations[Operation(flops, self._traffic.move(reads, writes), reads[0].dtype)] += 1

    def follow_heap(self) -> None:
        """Ask malloc for everything that is held, and from now on for what comes."""
        self.heap = Heap()
        for key, (_, size) in self._held.items():
            self.heap.resize(key, size)

    def mark(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Count the storages of these tensors as ``kind`` from now on."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            key = id_of(local)
            self._follow(local)
            self._set(key, kind, self._held[key][1])

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in inputs)
        if inputs and not is_fake and not any(tensor.is_meta for tensor in inputs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return 1.0 if inputs[0].dtype.is_floating_point else 1
        if func.namespace == "c10d":
            self._communicate(func, args, inputs)
            return func(*args, **kwargs)
        if func is aten._grouped_mm.default:
            # On fake tensors it refuses other types than bf16, which the kernel computes all the same.
            first, second, *rest = args
            result = func(first.bfloat16(), second.bfloat16(), *rest, **kwargs).to(first.dtype)
        else:
            result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if inputs:
            moved = self._traffic.move(*operands(func, args, kwargs, inputs, outputs))
            flops = flops_of(func._schema.name, args, kwargs)
            # Views and queries such as ``prim.device`` take no time.
            is_kernel = self.on_host and not func.is_view and func.namespace != "prim"
            kernel = kernel_of(func, args, kwargs) if is_kernel else None
            if moved or flops or kernel:
                self.tally.operations[Operation(flops, moved, inputs[-1].dtype, kernel)] += 1
        for tensor in outputs:
            if isinstance(tensor, FakeTensor):
                self._follow(tensor)
        return result

    def _communicate(self, func: OpOverload, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
        name = func._schema.name.partition("::")[2]
        known = _COLLECTIVES.get(name)
        if known is None:
            return
        group = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject)), None)
        ranks = () if group is None else tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
        total = max(tensor.numel() * tensor.element_size() for tensor in tensors)
        if known in ("gather", "all_gather") and not name.startswith("_"):
            total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.tally.collectives[Collective(known, ranks, total)] += 1
        self.mark(tensors, Kind.COMMUNICATION)
        if known == "reduce_scatter":
            # The summed shard is what becomes the gradient.
            self.mark([min(tensors, key=Tensor.numel)], Kind.GRADIENTS)

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (key := id_of(storage)) not in self._held:
            self._held[key] = (Kind.ACTIVATIONS, 0)
            weakref.finalize(storage, self._forget, key)
            self._set(key, Kind.ACTIVATIONS, storage.nbytes())

    def _forget(self, key: int) -> None:
        self._set(key, self._held[key][0], 0)
        del self._held[key]

    def _set(self, key: int, kind: Kind, size: int) -> None:
        size += -size % self.granularity
        old_kind, old_size = self._held[key]
        if self.heap is not None and size != old_size:
            self.heap.resize(key, size)
        if not size:
            self._traffic.forget(key)
        self.live[old_kind] -= old_size
        self.live[kind] += size
        self._held[key] = (kind, size)
        self._total += size - old_size
        if self._total > self._peak:
            self._peak = self._total
            self.tally.peak = dict(self.live)


_COLLECTIVES = {
    **dict.fromkeys(("_allgather_base_", "allgather_"), "all_gather"),
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_"), "reduce_scatter"),
    **dict.fromkeys(("alltoall_base_", "alltoall_"), "all_to_all"),
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "recv_": "receive",
}


def flops_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Multiplications and additions of a kernel; 0 for all but matrix products and attention."""
    if name in _FACTORS:
        left, right = _FACTORS[name]
        return 2 * prod(args[left].shape) * int(args[right].shape[-1])
    if name == "mkldnn::_linear_pointwise":
        return 2 * prod(args[0].shape) * int(args[1].shape[0])
    if name == "aten::_grouped_mm":
        return 2 * prod(args[0].shape[-2:]) * int(args[1].shape[-1])
    if name not in _ATTENTION:
        return 0
    first, place, products = _ATTENTION[name]
    rows, heads, length, size = args[first].shape
    # Causal attention needs half of each product.
    causal = bool(kwargs.get("is_causal", args[place] if len(args) > place else False))
    return 2 * products * rows * heads * length * int(args[first + 1].shape[2]) * size // (2 if causal else 1)


# Places of the two matrices among the arguments of a product.
_FACTORS = {
    **dict.fromkeys(("aten::mm", "aten::bmm"), (0, 1)),
    **dict.fromkeys(("aten::addmm", "aten::addmm_", "aten::baddbmm"), (1, 2)),
}
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 4, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (1, 7, 5),
}
"""Places of the queries (the keys follow) and of ``is_causal`` among the arguments, and the number of matrix products
of (length, keys, head)."""


def operands(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> tuple[list[Operand], list[Operand]]:
    """The tensors that a kernel reads, and those that it writes, of its ``inputs`` and ``outputs``."""
    name = func._schema.name
    if func.is_view or name in _BARE:
        return [], []
    if name in _PICKING:
        table = inputs[0]
        return [(id_of(table), sum(map(num_bytes, outputs)))], list(outputs)
    if name in _SCATTERING:
        target, *given = inputs  # indices, then the source unless it is a number
        part = id_of(target), num_bytes(given[-1])
        return [*given, part], [part]
    # The tensors that it writes into by its schema, and whether they are there for that alone.
    written: list[tuple[Tensor, bool]] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [(one, argument.is_out) for one in tree_leaves(value) if isinstance(one, Tensor)]
    keys = {id_of(tensor) for tensor in inputs}
    made = [one for one in outputs if id_of(one) not in keys]
    if not written and not made:
        return [], []  # a view under another name, or a question about a tensor
    read = [] if name in _FILLING else list(inputs)
    unread = {id(one) for one, is_out in written if is_out or name in _OVERWRITING}
    return [one for one in read if id(one) not in unread], [*(one for one, _ in written), *made]


_PICKING = {"aten::embedding", "aten::gather", "aten::index_select", "aten::index"}
"""They read as much of their table as they write."""
_SCATTERING = {"aten::scatter_add_", "aten::index_add_", "aten::index_put_", "aten::scatter_", "aten::index_copy_"}
_FILLING = {
    *(f"aten::{name}_like" for name in ("zeros", "ones", "full", "rand", "randn")),
    *(f"aten::new_{name}" for name in ("zeros", "ones", "full")),
}
"""They take shape and type of a tensor, and do not read it."""
_BARE = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
"""They write nothing."""
_OVERWRITING = {f"aten::{name}" for name in ("copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_")}
"""They do not read what they write to."""
