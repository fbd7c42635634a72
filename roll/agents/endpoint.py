"""HTTP endpoint for agents' programs: OpenAI's and Anthropic's interfaces, with one key per episode.

It runs in its own thread, so that it accepts requests while the driver is busy; model calls run on the event loop of
their episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from roll.agents.chat_ids import TemplateError
from roll.agents.session import Refusal, Session, episode_over
from roll.agents.wire_chat import chat_body, chat_events, read_chat_request
from roll.agents.wire_messages import messages_body, messages_events, read_messages_request
from roll.agents.wire_responses import read_responses_request, responses_body, responses_events
from roll.serving.app import CLIENT_HAS_GONE, DISCONNECT_POLL_SECONDS, while_connected
from roll.serving.requests import BadRequest, TooLong, read_json
from roll.serving.responses import error_body
from roll.serving.server import HttpServer

logger = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[Request, Session], Awaitable[Response]]
_MAX_RETIRED = 65_536
"""Number of ended episodes whose keys are remembered."""
_MAX_WAIT = 60.0
"""Seconds that ``POST /episodes`` waits for an episode at most."""


class AgentEndpoint:
    """Serves the model of every open session to clients with its key.

    Args:
        host: address to listen on; other hosts reach it only where it is not a loopback address.
        port: 0: a free one.
        worker_key: key that agents from elsewhere send with ``POST /episodes``; empty: they are refused.
        public_url: address under which they reach the endpoint; empty: the one that it listens on.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, worker_key: str = "", public_url: str = "") -> None:
        self._host, self._port = host, port
        self._worker_key = worker_key
        self._public_url = public_url.rstrip("/")
        self._server: HttpServer | None = None
        self._sessions: dict[str, Session] = {}
        """Public part of a key to its session."""
        self._retired: OrderedDict[str, bytes] = OrderedDict()
        """Public part of a key of an ended episode to the digest of the key."""
        self._waiting: list[Session] = []
        """Episodes that wait for an agent from elsewhere, first come first served."""
        self._workers: dict[str, bytes] = {}
        """Public part of a worker's key to the digest of the key, for programs that we have started."""
        self._have_taken: set[str] = set()
        """Public parts of the keys of workers that have taken an episode."""
        self._lock = threading.Lock()
        self._began = int(time.time())

    def start(self) -> None:
        """Serve from now on; a second call does nothing.

        Raises:
            OSError: the address cannot be had.
            RuntimeError: the server does not start.
        """
        if self._server is None:
            self._server = HttpServer(self._host, self._port)
            self._server.start(self._app)

    @property
    def url(self) -> str:
        """Address of the endpoint, which has been started, without ``/v1``."""
        assert self._server is not None, "start() comes first"
        return self._public_url or self._server.url

    def close(self) -> None:
        """Stop serving; a later :meth:`start` would begin anew."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def open(self, session: Session) -> None:
        """Give ``session`` a key and serve it."""
        name, session.key = _new_key()
        self._sessions[name] = session

    def retire(self, session: Session) -> None:
        """End a session: whoever still sends its key is told that the episode has ended."""
        session.close()
        name = _public_part(session.key)
        if self._sessions.pop(name, None) is not None:
            self._retired[name] = _digest(session.key)
            while len(self._retired) > _MAX_RETIRED:
                self._retired.popitem(last=False)
        with self._lock:
            self._waiting = [one for one in self._waiting if one is not session]

    def admit_worker(self) -> str:
        """A key for a program that may take episodes."""
        name, key = _new_key()
        self._workers[name] = _digest(key)
        return key

    def dismiss_worker(self, key: str) -> tuple[list[Session], bool]:
        """Refuse the key from now on, also to a request that still waits for an episode.

        Returns:
            The episodes that the worker has taken and not finished, and whether it has taken any.
        """
        name = _public_part(key)
        with self._lock:
            del self._workers[name]
            has_taken = name in self._have_taken
            self._have_taken.discard(name)
        unfinished = [one for one in list(self._sessions.values()) if one.taker == name and not one.done.is_set()]
        return unfinished, has_taken

    def offer(self, session: Session) -> None:
        """Queue ``session`` for agents that ask for an episode."""
        with self._lock:
            self._waiting.append(session)

    def waiting(self) -> list[Session]:
        """The episodes that nobody has taken yet."""
        with self._lock:
            return list(self._waiting)

    def _take(self, worker: str) -> Session | None:
        """The episode that waits longest, if any, for ``worker`` (empty: an agent from elsewhere), unless dismissed."""
        with self._lock:
            if not self._waiting or (worker and worker not in self._workers):
                return None
            session = self._waiting.pop(0)
            session.taker = worker
            if worker:
                self._have_taken.add(worker)
            return session

    def _app(self) -> Starlette:
        post = ["POST"]
        return Starlette(
            routes=[
                Route("/health", _health),
                Route("/v1/models", self._keyed(self._models)),
                Route("/v1/chat/completions", self._keyed(self._chat), methods=post),
                Route("/v1/responses", self._keyed(self._responses), methods=post),
                Route("/v1/messages", self._keyed(self._messages), methods=post),
                Route("/v1/messages/count_tokens", self._keyed(self._count_tokens), methods=post),
                Route("/reward", self._keyed(self._reward), methods=post),
                Route("/task", self._keyed(self._task)),
                Route("/episodes", self._episodes, methods=post),
            ]
        )

    def _keyed(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Find the session of a request's key, and turn errors into what the interface's clients expect."""

        async def handle(request: Request) -> Response:
            try:
                return await handler(request, self._session_of(request))
            except BadRequest as error:
                status = 413 if isinstance(error, TooLong) else 400
                return _error(request, Refusal(status, str(error)), error.field)
            except Refusal as refusal:
                return _error(request, refusal)
            except ClientDisconnect:
                return Response(status_code=CLIENT_HAS_GONE)
            except Exception:  # fails this request only; details go to the log, not to the client
                logger.exception("a request to %s has failed", request.url.path)
                return _error(request, Refusal(500, "the request has failed; see the run's log", "server_error"))

        return handle

    def _session_of(self, request: Request) -> Session:
        """The session that a request's key opens.

        Raises:
            Refusal: 410 for the key of an episode that has ended, 401 for any other wrong key.
        """
        key = _key_of(request)
        name = _public_part(key)
        session = self._sessions.get(name)
        if session is not None and hmac.compare_digest(key.encode(), session.key.encode()):
            return session
        if hmac.compare_digest(self._retired.get(name, b""), _digest(key)):
            raise episode_over()
        raise Refusal(401, "the API key is missing or wrong", "authentication_error", "invalid_api_key")

    async def _models(self, request: Request, session: Session) -> Response:
        names = session.roles or ("policy",)
        models = [{"id": name, "object": "model", "created": self._began, "owned_by": "roll"} for name in names]
        return JSONResponse({"object": "list", "data": models})

    async def _task(self, request: Request, session: Session) -> Response:
        return JSONResponse(session.task.body)

    async def _chat(self, request: Request, session: Session) -> Response:
        call = read_chat_request(await read_json(request))
        (reply,) = await while_connected(request, _on_loop(session, session.answer(call)))
        return _events(chat_events(reply, call.include_usage)) if call.stream else JSONResponse(chat_body(reply))

    async def _responses(self, request: Request, session: Session) -> Response:
        call = read_responses_request(await read_json(request), session.responses)
        (reply,) = await while_connected(request, _on_loop(session, session.answer(call)))
        body = responses_body(reply, call)
        session.responses[body["id"]] = [*call.messages[call.own_messages :], reply.message]
        return _events(responses_events(body)) if call.stream else JSONResponse(body)

    async def _messages(self, request: Request, session: Session) -> Response:
        call = read_messages_request(await read_json(request))
        (reply,) = await while_connected(request, _on_loop(session, session.answer(call)))
        body = messages_body(reply, call.stops[0] if len(call.stops) == 1 else None)
        return _events(messages_events(reply, body)) if call.stream else JSONResponse(body)

    async def _count_tokens(self, request: Request, session: Session) -> Response:
        call = read_messages_request(await read_json(request), counting=True)

        async def count() -> int:
            return session.model.conversations.count_tokens(call.messages, call.tools)

        try:
            return JSONResponse({"input_tokens": await _on_loop(session, count())})
        except TemplateError as error:
            raise Refusal(400, f"messages: {error}") from error

    async def _reward(self, request: Request, session: Session) -> Response:
        body = await read_json(request)
        if not isinstance(body, Mapping):
            raise BadRequest("the body must be a JSON object with reward")
        unknown = body.keys() - {"reward", "success", "metrics", "done"}
        if unknown:
            raise BadRequest(f"{min(unknown)}: unknown field; there are reward, success, metrics, done")
        metrics = body.get("metrics", {})
        if not isinstance(metrics, Mapping) or not all(isinstance(one, int | float) for one in metrics.values()):
            raise BadRequest("metrics: must map names to numbers", "metrics")
        if not isinstance(body.get("success"), bool | None):
            raise BadRequest("success: must be true or false", "success")
        await _on_loop(session, session.post(body))
        return JSONResponse({"ok": True})

    async def _episodes(self, request: Request) -> Response:
        """Give a worker or an agent from elsewhere an episode (its key, address and task); 204 where none waits."""
        key = _key_of(request)
        name = _public_part(key)
        if not hmac.compare_digest(self._workers.get(name, b""), _digest(key)):
            name = ""
        from_elsewhere = self._worker_key and hmac.compare_digest(key.encode(), self._worker_key.encode())
        if not name and not from_elsewhere:
            return _error(request, Refusal(401, "the worker's key is missing or wrong", "authentication_error"))
        until = time.monotonic() + min(_MAX_WAIT, _seconds(request.query_params.get("wait", "0")))
        while not await request.is_disconnected():
            session = self._take(name)
            if session is not None:
                session.loop.call_soon_threadsafe(session.begin)
                return JSONResponse({"key": session.key, "base_url": self.url, "task": session.task.body})
            if time.monotonic() >= until:
                break
            await asyncio.sleep(DISCONNECT_POLL_SECONDS)
        return Response(status_code=204)


