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
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from roll.agents.agent_options import BlackBoxOptions, Sampling, ToolChoice
from roll.agents.chat_ids import Message, TemplateError
from roll.agents.episode import EngineFault, EpisodeOver, Model, Task
from roll.agents.episode import Response as ModelResponse
from roll.agents.images import has_images
from roll.rewards.base import finite_number
from roll.serving.dialects.chat import (
    chat_body,
    chat_events,
    read_chat,
    read_responses,
    responses_body,
    responses_events,
)
from roll.serving.dialects.messages import messages_body, messages_events, read_messages
from roll.serving.dialects.requests import ChatRequest, Reply
from roll.serving.http import (
    DISCONNECT_POLL_SECONDS,
    BadRequest,
    HttpServer,
    Refusal,
    answered,
    event_stream,
    is_same,
    key_of,
    models_response,
    read_json,
    while_connected,
    wrong_key,
)
from roll.strategies.engines.requests import visible_text

T = TypeVar("T")


@dataclass(eq=False)
class Session:
    """An episode that the endpoint serves; created and used on the episode's event loop."""

    task: Task
    model: Model
    sampling: Sampling = "run"
    tool_choice: ToolChoice = "enforce"
    # Model names, each a role that the policy plays; empty: the policy has a single role under any name.
    roles: tuple[str, ...] = ()
    key: str = ""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    reward: float | dict[str, float] | None = None  # as posted: one number, or one by role
    success: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    # The agent has posted that it is done, has no turn left, or an engine has failed.
    done: asyncio.Event = field(default_factory=asyncio.Event)
    limit: EpisodeOver | None = None  # the limit that the latest call ran into
    fault: EngineFault | None = None
    demanded: int = 0  # calls with an enforced tool call
    overridden: int = 0  # calls whose sampling parameters were replaced by the run's
    in_flight: set[asyncio.Task[Any]] = field(default_factory=set)
    closed: bool = False
    began: float | None = None  # time at which an agent began to work on it, by `time.perf_counter`
    taker: str = ""  # key of the worker that has taken it; empty for agents from elsewhere
    lost: str = ""  # reason why there is no reward: as the agent says, or the end of that worker before the episode's
    # Response id to its conversation, for `previous_response_id`.
    responses: dict[str, list[Message]] = field(default_factory=dict)

    async def answer(self, request: ChatRequest) -> Reply:
        """Make one model call; ``Refusal`` where the episode is over or meets a limit, for messages that the chat
        template does not take, and for sampling parameters that may not be set."""
        if self.closed:
            raise episode_over()
        if self.roles and request.model not in self.roles:
            message = f"model: {request.model!r} is no role of this agent; there are {', '.join(self.roles)}"
            raise Refusal(404, message, "not_found_error", "model_not_found")
        if request.set_sampling and self.sampling == "refuse":
            raise Refusal(400, f"{request.set_sampling[0]}: the run's sampling parameters hold here; leave it out")
        self.overridden += bool(request.set_sampling)
        task = asyncio.current_task()
        assert task is not None
        if self.model.conversations.is_blind and any(has_images(one.get("content")) for one in request.messages):
            raise Refusal(400, "messages: the policy is a model of text, and sees no images")
        options: dict[str, Any] = {"max_new_tokens": request.params.max_new_tokens}
        if request.params.stop_strings:
            options["stop"] = request.params.stop_strings
        if request.must_call and self.tool_choice == "enforce":
            options["must_call"] = request.must_call
            self.demanded += 1
        self.in_flight.add(task)
        try:
            model = self.model.as_(request.model) if self.roles else self.model
            response = await model.chat(request.messages, tools=request.tools, **options)
        except EpisodeOver as over:
            self.limit = over
            if over.outcome != "context_limit":  # an agent may answer that one with a shorter conversation
                self.done.set()
                raise Refusal(
                    403, f"the episode is over: {over.outcome}", "permission_error", str(over.outcome)
                ) from None
            message = "prompt is too long: it leaves no room for a response"
            raise Refusal(400, message, code="context_length_exceeded") from None
        except TemplateError as error:
            raise BadRequest(f"messages: {error}") from error
        except EngineFault as fault:
            self.fault = fault
            self.done.set()
            raise Refusal(503, "the engines have failed", "server_error") from fault
        finally:
            self.in_flight.discard(task)
        # The agent got past the limit by a shorter conversation, so that the episode has not ended by it.
        self.limit = None
        reply = self._reply(request, response)
        # Clients send the message back as they got it: thinking apart, cut at stop strings.
        self.model.conversations.known_as(response.call, reply.message)
        return reply

    def _reply(self, request: ChatRequest, response: ModelResponse) -> Reply:
        """The client's view of ``response``: thinking separated, stop strings cut off."""
        parsed = response.parsed
        calls = list(response.message.get("tool_calls", ())) if request.parse_calls else []
        content = parsed.content if request.parse_calls or not parsed.calls else response.text
        shown = visible_text(content, request.params)
        return Reply(
            content=shown,
            reasoning=parsed.reasoning,
            calls=calls,
            finish_reason="tool_calls" if calls else response.finish_reason,
            stop_string=shown != content,
            prompt_tokens=len(self.model.conversations.prompt_ids(response.call)),
            completion_tokens=len(response.call.response_ids),
            model=request.model,
        )

    async def count_tokens(self, request: ChatRequest) -> int:
        """The tokens of the conversation as a prompt; ``Refusal`` where the chat template does not take it."""
        try:
            return self.model.conversations.count_tokens(request.messages, request.tools)
        except TemplateError as error:
            raise BadRequest(f"messages: {error}") from error

    async def post(self, body: object) -> None:
        """Take the body of ``POST /reward``; ``BadRequest`` for a field that is missing, unknown or of a wrong type, or
        a role that there is not."""
        if not isinstance(body, Mapping):
            raise BadRequest("the body must be a JSON object with reward")
        if body.keys() == {"error"}:
            self.lost, self.closed = str(body["error"]), True
            self.done.set()
            return
        unknown = body.keys() - {"reward", "success", "metrics", "done"}
        if unknown:
            raise BadRequest(f"{min(unknown)}: unknown field; there are reward, success, metrics, done")
        metrics, rewards = body.get("metrics", {}), body.get("reward")
        if not isinstance(metrics, Mapping) or not all(
            isinstance(one, int | float) and finite_number(one) is not None for one in metrics.values()
        ):
            raise BadRequest("metrics: must map names to finite numbers", "metrics")
        if not isinstance(body.get("success"), bool | None):
            raise BadRequest("success: must be true or false", "success")
        by_role: Mapping[str, Any] = rewards if isinstance(rewards, Mapping) else {"reward": rewards}
        for role, value in by_role.items():
            if by_role is rewards and role not in self.roles:
                names = ", ".join(self.roles)
                known = f"there are {names}" if names else "the agent has none (agent_config.roles)"
                raise BadRequest(f"reward: {role!r} is no role of this agent; {known}", "reward")
            # JSON true is a bool, which Python counts among the integers.
            if not isinstance(value, int | float) or isinstance(value, bool) or finite_number(value) is None:
                raise BadRequest(f"{role}: is needed, a finite number", "reward")
        numbers = {str(role): float(value) for role, value in by_role.items()}
        self.reward = numbers if by_role is rewards else numbers["reward"]
        self.success = body.get("success")
        self.metrics = {str(name): float(value) for name, value in metrics.items()}
        if body.get("done", True):
            self.closed = True
            self.done.set()


