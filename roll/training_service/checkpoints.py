"""Checkpoints on disk, by the paths that the SDK gives them: ``tinker://RUN/KIND/NAME``.

Each is a folder ``RUN/KIND/NAME`` with an adapter as peft reads it, ``checkpoint.json``, and in ``weights`` the state
of the optimizer. A folder is written under another name and renamed when it is whole.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from roll.serving.http import BadRequest, Refusal

# Folder to the SDK's type of a checkpoint.
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
SCHEME = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
_HOUR, _TEN_YEARS = 3600, 10 * 366 * 86400
_META, _RUN = "checkpoint.json", "run.json"


def missing(what: str) -> Refusal:
    """The refusal of something that is not there."""
    return Refusal(404, f"there is no {what}", "not_found_error")


def check_name(name: str, key: str) -> str:
    """The name; ``BadRequest`` where it is none of a folder."""
    if not _NAME.fullmatch(name):
        raise BadRequest(f"{key}: {name[:100]!r} must be of letters, digits and . _ : -, at most 200", key)
    return name


def expiry(ttl_seconds: int | None) -> str | None:
    """The end of a checkpoint's life; ``BadRequest`` for less than an hour, or more than ten years."""
    if ttl_seconds is None:
        return None
    if not _HOUR <= ttl_seconds <= _TEN_YEARS:
        raise BadRequest(f"ttl_seconds: {ttl_seconds} must be from 3600 (an hour) to ten years", "ttl_seconds")
    return (datetime.now(UTC) + timedelta(seconds=ttl_seconds)).isoformat()


class Store:
    """The checkpoints below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob("*/*/.new-*"):
            shutil.rmtree(left)

    def find(self, path: str) -> tuple[Path, dict[str, Any]]:
        """The folder of ``tinker://RUN/KIND/NAME``. Raises ``BadRequest``: no such path. Refusal: no such checkpoint,
        or one that has expired."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise BadRequest(f"path: {path[:200]!r} must be tinker://RUN/KIND/NAME, KIND one of {', '.join(KINDS)}")
        folder = self._place(*parts)
        meta = _read(folder / _META)
        if meta is None or _is_over(meta):
            raise missing(f"checkpoint {path}")
        return folder, meta

    def _place(self, run: str, kind: str, name: str) -> Path:
        return self.root / check_name(run, "path") / kind / check_name(name, "path")

    def save(
        self, run: str, kind: str, name: str, write: Callable[[Path], None], meta: Mapping[str, Any], overwrite: bool
    ) -> str:
        """Have ``write`` fill a checkpoint's folder; its path. Raises ``ValueError``: the name is taken."""
        folder = self._place(run, kind, name)
        if folder.exists() and not overwrite:
            raise ValueError(f"{SCHEME}{run}/{kind}/{name} exists; choose another name, or overwrite=True")
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        try:
            write(fresh)
            size = sum(file.stat().st_size for file in fresh.iterdir())
            whole = {**meta, "time": datetime.now(UTC).isoformat(), "public": False, "size_bytes": size}
            (fresh / _META).write_text(json.dumps(whole))
            if folder.exists():
                shutil.rmtree(folder)
            fresh.rename(folder)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        return f"{SCHEME}{run}/{kind}/{name}"

    def change(self, path: str, **values: object) -> None:
        """Change entries of what :meth:`save` was given."""
        folder, meta = self.find(path)
        _write(folder / _META, {**meta, **values})

    def listed(self, run: str | None = None) -> list[dict[str, Any]]:
        """``Checkpoint`` of the SDK for each checkpoint (of a run), the newest first."""
        found = []
        for file in self.root.glob(f"{'*' if run is None else check_name(run, 'run')}/*/*/{_META}"):
            meta = _read(file)
            owner, kind, name = file.parent.parts[-3:]
            if meta is not None and kind in KINDS and not _is_over(meta):
                keys = ("time", "size_bytes", "public", "user_metadata", "expires_at")
                found.append(
                    {
                        "checkpoint_id": f"{kind}/{name}",
                        "checkpoint_type": KINDS[kind],
                        "tinker_path": f"{SCHEME}{owner}/{kind}/{name}",
                        **{key: meta.get(key) for key in keys},
                    }
                )
        return sorted(found, key=lambda one: str(one["time"]), reverse=True)

    def begin_run(self, run: str, **values: object) -> None:
        """Note a new training run."""
        folder = self.root / check_name(run, "model_id")
        folder.mkdir(parents=True, exist_ok=True)
        about = {"training_run_id": run, "last_request_time": datetime.now(UTC).isoformat()}
        _write(folder / _RUN, {**about, **values})

    def run(self, run: str) -> dict[str, Any]:
        """``TrainingRun`` of the SDK. Raises ``Refusal``: no such run."""
        found = _read(self.root / check_name(run, "run") / _RUN)
        if found is None:
            raise missing(f"training run {run}")
        newest: dict[str, Any] = {}
        for one in self.listed(run):
            newest.setdefault(one["checkpoint_type"], one)
        if newest:
            found["last_request_time"] = max(found["last_request_time"], *(one["time"] for one in newest.values()))
        return {
            **found,
            "model_owner": "local",
            "is_lora": True,
            "last_checkpoint": newest.get("training"),
            "last_sampler_checkpoint": newest.get("sampler"),
        }

    def runs(self) -> list[dict[str, Any]]:
        """All runs, the newest first."""
        found = [self.run(file.parent.name) for file in self.root.glob(f"*/{_RUN}")]
        return sorted(found, key=lambda one: str(one["last_request_time"]), reverse=True)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return content


def _write(file: Path, content: Mapping[str, Any]) -> None:
    fresh = file.with_suffix(".new")  # a reader finds the old content or the new, never half of it
    fresh.write_text(json.dumps(content))
    fresh.replace(file)


def _is_over(meta: Mapping[str, Any]) -> bool:
    expires = meta.get("expires_at")
    return expires is not None and datetime.fromisoformat(expires) < datetime.now(UTC)