def _new_key() -> tuple[str, str]:
    """The public part of a key, and the key."""
    name = secrets.token_hex(8)
    return name, f"sk-{name}-{secrets.token_urlsafe(32)}"


def _public_part(key: str) -> str:
    """The part of a key that identifies its episode or worker; the rest is secret."""
    parts = key.split("-", 2)
    return parts[1] if len(parts) == 3 else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _key_of(request: Request) -> str:
    """OpenAI's clients send a bearer token, Anthropic's ``x-api-key`` or the same."""
    return request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        return max(0.0, float(text))
    return 0.0


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _error(request: Request, refusal: Refusal, field_name: str | None = None) -> Response:
    if request.url.path.startswith("/v1/messages"):
        kinds = {"server_error": "api_error"}
        error = {"type": kinds.get(refusal.kind, refusal.kind), "message": refusal.message}
        return JSONResponse({"type": "error", "error": error}, refusal.status)
    body = error_body(refusal.message, refusal.kind, field_name)
    body["error"]["code"] = refusal.code
    return JSONResponse(body, refusal.status)


def _events(events: Any) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


async def _on_loop(session: Session, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run ``coroutine`` on the event loop of the episode; cancellation is passed on.

    Raises:
        Refusal: the run has ended.
    """
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, session.loop)
    except RuntimeError as error:
        coroutine.close()
        raise episode_over() from error
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if future.cancelled() and not _is_cancelling():
            raise episode_over() from None
        raise


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
