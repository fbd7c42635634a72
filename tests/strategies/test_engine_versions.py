"""Versions of the engines' packages that are let in."""

from __future__ import annotations

import logging

import pytest

from roll.config.strategies.registry import BACKENDS
from roll.strategies.engines.packaged import check_version

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
