"""Rewards computed elsewhere: by a service over HTTP (format: docs/rewards.md), whose client sends JSON with retries,
deadlines and bounded concurrency, or by the role reward_model."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import httpx2
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential

from roll.config.losses import SCORE_INPUT_DEFAULT, SCORE_MEAN, SCORE_STD, ScoreInput
from roll.config.reading.masking import masked_text, register_secrets
from roll.rewards.base import RewardOptionError, RewardResult, RewardRule, RewardSample, failure
from roll.rewards.custom import LoopThread

RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses worth a retry; others, such as 401 and 404, are permanent."""
SHOWN_BODY = 300  # characters of an error's body that are quoted
MAX_REPLY = 16 * 2**20  # bytes of an answer. Compressed answers are refused: a few bytes could expand to gigabytes.
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(kw_only=True)
class ServiceOptions:
    """Time limits, retries and concurrency of requests to a service; options of a reward that asks one."""

    timeout: float = 30.0
    """Seconds for a request with all its tries and the pauses between them; waiting for a free slot does not count."""
    request_timeout: float | None = None  # seconds for one try, from connecting to the last byte; null: `timeout`
    max_retries: int = 4  # tries beyond the first
    backoff: float = 0.5
    """Upper end of the first pause in seconds; it doubles from try to try. The pause is drawn evenly from below it, so
    that many workers do not come back at the same moment."""
    max_backoff: float = 20.0  # longest pause in seconds, also of those that the service asks for by `Retry-After`
    concurrency: int = 32  # requests that one worker has in flight at a time


class ServiceRule(RewardRule):
    """A rule that asks a service about several samples at a time; subclasses define ``__call__``."""

    concurrent_calls: ClassVar[int] = 16
    _client: JsonClient

    def judge(self, sample: RewardSample) -> RewardResult:
        return self([sample])[0]

    def close(self) -> None:
        self._client.close()


@dataclass(frozen=True, slots=True)
class Reply:
    """Outcome of one request: exactly one of ``body`` and ``error`` is there."""

    body: Any = None
    error: str | None = None  # begins with `timeout:` where time ran out
    tries: int = 1


