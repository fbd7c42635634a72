"""Record of a run, which reports are made of: samples, the driver's phases, the calls of workers, single requests.

Samples are in one file, a line of JSON a step::

    {"step": 3, "crc": <CRC-32 of data>, "data": <the block: JSON, zlib-compressed, in base64>}

A process that is killed leaves a torn last line, which readers leave out and the next writer cuts off; a damaged line
in the middle costs its own step alone. The data go into a report as they are: browsers decompress them by themselves.

The JSON of a block of samples (:mod:`roll.pipelines.sample_records` makes it)::

    {"step": 3, "kind": "train", "time": 1763860000.0,
     "prompts": [{"id": ..., "text": ..., "domain": ..., "tag": ..., "truth": ..., "images": [...],
                  "decoded": ...}],            # what the prompt's ids say, where that is another text
     "ids": [...], "pieces": [...],            # the vocabulary of this block: token ids and their texts
     "samples": [{"prompt": 0, "group": "17", "score": 1.0, ...}]}

A block of the kind ``images`` has no samples but ``"images": {name: PNG in base64}``, small copies of the images that
prompts name.

The keys of a sample, all but ``prompt`` left out where there is nothing to say:

=====================  ===============================================================================================
prompt                 index of its prompt
group                  samples of the same prompt share it
kind                   ``chosen`` or ``rejected`` of a pair
score, reward          the reward, and the normalised one
metrics                reward parts by name
error                  of the reward or of the episode
finish_reason          why sampling ended
outcome, role          of an episode
images                 names of the images that an episode has shown
response_tokens        number of sampled tokens
tokens                 places in the block's vocabulary of the tokens after the first prompt
response               text, where the tokens are not known
given                  ``[first, end]`` in ``tokens`` of what was given, not sampled
turns                  ``[first, end, reward]`` in ``tokens``
log_probs              of the engine, thousandths
mismatch               trainer minus engine, hundred-thousandths
ref_log_probs          of the reference (preferences), thousandths
advantages             a number, or a list
experts                of each token in the last layer of experts, or null (router replay)
versions               version of the weights: a number, or ``[version, tokens]`` pairs
cut                    number of tokens that the record leaves out at the end
=====================  ===============================================================================================

Times are seconds since the epoch on the clock of whoever writes.  The driver's file has a line a step::

    {"step": 3, "begin": ..., "end": ..., "phases": [["step_generate", begin, end], ...]}

and a worker's, next to its log, a line that says who it is and then one a call (:class:`roll.distributed.actor.
CallTimes`)::

    {"role": "actor_train", "rank": 0, "devices": [0], "host": "node-1"}
    ["update", begin, end]
"""

from __future__ import annotations

import base64
import json
import logging
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.tracking.records import JsonLines, read_rows

logger = logging.getLogger(__name__)

RECORD_FOLDER = "record"  # folder in a run's output folder: samples, timeline, and the places of the rest of the run
SAMPLES_NAME = "samples.jsonl"

MAX_BYTES = 1 << 30
"""Most bytes of the record of samples."""


