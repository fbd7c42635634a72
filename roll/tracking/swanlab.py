"""SwanLab. Needs the extra ``swanlab`` and, unless offline, ``SWANLAB_API_KEY``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.tracking.run_id import run_id
from roll.tracking.tracker import SampleTable, Tracker


class SwanLabTracker(Tracker):
    """One SwanLab run; a resumed run goes on in the same one, found by the id that is kept in ``folder``.

    Args:
        folder: where SwanLab keeps its files.
        run_config: shown as the run's configuration; secrets are masked by the caller.
        project, name, notes, tags, group, workspace, mode: as in ``swanlab.init`` (notes: its description).
        resume_step: the last step that counts; None: a new run.

    Raises:
        ModuleNotFoundError: swanlab is not installed.
        ValueError: no key is there and the mode is online.
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
        workspace: str | None = None,
        mode: str | None = None,
    ) -> None:
        try:
            import swanlab
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("track_with: swanlab is not installed; pip install 'roll-rl[swanlab]'") from error
        mode = mode or os.environ.get("SWANLAB_MODE", "online")
        # Asked for here and not by swanlab.init, which would wait at a prompt where there is a terminal.
        if mode == "online" and not os.environ.get("SWANLAB_API_KEY"):
            raise ValueError(
                "track_with: swanlab has no key; set the environment variable SWANLAB_API_KEY, or keep the run on this "
                "machine with tracker_kwargs.mode=offline"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._swanlab = swanlab
        self._run = swanlab.init(
            project=project,
            workspace=workspace,
            name=name,
            description=notes,
            tags=tags,
            group=group,
            mode=mode,
            log_dir=str(folder),
            config=dict(run_config),
            id=run_id(folder / "run-id", resume_step is not None),
            resume="allow",
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        texts = ["\n\n".join(f"{column}: {value}" for column, value in row.items()) for row in rows]
        if texts:
            self._run.log({f"samples/{name}": [self._swanlab.Text(text) for text in texts]}, step=step)

    def files(self) -> dict[str, Path]:
        return {"SwanLab": self._folder}

    def close(self) -> None:
        self._run.finish()
