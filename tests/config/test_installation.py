"""The command that a remedy names, in this clone; :mod:`tests.config.test_explain` tries that of a wheel."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from roll.config.installation import install_command
from tests.conftest import ROOT


def test_a_clone_is_named_by_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in (tmp_path, ROOT):
        monkeypatch.chdir(folder)
        install_command.cache_clear()
        *words, source = shlex.split(install_command("megatron"))
        place, _, extra = source.partition("[")
        assert words == ["pip", "install", "-e"] and extra == "megatron]"
        assert (Path(place) / "setup.py").is_file()
    install_command.cache_clear()
