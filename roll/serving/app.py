"""The HTTP endpoints: models, completions, chat completions, health."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from roll.serving.requests import (
    MAX_PROMPT_LOG_PROBS,
    MAX_TOP_LOG_PROBS,
    BadRequest,
    ParsedChat,
    ParsedCompletion,
    ParsedRequest,
    TooLong,
    read_chat,
    read_completion,
    read_json,
)
from roll.serving.responses import LiveResponse, ResponseBody, Writer, error_body
from roll.serving.service import EngineService, Overloaded, Refused, Unavailable
from roll.serving.turns import ClientTurns, fits
from roll.strategies.engines.requests import PromptScore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
RETRY_AFTER = "1"
DISCONNECT_POLL_SECONDS = 0.2
CLIENT_HAS_GONE = 499
"""Status for a client that has disconnected; it is not read."""


class Endpoint:
    """HTTP handlers on top of an engine service.

    Args:
        model: the name that the model is served under.
        max_model_len: most tokens of prompt and response together; what cannot fit is not tokenised.
        api_key: bearer token that requests must carry; empty: none.
    """

    def __init__(
        self,
        service: EngineService,
        tokenizer: PreTrainedTokenizerBase,
        model: str,
        max_model_len: int,
        api_key: str = "",
    ) -> None:
        self._service = service
        self._tokenizer = tokenizer
        self._model = model
        self._max_model_len = max_model_len
        self._api_key = api_key
        self._began = int(time.time())
        self._chat_writer = Writer(tokenizer, model, chat=True)
        self._completion_writer = Writer(tokenizer, model, chat=False)
        self._turns = ClientTurns()
        self._reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self._guarded(self.models)),
                Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
                Route("/v1/chat/completions", self._guarded(self.chat_completions), methods=["POST"]),
            ]
        )

    async def health(self, request: Request) -> Response:
        """200 while engines serve, else 503 with the reason."""
        failure = self._service.failure
        state = {
            "status": "ok" if failure is None else "failed",
            "engines": self._service.num_engines,
            "open_requests": self._service.num_open,
            **asdict(self._service.counts),
        }
        if failure is not None:
            state["reason"] = str(failure)
        return JSONResponse(state, 200 if failure is None else 503)

    async def models(self, request: Request) -> Response:
        model = {"id": self._model, "object": "model", "created": self._began, "owned_by": "roll"}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat_completions(self, request: Request) -> Response:
        in_turn = self._in_turn(request)
        parsed = read_chat(await read_json(request, in_turn), self._model)
        prompt = await in_turn(self._chat_prompt, parsed)
        return await self._respond(request, parsed, [prompt], self._chat_writer)

    async def completions(self, request: Request) -> Response:
        in_turn = self._in_turn(request)
        parsed = read_completion(await read_json(request, in_turn), self._model)
        prompts = await in_turn(self._completion_prompts, parsed)
        if parsed.prompt_log_probs is not None:
            self._check_prompt_scores(prompts, parsed.prompt_log_probs)
        if parsed.echo and parsed.log_probs:
            self._check_prompt_scores(prompts, parsed.params.top_log_probs)
        return await self._respond(request, parsed, prompts, self._completion_writer)

    def _in_turn(self, request: Request) -> Callable[..., Awaitable[Any]]:
        return partial(self._turns.run, request.client.host if request.client is not None else "")

    def _chat_prompt(self, parsed: ParsedChat) -> list[int]:
        if not self._tokenizer.chat_template:
            raise BadRequest("messages: the model has no chat template; use /v1/completions", "messages")
        for name in parsed.template_kwargs:
            if name in self._reserved or not name.isidentifier():
                rule = "is not for clients to say; only variables of the model's own chat template are"
                raise BadRequest(f"chat_template_kwargs: {name!r} {rule}"[:300], "chat_template_kwargs")
        try:
            text: Any = self._tokenizer.apply_chat_template(
                [dict(message) for message in parsed.messages],
                add_generation_prompt=parsed.add_generation_prompt,
                tokenize=False,
                **parsed.template_kwargs,
            )
        except Exception as error:  # templates raise what they like for conversations that they do not support
            raise BadRequest(
                f"messages: the chat template fails: {type(error).__name__}: {error}", "messages"
            ) from error
        return self._encoded(text, "messages", add_special_tokens=False)

    def _encoded(self, text: str, field: str, add_special_tokens: bool = True) -> list[int]:
        encode = partial(self._tokenizer.encode, add_special_tokens=add_special_tokens)
        try:
            token_ids = fits(encode, text, self._max_model_len)
        except Exception as error:  # whatever the tokenizer raises for a text that it cannot encode
            raise BadRequest(f"{field}: the tokenizer fails: {type(error).__name__}: {error}"[:300], field) from error
        if token_ids is None:
            rule = f"a text of {len(text)} characters is more than max_model_len {self._max_model_len} holds"
            raise BadRequest(f"{field}: {rule}", field)
        return token_ids

    def _completion_prompts(self, parsed: ParsedCompletion) -> list[list[int]]:
        return [
            self._encoded(prompt, "prompt") if isinstance(prompt, str) else list(prompt) for prompt in parsed.prompts
        ]

    async def _respond(
        self, request: Request, parsed: ParsedRequest, prompts: Sequence[Sequence[int]], writer: Writer
    ) -> Response:
        if parsed.stream:
            return await self._stream(request, parsed, prompts, writer)
        groups = await while_connected(
            request, *(self._service.generate(prompt, parsed.params, parsed.num_samples) for prompt in prompts)
        )
        echoed = scored = None
        # The engines have accepted these prompts: they refuse one that is too long, or has what is no token.
        if isinstance(parsed, ParsedCompletion) and parsed.echo:
            wanted = prompts if parsed.log_probs else []
            scores = await self._prompt_scores(wanted, parsed.params.top_log_probs)
            echoed = scores if wanted else [PromptScore([], [])] * len(prompts)
        if isinstance(parsed, ParsedCompletion) and parsed.prompt_log_probs is not None:
            scored = await self._prompt_scores(prompts, parsed.prompt_log_probs)
        body = ResponseBody(parsed, prompts, groups, echoed, scored)
        if scored is None:
            return JSONResponse(writer.body(body))
        # Many log-probs at many positions: written in a thread, so that other requests need not wait.
        response: Response = await self._in_turn(request)(lambda body: JSONResponse(writer.body(body)), body)
        return response

    def _check_prompt_scores(self, prompts: Sequence[Sequence[int]], top: int) -> None:
        if top < 0 and len(self._tokenizer) > MAX_TOP_LOG_PROBS:
            rule = f"prompt_logprobs: -1 is for vocabularies of up to {MAX_TOP_LOG_PROBS} tokens"
            raise BadRequest(rule, "prompt_logprobs")
        number = sum(map(len, prompts)) * (1 + (len(self._tokenizer) if top < 0 else top))
        if number > MAX_PROMPT_LOG_PROBS:
            rule = f"{number} log-probs of prompts are more than the {MAX_PROMPT_LOG_PROBS} of one response"
            raise BadRequest(f"{rule}: send fewer prompts, or name a number", "prompt_logprobs")

    async def _prompt_scores(self, prompts: Sequence[Sequence[int]], top: int) -> list[PromptScore]:
        return list(await asyncio.gather(*(self._service.prompt_score(prompt, top) for prompt in prompts)))

    async def _stream(
        self, request: Request, parsed: ParsedRequest, prompts: Sequence[Sequence[int]], writer: Writer
    ) -> Response:
        """Respond once there are first tokens, so that a request that an engine refuses has the status for it."""
        live = LiveResponse(self._service, parsed, prompts)
        try:
            while not await live.wait(DISCONNECT_POLL_SECONDS):
                if await request.is_disconnected():
                    live.close()
                    return Response(status_code=CLIENT_HAS_GONE)
        except BaseException:
            live.close()
            raise
        return StreamingResponse(live.events(writer, self._tokenizer), media_type="text/event-stream")

    def _guarded(self, handler: Handler) -> Handler:
        """The handler behind the API key, with errors as OpenAI's clients expect them."""

        async def guarded(request: Request) -> Response:
            key = request.headers.get("authorization", "").removeprefix("Bearer ")
            if self._api_key and not hmac.compare_digest(key.encode(), self._api_key.encode()):
                return JSONResponse(error_body("the API key is missing or wrong", "authentication_error"), 401)
            try:
                return await handler(request)
            except BadRequest as error:
                return JSONResponse(
                    error_body(str(error), "invalid_request_error", error.field),
                    413 if isinstance(error, TooLong) else 404 if error.field == "model" else 400,
                )
            except (Refused, Overloaded, Unavailable) as error:
                return _failed(error)
            except ClientDisconnect:
                return Response(status_code=CLIENT_HAS_GONE)
            except Exception:  # of this request alone; what it is goes to the log, not to the client
                logger.exception("a request to %s has failed", request.url.path)
                return JSONResponse(error_body("the request has failed; see the server's log", "server_error"), 500)

        return guarded


async def while_connected(request: Request, *work: Coroutine[Any, Any, T]) -> list[T]:
    """Results of concurrent work, all of which is dropped when one fails.

    Raises:
        ClientDisconnect: the client has gone; the work is dropped.
    """
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


def _failed(error: Exception) -> Response:
    if isinstance(error, Refused):
        return JSONResponse(error_body(str(error), "invalid_request_error"), 400)
    status, kind = (429, "rate_limit_error") if isinstance(error, Overloaded) else (503, "server_error")
    return JSONResponse(error_body(str(error), kind), status, headers={"Retry-After": RETRY_AFTER})
