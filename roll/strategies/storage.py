"""Taking tensors off the device and back without anyone noticing: storages shrink and grow, views stay valid.

Parameters, gradients and optimizer shards are often views of a few large buffers (Megatron's, DeepSpeed's, an engine's
fused matrices), so nothing may be replaced.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from roll.platforms import current_platform


class OffloadedStorages:
    """Device storages of some tensors, with their contents in (page-locked) host memory."""

    def __init__(self, tensors: Iterable[Tensor], keep_contents: bool = True) -> None:
        """
        Args:
            keep_contents: False for what is rewritten before it is read (gradients); it comes back as zeros.
        """
        # Not resizable: a file mapped into host memory, as freshly loaded weights are. It takes nothing from a device.
        storages = {key: storage for key, storage in storages_of(tensors).items() if storage.resizable()}
        self._held: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        for storage in storages.values():
            size = storage.nbytes()
            copy = None
            if keep_contents:
                copy = torch.empty(size, dtype=torch.uint8, pin_memory=current_platform().pin_memory)
                copy.copy_(_as_bytes(storage))
            storage.resize_(0)
            self._held.append((storage, size, copy))

    def restore(self) -> None:
        for storage, size, copy in self._held:
            storage.resize_(size)
            if copy is None:
                _as_bytes(storage).zero_()
            else:
                _as_bytes(storage).copy_(copy)
        self._held = []


def storages_of(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages that hold the tensors' elements, each once, by address; those without any are left out."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
