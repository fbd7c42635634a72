"""Weights & Biases. Needs the extra ``wandb`` and, unless offline, ``WANDB_API_KEY`` or an earlier ``wandb login``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.tracking.run_id import run_id
from roll.tracking.tracker import SampleTable, Tracker

_STEP = "global_step"


class WandbTracker(Tracker):
    """One W&B run; a resumed run goes on in the same one, found by the id that is kept in ``folder``.

    Args:
        folder: where W&B keeps its files.
        run_config: shown as the run's configuration; secrets are masked by the caller.
        project, name, notes, tags, group, entity, mode: as in ``wandb.init``.
        resume_step: the last step that counts; None: a new run.

    Raises:
        ModuleNotFoundError: wandb is not installed.
        ValueError: no key is there and the mode is not offline.
    """

    def __init__(
        self,
        folder: Path,
        run_config: Mapping[str, Any],
        *,
        project: str,
        name: str,
        resume_step: int | None = None,
        notes: str | None = None,
        tags: list[str] | None = None,
        group: str | None = None,
        entity: str | None = None,
        mode: str | None = None,
    ) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("track_with: wandb is not installed; pip install 'roll-rl[wandb]'") from error
        mode = mode or os.environ.get("WANDB_MODE", "online")
        # Asked for here and not by wandb.init, which would wait at a prompt where there is a terminal.
        if mode == "online" and not wandb.login(prompt=False):
            raise ValueError(
                "track_with: wandb has no key; set the environment variable WANDB_API_KEY, or keep the run on this "
                "machine with tracker_kwargs.mode=offline"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._wandb = wandb
        self._run = wandb.init(
            project=project,
            name=name,
            notes=notes,
            tags=tags,
            group=group,
            entity=entity,
            mode=mode,
            dir=str(folder),
            config=dict(run_config),
            id=run_id(folder / "run-id", resume_step is not None),
            resume="allow",
        )
        # W&B's own step only grows; with a step metric of ours a run resumed from an older step is drawn as well.
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, _STEP: step})

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        if rows:
            columns = list(rows[0])
            data = [[_cell(row.get(column)) for column in columns] for row in rows]
            self._run.log({f"samples/{name}": self._wandb.Table(columns=columns, data=data), _STEP: step})

    def files(self) -> dict[str, Path]:
        return {"Weights & Biases": self._folder}

    def close(self) -> None:
        self._run.finish()


def _cell(value: Any) -> str | float | bool | None:
    # A table's column has one type; what is neither number nor text is shown as text.
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
