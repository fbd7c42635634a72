"""Client of reward services: JSON with retries, deadlines and bounded concurrency."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx2
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential

from roll.config.reading.masking import masked_text, register_secrets
from roll.rewards.base import RewardResult, RewardRule, RewardSample
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
