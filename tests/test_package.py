"""The package itself: what an import of a module that it does not have says."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    "module", ["roll.pipeline.rlvr.rlvr_pipeline", "roll.utils.functionals", "roll.distributed.scheduler.protocol"]
)
def test_code_written_for_roll_is_told_where_to_look(module: str) -> None:
    with pytest.raises(ImportError, match=r"Files written for ROLL load here.* docs/migration.md"):
        importlib.import_module(module)


def test_a_name_that_a_module_lacks_is_an_import_error_of_that_module() -> None:
    with pytest.raises(ImportError, match=r"cannot import name 'Nothing' from 'roll\.protocol'"):
        from roll.protocol import Nothing  # type: ignore[attr-defined]  # noqa: F401
