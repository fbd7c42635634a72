from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """asyncio complains of tasks that are dropped while they wait, and of failures that nobody has looked at."""
    yield
    complaints = [r for phase in ("setup", "call") for r in caplog.get_records(phase) if r.name == "asyncio"]
    assert not [record.getMessage() for record in complaints if record.levelno >= logging.WARNING]