class SampleLog:
    """Appends blocks; compression and writing go on in a thread while the caller does something else, one block at a
    time.  A disk that is full ends the record, not the run.

    Args:
        path: of the file; its folder is made if need be.
        max_bytes: limit of the file, logged once when it is reached; later blocks are dropped.
        resume_step: the last step that counts: what comes after it is cut off. None: a new run, an earlier file is
            renamed to ``<name>.previous``.
    """

    def __init__(self, path: Path, max_bytes: int, resume_step: int | None = None) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._lines = JsonLines(path, resume_step, max_bytes)
        self._ended = False
        self._pending: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="samples")

    def append(self, block: Mapping[str, Any]) -> None:
        """Write one block; the caller changes nothing in it afterwards."""
        self.flush()
        if not self._ended:
            self._pending = self._writer.submit(self._write, block)

    def flush(self) -> None:
        """Wait until everything is written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, block: Mapping[str, Any]) -> None:
        data = encoded(block)
        reason: object = f"the limit of {self._max_bytes >> 20} MiB is reached"
        try:
            self._ended = not self._lines.append({"step": int(block["step"]), "crc": _crc(data), "data": data})
        except OSError as error:
            self._ended, reason = True, error
        if self._ended:
            logger.warning("%s: %s; later samples are not kept", self._path, reason)

    def close(self) -> None:
        self.flush()
        self._writer.shutdown()
        self._lines.close()


def encoded(block: Mapping[str, Any]) -> str:
    """The data of a block; numbers that are not finite become null."""
    try:
        # Most blocks are finite: the tree is walked in Python only where json has refused it.
        text = json.dumps(block, ensure_ascii=False, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(block), ensure_ascii=False, separators=(",", ":"), default=str)
    return base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), 6)).decode("ascii")


def _finite(value: object) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def decoded(data: str) -> dict[str, Any]:
    """The block of its data."""
    block: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(data)))
    return block


def _crc(data: str) -> int:
    return zlib.crc32(data.encode("utf-8", "replace"))


def read_blocks(path: Path) -> Iterator[str]:
    """The data of every block, in the order of writing, also while a run writes; nothing where there is no file."""
    for row in read_rows(path) if path.is_file() else ():
        data = row.get("data")
        if isinstance(data, str) and _crc(data) == row.get("crc"):
            yield data
        else:
            logger.warning("%s: the block of step %d is damaged and left out", path, row["step"])


TIMELINE_NAME = "timeline.jsonl"
CALLS_SUFFIX = ".calls.jsonl"

Span = tuple[str, float, float]  # Name, begin, end


class TimelineLog:
    """Appends the phases of steps, a line of JSON each. A full disk costs lines and one warning, not the run.

    Args:
        path: of the file; its folder is made if need be.
        resumed: go on in an earlier run's file; else that is renamed to ``<name>.previous``.
    """

    def __init__(self, path: Path, resumed: bool) -> None:
        self._path = path
        # Steps after the checkpoint that a run resumes from have taken their time too.
        self._lines = JsonLines(path, math.inf if resumed else None)
        self._failed = False

    def append(self, step: int, begin: float, end: float, phases: Sequence[Span]) -> None:
        spans = [[name, round(first, 4), round(last, 4)] for name, first, last in phases]
        try:
            self._lines.append({"step": step, "begin": round(begin, 4), "end": round(end, 4), "phases": spans})
        except OSError as error:
            if not self._failed:
                logger.warning("%s: %s; lines are lost, and the run goes on", self._path, error)
            self._failed = True

    def close(self) -> None:
        self._lines.close()


@dataclass(frozen=True)
class WorkerCalls:
    """The calls of one rank's process."""

    role: str
    rank: int
    devices: tuple[int, ...]
    host: str
    spans: tuple[Span, ...]


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """The driver's lines, in order; [] where there is no file."""
    return [
        row
        for row in (read_rows(path) if path.is_file() else ())
        # A line may be damaged and still be JSON.
        if all(isinstance(row.get(key), int | float) for key in ("begin", "end"))
        and isinstance(row.get("phases"), list)
        and all(map(_is_span, row["phases"]))
    ]


def read_calls(folder: Path, since: float = 0.0) -> list[WorkerCalls]:
    """The calls of all workers whose files are in ``folder``, those that ended before ``since`` left out."""
    found = []
    for path in sorted(folder.glob(f"*{CALLS_SUFFIX}")):
        who: dict[str, Any] = {}
        spans: list[Span] = []
        for row in _lines(path):
            if isinstance(row, dict) and isinstance(row.get("rank"), int) and "role" in row:
                who = row
            elif _is_span(row) and row[2] >= since:
                spans.append((str(row[0]), float(row[1]), float(row[2])))
        if who and spans:
            devices = tuple(who["devices"]) if isinstance(who.get("devices"), list) else ()
            found.append(
                WorkerCalls(str(who["role"]), int(who["rank"]), devices, str(who.get("host", "")), tuple(spans))
            )
    return found


def _is_span(row: object) -> bool:
    return isinstance(row, list) and len(row) == 3 and all(isinstance(time, int | float) for time in row[1:])


def _lines(path: Path) -> Iterator[Any]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # the end of a process that was killed
                continue
