"""A run without the package of its strategy ends before anything starts; its plan does not need it."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll import preflight
from roll.config.reading.errors import ConfigError
from roll.preflight import is_installed, require_packages
from tests.config.good import changed, load

ENGINE = {"actor_infer.strategy_args.strategy_name": "vllm"}


def test_a_missing_package_is_named_with_its_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(tmp_path, changed(ENGINE))
    monkeypatch.setattr(preflight, "is_installed", lambda module: module != "vllm")
    with pytest.raises(ConfigError, match=r"actor_infer\.strategy_args\.strategy_name = 'vllm': .*make install-vllm"):
        require_packages(loaded)
    monkeypatch.setattr(preflight, "is_installed", lambda module: True)
    require_packages(loaded)


def test_the_base_install_needs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "is_installed", lambda module: False)
    require_packages(load(tmp_path, changed({})))


def test_looking_for_a_package() -> None:
    assert is_installed("json") and not is_installed("no_such_package.part")
