"""TensorBoard, Weights & Biases, SwanLab and Trackio, and all trackers of a run as ``track_with`` names them."""

from __future__ import annotations

import importlib
import inspect
import os
import time
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from roll.config.installation import dotted_path, offered
from roll.config.names import UNPUBLISHED_TRACKERS
from roll.config.pipelines import find_own_modules
from roll.config.reading.errors import did_you_mean
from roll.config.reading.fields import DOTTED_PATH
from roll.tracking.mlflow import MlflowTracker
from roll.tracking.prometheus import PrometheusTracker
from roll.tracking.records import CompositeTracker, JsonlTracker, SampleTable, StdoutTracker, Tracker, tracker_package

_MAX_SAMPLES = 16
"""Rows shown of a sample table: TensorBoard's text view is for a look, the run's own files hold them all."""


class TensorBoardTracker(Tracker):
    """Event files in ``folder``, written with tensorboard's own writer (torch's costs a second of imports).

    Args:
        folder: the event files' folder.
        resume_step: the last step that counts; earlier event files in ``folder`` are cut after it, so that the curves
            of a resumed run continue without a fold. None: a new run, whatever stood in the folder is hidden.
        flush_secs: seconds after which events reach the file at the latest.
    """

    def __init__(self, folder: Path, resume_step: int | None = None, flush_secs: int = 10) -> None:
        # Imported where it is used: a run without TensorBoard does not wait for it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder = folder
        self._writer = EventFileWriter(str(folder), flush_secs=flush_secs)
        # A session that starts at step s tells TensorBoard to drop what earlier files hold from step s on.
        first_step = 0 if resume_step is None else resume_step + 1
        self._writer.add_event(
            Event(step=first_step, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._add([{"tag": name, "simple_value": value} for name, value in metrics.items()], step)

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        text = _markdown_table(rows[:_MAX_SAMPLES]).encode()
        tensor = {"dtype": "DT_STRING", "string_val": [text], "tensor_shape": {"dim": [{"size": 1}]}}
        metadata = {"plugin_data": {"plugin_name": "text"}}
        self._add([{"tag": f"samples/{name}/text_summary", "metadata": metadata, "tensor": tensor}], step)

    def files(self) -> dict[str, Path]:
        return {"TensorBoard": self._folder}

    def close(self) -> None:
        self._writer.close()

    def _add(self, values: Sequence[Mapping[str, Any]], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=step, wall_time=time.time(), summary={"value": values}))


# No text may end its cell or row, or start markup.
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", "|": "&#124;", "\n": "<br>"})


def _markdown_table(rows: SampleTable) -> str:
    if not rows:
        return ""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        values = [row.get(column) for column in columns]
        cells = [f"{value:.4g}" if isinstance(value, float) else str(value).translate(_ESCAPES) for value in values]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_STEP = "global_step"


class ServiceTracker(Tracker):
    """A run of a package of a service: metrics by its ``log``, samples as a table."""

    _module: Any
    _run: Any

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        if rows:
            self.log({f"samples/{name}": self._shown(rows)}, step)

    def _shown(self, rows: SampleTable) -> Any:
        """Rows as the ``Table`` of W&B or Trackio."""
        columns = list(rows[0])
        # A table's column has one type; what is neither number nor text is shown as text.
        data = [
            [v if isinstance(v := row.get(name), str | int | float | None) else str(v) for name in columns]
            for row in rows
        ]
        return self._module.Table(columns=columns, data=data)

    def close(self) -> None:
        self._run.finish()


class OnlineTracker(ServiceTracker):
    """A run at an online service; a resumed run continues it, found by the id that is kept in ``folder``.

    Args:
        folder: where the package keeps its files.
        run_config: shown as the run's configuration; secrets are masked by the caller.
        resume_step: the last step that counts; None: a new run.
        options: ``project``, ``name``, ``notes``, ``tags``, ``group``, ``mode``, and the service's own.

    Raises:
        ModuleNotFoundError: the package is not installed.
        ValueError: no key is there and the mode is online.
    """

    package: ClassVar[str]
    title: ClassVar[str]

    def __init__(
        self, folder: Path, run_config: Mapping[str, Any], *, resume_step: int | None = None, **options: object
    ) -> None:
        self._module = tracker_package(self.package)
        prefix = self.package.upper()
        mode = options.pop("mode", None) or os.environ.get(f"{prefix}_MODE", "online")
        # Asked for here and not by the package, which would wait at a prompt where there is a terminal.
        if mode == "online" and not self._has_key():
            raise ValueError(
                f"track_with: {self.package} has no key; set the environment variable {prefix}_API_KEY, or keep the "
                "run on this machine with tracker_kwargs.mode=offline"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, written = folder, folder / "run-id"
        if resume_step is None or not written.exists():
            written.write_text(uuid.uuid4().hex[:16], encoding="utf-8")
        own_id = written.read_text(encoding="utf-8").strip()
        self._run = self._start(id=own_id, mode=mode, config=dict(run_config), resume="allow", **options)

    @abstractmethod
    def _has_key(self) -> bool:
        """True when the service can be logged in to without asking anyone."""

    @abstractmethod
    def _start(self, **options: object) -> Any:
        """The package's run."""

    def files(self) -> dict[str, Path]:
        return {self.title: self._folder}


class WandbTracker(OnlineTracker):
    """One W&B run. ``options`` are those of ``wandb.init``."""

    package, title = "wandb", "Weights & Biases"

    def _has_key(self) -> bool:
        return bool(self._module.login(prompt=False))

    def _start(self, **options: object) -> Any:
        run = self._module.init(dir=str(self._folder), **options)
        # W&B's own step only grows; with a step metric of ours a run resumed from an older step is drawn as well.
        run.define_metric("*", step_metric=_STEP)
        return run

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._run.log({**metrics, _STEP: step})


class SwanLabTracker(OnlineTracker):
    """One SwanLab run. ``options`` are those of ``swanlab.init`` (``notes``: its description)."""

    package, title = "swanlab", "SwanLab"

    def _has_key(self) -> bool:
        return bool(os.environ.get("SWANLAB_API_KEY"))

    def _start(self, **options: object) -> Any:
        return self._module.init(log_dir=str(self._folder), description=options.pop("notes", None), **options)

    def _shown(self, rows: SampleTable) -> Any:
        texts = ["\n\n".join(f"{column}: {value}" for column, value in row.items()) for row in rows]
        return [self._module.Text(text) for text in texts]


class TrackioTracker(ServiceTracker):
    """A Trackio run: a database on this machine, or a Space. A resumed run continues the newest run of its name.

    Args:
        folder: of the databases, which ``TRACKIO_DIR`` names for ``trackio show``; None: the package's own place.
        run_config: shown as the run's configuration; secrets are masked by the caller.
        resume_step: the last step that counts; None: a new run.
        options: ``project``, ``name``, ``group``, ``space_id``, ``server_url`` of ``trackio.init``. A key for a Space
            comes from the environment (``HF_TOKEN``).

    Raises:
        ModuleNotFoundError: the package is not installed.
    """

    def __init__(
        self, folder: Path | None, run_config: Mapping[str, Any], *, resume_step: int | None = None, **options: object
    ) -> None:
        if folder is not None:
            os.environ["TRACKIO_DIR"] = str(folder)  # read when the package is imported
        self._module = tracker_package("trackio")
        resume = "never" if resume_step is None else "allow"
        self._run = self._module.init(config=dict(run_config), resume=resume, embed=False, **options)

    def files(self) -> dict[str, Path]:
        return {"Trackio": Path(self._module.TRACKIO_DIR)}


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


@dataclass(frozen=True)
class TrackedRun:
    """The run as every tracker sees it.

    Attributes:
        log_dir: the run's own folder of logs; files go there unless ``tracker_kwargs.log_dir`` names another place.
        exp_name: name of the experiment; a folder of that name is made under ``tracker_kwargs.log_dir``.
        config: the effective configuration, secrets masked.
        resume_step: the last finished step of the checkpoint that the run resumes from; None: a new run.
    """

    log_dir: Path
    exp_name: str
    config: Mapping[str, Any]
    resume_step: int | None = None


def build_trackers(
    track_with: str | Sequence[str], tracker_kwargs: Mapping[str, Any], run: TrackedRun
) -> CompositeTracker:
    """Build the trackers that ``track_with`` names, and always the run's own record (``metrics.jsonl``) before them.

    ``tracker_kwargs`` holds options for all of them, each tracker taking those it understands; a key that is the name
    of a tracker holds options of that one alone. A tracker of one's own, by dotted path or the name of an installed
    package, is a subclass of :class:`Tracker` that is built as ``MyTracker(run, **options)``.

    Raises:
        ValueError: an unknown tracker, an option that none of the trackers understands, or a key given in the YAML.
        ModuleNotFoundError: the package of a tracker is not installed.
    """
    options = tracker_options(track_with, tracker_kwargs)
    # A tracker that is not published is written by another one: with both named, the same curves would be written
    # twice.
    options = {name: own for name, own in options.items() if UNPUBLISHED_TRACKERS.get(name) not in options}
    trackers: list[Tracker] = [JsonlTracker(run.log_dir, run.resume_step)]
    trackers += [_build(name, own, run) for name, own in options.items() if name != "jsonl"]
    return CompositeTracker(trackers)


def own_tracker(name: str) -> type[Tracker]:
    """The class of a tracker that does not come with this package.

    Args:
        name: a dotted path, or a name that an installed package offers.

    Raises:
        ValueError: no such name, nothing that can be imported, or no complete subclass of :class:`Tracker`.
    """
    path = dotted_path("trackers", name).replace(":", ".")
    if not DOTTED_PATH.fullmatch(path):
        known = sorted((*OPTIONS, *offered("trackers")))
        hint = did_you_mean(name, known, "; did you mean {}?")
        raise ValueError(f"track_with: {name!r} is no tracker; there are {', '.join(known)}{hint}")
    find_own_modules()
    module, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
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


def _build(name: str, options: dict[str, Any], run: TrackedRun) -> Tracker:
    if name == "stdout":
        return StdoutTracker()
    if name not in OPTIONS:
        return own_tracker(name)(run, **options)  # type: ignore[call-arg]
    if name == "prometheus":
        return PrometheusTracker(run.exp_name, run.log_dir / name, **options)
    log_dir = options.pop("log_dir", None)
    # No time stamp in the path: a resumed run has to find its own curves.
    folder = Path(log_dir) / run.exp_name if log_dir else run.log_dir / UNPUBLISHED_TRACKERS.get(name, name)
    if UNPUBLISHED_TRACKERS.get(name, name) == "tensorboard":
        options = {key: value for key, value in options.items() if key in OPTIONS["tensorboard"]}
        return TensorBoardTracker(folder, run.resume_step, **options)
    options = {"project": "roll", "name": run.exp_name, **options, "resume_step": run.resume_step}
    if name == "trackio":
        return TrackioTracker(Path(log_dir) if log_dir else None, run.config, **options)
    if name == "mlflow":
        return MlflowTracker(folder, run.config, **options)
    if name == "wandb":
        return WandbTracker(folder, run.config, **options)
    return SwanLabTracker(folder, run.config, **options)