def episode_over() -> Refusal:
    return Refusal(410, "the episode of this key has ended", "permission_error", "episode_over")


# Of an interface: what reads a request's body, writes that of the response, and makes its stream.
Dialect = tuple[
    Callable[[object, Session], ChatRequest],
    Callable[[Reply, ChatRequest], dict[str, Any]],
    Callable[[Mapping[str, Any], ChatRequest], Iterator[bytes]],
]
DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": (lambda body, _: read_chat(body), chat_body, chat_events),
    "/v1/responses": (lambda body, session: read_responses(body, session.responses), responses_body, responses_events),
    "/v1/messages": (lambda body, _: read_messages(body), messages_body, messages_events),
}
_MAX_WAIT = 60.0  # seconds that `POST /episodes` waits for an episode at most


class AgentEndpoint:
    """Serves the model of every open session to clients with its key."""

    def __init__(self, options: BlackBoxOptions) -> None:
        self._options = options
        self._server: HttpServer | None = None
        # Signs the keys that the endpoint gives, so that it knows them without a record.
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[str, Session] = {}  # key to its session
        self.waiting: list[Session] = []  # episodes that wait for an agent from elsewhere, first come first served
        self._workers: dict[str, bool] = {}  # key of a program that we have started to whether it has taken an episode
        self._lock = threading.Lock()
        self._began = int(time.time())

    def start(self) -> None:
        """Serve from now on; a second call does nothing. ``OSError`` where the address cannot be had, ``RuntimeError``
        where the server does not start."""
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
        """End a session and drop its calls in flight: later requests with its key get the error that the episode has
        ended."""
        session.closed = True
        for task in session.in_flight:
            task.cancel()
        self._sessions.pop(session.key, None)
        with self._lock:
            if session in self.waiting:
                self.waiting.remove(session)

    def admit_worker(self) -> str:
        """A key for a program that may take episodes."""
        key = self._signed(f"sk-worker-{secrets.token_hex(8)}")
        self._workers[key] = False
        return key

    def dismiss_worker(self, key: str) -> tuple[list[Session], bool]:
        """Refuse the key from now on, also to a request that still waits for an episode; returns the episodes that the
        worker has taken and not finished, and whether it has taken any."""
        with self._lock:
            # Under the lock of `_take`: the server's thread could otherwise give an episode to a worker that has ended.
            has_taken = self._workers.pop(key)
        unfinished = [one for one in list(self._sessions.values()) if one.taker == key and not one.done.is_set()]
        return unfinished, has_taken

    def offer(self, session: Session) -> None:
        """Queue ``session`` for agents that request an episode."""
        with self._lock:
            self.waiting.append(session)

    def _take(self, worker: str) -> Session | None:
        """The episode that waits longest, if any, for ``worker`` (empty: an agent from elsewhere), unless dismissed."""
        with self._lock:
            if not self.waiting or (worker and worker not in self._workers):
                return None
            session = self.waiting.pop(0)
            session.taker = worker
            if worker:
                self._workers[worker] = True
            return session

    def _app(self) -> Starlette:
        async def models(_: Request, session: Session) -> Response:
            return models_response(session.roles or ("policy",), self._began)

        async def task(_: Request, session: Session) -> Response:
            return JSONResponse(session.task.body)

        def route(path: str, handler: Callable[[Request, Session], Awaitable[Response]], method: str = "POST") -> Route:
            return Route(path, answered(handler, self._session_of), methods=[method])

        return Starlette(
            routes=[
                Route("/health", lambda _: JSONResponse({"status": "ok"})),
                route("/v1/models", models, "GET"),
                *(route(path, _model_call) for path in DIALECTS),
                route("/v1/messages/count_tokens", _count_tokens),
                route("/reward", _reward),
                route("/task", task, "GET"),
                Route("/episodes", answered(self._episodes, self._worker_of), methods=["POST"]),
            ]
        )

    def _signed(self, name: str) -> str:
        return f"{name}-{hmac.new(self._secret, name.encode(), 'sha256').hexdigest()}"

    def _session_of(self, request: Request) -> Session:
        """The session that a request's key opens; 410 for an episode that has ended, 401 for any other wrong key."""
        key = key_of(request)
        if not key.startswith("sk-episode-") or not is_same(key, self._signed(key.rpartition("-")[0])):
            raise wrong_key()
        session = self._sessions.get(key)
        if session is None:
            raise episode_over()
        return session

    def _worker_of(self, request: Request) -> str:
        """The key of a worker, empty for agents from elsewhere; any other key is refused."""
        key = key_of(request)
        if key in self._workers:  # 256 bits of a signature: a look-up tells nothing about other keys
            return key
        if self._options.worker_key and is_same(key, self._options.worker_key):
            return ""
        raise wrong_key("the worker's key")

    async def _episodes(self, request: Request, worker: str) -> Response:
        """Give a worker or an agent from elsewhere an episode (its key, address and task); 204 where none waits."""
        wait = request.query_params.get("wait", "")
        until = time.monotonic() + (min(_MAX_WAIT, float(wait)) if re.fullmatch(r"\d+\.?\d*", wait, re.ASCII) else 0)
        while not await request.is_disconnected():
            session = self._take(worker)
            if session is not None:
                # This is the server's thread; sessions are changed on the event loop of their episode only.
                session.loop.call_soon_threadsafe(setattr, session, "began", time.perf_counter())
                return JSONResponse({"key": session.key, "base_url": self.url, "task": session.task.body})
            if time.monotonic() >= until:
                break
            await asyncio.sleep(DISCONNECT_POLL_SECONDS)
        return Response(status_code=204)


async def _model_call(request: Request, session: Session) -> Response:
    read, write, events = DIALECTS[request.url.path]
    call = read(await read_json(request), session)
    (reply,) = await while_connected(request, _on_loop(session, session.answer(call)))
    body = write(reply, call)
    if body.get("object") == "response":
        session.responses[body["id"]] = [*call.messages[call.own_messages :], reply.message]
    return event_stream(events(body, call)) if call.stream else JSONResponse(body)


async def _count_tokens(request: Request, session: Session) -> Response:
    call = read_messages(await read_json(request), counting=True)
    return JSONResponse({"input_tokens": await _on_loop(session, session.count_tokens(call))})


async def _reward(request: Request, session: Session) -> Response:
    await _on_loop(session, session.post(await read_json(request)))
    return JSONResponse({"ok": True})


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