class ServiceError(Exception):
    """One try failed; ``retry_after``: seconds that the service asks to be left alone."""

    def __init__(self, message: str, is_transient: bool, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.is_transient = is_transient
        self.retry_after = retry_after


class JsonClient:
    """One service. Safe to use from several threads; they share its slots and connections, made with the first request.

    Args:
        url: where requests are posted to.
        api_key: sent as bearer token, and never part of a message; empty: none is sent.
        max_reply: bytes of an answer; a longer one is refused.
    """

    def __init__(self, url: str, options: ServiceOptions, api_key: str = "", max_reply: int = MAX_REPLY) -> None:
        self._url = url
        self._options = options
        self._request_timeout = options.request_timeout or options.timeout
        self._max_reply = max_reply
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        register_secrets({"api_key": api_key})
        self._thread = LoopThread(f"http client of {url}")
        self._client: httpx2.AsyncClient | None = None

    def post(self, bodies: Sequence[object]) -> list[Reply]:
        """Post every body; one reply each, in order. Never raises for what the service does."""

        async def post_all() -> list[Reply]:
            if self._client is None:
                size = self._options.concurrency
                # Made here, on the client's own loop, to which a semaphore and an HTTP client are bound.
                self._slots = asyncio.Semaphore(size)
                self._client = httpx2.AsyncClient(
                    headers={**self._headers, "Accept-Encoding": "identity"},
                    timeout=self._request_timeout,
                    limits=httpx2.Limits(max_connections=size, max_keepalive_connections=size),
                    # A proxy of the environment is for services outside; it cannot reach this host's own loopback.
                    trust_env=httpx2.URL(self._url).host not in LOOPBACK,
                )
            return await asyncio.gather(*(self._post(body) for body in bodies))

        return self._thread.run(post_all()) if bodies else []

    def close(self) -> None:
        if self._client is not None:
            self._thread.run(self._client.aclose())
            self._client = None
        self._thread.close()

    async def _post(self, body: object) -> Reply:
        timeout, tries, last, answer = self._options.timeout, 0, "", None
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, ServiceError) and error.is_transient),
            stop=stop_after_attempt(self._options.max_retries + 1),
            wait=self._pause,
            reraise=True,
        )
        # The deadline begins with the slot: a large batch in the queue is no fault of the service.
        async with self._slots:
            try:
                async with asyncio.timeout(timeout):
                    async for attempt in retrying:
                        with attempt:
                            tries += 1
                            try:
                                answer = await self._try_once(body)
                            except ServiceError as error:
                                last = f"; before that: {error}"
                                raise
            except TimeoutError:
                message = f"timeout: no answer within {timeout:g} s ({tries} tries{last})"
                return Reply(error=masked_text(message), tries=tries)
            except ServiceError as error:
                return Reply(error=masked_text(f"{error} ({tries} tries)" if tries > 1 else str(error)), tries=tries)
        return Reply(answer, tries=tries)

    def _pause(self, state: RetryCallState) -> float:
        longest = self._options.max_backoff
        drawn = float(wait_random_exponential(multiplier=self._options.backoff, max=longest)(state))
        error = state.outcome.exception() if state.outcome is not None else None
        wanted = error.retry_after if isinstance(error, ServiceError) else None
        return drawn if wanted is None else min(max(wanted, drawn), longest)

    async def _try_once(self, body: object) -> Any:
        """The answer, of which no more than ``max_reply`` bytes are ever held."""
        assert self._client is not None
        content = bytearray()
        try:
            async with (
                asyncio.timeout(self._request_timeout),
                self._client.stream("POST", self._url, json=body) as reply,
            ):
                encoding = reply.headers.get("content-encoding", "identity")
                if encoding.lower() != "identity":
                    raise ServiceError(f"{self._url}: the answer is compressed ({encoding[:20]!r})", is_transient=False)
                async for piece in reply.aiter_raw():
                    content += piece
                    if len(content) > self._max_reply:
                        message = f"{self._url}: the answer is longer than {self._max_reply} bytes"
                        raise ServiceError(message, is_transient=False)
        except (TimeoutError, httpx2.TimeoutException) as error:
            message = f"timeout: {self._url} did not answer within {self._request_timeout:g} s"
            raise ServiceError(message, is_transient=True) from error
        except httpx2.TransportError as error:
            raise ServiceError(f"{self._url}: {type(error).__name__}: {error}", is_transient=True) from error
        response = httpx2.Response(reply.status_code, headers=reply.headers, content=bytes(content))
        if response.status_code != 200:
            text = shown_body(response.text)
            message = f"{self._url}: status {response.status_code}: {text}"
            try:
                wanted = float(response.headers.get("retry-after", "nan"))
            except ValueError:  # a date
                wanted = math.nan
            transient = response.status_code in RETRIED_STATUS
            raise ServiceError(message, transient, None if math.isnan(wanted) else max(0.0, wanted))
        try:
            return response.json()
        except (ValueError, RecursionError) as error:  # also integers of thousands of digits, and endless nesting
            text = shown_body(response.text)
            raise ServiceError(f"{self._url}: the answer is not JSON: {text!r}", is_transient=True) from error


def shown_body(text: str) -> str:
    """The beginning of an error's body. Services quote the key that they refuse: masked before anything is cut."""
    return masked_text(" ".join(text[: 4 * SHOWN_BODY].split()))[:SHOWN_BODY]


MAX_SHOWN = 500  # characters of a service's words in an error


@dataclass
class HttpReward(ServiceOptions, ServiceRule):
    """Asks a service for the scores of up to ``batch_size`` samples at a time."""

    url: str = ""  # address that samples are posted to
    api_key_env: str = ""  # environment variable with the token that is sent as `Authorization: Bearer ...`
    batch_size: int = 64  # most samples of one request
    columns: list[str] | None = None  # columns of the data row that are sent; null: all
    options: dict[str, Any] = field(default_factory=dict)  # sent along with every request, for the service

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise RewardOptionError(
                f"url = {self.url!r}: must be the service's address, as http://127.0.0.1:9000/score"
            )
        if self.batch_size < 1:
            raise RewardOptionError(f"batch_size = {self.batch_size}: must be at least 1")
        if self.api_key_env and self.api_key_env not in os.environ:
            raise RewardOptionError(f"api_key_env = {self.api_key_env!r}: no such variable in the environment")
        self._client = JsonClient(self.url, self, os.environ.get(self.api_key_env, ""))

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        names = ("prompt", "response", "ground_truth", "finish_reason")
        contents = []
        for sample in samples:
            row = sample.row if self.columns is None else {name: sample.row.get(name) for name in self.columns}
            content = {name: getattr(sample, name) for name in names} | {"row": row}
            # Arrays become lists; what else JSON does not know becomes its text.
            plain = json.dumps(content, default=lambda one: one.tolist() if hasattr(one, "tolist") else str(one))
            contents.append(json.loads(plain))
        batches = [contents[begin : begin + self.batch_size] for begin in range(0, len(contents), self.batch_size)]
        replies = self._client.post([{"samples": batch, "options": self.options} for batch in batches])
        return [result for batch, reply in zip(batches, replies, strict=True) for result in read(reply, len(batch))]


