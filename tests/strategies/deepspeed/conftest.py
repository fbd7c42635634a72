from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.strategies.ranks import RankPool


@pytest.fixture(scope="session")
def run_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """``run_deepspeed(world_size, function, *args)``: the results by rank, each time from new processes.

    DeepSpeed keeps process groups in module variables for as long as a process lives.
    """

    def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        pool = RankPool(world_size)
        try:
            return pool.run(tmp_path_factory.mktemp("store"), world_size, function, *args)
        finally:
            pool.close()

    return run
