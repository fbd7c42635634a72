from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.ranks import RankPool
from tests.strategies.samples import write_model


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """``run_ranks(world_size, function, *args)``: the results by rank; see :class:`RankPool`."""
    pool = RankPool(4)
    yield partial(pool.run, tmp_path_factory.mktemp("stores"))
    pool.close()


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders: ``qwen2`` is tied, with biases; ``qwen3`` is untied, with grouped queries and normalised heads."""
    from tests.strategies.engine_models import CONFIGS, save_model

    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in CONFIGS}
