from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from roll.rollout.engines import EngineClient
from roll.serving.http import HttpServer
from roll.serving.server import Endpoint
from roll.serving.service import EngineService
from tests.datasets.conftest import tiny  # noqa: F401  the modules of examples/tiny, as a fixture
from tests.serving.local_cluster import LocalCluster, engine_role
from tests.support.tiny_runs import write_untrained

MAX_MODEL_LEN = 256


@pytest.fixture(scope="session")
def served_model(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The untrained tiny model with a chat template."""
    return write_untrained(tiny, tmp_path_factory.mktemp("served") / "model")


class Serving:
    """A server over two engines, and a client of it."""

    def __init__(self, model: Path, max_open_requests: int, api_key: str = "") -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.cluster = LocalCluster(engine_role(model, MAX_MODEL_LEN), world_size=2)
        self.server = HttpServer()

        def make_app() -> Any:
            self.service = EngineService(EngineClient(self.cluster, 4, 0.01, report_refusals=True), max_open_requests)
            return Endpoint(self.service, self.tokenizer, "tiny", MAX_MODEL_LEN, api_key).app()

        self.server.start(make_app)
        self.client = httpx2.Client(base_url=self.server.url, timeout=30, trust_env=False)

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.client.post(f"/v1/{path}", json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.post("completions", model="tiny", **body)
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]

    def chat(self, **body: Any) -> dict[str, Any]:
        response = self.post("chat/completions", model="tiny", **body)
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]

    def close(self) -> None:
        self.cluster.free.set()
        self.client.close()
        self.server.close()
        self.cluster.close()


@pytest.fixture(scope="module")
def shared(served_model: Path) -> Iterator[Serving]:
    """A server for all tests of a module that leave it as it was."""
    serving = Serving(served_model, 100)
    yield serving
    serving.close()


@pytest.fixture
def make_serving(served_model: Path) -> Iterator[Any]:
    made: list[Serving] = []

    def make(max_open_requests: int = 100, api_key: str = "") -> Serving:
        serving = Serving(served_model, max_open_requests, api_key)
        made.append(serving)
        return serving

    yield make
    for serving in made:
        serving.close()


@pytest.fixture
def serving(make_serving: Any) -> Serving:
    return make_serving()  # type: ignore[no-any-return]
