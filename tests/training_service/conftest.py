"""A service in this process over the tiny model, and clients of it: the SDK itself, unmodified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roll.config.roles import ModelArguments
from roll.training_service.command import Options, start
from tests.datasets.conftest import tiny  # noqa: F401  the modules of examples/tiny, as a fixture
from tests.support.tiny_runs import write_untrained

NAME = "tiny/model"
MAX_LENGTH = 256


@pytest.fixture(scope="session")
def base_folder(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The untrained tiny model, whose output matrix is its embeddings."""
    return write_untrained(tiny, tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="session")
def options(base_folder: Path) -> Callable[..., Options]:
    def make(output: Path, **values: Any) -> Options:
        args = ModelArguments(model_name_or_path=str(base_folder), dtype="fp32")
        return Options(args, NAME, MAX_LENGTH, output, port=0, **values)

    return make


@pytest.fixture(scope="session")
def service(options: Callable[..., Options], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service that tests share."""
    server = start(options(tmp_path_factory.mktemp("service")))
    yield server.url
    server.close()


@pytest.fixture
def connect(service: str) -> Iterator[Callable[..., Any]]:
    """Clients of the service, each a session of its own."""
    tinker = pytest.importorskip("tinker", reason="needs the SDK: pip install tinker")
    made = []

    def make(url: str = service, api_key: str = "tml-any") -> Any:
        made.append(tinker.ServiceClient(base_url=url, api_key=api_key))
        return made[-1]

    yield make
    for client in made:
        client.close("success")
