"""Messages of a contestant to the harness that a step is done: one JSON line on standard error."""

from __future__ import annotations

import json
import sys

PREFIX = "STEP-DONE "


def mark_step(step: int, **facts: float) -> None:
    sys.stderr.write(PREFIX + json.dumps({"step": step, **facts}) + "\n")
    sys.stderr.flush()
