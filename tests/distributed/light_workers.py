"""Workers without tensors: their processes start fast because nothing here imports torch."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from roll.distributed import Dispatch, Worker, register


@dataclass(frozen=True)
class Note:
    note: str = ""


class BasicWorker(Worker):
    settings_class = Note
    settings: Note

    @register(Dispatch.ONE_TO_ALL)
    def describe(self) -> dict:
        return {
            "rank": self.context.rank,
            "devices": self.context.device_ids,
            "world_size": self.context.world_size,
            "note": self.settings.note,
            "seed": self.context.seed,
            "environment": dict(os.environ),
            "pid": os.getpid(),
            "has_torch": "torch" in sys.modules,
        }

    @register(Dispatch.ONE_TO_ALL)
    def collects_garbage(self) -> bool:
        return gc.isenabled()

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value: object, *, times: int = 1) -> list:
        return [value] * times

    @register(Dispatch.ALL_TO_ALL)
    def add(self, left: int, *, right: int) -> int:
        return left + right

    @register(Dispatch.RANK_ZERO)
    def who(self) -> int:
        return self.context.rank

    def unregistered(self, value: int) -> int:
        return value + self.context.rank

    @register(Dispatch.ONE_TO_ALL, deadline=1.0, name="short nap")
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def spawn_child(self) -> int:
        """Leave a process behind that would live on by itself."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid


class IndependentWorker(BasicWorker):
    """Needs no other rank, as engines do not."""

    initialized = False

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self) -> None:
        self.initialized = True

    @register(Dispatch.ONE_TO_ALL)
    def state(self) -> tuple[int, bool]:
        return self.context.rank, self.initialized


class BrokenAtRestart(IndependentWorker):
    """Its second process cannot be initialised. All of them are noted in the file ``settings.note``."""

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self) -> None:
        with open(self.settings.note, "a+") as file:
            child = subprocess.Popen(["sleep", "300"]).pid
            file.write(f"{os.getpid()}\n{child}\n")
            file.seek(0)
            if len(file.readlines()) == 4:
                raise MemoryError("somebody else has the device")
        super().initialize()


class BrokenAtStart(Worker):
    def __init__(self, context) -> None:
        super().__init__(context)
        if context.rank == 1:
            raise OSError("cannot find the model folder")
