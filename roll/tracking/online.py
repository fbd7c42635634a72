"""Online trackers: Weights & Biases and SwanLab, each with an extra of its name."""

from __future__ import annotations

import importlib
import os
import uuid
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from roll.tracking.trackers import SampleTable, Tracker

_STEP = "global_step"


class OnlineTracker(Tracker):
    """A run at an online service; a resumed run goes on in the same one, found by the id that is kept in ``folder``.

    Args:
        folder: where the package keeps its files.
        run_config: shown as the run's configuration; secrets are masked by the caller.
        resume_step: the last step that counts; None: a new run.
        options: ``project``, ``name``, ``notes``, ``tags``, ``group``, ``mode``, and what the service has besides.

    Raises:
        ModuleNotFoundError: the package is not installed.
        ValueError: no key is there and the mode is online.
    """

    package: ClassVar[str]
    title: ClassVar[str]

    def __init__(
        self, folder: Path, run_config: Mapping[str, Any], *, resume_step: int | None = None, **options: Any
    ) -> None:
        try:
            self._module = importlib.import_module(self.package)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"track_with: {self.package} is not installed; pip install 'roll-rl[{self.package}]'"
            ) from error
        prefix = self.package.upper()
        mode = options.pop("mode", None) or os.environ.get(f"{prefix}_MODE", "online")
        # Asked for here and not by the package, which would wait at a prompt where there is a terminal.
        if mode == "online" and not self._has_key():
            raise ValueError(
                f"track_with: {self.package} has no key; set the environment variable {prefix}_API_KEY, or keep the "
                "run on this machine with tracker_kwargs.mode=offline"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        shared = {"mode": mode, "config": dict(run_config), "resume": "allow"}
        self._run = self._start(id=run_id(folder / "run-id", resume_step is not None), **shared, **options)

    @abstractmethod
    def _has_key(self) -> bool:
        """True when the service can be logged in to without asking anyone."""

    @abstractmethod
    def _start(self, **options: Any) -> Any:
        """The package's run."""

    def files(self) -> dict[str, Path]:
        return {self.title: self._folder}

    def close(self) -> None:
        self._run.finish()


class WandbTracker(OnlineTracker):
    """One W&B run. ``options`` are those of ``wandb.init``."""

    package, title = "wandb", "Weights & Biases"

    def _has_key(self) -> bool:
        return bool(self._module.login(prompt=False))

    def _start(self, **options: Any) -> Any:
        run = self._module.init(dir=str(self._folder), **options)
        # W&B's own step only grows; with a step metric of ours a run resumed from an older step is drawn as well.
        run.define_metric("*", step_metric=_STEP)
        return run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, _STEP: step})

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        if rows:
            columns = list(rows[0])
            data = [[_cell(row.get(column)) for column in columns] for row in rows]
            self._run.log({f"samples/{name}": self._module.Table(columns=columns, data=data), _STEP: step})


class SwanLabTracker(OnlineTracker):
    """One SwanLab run. ``options`` are those of ``swanlab.init`` (``notes``: its description)."""

    package, title = "swanlab", "SwanLab"

    def _has_key(self) -> bool:
        return bool(os.environ.get("SWANLAB_API_KEY"))

    def _start(self, **options: Any) -> Any:
        return self._module.init(log_dir=str(self._folder), description=options.pop("notes", None), **options)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        texts = ["\n\n".join(f"{column}: {value}" for column, value in row.items()) for row in rows]
        if texts:
            self._run.log({f"samples/{name}": [self._module.Text(text) for text in texts]}, step=step)


def run_id(path: Path, resumed: bool) -> str:
    """Read the id in ``path`` if the run is resumed; else make a new one and keep it there."""
    if resumed and path.exists():
        return path.read_text(encoding="utf-8").strip()
    new_id = uuid.uuid4().hex[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(new_id, encoding="utf-8")
    return new_id


def _cell(value: Any) -> str | float | bool | None:
    # A table's column has one type; what is neither number nor text is shown as text.
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
