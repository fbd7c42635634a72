"""TensorBoard event files, written with tensorboard's own writer (torch's costs a second of imports)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from roll.tracking.trackers import SampleTable, Tracker

_MAX_SAMPLES = 16
"""Rows shown of a sample table: TensorBoard's text view is for a look, the run's own files hold them all."""


class TensorBoardTracker(Tracker):
    """Writes into ``folder``.

    Args:
        folder: the event files' folder.
        resume_step: the last step that counts; earlier event files in ``folder`` are cut after it, so that the curves
            of a resumed run continue without a fold. None: a new run, whatever stood in the folder is hidden.
        flush_secs: seconds after which events reach the file at the latest.
    """

    def __init__(self, folder: Path, resume_step: int | None = None, flush_secs: int = 10) -> None:
        self._folder = folder
        self._writer = EventFileWriter(str(folder), flush_secs=flush_secs)
        # A session that starts at step s tells TensorBoard to drop what earlier files hold from step s on.
        first_step = 0 if resume_step is None else resume_step + 1
        self._writer.add_event(
            Event(step=first_step, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(Summary(value=values), step)

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        text = _markdown_table(rows[:_MAX_SAMPLES])
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(
            dtype=DT_STRING,
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        value = Summary.Value(tag=f"samples/{name}/text_summary", metadata=metadata, tensor=tensor)
        self._add(Summary(value=[value]), step)

    def files(self) -> dict[str, Path]:
        return {"TensorBoard": self._folder}

    def close(self) -> None:
        self._writer.close()

    def _add(self, summary: Summary, step: int) -> None:
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=summary))


def _markdown_table(rows: SampleTable) -> str:
    if not rows:
        return ""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    """Text as it is, in a form that cannot end the cell or the row or start markup."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    for character, escaped in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\n", "<br>")):
        text = text.replace(character, escaped)
    return text
