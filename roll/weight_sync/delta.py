"""``delta``: of a tensor that the engine holds already, only the elements that are not what they were.

Master weights are float32, what is sent is rounded to the compute dtype. A step of 1e-6 moves a bfloat16 weight of 0.02
to its neighbour (1.2e-4 away) once in a hundred steps, so most elements are bit for bit what they were.  Indices are
int32, so an element costs 4 bytes beside its own; a tensor that would grow by that is sent whole.  Nothing is rounded
or left out: both sides check the whole tensor.
"""

from __future__ import annotations

import torch

from roll.protocol.columns import flat_view

INDICES_PART, VALUES_PART = "#indices", "#values"
"""Behind the name of a tensor: which elements of it (int32, of the flattened tensor), and their new values."""

_CHUNK = 1 << 18
"""Elements that are compared at a time: what this needs stays in the cache."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LARGEST_INDEX = 2**31 - 1


class DeltaEncoder:
    """Remembers what was sent, in host memory: a copy of all tensors that go through it."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def forget(self) -> None:
        """The engines hold nothing that can be built on: the next tensors are sent whole."""
        self._held.clear()

    def encode(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts that turn what was sent last under this name into ``tensor``: none where that is the same, and
        itself where it is smaller than they."""
        flat = flat_view(tensor.detach().cpu())
        held = self._held.get(name)
        if held is None or held.dtype != flat.dtype or held.numel() != flat.numel() or flat.numel() > _LARGEST_INDEX:
            self._held[name] = flat.clone()
            return {name: tensor}
        indices = changed_elements(held, flat)
        if not indices.numel():
            return {}
        if indices.numel() * (indices.itemsize + flat.itemsize) >= flat.nbytes:
            held.copy_(flat)
            return {name: tensor}
        values = flat[indices]
        held[indices] = values
        return {name + INDICES_PART: indices, name + VALUES_PART: values}


def changed_elements(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """int32 indices of the elements whose bits differ; both flat and of one dtype."""
    integer = _INTEGERS[before.itemsize]
    first, second = before.view(integer), after.view(integer)
    found = []
    for start in range(0, first.numel(), _CHUNK):
        changed = (first[start : start + _CHUNK] != second[start : start + _CHUNK]).nonzero()[:, 0]
        found.append(changed.to(torch.int32).add_(start))
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int32)


def apply_delta(held: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Change ``held``, a contiguous tensor, in place.

    Raises:
        ValueError: an index outside the tensor.
    """
    if indices.numel() and int(indices.max()) >= held.numel():
        raise ValueError(f"index {int(indices.max())} in a tensor of {held.numel()} elements")
    held.view(-1)[indices.to(held.device)] = values.to(held.device)
