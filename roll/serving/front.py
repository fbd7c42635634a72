"""A cluster of generation engines behind one address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll.config.roles import GenerationWorkerConfig
from roll.distributed import Cluster
from roll.distributed.failures import RemoteError
from roll.rollout.engines import EnginePool
from roll.serving.app import Endpoint
from roll.serving.server import HttpServer
from roll.serving.service import EngineService

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class FrontOptions:
    """How a model is served."""

    model: str
    """The name that clients give."""
    api_key: str = ""
    """Bearer token that clients must send; empty: none."""
    max_running_requests: int = 128
    """Prompts that one engine works on at a time; further ones wait."""
    max_open_requests: int = 1024
    """Prompts under way, those that wait included; further ones are turned away with status 429."""
    slice_seconds: float = 0.05
    """How long an engine works before it reports what is finished and takes what is new."""


class HttpFront:
    """The address is there at once; requests are answered after :meth:`open`, by whichever engine has least to do."""

    def __init__(self, options: FrontOptions, host: str = "127.0.0.1", port: int = 0) -> None:
        self._options = options
        self._server = HttpServer(host, port)
        self._service: EngineService | None = None

    @property
    def base_url(self) -> str:
        """What OpenAI's clients call so: up to and with ``/v1``."""
        return f"{self._server.url}/v1"

    def open(self, cluster: Cluster, tokenizer: PreTrainedTokenizerBase) -> None:
        """Answer by these engines, whose models are loaded. Nobody else may give them requests."""
        options = self._options
        timeout = cluster.role.engine_timeout if isinstance(cluster.role, GenerationWorkerConfig) else None

        def make_app() -> Starlette:
            pool = EnginePool(
                cluster,
                options.max_running_requests,
                options.slice_seconds,
                report_refusals=True,
                turn_timeout=timeout,
            )
            self._service = EngineService(pool, options.max_open_requests)
            return Endpoint(self._service, tokenizer, options.model, options.api_key).app()

        self._server.start(make_app)

    @property
    def failure(self) -> RemoteError | None:
        """What ended the engines, if anything has."""
        return None if self._service is None else self._service.failure

    def check(self) -> None:
        """Raise what ended the engines."""
        if self.failure is not None:
            raise self.failure

    def pause(self) -> None:
        """Drop what is under way and keep later requests waiting, so that the engines can leave their devices."""
        if self._service is not None:
            self._server.call(self._service.pause())

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        if self._service is not None:
            self._server.call(self._service.resume())

    def close(self) -> None:
        """Stop answering; before the cluster ends."""
        self._server.close()
