"""The id of a run at an online tracker, kept beside the run's logs so that a resumed run goes on in the same one."""

from __future__ import annotations

import uuid
from pathlib import Path


def run_id(path: Path, resumed: bool) -> str:
    """Read the id in ``path`` if the run is resumed; else make a new one and keep it there."""
    if resumed and path.exists():
        return path.read_text(encoding="utf-8").strip()
    new_id = uuid.uuid4().hex[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(new_id, encoding="utf-8")
    return new_id
