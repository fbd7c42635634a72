"""Engine arguments that a configuration adds, by the classes of the installed engines."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import pytest

from roll.strategies.engines.packaged import typed_arguments


class Level(IntEnum):
    NONE = 0
    MOST = 2


@dataclass
class Arguments:
    """Fields as engines declare them."""

    level: Level = Level.MOST
    chunk: int | None = None
    policy: Literal["first", "longest"] = "first"
    switch: bool = False
    section: dict[str, Any] | None = None
    checked: Unknown | None = None  # type: ignore[name-defined]  # noqa: F821


RIGHT = {"level": 0, "chunk": 512, "policy": "longest", "switch": True, "section": {"a": 1}, "checked": 3}
WRONG = [
    ("level", "fast", "must be one of 0, 2"),
    ("chunk", "big", "must be a whole number; for example chunk: 1"),
    ("policy", "long", "must be one of first, longest"),
    ("switch", 3, "must be true or false"),
    ("chunks", 512, "Arguments has no such field; did you mean 'chunk'"),
]


def test_values_that_fit_are_passed_on() -> None:
    assert typed_arguments(RIGHT, Arguments, "actor_infer") == RIGHT


@pytest.mark.parametrize(("name", "value", "rule"), WRONG)
def test_values_of_other_types_are_refused(name: str, value: object, rule: str) -> None:
    with pytest.raises(ValueError, match=rf"actor_infer\..*\.engine_args\.{name} = .*{rule}"):
        typed_arguments({name: value}, Arguments, "actor_infer")
