"""From the YAML keys ``track_with`` and ``tracker_kwargs`` to trackers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.config.names import UNPUBLISHED_TRACKERS
from roll.tracking.jsonl import JsonlTracker
from roll.tracking.stdout import StdoutTracker
from roll.tracking.tracker import CompositeTracker, Tracker

_ONLINE_OPTIONS = frozenset({"log_dir", "project", "name", "notes", "tags", "group", "mode"})
OPTIONS: dict[str, frozenset[str]] = {
    "tensorboard": frozenset({"log_dir", "flush_secs"}),
    "wandb": _ONLINE_OPTIONS | {"entity"},
    "swanlab": _ONLINE_OPTIONS | {"workspace"},
    "ml_tracker": _ONLINE_OPTIONS,
    "stdout": frozenset(),
    "jsonl": frozenset(),
}
"""The keys of ``tracker_kwargs`` that each tracker understands."""
_SECRETS = {"api_key": "WANDB_API_KEY or SWANLAB_API_KEY", "login_kwargs": "SWANLAB_API_KEY"}


@dataclass(frozen=True)
class TrackedRun:
    """What every tracker is told about the run.

    Attributes:
        log_dir: the run's own folder of logs; files go there unless ``tracker_kwargs.log_dir`` names another place.
        exp_name: name of the experiment; a folder of that name is made under ``tracker_kwargs.log_dir``.
        config: the effective configuration, secrets masked.
        resume_step: the last finished step of the checkpoint that the run goes on from; None: a new run.
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
    of a tracker holds options of that one alone.

    Raises:
        ValueError: an unknown tracker, an option that none of the trackers understands, or a key given in the YAML.
        ModuleNotFoundError: the package of a tracker is not installed.
    """
    options = tracker_options(track_with, tracker_kwargs)
    options = {name: own for name, own in options.items() if UNPUBLISHED_TRACKERS.get(name) not in options}
    trackers: list[Tracker] = [JsonlTracker(run.log_dir, run.resume_step)]
    trackers += [_build(name, own, run) for name, own in options.items() if name != "jsonl"]
    return CompositeTracker(trackers)


def tracker_options(track_with: str | Sequence[str], tracker_kwargs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of each tracker that ``track_with`` names, checked; nothing is started.

    Raises:
        ValueError: as :func:`build_trackers`.
    """
    names = [track_with] if isinstance(track_with, str) else list(dict.fromkeys(track_with))
    for name in names:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"track_with: {name!r} is no tracker; there are {', '.join(sorted(OPTIONS))}{hint}")
    return {name: _options_of(name, names, tracker_kwargs) for name in names}


def _options_of(name: str, names: Sequence[str], tracker_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    own = _given(tracker_kwargs.get(name) or {})
    shared = _given({key: value for key, value in tracker_kwargs.items() if key not in OPTIONS})
    understood = frozenset().union(*(OPTIONS[other] for other in names))
    for key in (*shared, *own):
        where = "tracker_kwargs" if key in shared else f"tracker_kwargs.{name}"
        if key in _SECRETS:
            raise ValueError(
                f"{where}.{key}: secrets do not belong in a configuration, which is logged and copied; set the "
                f"environment variable {_SECRETS[key]} and remove this line"
            )
        if key not in (understood if key in shared else OPTIONS[name]):
            known = ", ".join(sorted(understood if key in shared else OPTIONS[name])) or "no options"
            raise ValueError(f"{where}.{key}: not an option of {' or '.join(names)}, which take {known}")
    return {key: value for key, value in {**shared, **own}.items() if key in OPTIONS[name]}


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without the options that were left empty."""
    return {key: value for key, value in options.items() if value not in (None, "")}


def _build(name: str, options: dict[str, Any], run: TrackedRun) -> Tracker:
    if name == "stdout":
        return StdoutTracker()
    log_dir = options.pop("log_dir", None)
    # No time stamp in the path: a resumed run has to find its own curves.
    folder = Path(log_dir) / run.exp_name if log_dir else run.log_dir / UNPUBLISHED_TRACKERS.get(name, name)
    if UNPUBLISHED_TRACKERS.get(name, name) == "tensorboard":
        from roll.tracking.tensorboard import TensorBoardTracker

        options = {key: value for key, value in options.items() if key in OPTIONS["tensorboard"]}
        return TensorBoardTracker(folder, run.resume_step, **options)
    options = {"project": "roll", "name": run.exp_name, **options, "resume_step": run.resume_step}
    if name == "wandb":
        from roll.tracking.wandb import WandbTracker

        return WandbTracker(folder, run.config, **options)
    from roll.tracking.swanlab import SwanLabTracker

    return SwanLabTracker(folder, run.config, **options)
