"""Bytes that kernels move between a device's memory and its processors, at least.

What a kernel reads may be in the last level of cache, where an earlier one has left it, and what it writes need not
leave the cache if it is freed before.  The cache here keeps what was used last, by storage and up to its size: of a
tensor that is too large for what is left, a part.  Reads of what is there and writes of what is freed in time cost
nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch import UntypedStorage
    from torch._ops import OpOverload

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

Operand = Tensor | tuple[int, int]  # A tensor, or so many bytes of a storage


class MemoryTraffic:
    """A cache of so many bytes (the last level of a device), and what goes past it."""

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
        target, source = inputs[0], min(inputs, key=num_bytes)
        part = id_of(target), num_bytes(source)
        return [source, part], [part]
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


def num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor; what is repeated without a copy (``expand``) counts once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def id_of(held: Tensor | UntypedStorage) -> int:
    """The identity of a storage, the same for all Python objects that refer to it."""
    storage = held.untyped_storage() if isinstance(held, Tensor) else held
    return int(storage._cdata)
