"""Failures of a call, as exceptions that say first who, where, how long, and why."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError

from roll.config.reading.masking import masked_text


@dataclass(frozen=True)
class RankReport:
    """Evidence about one rank when a call fails."""

    rank: int
    where: str = ""  # process and node, ``pid 123 on 10.0.0.4``
    error: str = ""
    stack: str = ""  # the frames that raised, without those of the machinery around the worker
    log_file: str | None = None
    log_tail: list[str] = field(default_factory=list)


class RayLost(RuntimeError):
    """A daemon of Ray has ended, and the run with it."""

    def __init__(self, what: str, log_tail: list[str]) -> None:
        lines = [f"{what}; without it the run cannot go on", *_quoted("end of its log", None, log_tail)]
        super().__init__("\n".join(lines))


class NotFinite(RuntimeError):
    """A loss or gradient is not finite, and ``on_nonfinite`` does not let the run continue as it is.

    Attributes: ``rewinds`` (the run is to continue from its newest checkpoint, without the batch of this step).
    """

    def __init__(self, text: str, rewinds: bool) -> None:
        super().__init__(text)
        self.rewinds = rewinds


_NO_ROOM = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))
_REFUSALS = (*_NO_ROOM, *map(os.strerror, (errno.EROFS, errno.EACCES)))


class OutputRefused(RuntimeError):
    """The disk refuses the run's files: a restart would fail in the same way."""

    @classmethod
    def of(cls, error: BaseException) -> OutputRefused | None:
        """Refusal of the trained model, when all steps are done; None: something else was wrong."""
        reason = next((text for text in _REFUSALS if text in str(error)), None)
        if reason is None:
            return None
        return cls(
            f"all steps are done, but the trained model could not be written: {reason}. Make room, then write it from "
            f"the newest checkpoint with `roll export` (without a checkpoint, run again with save_steps)\n{error}"
        )


def missing_room(error: BaseException) -> str | None:
    """The reason where the driver or a worker had no room for a file (none left, beyond a quota, or beyond the largest
    allowed); None: something else was wrong."""
    if isinstance(error, WorkerFailed):
        # A worker's exception arrives as text (WorkerRaised), so its errno can only be recognised by its words.
        texts = [report.error for report in error.reports]
    else:  # safetensors has an error of its own, which only says in words what the system did.
        texts = [str(error)] if isinstance(error, OSError | SafetensorError) else []
        texts += [os.strerror(error.errno)] if isinstance(error, OSError) and error.errno else []
    return next((reason for reason in _NO_ROOM for text in texts if reason in text), None)


def free_room(folder: Path) -> str:
    """``1.5 GB are free in <folder>``."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    return f"{shutil.disk_usage(there).free / 1e9:.1f} GB are free in {folder}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file or folder in a system's error that names none, as that of a write without room."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def needing_room(folder: Path) -> Iterator[None]:
    """Explain a failure of the block that is due to a full disk. Raises ``OutputRefused``: in place of that error, with
    its notes."""
    try:
        yield
    except Exception as error:
        reason = missing_room(error)
        if reason is None:
            raise
        refused = OutputRefused(
            f"the disk takes no more of what the run writes: {reason}; {free_room(folder)}. Make room there, or raise "
            f"the quota or the limit of file sizes (ulimit -f), then run again, from the newest checkpoint where "
            f"there is one (resume_from_checkpoint=true)\n{error}"
        )
        for note in getattr(error, "__notes__", ()):
            refused.add_note(note)
        raise refused from error


class NodeError(RuntimeError):
    """Nodes that did not join, became unreachable, or differ from the others; the message names each."""


class RemoteError(RuntimeError):
    """A call to a cluster that did not end well.

    Attributes: ``cluster`` (the role's name), ``method``, ``rank`` (the one to look at first), ``seconds`` since the
    call began, ``silent_ranks`` (no answer yet), ``reports`` (of the ranks at fault), ``links`` (lines on the network
    from the driver to the nodes of the silent ranks, where that may be the cause).
    """

    verb = "failed"

    def __init__(
        self,
        cluster: str,
        method: str,
        seconds: float,
        reports: list[RankReport],
        silent_ranks: list[int],
        links: Sequence[str] = (),
    ) -> None:
        assert reports, "a failure is some rank's"
        self.cluster, self.method, self.seconds = cluster, method, seconds
        self.reports, self.rank = reports, reports[0].rank
        self.silent_ranks, self.links = silent_ranks, list(links)
        super().__init__(masked_text(self.describe()))

    def describe(self) -> str:
        """The message: cause first, then the evidence."""
        first = self.reports[0]
        where = f" ({first.where})" if first.where else ""
        head = f"{self.cluster} rank {first.rank}{where} {self.verb} in {self.method!r} after {self.seconds:.1f} s"
        lines = [f"{head}: {first.error}", *self._evidence(first)]
        others = [report.rank for report in self.reports[1:]]
        if others:
            lines.append(f"  then also rank {_ranks(others)}: {self.reports[1].error.partition(chr(10))[0][:200]}")
        if self.silent_ranks:
            lines.append(f"  no answer from rank {_ranks(self.silent_ranks)}")
        return "\n".join(lines)

    def _evidence(self, report: RankReport) -> list[str]:
        return _quoted("last lines of its log", report.log_file, report.log_tail)


class WorkerDied(RemoteError):
    """A worker's process ended: killed, out of memory, or crashed in native code."""

    verb = "died"


class WorkerFailed(RemoteError):
    """A worker's method raised; ``reports[0].stack`` is where."""

    def _evidence(self, report: RankReport) -> list[str]:
        lines = ["  raised at:"] + [f"    {line}" for line in report.stack.splitlines()] if report.stack else []
        if report.log_file:
            lines.append(f"  its log: {report.log_file}")
        return lines


class DeadlineExceeded(RemoteError):
    """Ranks that did not answer in time; ``reports`` has the stacks of the first few."""

    def describe(self) -> str:
        how = f"{self.method!r} was not done after {self.seconds:.1f} s; {self.reports[0].error}"
        lines = [f"{self.cluster}: {how}", f"  no answer from rank {_ranks(self.silent_ranks)}"]
        lines += _quoted("network from the driver to their nodes", None, self.links)
        for each in self.reports:
            stands = f"({each.where}) stands at" if each.where else "has no process yet; last errors of Ray here"
            lines += _quoted(f"rank {each.rank} {stands}", each.log_file, each.log_tail)
        return "\n".join(lines)


def _quoted(title: str, file: str | None, lines: list[str]) -> list[str]:
    if not lines:
        return [f"  its log: {file}"] if file else []
    return [f"  {title}" + (f" ({file}):" if file else ":")] + [f"    {line}" for line in lines]


def _ranks(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))
