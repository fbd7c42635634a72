"""A served model: its HTTP endpoints (models, completions, chat completions, health) over a cluster of engines."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from roll.agents.chat_ids import ChatTemplate
from roll.config.roles import GenerationWorkerConfig
from roll.config.strategies.registry import typed_strategy_config
from roll.distributed import Cluster
from roll.models.build import load_config
from roll.rollout.engines import EngineClient
from roll.serving.dialects.chat import CompletionRequest, chat_events, read_chat, read_completion
from roll.serving.dialects.requests import MAX_TOP_LOG_PROBS, ChatRequest, ModelRequest
from roll.serving.http import (
    BadRequest,
    HttpServer,
    answered,
    check_key,
    event_stream,
    models_response,
    read_json,
    while_connected,
)
from roll.serving.service import EngineService
from roll.serving.writing import CallReader, LiveResponse, Writer
from roll.strategies.engines.requests import PromptScore, longest_sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")
InTurn = Callable[..., Awaitable[Any]]  # runs a function in the thread that serves clients in turn
MAX_PROMPT_LOG_PROBS = 1 << 20  # log-probs of prompts in one response
_MARGIN = 64  # tokens by which a beginning of a text may have more than the text itself has there


@dataclass(eq=False)
class Endpoint:
    """HTTP handlers on top of an engine service."""

    service: EngineService
    tokenizer: PreTrainedTokenizerBase
    model: str  # the name that the model is served under
    max_model_len: int  # most tokens of prompt and response together; what cannot fit is not tokenised
    api_key: str = ""  # bearer token that requests must carry; empty: none
    turns: ClientTurns = field(default_factory=lambda: ClientTurns())

    def app(self) -> Starlette:
        """The routes; all but ``/health`` and ``/metrics`` need the key."""
        began = int(time.time())

        async def metrics(_: Request) -> Response:
            return Response(self.service.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

        async def models(_: Request, in_turn: InTurn) -> Response:
            return models_response([self.model], began)

        completions, chat = answered(self.completions, self._admit), answered(self.chat_completions, self._admit)
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", metrics),
                Route("/v1/models", answered(models, self._admit)),
                Route("/v1/completions", completions, methods=["POST"]),
                Route("/v1/chat/completions", chat, methods=["POST"]),
            ]
        )

    def _admit(self, request: Request) -> InTurn:
        """Check the key; returns the function that runs work when it is the client's turn."""
        check_key(request, self.api_key)
        return partial(self.turns.run, request.client.host if request.client is not None else "")

    async def health(self, request: Request) -> Response:
        """200 while engines serve, else 503 with the reason."""
        failure = self.service.engines.failure
        state = {
            "status": "ok" if failure is None else "failed",
            "engines": self.service.num_engines,
            "open_requests": self.service.num_open,
            **self.service.counts,
        }
        if failure is not None:
            state["reason"] = str(failure)
        return JSONResponse(state, 200 if failure is None else 503)

    async def chat_completions(self, request: Request, in_turn: InTurn) -> Response:
        """``POST /v1/chat/completions``."""
        parsed = read_chat(await read_json(request, in_turn), self.model)
        prompt, calls = await in_turn(self._chat_prompt, parsed)
        params = replace(parsed.params, max_new_tokens=1, min_new_tokens=0, stop_strings=(), top_log_probs=0)

        async def draw(prompt_ids: list[int]) -> int:
            return int((await self.service.generate(prompt_ids, params)).token_ids[0])

        if calls is not None:
            (prompt,) = await while_connected(request, calls.demand(prompt, draw))
        return await self._respond(request, parsed, [prompt], in_turn, calls)

    async def completions(self, request: Request, in_turn: InTurn) -> Response:
        """``POST /v1/completions``."""
        parsed = read_completion(await read_json(request, in_turn), self.model)
        texts = parsed.prompts
        prompts: list[list[int]] = await in_turn(
            lambda: [self._encoded(one, "prompt") if isinstance(one, str) else list(one) for one in texts]
        )
        tops = [] if parsed.prompt_log_probs is None else [parsed.prompt_log_probs]
        if parsed.echo and parsed.log_probs:
            tops.append(parsed.params.top_log_probs)
        for top in tops:
            size = len(self.tokenizer)
            if top < 0 and size > MAX_TOP_LOG_PROBS:
                rule = f"prompt_logprobs: -1 is for vocabularies of up to {MAX_TOP_LOG_PROBS} tokens"
                raise BadRequest(rule, "prompt_logprobs")
            number = sum(map(len, prompts)) * (1 + (size if top < 0 else top))
            if number > MAX_PROMPT_LOG_PROBS:
                rule = f"{number} log-probs of prompts are more than the {MAX_PROMPT_LOG_PROBS} of one response"
                raise BadRequest(f"{rule}: send fewer prompts, or name a number", "prompt_logprobs")
        return await self._respond(request, parsed, prompts, in_turn)

    def _chat_prompt(self, parsed: ChatRequest) -> tuple[list[int], CallReader | None]:
        """The prompt's ids; and what reads the calls of its responses, where there may be any."""
        tokenizer = self.tokenizer
        if not tokenizer.chat_template:
            raise BadRequest("messages: the model has no chat template; use /v1/completions", "messages")
        reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
        for name in parsed.template_kwargs:
            if name in reserved or not name.isidentifier():
                rule = "is not for clients to say; only variables of the model's own chat template are"
                raise BadRequest(f"chat_template_kwargs: {name!r} {rule}"[:300], "chat_template_kwargs")
        try:
            template = ChatTemplate(tokenizer, tools=parsed.tools, arguments=dict(parsed.template_kwargs))
            text = template.render(parsed.messages, parsed.add_generation_prompt)
            # A template that ignores tools renders the same text: the model would never learn of them, and the client
            # never know.
            if parsed.tools and text == template.with_tools(()).render(parsed.messages, parsed.add_generation_prompt):
                raise BadRequest("tools: the model's chat template does not write any", "tools")
            prompt = self._encoded(text, "messages", add_special_tokens=False)
            offers = bool(parsed.tools) and parsed.parse_calls
            return prompt, CallReader(tokenizer, template, parsed, prompt) if offers else None
        except BadRequest:
            raise
        except Exception as error:  # templates raise what they like for conversations that they do not support
            rule = f"the chat template fails: {type(error).__name__}: {error}"
            raise BadRequest(f"messages: {rule}", "messages") from error

    def _encoded(self, text: str, field: str, add_special_tokens: bool = True) -> list[int]:
        encode = partial(self.tokenizer.encode, add_special_tokens=add_special_tokens)
        try:
            token_ids = fits(encode, text, self.max_model_len)
        except Exception as error:  # whatever the tokenizer raises for a text that it cannot encode
            raise BadRequest(f"{field}: the tokenizer fails: {type(error).__name__}: {error}"[:300], field) from error
        if token_ids is None:
            rule = f"a text of {len(text)} characters is more than max_model_len {self.max_model_len} holds"
            raise BadRequest(f"{field}: {rule}", field)
        return token_ids

    async def _respond(
        self,
        request: Request,
        parsed: ModelRequest,
        prompts: Sequence[Sequence[int]],
        in_turn: InTurn,
        calls: CallReader | None = None,
    ) -> Response:
        if parsed.stream and calls is None:
            # The head is sent once there are first tokens, so that what an engine refuses has the status for it.
            live = LiveResponse(self.service, self.tokenizer, parsed, prompts)
            try:
                await while_connected(request, live.wait())
            except BaseException:
                live.close()
                raise
            return event_stream(live.events())
        groups = await while_connected(
            request, *(self.service.generate(prompt, parsed.params, parsed.num_samples) for prompt in prompts)
        )
        writer, echoed, scored = Writer(self.tokenizer, parsed, calls), None, None
        # The engines have accepted these prompts: they refuse prompts that are too long or have unknown ids.
        if isinstance(parsed, CompletionRequest) and parsed.echo:
            echoed = [PromptScore([], [])] * len(prompts)
            if parsed.log_probs:
                echoed = await self._prompt_scores(prompts, parsed.params.top_log_probs)
        if isinstance(parsed, CompletionRequest) and parsed.prompt_log_probs is not None:
            scored = await self._prompt_scores(prompts, parsed.prompt_log_probs)
        body = partial(writer.body, prompts, groups, echoed, scored)
        if parsed.stream:  # what is a call shows at its end
            assert isinstance(parsed, ChatRequest)
            return event_stream(chat_events(await in_turn(body), parsed))
        if scored is None and calls is None:
            return JSONResponse(body())
        # Calls to parse, or many log-probs at many positions: in a thread, so that other requests need not wait.
        response: Response = await in_turn(lambda: JSONResponse(body()))
        return response

    async def _prompt_scores(self, prompts: Sequence[Sequence[int]], top: int) -> list[PromptScore]:
        return list(await asyncio.gather(*(self.service.prompt_score(prompt, top) for prompt in prompts)))


