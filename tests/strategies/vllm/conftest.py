"""Engines live in a process of their own: vLLM changes global state of torch, and is imported once for all tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.vllm import cases


@pytest.fixture(scope="session")
def in_engine_process() -> Iterator[Callable[..., Any]]:
    """``in_engine_process(function, ...)``: what the function returns there."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed: make install-vllm")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *args, **options: pool.submit(function, *args, **options).result()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders: ``qwen2`` is tied, with biases; ``qwen3`` is untied, with grouped queries and normalised heads."""
    return {name: cases.save_model(name, tmp_path_factory.mktemp(name)) for name in cases.CONFIGS}
