from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.megatron.layouts import SHORT, rows_by_rank
from tests.strategies.megatron.models import plain_results, write_family
from tests.strategies.samples import make_batch, make_role


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``family(name)``: the folder of a small model of that family."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = write_family(tmp_path_factory.mktemp(name), name)
        return folders[name]

    return folder


@pytest.fixture(scope="session")
def value_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``value_family(name)``: the same with a random scalar head."""
    return lambda name: write_family(tmp_path_factory.mktemp(f"value_{name}"), name, value=True)


@pytest.fixture(scope="session")
def expected(family: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    """``expected(name)``: what the plain model of that family computes on the whole batch."""
    results: dict[str, dict[str, Any]] = {}

    def plain(name: str) -> dict[str, Any]:
        if name not in results:
            results[name] = plain_results(family(name), make_batch())
        return results[name]

    return plain


@pytest.fixture(scope="session")
def run_case(run_ranks: Callable[..., list[Any]], family: Callable[[str], Path]) -> Callable[..., list[Any]]:
    """``run_case(case, world, sizes, model="qwen2", args=(), **role)``: the results by rank of a case of ``cases`` with
    the rows of :func:`make_batch` spread over the data-parallel ranks. ``sizes``: short names and other options."""

    def run(
        case: Callable[..., Any],
        world: int,
        sizes: dict[str, Any],
        model: str | Path = "qwen2",
        args: tuple[Any, ...] = (),
        batch: Any = None,
        **options: Any,
    ) -> list[Any]:
        folder = model if isinstance(model, Path) else family(model)
        config = {SHORT.get(name, name): value for name, value in sizes.items()}
        role = make_role(folder, options.pop("strategy", "megatron_train"), config=config, **options)
        rows = rows_by_rank(world, config, make_batch() if batch is None else batch)
        return run_ranks(world, case, role, rows if world > 1 else rows[0], *args)

    return run
