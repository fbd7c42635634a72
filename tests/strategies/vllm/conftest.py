"""vLLM lives in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.strategies.engine_process import engine_process


@pytest.fixture(scope="session")
def in_engine_process() -> Iterator[Callable[..., Any]]:
    """``in_engine_process(function, ...)``: what the function returns there."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed: make install-vllm")
    with engine_process() as in_process:
        yield in_process
