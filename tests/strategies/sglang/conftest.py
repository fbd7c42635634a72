"""Engines live in a process of their own. ``make test-sglang`` puts stand-ins for SGLang's GPU kernels on the path."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.vllm import cases as shared_cases


@pytest.fixture(scope="session")
def in_engine_process() -> Iterator[Callable[..., Any]]:
    """``in_engine_process(function, ...)``: what the function returns there."""
    if find_spec("sglang") is None or find_spec("sgl_kernel") is None:
        pytest.skip("SGLang is not installed, or its kernels are not: make test-sglang")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *args, **options: pool.submit(function, *args, **options).result()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders: ``qwen2`` is tied, with biases; ``qwen3`` is untied, with grouped queries and normalised heads."""
    return {name: shared_cases.save_model(name, tmp_path_factory.mktemp(name)) for name in shared_cases.CONFIGS}
