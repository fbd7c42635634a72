"""Configurations are checked as for a host that may ask the hub; nothing here does."""

from __future__ import annotations

import pytest

from roll.config.model_files import OFFLINE


@pytest.fixture(autouse=True)
def may_ask_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OFFLINE:
        monkeypatch.delenv(name, raising=False)
