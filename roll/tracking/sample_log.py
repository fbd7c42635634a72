"""The record of a run's samples: one compressed block a step, appended to one file.

A block is a frame of 16 bytes, ``magic, step, length, CRC-32 of the payload`` (little-endian), and a payload of zlib-
compressed JSON.  A process that is killed leaves a torn last frame, which readers leave out and the next writer cuts
off; a damaged frame in the middle costs its own step alone.  The blocks go into a report as they are: browsers
decompress them by themselves.

The JSON of a block of samples (:mod:`roll.pipelines.sample_records` makes it)::

    {"step": 3, "kind": "train", "time": 1763860000.0,
     "prompts": [{"id": ..., "text": ..., "domain": ..., "tag": ..., "truth": ..., "images": [...],
                  "decoded": ...}],            # what the prompt's ids say, where that is another text
     "ids": [...], "pieces": [...],            # the vocabulary of this block: token ids and their texts
     "samples": [{"p": 0, "g": "17", "s": 1.0, ...}]}

A block of the kind ``images`` has no samples but ``"images": {name: PNG in base64}``, small copies of the images that
prompts name.

The keys of a sample, all but ``p`` left out where there is nothing to say:

====  ================================================================================================================
p     index of its prompt
g     group; samples of the same prompt share it
k     ``chosen`` or ``rejected`` of a pair
s, r  score and normalised reward
m     reward parts by name
e     error of the reward or of the episode
f     finish reason
o     outcome of an episode
i     names of the images that an episode has shown
n     sampled tokens
t     places in the block's vocabulary of the tokens behind the first prompt
x     text, where the tokens are not known
c     ``[first, behind last]`` of tokens in ``t`` that were given, not sampled
u     turns: ``[first, behind last, reward]`` in ``t``
l     log-probs of the engine, thousandths
q     trainer minus engine, hundred-thousandths
h     log-probs of the reference (preferences), thousandths
a     advantages: a number, or a list
y     experts of each token in the last layer of experts, or null (router replay)
w     version of the weights: a number, or ``[version, tokens]`` pairs
cut   tokens that the record leaves out at the end
====  ================================================================================================================
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

RECORD_FOLDER = "record"
"""Under a run's output folder: samples, timeline, and where the rest of the run is."""
SAMPLES_NAME = "samples.blocks"

_FRAME = struct.Struct("<4siII")
_MAGIC = b"RSB1"
_LEVEL = 6


class SampleLog:
    """Appends blocks; compression and writing go on in a thread while the caller does something else, one block at a
    time.  A disk that is full ends the record, not the run.

    Args:
        path: of the file; its folder is made if need be.
        max_bytes: nothing is appended beyond, which is said once.
        resume_step: the last step that counts: what is behind it is cut off. None: a new run, an earlier file is
            renamed to ``<name>.previous``.
    """

    def __init__(self, path: Path, max_bytes: int, resume_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._max_bytes = path, max_bytes
        self._ended = False
        self._pending: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="samples")
        if path.exists():
            if resume_step is None:
                path.replace(path.with_name(f"{path.name}.previous"))
            else:
                _keep(path, lambda step: step <= resume_step)
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
        """By a single call of the system."""
        data = frame(block)
        if self._file.tell() + len(data) > self._max_bytes:
            self._ended = True
            logger.warning(
                "the record of samples has reached sample_log.max_megabytes (%d): later samples are not kept",
                self._max_bytes >> 20,
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
    """A block as it stands in the file; numbers that are not finite become null."""
    try:
        text = json.dumps(block, ensure_ascii=False, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(block), ensure_ascii=False, separators=(",", ":"), default=str)
    payload = zlib.compress(text.encode("utf-8", "replace"), _LEVEL)
    return _FRAME.pack(_MAGIC, int(block["step"]), len(payload), zlib.crc32(payload)) + payload


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def read_payloads(path: Path) -> Iterator[tuple[int, bytes]]:
    """Step and compressed payload of every whole block, in the order of writing; nothing where there is no file.

    May be called while a run writes.
    """
    for step, _, payload in _frames(path):
        yield step, payload


def decoded(payload: bytes) -> dict[str, Any]:
    """The block of a payload."""
    block: dict[str, Any] = json.loads(zlib.decompress(payload))
    return block


def _frames(path: Path) -> Iterator[tuple[int, bytes, bytes]]:
    """Step, whole frame and payload; what is damaged is passed over up to the next magic word."""
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
    """Go to the next magic word at or behind ``begin``; False where there is none."""
    file.seek(begin)
    place, rest = begin, b""
    while chunk := file.read(1 << 20):
        found = (rest + chunk).find(_MAGIC)
        if found >= 0:
            file.seek(place - len(rest) + found)
            return True
        place += len(chunk)
        rest = chunk[-len(_MAGIC) + 1 :]
    return False


def _keep(path: Path, wanted: Callable[[int], bool]) -> None:
    kept = path.with_name(f"{path.name}.kept")
    with open(kept, "wb") as file:
        for step, data, _ in _frames(path):
            if wanted(step):
                file.write(data)
        file.flush()
        os.fsync(file.fileno())
    kept.replace(path)