def read(reply: Reply, count: int) -> list[RewardResult]:
    """The results of one request's ``count`` samples; all of them fail where the answer as a whole cannot be used."""
    if reply.error is not None:
        return [failure(f"http_reward: {reply.error}")] * count
    results = reply.body.get("results") if isinstance(reply.body, Mapping) else None
    if not isinstance(results, list) or len(results) != count:
        found = f"{len(results)}" if isinstance(results, list) else "no list"
        return [failure(f"http_reward: the answer must have a list 'results' of {count}; it has {found}")] * count
    return [_read_one(result) for result in results]


def _read_one(result: object) -> RewardResult:
    """A number, or an object with ``score`` and perhaps ``metrics``, or with ``error``."""
    entry = result if isinstance(result, Mapping) else {"score": result}
    if entry.get("error") is not None:
        return failure(f"http_reward: {str(entry['error'])[:MAX_SHOWN]}")
    metrics = entry.get("metrics") or {}
    if not isinstance(metrics, Mapping):
        return failure(f"http_reward: metrics must be an object, not {type(metrics).__name__}")
    numbers = {"score": entry.get("score"), **metrics}
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            return failure(f"http_reward: {name} must be a finite number, not {repr(value)[:MAX_SHOWN]}")
    score = float(numbers.pop("score"))
    return RewardResult(score, {name: float(value) for name, value in numbers.items()})


@dataclass
class RewardModelScore(RewardRule):
    """``scale * raw + shift``, perhaps squashed; ``raw`` is what a sequence-classification model with one label says.

    The model is computed before this rule is called (:mod:`roll.rollout.rewarding`).
    """

    numbers: ClassVar[tuple[str, ...]] = ("raw",)
    input: ScoreInput = SCORE_INPUT_DEFAULT
    """``chat``: the row's messages and the response through the reward model's own tokenizer and chat template;
    ``tokens``: the tokens of prompt and response as the policy has them, for a model with the same vocabulary."""
    scale: float = 1.0
    shift: float = 0.0
    squash: Literal["none", "sigmoid", "tanh"] = "none"  # applied last; `sigmoid` gives 0..1
    normalize: bool = False
    """Subtract the mean and divide by the standard deviation that the ``rm`` pipeline saved with the model."""
    clip: float | None = None  # raw scores (normalised, if they are) are clipped to plus and minus this

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip <= 0:
            raise RewardOptionError(f"clip = {self.clip}: must be greater than 0, or null for none")

    def judge(self, sample: RewardSample) -> RewardResult:
        given = sample.model_result
        if given is None:
            return failure("reward_model: the sample was not given to the role reward_model")
        if given.score is None:
            return failure(f"reward_model: {given.error}")
        raw = given.score
        if not math.isfinite(raw):
            return failure(f"reward_model: the model's score is {raw}")
        value = raw
        if self.normalize:
            if SCORE_STD not in given.metrics:
                return failure(f"reward_model: normalize is set, and the model's config.json has no {SCORE_STD}")
            value = (raw - given.metrics[SCORE_MEAN]) / given.metrics[SCORE_STD]
        value = value if self.clip is None else max(-self.clip, min(self.clip, value))
        value = self.scale * value + self.shift
        if self.squash == "sigmoid":
            # By tanh: math.exp(-value) overflows for raw scores below -709.
            value = 0.5 * (1.0 + math.tanh(value / 2.0))
        elif self.squash == "tanh":
            value = math.tanh(value)
        return RewardResult(value, {"raw": raw})
