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

Operand = Tensor | tuple[int, int]
"""A tensor, or so many bytes of a storage."""


class MemoryTraffic:
    """The cache of a device and what goes past it.

    Args:
        cache: bytes of the last level.
    """

    def __init__(self, cache: int) -> None:
        self._cache = cache
        self._used = 0
        self._there: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Bytes of a storage in the cache, and how many of them memory does not have; what was used last at the end."""

    def move(self, reads: Iterable[Operand], writes: Iterable[Operand]) -> int:
        """Bytes to and from memory of one kernel."""
        moved = 0
        for key, size in map(_extent, reads):
            there, unsaved = self._there.get(key, (0, 0))
            moved += max(0, size - there)
            self._put(key, max(there, min(size, self._cache)), unsaved)
        for key, size in map(_extent, writes):
            there, unsaved = self._there.get(key, (0, 0))
            held = min(size, self._cache)
            moved += size - held
            self._put(key, max(there, held), max(unsaved, held))
        return moved + self._make_room()

    def forget(self, key: int) -> None:
        """The storage is freed."""
        self._used -= self._there.pop(key, (0, 0))[0]

    def _put(self, key: int, there: int, unsaved: int) -> None:
        self._used += there - self._there.pop(key, (0, 0))[0]
        self._there[key] = there, unsaved

    def _make_room(self) -> int:
        """Bytes that had to be written to memory for it."""
        written = 0
        while self._used > self._cache:
            key, (there, unsaved) = next(iter(self._there.items()))
            gone = min(there, self._used - self._cache)
            saved = max(0, unsaved - (there - gone))  # what memory has goes first
            written += saved
            self._used -= gone
            if gone == there:
                del self._there[key]
            else:
                self._there[key] = there - gone, unsaved - saved
        return written


def operands(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> tuple[list[Operand], list[Operand]]:
    """The tensors that a kernel reads, and those that it writes.

    Args:
        inputs: the tensors among its arguments.
        outputs: those of its result.
    """
    name = func._schema.name
    if func.is_view or name in _BARE:
        return [], []
    if name in _PICKING:
        table = inputs[0]
        return [(_key(table), sum(map(num_bytes, outputs)))], list(outputs)
    if name in _SCATTERING:
        target, source = inputs[0], min(inputs, key=num_bytes)
        part = _key(target), num_bytes(source)
        return [source, part], [part]
    written = _written(func, args, kwargs)
    keys = {_key(tensor) for tensor in inputs}
    made = [one for one in outputs if _key(one) not in keys]
    if not written and not made:
        return [], []  # a view under another name, or a question about a tensor
    read = [] if name in _FILLING else list(inputs)
    unread = {id(one) for one, is_out in written if is_out or name in _OVERWRITING}
    return [one for one in read if id(one) not in unread], [*(one for one, _ in written), *made]


def _written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Tensor, bool]]:
    """The tensors that a kernel writes into by its schema, and whether they are there for that alone."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        found += [(one, argument.is_out) for one in tree_leaves(value) if isinstance(one, Tensor)]
    return found


def num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor; what is repeated without a copy (``expand``) counts once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _extent(one: Operand) -> tuple[int, int]:
    return one if isinstance(one, tuple) else (_key(one), num_bytes(one))


def _key(tensor: Tensor) -> int:
    return id_of(tensor.untyped_storage())


def id_of(storage: UntypedStorage) -> int:
    """The identity of a storage, the same for all Python objects that refer to it."""
    return int(storage._cdata)
