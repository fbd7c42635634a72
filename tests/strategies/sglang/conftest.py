"""Engines live in a process of their own. ``make test-sglang`` puts stand-ins for SGLang's GPU kernels on the path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.strategies.engine_process import engine_process


@pytest.fixture(scope="session")
def in_engine_process() -> Iterator[Callable[..., Any]]:
    """``in_engine_process(function, ...)``: what the function returns there."""
    if find_spec("sglang") is None or find_spec("sgl_kernel") is None:
        pytest.skip("SGLang is not installed, or its kernels are not: make test-sglang")
    with engine_process() as in_process:
        yield in_process
