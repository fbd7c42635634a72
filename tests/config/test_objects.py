"""What is said of a user's module that cannot be imported: the same wherever a configuration names one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll.agents.built_in_tools import ToolError, load_function
from roll.algorithms.policy_losses import policy_losses
from roll.config.objects import imported
from roll.config.pipelines import load_definition
from roll.datasets.columns import import_function
from roll.datasets.types import DataError
from roll.environments.base import EnvironmentOptionError, load_environment_class
from roll.pipelines.agentic.definition import own_group_filter
from roll.rewards.base import RewardNameError
from roll.rewards.registry import load_target
from roll.tracking.trackers import own_tracker

MODULES = {
    "lacks": ("import numpyy\n", "No module named 'numpyy'"),
    "typo": ("def keep(row)\n    return True\n", "SyntaxError: expected ':' (typo.py, line 1)"),
    "raises": ("LIMIT = 1 / 0\n", "raises.py, line 1)"),
    "empty": ("", "'own_code.empty' has no"),
}
READERS: dict[Callable[[str], Any], type[Exception]] = {
    import_function: DataError,
    load_target: RewardNameError,
    load_environment_class: EnvironmentOptionError,
    own_tracker: ValueError,
    own_group_filter: ValueError,
    load_definition: ValueError,
    policy_losses.resolve: ValueError,
    lambda path: load_function(path, "tools"): ToolError,
}


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_code").mkdir()
    (tmp_path / "own_code/__init__.py").touch()
    for name, (text, _) in MODULES.items():
        (tmp_path / f"own_code/{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize("module", MODULES)
def test_every_key_says_what_the_module_raised_and_where(module: str) -> None:
    for read, raised in READERS.items():
        with pytest.raises(raised) as caught:
            read(f"own_code.{module}.keep")
        assert MODULES[module][1] in str(caught.value), read


def test_an_attribute_of_a_class_has_a_path_too() -> None:
    assert imported("pathlib:Path.cwd") == Path.cwd
    with pytest.raises(ImportError, match="has no attribute 'nobody'"):
        imported("pathlib.Path.nobody")
    with pytest.raises(ImportError, match="names no module"):
        imported("keep")
    with pytest.raises(ImportError, match="invalid format"):
        imported("own_code..keep")
