"""PyTorch's profiler around the calls that workers compute: timelines, and what operators or the device allocate."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

logger = logging.getLogger(__name__)

PROFILER_ENV = "ROLL_PROFILER"
"""How a run tells its workers what to record: :class:`Profiling` as JSON."""
_TABLE_ROWS = 40


@dataclass(frozen=True)
class Profiling:
    """What is recorded.

    Attributes:
        folder: for ``<worker>-<method>-<call>.trace.json.gz`` (Chrome's trace format, which Perfetto and TensorBoard
            read), ``....memory.txt`` (operators by bytes) and ``....memory.pickle`` (snapshots of an accelerator's
            allocator, for pytorch.org/memory_viz).
        timeline: write timelines.
        memory: write what allocates memory.
        calls: of each method the calls that are recorded, from 0; a step calls most methods once.
    """

    folder: str
    timeline: bool
    memory: bool
    calls: Sequence[int]

    def environment(self) -> dict[str, str]:
        """The variables of the workers; none where nothing is recorded."""
        return {PROFILER_ENV: json.dumps(asdict(self))} if self.timeline or self.memory else {}

    @classmethod
    def of_this_process(cls) -> Self | None:
        """As the run has told this worker."""
        text = os.environ.get(PROFILER_ENV)
        return None if text is None else cls(**json.loads(text))


class Profiler:
    """Records a worker's calls as its environment says."""

    def __init__(self, worker_name: str) -> None:
        self._profiling = Profiling.of_this_process()
        self._worker_name = worker_name
        self._calls: Counter[str] = Counter()

    @contextmanager
    def around(self, method: str) -> Iterator[None]:
        """Record the block if it is a call that is to be recorded; nothing is written of one that raises."""
        call, profiling = self._calls[method], self._profiling
        self._calls[method] += 1
        if profiling is None or call not in profiling.calls:
            yield
            return
        import torch
        from torch.profiler import ProfilerActivity, profile

        on_cuda = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
        snapshots = profiling.memory and on_cuda
        if snapshots:
            torch.cuda.memory._record_memory_history()
        with profile(activities=activities, profile_memory=profiling.memory) as recorded:
            yield
        name = f"{self._worker_name}-{method}-{call}".replace("/", "-")
        folder = Path(profiling.folder)
        folder.mkdir(parents=True, exist_ok=True)
        if profiling.timeline:
            recorded.export_chrome_trace(str(folder / f"{name}.trace.json.gz"))
        if profiling.memory:
            order = "self_cuda_memory_usage" if on_cuda else "self_cpu_memory_usage"
            table = recorded.key_averages().table(sort_by=order, row_limit=_TABLE_ROWS)
            (folder / f"{name}.memory.txt").write_text(table, encoding="utf-8")
        if snapshots:
            torch.cuda.memory._dump_snapshot(str(folder / f"{name}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        logger.info("profile of %s written to %s", name, folder)
