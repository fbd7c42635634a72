"""``safetensors``: a bucket is a file on storage that trainer and engines share.

A file is written under another name and renamed when it is whole, so an engine never reads half of one.  It is deleted
when every engine has read it; the folder of an update when the update is over, and those of updates that were cut
short when the next one starts.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from roll.weight_sync.transports.base import Receiver, Sender, Tensors

_PREFIX = "update-"


@dataclass(frozen=True)
class FileLink:
    key: str = "safetensors"

    def connect(self) -> Receiver:
        return _FileReceiver()


class _FileReceiver(Receiver):
    def receive(self, parcel: str) -> dict[str, torch.Tensor]:
        # The tensors are views of the mapped file, which stays mapped after the file is gone.
        with safe_open(parcel, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict


class FileSender(Sender):
    """Args:
    directory: on shared storage, of this run alone.
    """

    slots = 2

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._update = directory
        self._index = 0
        self._files: deque[Path] = deque()

    def start(self, engines: Sequence[object], version: int, seconds: float) -> Sequence[FileLink]:
        self._directory.mkdir(parents=True, exist_ok=True)
        for stale in self._directory.glob(f"{_PREFIX}*"):
            shutil.rmtree(stale)
        self._update = self._directory / f"{_PREFIX}{version}"
        self._update.mkdir()
        self._index = 0
        return [FileLink()] * len(engines)

    def pack(self, tensors: Tensors) -> str:
        file = self._update / f"bucket-{self._index:05}.safetensors"
        self._index += 1
        partial = file.with_suffix(".partial")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
        partial.rename(file)
        self._files.append(file)
        return str(file)

    def release(self) -> None:
        self._files.popleft().unlink()

    def finish(self) -> None:
        self._update.rmdir()

    def abandon(self) -> None:
        self._files.clear()
        shutil.rmtree(self._update, ignore_errors=True)
