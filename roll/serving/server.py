"""A cluster of generation engines that an HTTP server makes available."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll.config.roles import GenerationWorkerConfig
from roll.config.strategies.registry import typed_strategy_config
from roll.distributed import Cluster
from roll.models.build import load_config
from roll.rollout.engines import EngineClient
from roll.serving.app import Endpoint
from roll.serving.http import HttpServer
from roll.serving.service import EngineService
from roll.strategies.engines.requests import longest_sequence

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class FrontOptions:
    """Options of a served model."""

    model: str
    """The name that clients give."""
    api_key: str = ""
    """Bearer token that clients must send; empty: none."""
    max_running_requests: int = 128
    """Prompts that one engine works on at a time; further ones wait."""
    max_open_requests: int = 1024
    """Prompts in flight, those that wait included; further ones are turned away with status 429."""
    slice_seconds: float = 0.05
    """Seconds that an engine works before it reports finished prompts and takes new ones."""
    max_restarts: int = 0
    """Number of restarts of each engine that was lost, requests waiting meanwhile if there is no other."""


class HttpFront:
    """A served model whose address is known before its engines are: requests are answered after :meth:`open`, by the
    least busy engine."""

    def __init__(self, options: FrontOptions, host: str = "127.0.0.1", port: int = 0) -> None:
        self._options, self.model = options, options.model
        self._server = HttpServer(host, port)
        self._service: EngineService | None = None

    @property
    def base_url(self) -> str:
        """``base_url`` of OpenAI's clients: up to and with ``/v1``."""
        return f"{self._server.url}/v1"

    def open(self, cluster: Cluster, tokenizer: PreTrainedTokenizerBase) -> None:
        """Serve with these engines, whose models are loaded. Only this front may give them requests."""
        options = self._options
        arguments = cluster.role.model_args
        written = getattr(typed_strategy_config(cluster.role.strategy_args), "max_model_len", None)
        longest = longest_sequence(written, load_config(arguments), arguments.model_name_or_path)
        timeout = cluster.role.engine_timeout if isinstance(cluster.role, GenerationWorkerConfig) else None

        # Called on the server's own event loop, to which the client of the engines and its tasks are bound.
        def make_app() -> Starlette:
            engines = EngineClient(
                cluster,
                options.max_running_requests,
                options.slice_seconds,
                report_refusals=True,
                turn_timeout=timeout,
                max_restarts=options.max_restarts,
                fixed_weights=True,
            )
            self._service = EngineService(engines, options.max_open_requests)
            return Endpoint(self._service, tokenizer, options.model, longest, options.api_key).app()

        self._server.start(make_app)

    @property
    def failure(self) -> Exception | None:
        """Failure that ended the engines, if any."""
        return None if self._service is None else self._service.failure

    def check(self) -> None:
        """Raise the failure that ended the engines."""
        if self.failure is not None:
            raise self.failure

    def pause(self) -> None:
        """Drop the prompts in flight and keep later requests waiting, so that the engines can leave their devices."""
        if self._service is not None:
            self._server.call(self._service.pause())

    def resume(self) -> None:
        """Serve again after :meth:`pause`."""
        if self._service is not None:
            self._server.call(self._service.resume())

    def close(self) -> None:
        """Stop serving; before the cluster ends."""
        self._server.close()
