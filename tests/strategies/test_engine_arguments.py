"""Installed engines: versions that are let in, and arguments that a configuration adds, by the engines' own classes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import pytest

from roll.config.strategies.registry import BACKENDS
from roll.strategies.engines.base import check_version, typed_arguments


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


ENGINES = {backend.package.title: backend for backend in BACKENDS.rows if backend.package is not None}


def test_tested_versions_are_let_in(caplog):
    for package, version in (("vLLM", "0.32.0+cpu"), ("vLLM", "0.33.1"), ("SGLang", "0.5.23.post1")):
        check_version(ENGINES[package], version, False)
    assert not caplog.records


@pytest.mark.parametrize(
    ("package", "version"), [("vLLM", "0.31.2"), ("vLLM", "0.34.0"), ("SGLang", "0.5.22"), ("SGLang", "0.5.24")]
)
def test_others_are_refused_unless_allowed(package, version, caplog):
    low, high = {"vLLM": ("0.32", "0.34"), "SGLang": ("0.5.23", "0.5.24")}[package]
    text = f"{package} {version} is outside the tested versions (at least {low}, below {high})"
    with pytest.raises(ValueError, match="allow_untested_version: true") as refused:
        check_version(ENGINES[package], version, False)
    assert text in str(refused.value)
    with caplog.at_level(logging.WARNING):
        check_version(ENGINES[package], version, True)
    assert caplog.messages == [text]
