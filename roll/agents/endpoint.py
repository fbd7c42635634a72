"""HTTP endpoint for agents' programs: OpenAI's and Anthropic's interfaces, with one key per episode.

It runs in its own thread, so that it accepts requests while the driver is busy; model calls run on the event loop of
their episode.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from roll.agents.agent_options import BlackBoxOptions
from roll.agents.session import Session, episode_over
from roll.serving.dialects.chat import chat_body, chat_events, read_chat
from roll.serving.dialects.messages import messages_body, messages_events, read_messages
from roll.serving.dialects.parts import ChatRequest, Reply
from roll.serving.dialects.responses import read_responses, responses_body, responses_events
from roll.serving.http import (
    DISCONNECT_POLL_SECONDS,
    HttpServer,
    answered,
    event_stream,
    is_same,
    key_of,
    models_response,
    read_json,
    while_connected,
    wrong_key,
)

T = TypeVar("T")
_MAX_WAIT = 60.0
"""Seconds that ``POST /episodes`` waits for an episode at most."""


class AgentEndpoint:
    """Serves the model of every open session to clients with its key."""

    def __init__(self, options: BlackBoxOptions) -> None:
        self._options = options
        self._server: HttpServer | None = None
        self._secret = secrets.token_bytes(32)
        """Signs the keys that the endpoint gives, so that it knows them without a record."""
        self._sessions: dict[str, Session] = {}
        """Key to its session."""
        self._waiting: list[Session] = []
        """Episodes that wait for an agent from elsewhere, first come first served."""
        self._workers: dict[str, bool] = {}
        """Key of a program that we have started to whether it has taken an episode."""
        self._lock = threading.Lock()
        self._began = int(time.time())

    def start(self) -> None:
        """Serve from now on; a second call does nothing.

        Raises:
            OSError: the address cannot be had.
            RuntimeError: the server does not start.
        """
        if self._server is None:
            self._server = HttpServer(self._options.host, self._options.port)
            self._server.start(self._app)

    @property
    def url(self) -> str:
        """Address of the endpoint, which has been started, without ``/v1``."""
        assert self._server is not None, "start() comes first"
        return self._options.public_url.rstrip("/") or self._server.url

    def close(self) -> None:
        """Stop serving; a later :meth:`start` would begin anew."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def open(self, session: Session) -> None:
        """Give ``session`` a key and serve it."""
        session.key = self._signed(f"sk-episode-{secrets.token_hex(8)}")
        self._sessions[session.key] = session

    def retire(self, session: Session) -> None:
        """End a session: later requests with its key get the error that the episode has ended."""
        session.close()
        self._sessions.pop(session.key, None)
        with self._lock:
            self._waiting = [one for one in self._waiting if one is not session]

    def admit_worker(self) -> str:
        """A key for a program that may take episodes."""
        key = self._signed(f"sk-worker-{secrets.token_hex(8)}")
        self._workers[key] = False
        return key

    def dismiss_worker(self, key: str) -> tuple[list[Session], bool]:
        """Refuse the key from now on, also to a request that still waits for an episode.

        Returns:
            The episodes that the worker has taken and not finished, and whether it has taken any.
        """
        with self._lock:
            # Under the lock of `_take`: the server's thread could otherwise give an episode to a worker that has ended.
            has_taken = self._workers.pop(key)
        unfinished = [one for one in list(self._sessions.values()) if one.taker == key and not one.done.is_set()]
        return unfinished, has_taken

    def offer(self, session: Session) -> None:
        """Queue ``session`` for agents that request an episode."""
        with self._lock:
            self._waiting.append(session)

    def waiting(self) -> list[Session]:
        """The episodes that no agent has taken yet."""
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
                self._workers[worker] = True
            return session

    def _app(self) -> Starlette:
        def route(path: str, handler: Callable[[Request, Session], Awaitable[Response]], method: str = "POST") -> Route:
            return Route(path, answered(handler, self._session_of), methods=[method])

        return Starlette(
            routes=[
                Route("/health", lambda _: JSONResponse({"status": "ok"})),
                route("/v1/models", self._models, "GET"),
                route("/v1/chat/completions", self._chat),
                route("/v1/responses", self._responses),
                route("/v1/messages", self._messages),
                route("/v1/messages/count_tokens", self._count_tokens),
                route("/reward", self._reward),
                route("/task", self._task, "GET"),
                Route("/episodes", answered(self._episodes, self._worker_of), methods=["POST"]),
            ]
        )

    def _signed(self, name: str) -> str:
        return f"{name}-{hmac.new(self._secret, name.encode(), 'sha256').hexdigest()}"

    def _is_signed(self, key: str) -> bool:
        return is_same(key, self._signed(key.rpartition("-")[0]))

    def _session_of(self, request: Request) -> Session:
        """The session that a request's key opens; 410 for an episode that has ended, 401 for any other wrong key."""
        key = key_of(request)
        if not key.startswith("sk-episode-") or not self._is_signed(key):
            raise wrong_key()
        session = self._sessions.get(key)
        if session is None:
            raise episode_over()
        return session

    def _worker_of(self, request: Request) -> str:
        """The key of a worker, empty for agents from elsewhere; any other key is refused."""
        key = key_of(request)
        if self._is_signed(key) and key in self._workers:
            return key
        if self._options.worker_key and is_same(key, self._options.worker_key):
            return ""
        raise wrong_key("the worker's key")

    async def _models(self, request: Request, session: Session) -> Response:
        return models_response(session.roles or ("policy",), self._began)

    async def _task(self, request: Request, session: Session) -> Response:
        return JSONResponse(session.task.body)

    async def _chat(self, request: Request, session: Session) -> Response:
        call = read_chat(await read_json(request))
        body = chat_body(await _reply(request, session, call))
        return event_stream(chat_events(body, call.include_usage)) if call.stream else JSONResponse(body)

    async def _responses(self, request: Request, session: Session) -> Response:
        call = read_responses(await read_json(request), session.responses)
        reply = await _reply(request, session, call)
        body = responses_body(reply, call)
        session.responses[body["id"]] = [*call.messages[call.own_messages :], reply.message]
        return event_stream(responses_events(body)) if call.stream else JSONResponse(body)

    async def _messages(self, request: Request, session: Session) -> Response:
        call = read_messages(await read_json(request))
        body = messages_body(await _reply(request, session, call), call)
        return event_stream(messages_events(body)) if call.stream else JSONResponse(body)

    async def _count_tokens(self, request: Request, session: Session) -> Response:
        call = read_messages(await read_json(request), counting=True)
        return JSONResponse({"input_tokens": await _on_loop(session, session.count_tokens(call))})

    async def _reward(self, request: Request, session: Session) -> Response:
        await _on_loop(session, session.post(await read_json(request)))
        return JSONResponse({"ok": True})

    async def _episodes(self, request: Request, worker: str) -> Response:
        """Give a worker or an agent from elsewhere an episode (its key, address and task); 204 where none waits."""
        wait = request.query_params.get("wait", "")
        until = time.monotonic() + (min(_MAX_WAIT, float(wait)) if re.fullmatch(r"\d+\.?\d*", wait, re.ASCII) else 0)
        while not await request.is_disconnected():
            session = self._take(worker)
            if session is not None:
                # This is the server's thread; sessions are changed on the event loop of their episode only.
                session.loop.call_soon_threadsafe(session.begin)
                return JSONResponse({"key": session.key, "base_url": self.url, "task": session.task.body})
            if time.monotonic() >= until:
                break
            await asyncio.sleep(DISCONNECT_POLL_SECONDS)
        return Response(status_code=204)


async def _reply(request: Request, session: Session, call: ChatRequest) -> Reply:
    (reply,) = await while_connected(request, _on_loop(session, session.answer(call)))
    return reply


async def _on_loop(session: Session, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run ``coroutine`` on the event loop of the episode; 410 where the run has ended. Cancellation is passed on."""
    try:
        # Conversations and engines belong to the driver's event loop; this is the server's thread.
        future = asyncio.run_coroutine_threadsafe(coroutine, session.loop)
    except RuntimeError as error:
        # Nothing will await it: left open, it would warn of that when it is collected.
        coroutine.close()
        raise episode_over() from error
    task = asyncio.current_task()
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        # The episode's end cancels the future, a client that leaves cancels this task: only the former gets an answer.
        if future.cancelled() and (task is None or not task.cancelling()):
            raise episode_over() from None
        raise