class ClientTurns:
    """One thread that serves clients in turn, so that a client with a thousand long texts delays another by one.

    Tokenizers are not to be used by two threads at a time, and hold the interpreter's lock for most of their work.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        self._wakes = threading.Condition()
        threading.Thread(target=self._serve, daemon=True, name="tokenizing").start()

    async def run(self, client: str, function: Callable[..., T], *arguments: object) -> T:
        """``function(*arguments)``, when it is the client's turn; left out where the caller is cancelled before."""
        result: Future[T] = Future()
        with self._wakes:
            self._queues.setdefault(client, deque()).append((result, partial(function, *arguments)))
            self._wakes.notify()
        return await asyncio.wrap_future(result)

    def _serve(self) -> None:
        while True:
            with self._wakes:
                self._wakes.wait_for(lambda: self._queues)
                client, queue = next(iter(self._queues.items()))
                result, work = queue.popleft()
                del self._queues[client]
                if queue:  # to the end of the line
                    self._queues[client] = queue
            # False where the caller was cancelled while it waited: its work is skipped.
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(work())
                except Exception as error:
                    result.set_exception(error)


def fits(encode: Callable[[str], list[int]], text: str, limit: int) -> list[int] | None:
    """Token ids of ``text``; None where they are more than ``limit``, which a beginning of it shows.

    Twice as much is tokenised at most as a text of ``limit`` tokens has, however long the text is.
    """
    for shift in itertools.count(2):
        length = limit << shift
        if length >= len(text):
            return encode(text)
        if len(encode(text[:length])) > limit + _MARGIN:
            return None
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class FrontOptions:
    """Options of a served model."""

    model: str  # the name that clients give
    api_key: str = ""  # bearer token that clients must send; empty: none
    max_running_requests: int = 128  # prompts that one engine works on at a time; further ones wait
    # Prompts in flight, those that wait included; further ones are turned away with status 429.
    max_open_requests: int = 1024
    slice_seconds: float = 0.05  # seconds that an engine works before it reports finished prompts and takes new ones
    # Number of restarts of each engine that was lost, requests waiting meanwhile if there is no other.
    max_restarts: int = 0


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
        return None if self._service is None else self._service.engines.failure

    def check(self) -> None:
        """Raise :attr:`failure`."""
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
