"""A process for engines: they change global state of torch, and are imported once for all tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest


@contextmanager
def engine_process() -> Iterator[Callable[..., Any]]:
    """``in_engine_process(function, ...)``: what the function returns there."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *args, **options: pool.submit(function, *args, **options).result()


def process_fixture(reason: str, *packages: str) -> Any:
    """``in_engine_process`` for tests that are skipped without these packages."""

    @pytest.fixture(scope="session")
    def in_engine_process() -> Iterator[Callable[..., Any]]:
        if not all(map(find_spec, packages)):
            pytest.skip(reason)
        with engine_process() as in_process:
            yield in_process

    return in_engine_process
