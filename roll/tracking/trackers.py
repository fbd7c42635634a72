"""The trackers of a run as ``track_with`` names them, and TensorBoard's."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roll.config.installation import dotted_path, offered
from roll.config.objects import imported
from roll.config.pipelines import find_own_modules
from roll.config.reading.errors import did_you_mean
from roll.config.reading.fields import DOTTED_PATH
from roll.config.run import UNPUBLISHED_TRACKERS
from roll.tracking.records import CompositeTracker, JsonlTracker, SampleTable, StdoutTracker, TrackedRun, Tracker
from roll.tracking.services import MlflowTracker, PrometheusTracker, SwanLabTracker, TrackioTracker, WandbTracker

_MAX_SAMPLES = 16
"""Rows shown of a sample table: TensorBoard's text view is for a look, the run's own files hold them all."""
# No text may end its cell or row, or start markup.
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", "|": "&#124;", "\n": "<br>"})


class TensorBoardTracker(Tracker):
    """Event files, written with tensorboard's own writer (torch's costs a second of imports). Those of a run that is
    resumed are cut after its last step, so that the curves continue without a fold; a new run hides whatever stood in
    the folder. ``flush_secs``: seconds after which events reach the file at the latest."""

    def __init__(self, run: TrackedRun, log_dir: str | None = None, flush_secs: int = 10) -> None:
        # Imported where it is used: a run without TensorBoard does not wait for it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.folder("tensorboard", log_dir)
        self.paths = {"TensorBoard": folder}
        self._writer = EventFileWriter(str(folder), flush_secs=flush_secs)
        # A session that starts at step s tells TensorBoard to drop what earlier files hold from step s on.
        first_step = 0 if run.resume_step is None else run.resume_step + 1
        self._writer.add_event(
            Event(step=first_step, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._add([{"tag": name, "simple_value": value} for name, value in metrics.items()], step)

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        lines = []
        if rows:
            lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
        for row in rows[:_MAX_SAMPLES]:
            values = [row.get(column) for column in rows[0]]
            cells = [f"{value:.4g}" if isinstance(value, float) else str(value).translate(_ESCAPES) for value in values]
            lines.append(f"| {' | '.join(cells)} |")
        text = "\n".join(lines).encode()
        tensor = {"dtype": "DT_STRING", "string_val": [text], "tensor_shape": {"dim": [{"size": 1}]}}
        metadata = {"plugin_data": {"plugin_name": "text"}}
        self._add([{"tag": f"samples/{name}/text_summary", "metadata": metadata, "tensor": tensor}], step)

    def close(self) -> None:
        self._writer.close()

    def _add(self, values: Sequence[Mapping[str, Any]], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=step, wall_time=time.time(), summary={"value": values}))


_ONLINE_OPTIONS = frozenset({"log_dir", "project", "name", "notes", "tags", "group", "mode"})
OPTIONS: dict[str, frozenset[str]] = {
    "tensorboard": frozenset({"log_dir", "flush_secs"}),
    "wandb": _ONLINE_OPTIONS | {"entity"},
    "swanlab": _ONLINE_OPTIONS | {"workspace"},
    "trackio": frozenset({"log_dir", "project", "name", "group", "space_id", "server_url"}),
    "mlflow": frozenset({"log_dir", "project", "name", "notes", "tags", "tracking_uri"}),
    "ml_tracker": _ONLINE_OPTIONS,
    "prometheus": frozenset({"host", "port"}),
    "stdout": frozenset(),
    "jsonl": frozenset(),
}
"""The keys of ``tracker_kwargs`` that each tracker understands."""
_SECRETS = {"api_key": "WANDB_API_KEY or SWANLAB_API_KEY", "login_kwargs": "SWANLAB_API_KEY"}


_CLASSES: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "swanlab": SwanLabTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
    "prometheus": PrometheusTracker,
    "stdout": lambda run: StdoutTracker(),
}


def build_trackers(
    track_with: str | Sequence[str], tracker_kwargs: Mapping[str, Any], run: TrackedRun
) -> CompositeTracker:
    """Build the trackers that ``track_with`` names, and always the run's own record (``metrics.jsonl``) before them.

    ``tracker_kwargs`` holds options for all of them, each tracker taking those it understands; a key that is the name
    of a tracker holds options of that one alone. A tracker of one's own, by dotted path or the name of an installed
    package, is a subclass of :class:`Tracker` that is built as ``MyTracker(run, **options)``. Raises ``ValueError``: an
    unknown tracker, an option that none of the trackers understands, or a key given in the YAML;
    ``ModuleNotFoundError``: the package of a tracker is not installed.
    """
    options = tracker_options(track_with, tracker_kwargs)
    # A tracker that is not published is written by another one: with both named, the same curves would be written
    # twice.
    options = {name: own for name, own in options.items() if UNPUBLISHED_TRACKERS.get(name) not in options}
    trackers: list[Tracker] = [JsonlTracker(run.log_dir, run.resume_step)]
    for name, own in options.items():
        written_by = UNPUBLISHED_TRACKERS.get(name, name)
        if written_by != name:
            own = {key: value for key, value in own.items() if key in OPTIONS[written_by]}
        if name != "jsonl":
            build: Callable[..., Tracker] = _CLASSES.get(written_by) or own_tracker(name)
            trackers.append(build(run, **own))
    return CompositeTracker(trackers)


def own_tracker(name: str) -> type[Tracker]:
    """The class of a tracker that does not come with this package. ``name``: a dotted path, or a name that an installed
    package offers. Raises ``ValueError``: no such name, nothing that can be imported, or no complete subclass of
    :class:`Tracker`."""
    path = dotted_path("trackers", name).replace(":", ".")
    if not DOTTED_PATH.fullmatch(path):
        known = sorted((*OPTIONS, *offered("trackers")))
        hint = did_you_mean(name, known, "; did you mean {}?")
        raise ValueError(f"track_with: {name!r} is no tracker; there are {', '.join(known)}{hint}")
    find_own_modules()
    try:
        found = imported(path)
    except ImportError as error:
        raise ValueError(f"track_with: {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Tracker)) or inspect.isabstract(found):
        raise ValueError(f"track_with: {name!r} must be a subclass of roll.tracking.Tracker with log and log_samples")
    return found


def _understood(name: str) -> frozenset[str] | None:
    """The options of a tracker; None: any."""
    if name in OPTIONS:
        return OPTIONS[name]
    _, *options = inspect.signature(own_tracker(name)).parameters.values()
    if any(option.kind is option.VAR_KEYWORD for option in options):
        return None
    return frozenset(option.name for option in options)


def tracker_options(track_with: str | Sequence[str], tracker_kwargs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of each tracker that ``track_with`` names, checked; nothing is started. Raises ``ValueError``: as
    :func:`build_trackers`."""
    names = [track_with] if isinstance(track_with, str) else list(dict.fromkeys(track_with))
    understood = {name: _understood(name) for name in names}
    # Options that are left empty count as absent.
    given = {dotted_path("trackers", key): value for key, value in tracker_kwargs.items() if value not in (None, "")}
    shared = {key: value for key, value in given.items() if key not in OPTIONS and key not in names}
    own = {name: {k: v for k, v in given.get(name, {}).items() if v not in (None, "")} for name in names}
    _check_options("tracker_kwargs", shared, understood)
    for name in names:
        _check_options(f"tracker_kwargs.{name}", own[name], {name: understood[name]})
    options = {
        name: {key: value for key, value in {**shared, **own[name]}.items() if known is None or key in known}
        for name, known in understood.items()
    }
    for name in options.keys() - OPTIONS.keys():
        try:
            inspect.signature(own_tracker(name)).bind(None, **options[name])
        except TypeError as error:
            raise ValueError(f"tracker_kwargs: {name}(run, ...): {error}") from error
    return options


def _check_options(where: str, options: Mapping[str, Any], understood: Mapping[str, frozenset[str] | None]) -> None:
    """Raise ``ValueError`` for a secret, or an option that none of the trackers understands."""
    known = frozenset().union(*(taken or () for taken in understood.values()))
    for key in options:
        if key in _SECRETS:
            raise ValueError(
                f"{where}.{key}: secrets do not belong in a configuration, which is logged and copied; set the "
                f"environment variable {_SECRETS[key]} and remove this line"
            )
        if key not in known and None not in understood.values():
            names = " or ".join(understood)
            raise ValueError(
                f"{where}.{key}: not an option of {names}, which take {', '.join(sorted(known)) or 'no options'}"
            )
