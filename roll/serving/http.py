"""An HTTP server in a thread of its own, and what its handlers have in common: bodies, keys, errors, and clients that
leave."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from roll.agents.call_formats import no_constant


@dataclass(eq=False)
class Refusal(Exception):
    """A request that gets an error for a response."""

    status: int
    message: str
    kind: str = "invalid_request_error"  # type of the error, by the names of OpenAI and Anthropic
    code: str | None = None  # identifies the error to programs, where the type does not
    field: str | None = None  # of the request, which is wrong
    retry_after: int | None = None  # seconds after which the client may try again; None: it need not

    def __str__(self) -> str:
        return self.message

    @property
    def openai(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.field, "code": self.code}}


class BadRequest(Refusal):
    """A body, or a part of it (``field``), that cannot be served, now or later."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(status, message, field=field)


# The limit on open requests is reached; the client may try again later.
Overloaded = partial(Refusal, 429, kind="rate_limit_error", retry_after=1)
# The engines have failed, or have dropped their requests for a pause.
Unavailable = partial(Refusal, 503, kind="server_error", retry_after=1)


def wrong_key(of: str = "the API key") -> Refusal:
    """The refusal of a request without a valid key; ``of``: noun for the key."""
    return Refusal(401, f"{of} is missing or wrong", "authentication_error", "invalid_api_key")


logger = logging.getLogger(__name__)

T = TypeVar("T")
START_SECONDS = 30.0
SHUTDOWN_SECONDS = 3
DISCONNECT_POLL_SECONDS = 0.2
CLIENT_HAS_GONE = 499  # status for a client that has disconnected; it is not read
MAX_BODY = 32 * 2**20  # bytes; a million token ids take about seven
MAX_DEPTH = 32  # lists and objects inside each other
# Lists and objects of a body, and values: by the characters that begin and separate them, so texts count too. The
# parser of Python keeps the interpreter to itself, for seconds where there are millions.
MAX_CONTAINERS, MAX_VALUES = 1 << 18, 1 << 22


class HttpServer:
    """An HTTP server that binds its port (0: a free one) when it is made: the address is known before there is an
    app."""

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
        """Serve requests from now on; ``make_app`` is called on the server's event loop. ``RuntimeError`` where the
        server does not start."""
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
            # Twice: uvicorn waits SHUTDOWN_SECONDS for open connections, and then cancels them.
            self._thread.join(2 * SHUTDOWN_SECONDS)
            self._thread = self._server = None
        self._socket.close()


def answered(
    handler: Callable[[Request, T], Awaitable[Response]], admit: Callable[[Request], T]
) -> Callable[[Request], Awaitable[Response]]:
    """A handler whose errors become responses that clients of the interface understand; ``admit`` checks a request's
    key, and returns what it opens, the second argument of ``handler``."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request, admit(request))
        except Refusal as error:
            refusal = error
        except ClientDisconnect:
            return Response(status_code=CLIENT_HAS_GONE)
        except Exception:  # fails this request only; details go to the log, not to the client
            logger.exception("a request to %s has failed", request.url.path)
            refusal = Refusal(500, "the request has failed; see the server's log", "server_error")
        body = refusal.openai
        if request.url.path.startswith("/v1/messages"):  # Anthropic's interface
            kind = "api_error" if refusal.kind == "server_error" else refusal.kind
            body = {"type": "error", "error": {"type": kind, "message": refusal.message}}
        headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
        return JSONResponse(body, refusal.status, headers)

    return answer


def key_of(request: Request) -> str:
    """The key of a request: OpenAI's clients send a bearer token, Anthropic's ``x-api-key`` or the same."""
    return request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")


def is_same(key: str, other: str) -> bool:
    """Compare keys in a time that does not depend on where they differ."""
    return hmac.compare_digest(key.encode(), other.encode())


def check_key(request: Request, expected: str, of: str = "the API key") -> None:
    """Refuse a request without the key; empty: none is needed."""
    if expected and not is_same(key_of(request), expected):
        raise wrong_key(of)


def models_response(names: Sequence[str], created: int) -> Response:
    """The body of ``GET /v1/models``."""
    models = [{"id": name, "object": "model", "created": created, "owned_by": "roll"} for name in names]
    return JSONResponse({"object": "list", "data": models})


async def while_connected(request: Request, *work: Coroutine[Any, Any, T]) -> list[T]:
    """Results of concurrent work, all of which is dropped when one fails, or with ``ClientDisconnect`` when the client
    has gone."""
    # Kept apart from the gathering: when one fails, gather() leaves the others running.
    tasks = [asyncio.ensure_future(one) for one in work]
    done = asyncio.gather(*tasks)
    try:
        while not done.done():
            await asyncio.wait([done], timeout=DISCONNECT_POLL_SECONDS)
            if not done.done() and await request.is_disconnected():
                raise ClientDisconnect
        return done.result()
    finally:
        for task in tasks:
            task.cancel()


async def read_bytes(request: Request, most: int = MAX_BODY) -> bytes:
    """The body of a request; ``BadRequest`` of status 413 once it is longer than ``most`` bytes."""
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > most:
            raise BadRequest(f"the body is longer than {most} bytes", status=413)
    return bytes(content)


async def read_json(request: Request, in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread) -> Any:
    """The body of a request, parsed in another thread. Raises ``BadRequest``: it is too long (status 413), or has more
    parts than can be parsed in a moment; it is no JSON, nested too deep, or has text that is no Unicode."""
    content = await read_bytes(request)
    # Counted in the bytes, in C, before the parser runs: it cannot be interrupted once it has begun.
    if content.count(b"[") + content.count(b"{") > MAX_CONTAINERS or content.count(b",") > MAX_VALUES:
        rule = f"the body has more than {MAX_CONTAINERS} lists and objects, or {MAX_VALUES} values"
        raise BadRequest(rule, status=413)
    return await in_thread(_parse_json, content)


def _parse_json(content: bytes) -> Any:
    try:
        body = json.loads(content, parse_constant=no_constant)
    except RecursionError as error:
        raise BadRequest(f"the body is nested more than {MAX_DEPTH} deep") from error
    except ValueError as error:  # also what is no UTF-8, and integers of thousands of digits
        raise BadRequest(f"the body is not JSON: {error}") from error
    level, depth = [body], 0
    while level:  # level by level, without recursion: the depth is what is being checked
        depth += 1
        if depth > MAX_DEPTH:
            raise BadRequest(f"the body is nested more than {MAX_DEPTH} deep")
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                below += node.keys()
                below += node.values()
            elif isinstance(node, list):
                below += [item for item in node if not isinstance(item, int)]
            elif isinstance(node, str) and not node.isascii():
                try:
                    node.encode()
                except UnicodeEncodeError as error:  # no tokenizer takes it
                    raise BadRequest("the body has a text with half a surrogate pair, which is no Unicode") from error
        level = below
    return body


def event(body: Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


# A response of `event` after `event`.
event_stream = partial(StreamingResponse, media_type="text/event-stream")
