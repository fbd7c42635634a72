"""Record of a run, which reports are made of: samples, the driver's phases, the calls of workers, single requests.

Samples are in one file, a compressed block a step.  A block is a frame of 16 bytes, ``magic, step, length, CRC-32 of
the payload`` (little-endian), and a payload of zlib-compressed JSON.  A process that is killed leaves a torn last
frame, which readers leave out and the next writer cuts off; a damaged frame in the middle costs its own step alone.
The blocks go into a report as they are: browsers decompress them by themselves.

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

import json
import logging
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from roll.tracking.records import cut

logger = logging.getLogger(__name__)

RECORD_FOLDER = "record"  # folder in a run's output folder: samples, timeline, and the places of the rest of the run
SAMPLES_NAME = "samples.blocks"

MAX_BYTES = 1 << 30
"""Most bytes of the record, compressed."""

_FRAME = struct.Struct("<4siII")
_MAGIC = b"RSB2"
_LEVEL = 6


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
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._max_bytes = path, max_bytes
        self._ended = False
        self._pending: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="samples")
        if path.exists():
            cut(path, ((step, data) for step, data, _ in read_frames(path)), resume_step)
        # Unbuffered: each block is a single write(), so a killed run leaves at most its last block torn.
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115 (open for the whole run)

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
        data = frame(block)
        if self._file.tell() + len(data) > self._max_bytes:
            self._ended = True
            logger.warning(
                "the record of samples has reached %d MiB: later samples are not kept", self._max_bytes >> 20
            )
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._ended = True
            logger.warning("%s: %s; later samples are not kept", self._path, error)

    def close(self) -> None:
        self.flush()
        self._writer.shutdown()
        self._file.close()


def frame(block: Mapping[str, Any]) -> bytes:
    """A block as it is in the file; numbers that are not finite become null."""
    try:
        # Most blocks are finite: the tree is walked in Python only where json has refused it.
        text = json.dumps(block, ensure_ascii=False, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(block), ensure_ascii=False, separators=(",", ":"), default=str)
    payload = zlib.compress(text.encode("utf-8", "replace"), _LEVEL)
    return _FRAME.pack(_MAGIC, int(block["step"]), len(payload), zlib.crc32(payload)) + payload


def _finite(value: object) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def decoded(payload: bytes) -> dict[str, Any]:
    """The block of a payload."""
    block: dict[str, Any] = json.loads(zlib.decompress(payload))
    return block


def read_frames(path: Path) -> Iterator[tuple[int, bytes, bytes]]:
    """Step, whole frame and compressed payload of every block, in the order of writing, also while a run writes;
    nothing where there is no file. What is damaged is passed over up to the next magic word."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s cannot be read: %s", path, error)
        return
    with file:
        while head := file.read(_FRAME.size):
            begin = file.tell() - len(head)
            if len(head) == _FRAME.size:
                magic, step, length, crc = _FRAME.unpack(head)
                payload = file.read(length) if magic == _MAGIC else b""
                if magic == _MAGIC and len(payload) == length and zlib.crc32(payload) == crc:
                    yield step, head + payload, payload
                    continue
            logger.warning("%s: the block at byte %d is damaged or torn and left out", path, begin)
            if not _seek_magic(file, begin + 1):
                return


def _seek_magic(file: BinaryIO, begin: int) -> bool:
    """Go to the next magic word at or after ``begin``; False where there is none."""
    file.seek(begin)
    place, rest = begin, b""
    while chunk := file.read(1 << 20):
        found = (rest + chunk).find(_MAGIC)
        if found >= 0:
            file.seek(place - len(rest) + found)
            return True
        place += len(chunk)
        # A magic word may lie across two chunks.
        rest = chunk[-len(_MAGIC) + 1 :]
    return False


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
        if path.exists() and not resumed:
            path.replace(path.with_name(f"{path.name}.previous"))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: IO[str] = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (open for the whole run)
        self._failed = False

    def append(self, step: int, begin: float, end: float, phases: Sequence[Span]) -> None:
        spans = [[name, round(first, 4), round(last, 4)] for name, first, last in phases]
        row = {"step": step, "begin": round(begin, 4), "end": round(end, 4), "phases": spans}
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            if not self._failed:
                logger.warning("%s: %s; lines are lost, and the run goes on", self._path, error)
            self._failed = True

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


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
        for row in _lines(path)
        # A line may be damaged and still be JSON.
        if isinstance(row, dict)
        and isinstance(row.get("step"), int)
        and all(isinstance(row.get(key), int | float) for key in ("begin", "end"))
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
