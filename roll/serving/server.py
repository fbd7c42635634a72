"""An HTTP server in a thread of its own, and a cluster of generation engines behind it."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn

from roll.config.roles import GenerationWorkerConfig
from roll.config.strategies.registry import typed_strategy_config
from roll.distributed import Cluster
from roll.models.build import load_config
from roll.rollout.engines import EngineClient
from roll.serving.app import Endpoint
from roll.serving.service import EngineService
from roll.strategies.engines.requests import longest_sequence

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

T = TypeVar("T")
START_SECONDS = 30.0
SHUTDOWN_SECONDS = 3


class HttpServer:
    """An HTTP server that binds its port when it is made, so that the address is known before there is an app.

    Args:
        port: 0: a free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=2048)
        # Accepted connections inherit it. asyncio sets it only where a socket names its protocol, which these do not:
        # every response to a kept connection would wait some 40 ms for the client's acknowledgement of its head.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        self._server: uvicorn.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, make_app: Callable[[], Starlette]) -> None:
        """Serve requests from now on.

        Args:
            make_app: called on the server's event loop.

        Raises:
            RuntimeError: the server does not start.
        """
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(make_app, ready), name="http-server", daemon=True)
        self._thread.start()
        if not ready.wait(START_SECONDS) or self._server is None:
            raise RuntimeError(f"the HTTP server at {self.url} does not start; see the log")

    def _run(self, make_app: Callable[[], Starlette], ready: threading.Event) -> None:
        async def serve() -> None:
            try:
                config = uvicorn.Config(
                    make_app(),
                    log_config=None,
                    access_log=False,
                    lifespan="off",
                    timeout_graceful_shutdown=SHUTDOWN_SECONDS,
                )
                self._loop = asyncio.get_running_loop()
                self._server = uvicorn.Server(config)
            finally:
                ready.set()
            await self._server.serve(sockets=[self._socket])

        try:
            asyncio.run(serve())
        except Exception:
            logger.exception("the HTTP server at %s has failed", self.url)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's event loop, from another thread, and wait for it."""
        assert self._loop is not None, "start() comes first"
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Stop serving; a second call does nothing."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(2 * SHUTDOWN_SECONDS)
            self._thread = self._server = None
        self._socket.close()


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
    """The address is known at once; requests are answered after :meth:`open`, by the least busy engine."""

    def __init__(self, options: FrontOptions, host: str = "127.0.0.1", port: int = 0) -> None:
        self._options = options
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
        """Go on after :meth:`pause`."""
        if self._service is not None:
            self._server.call(self._service.resume())

    def close(self) -> None:
        """Stop serving; before the cluster ends."""
        self._server.close()
