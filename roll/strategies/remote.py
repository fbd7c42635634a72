"""A scorer at a URL: ``prompt_logprobs`` of an OpenAI-compatible server (vLLM's, ``roll serve``)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2

from roll.config.strategies.engines import RemoteStrategyConfig
from roll.rewards.http_reward import LOOPBACK, JsonClient, ServiceOptions
from roll.strategies.engines.requests import PromptScore
from roll.strategies.engines.scoring import ALL, ScoringStrategy

MAX_REPLY = 512 * 2**20  # bytes of an answer: about 70 for each token that is listed
LOOKUP_SECONDS = 10.0  # limit for the list of models
REQUEST_SECONDS = 120.0  # limit for one try of a request
TOTAL_SECONDS = 900.0
"""Longest outage of a service that a run waits for: as long as the start of a large engine takes."""


class ServiceRefused(RuntimeError):
    """The service does not answer, or its reply is unusable; the message quotes it."""


class RemoteService:
    """An OpenAI-compatible service.

    Args:
        path: of the requests, below ``base_url``.
        total_seconds: of a request, with all its tries.
        request_seconds: of one try.

    Raises:
        ServiceRefused: it cannot be reached, or the name of its model cannot be determined.
    """

    def __init__(
        self,
        options: RemoteStrategyConfig,
        path: str = "completions",
        total_seconds: float = TOTAL_SECONDS,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        self._base_url = options.base_url.rstrip("/")
        self._key = os.environ.get(options.api_key_env, "") if options.api_key_env else ""
        service = ServiceOptions(
            timeout=total_seconds,
            request_timeout=request_seconds,
            max_retries=options.max_retries,
            concurrency=options.concurrency,
        )
        url = f"{self._base_url}/models"
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # A proxy of the environment cannot reach this host's own loopback.
        trust = httpx2.URL(url).host not in LOOPBACK
        try:
            with httpx2.Client(timeout=LOOKUP_SECONDS, trust_env=trust, headers=headers) as client:
                response = client.get(url)
            response.raise_for_status()
            found = {str(entry["id"]): entry for entry in response.json()["data"]}
        except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ServiceRefused(f"{url}: {type(error).__name__}: {error}") from error
        names = list(found) if options.model is None else [options.model]
        if len(names) != 1 or names[0] not in found:
            raise ServiceRefused(
                f"{url} lists {', '.join(sorted(found)) or 'no model'}; strategy_config.model names one"
            )
        self.model = names[0]
        length = found[self.model].get("max_model_len")
        # Tokens that the model takes; not every server says so.
        self.max_model_len: int | None = length if isinstance(length, int) else None
        self._client = JsonClient(f"{self._base_url}/{path}", service, self._key, MAX_REPLY)
        self.close = self._client.close

    def post(self, bodies: Sequence[Any]) -> list[Any]:
        """The answer to each body; ServiceRefused if one is not answered."""
        replies = self._client.post(bodies)
        if errors := [reply.error for reply in replies if reply.error is not None]:
            raise ServiceRefused(errors[0])
        return [reply.body for reply in replies]


class PromptLogProbs(RemoteService):
    """A service that gives log-probs of prompts."""

    def ask(self, prompts: Sequence[Sequence[int]], top: int) -> list[list[Mapping[str, Any] | None]]:
        """``prompt_logprobs`` of each prompt: by position an object of id to ``logprob``, ``rank`` and
        ``decoded_token``; ServiceRefused if one is not answered."""
        shared = {"model": self.model, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top}
        answers = self.post([shared | {"prompt": list(prompt)} for prompt in prompts])
        found = []
        for prompt, body in zip(prompts, answers, strict=True):
            try:
                rows: Any = body["choices"][0]["prompt_logprobs"]
            except (KeyError, IndexError, TypeError):
                rows = None
            if not isinstance(rows, list):
                raise ServiceRefused(f"{self._base_url}: the answer has no prompt_logprobs")
            if len(rows) != len(prompt):
                raise ServiceRefused(
                    f"{self._base_url}: prompt_logprobs has {len(rows)} positions for a prompt of {len(prompt)} tokens"
                )
            for place, (row, token) in enumerate(zip(rows[1:], prompt[1:], strict=True), start=1):
                if not isinstance(row, Mapping) or str(token) not in row:
                    raise ServiceRefused(
                        f"{self._base_url}: position {place} of prompt_logprobs is not about token {token}, which is "
                        "there"
                    )
            found.append(rows)
        return found


class RemoteScoring(ScoringStrategy):
    """A model that is served elsewhere."""

    config: RemoteStrategyConfig
    _service: PromptLogProbs | None = None

    def initialize(self, num_training_steps: int = 0) -> None:
        """Find the service; ServiceRefused if it does not answer."""
        self._refuse_steps(num_training_steps)
        self._service = PromptLogProbs(self.config)

    def scores(self, prompts: Sequence[Sequence[int]], top: int) -> list[PromptScore]:
        """See the base class; ServiceRefused for no answer, or a log-prob that is none."""
        assert self._service is not None, "initialize() comes first"
        scores = []
        for rows, prompt in zip(self._service.ask(prompts, top), prompts, strict=True):
            score = PromptScore([], [], [])
            for token, row in zip(prompt[1:], rows[1:], strict=True):
                assert row is not None
                try:
                    entries = [(int(key), float(entry["logprob"])) for key, entry in row.items()]
                    rank = row[str(token)].get("rank")
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise ServiceRefused(f"prompt_logprobs: {type(error).__name__}: {error}") from error
                if not all(math.isfinite(value) for _, value in entries):
                    raise ServiceRefused("prompt_logprobs has log-probs that are not finite")
                # The prompt's own token is listed as well; it is the last where it is none of the most probable.
                entries.sort(key=lambda entry: -entry[1])
                score.top.append(entries if top == ALL else entries[:top])
                score.log_probs.append(float(row[str(token)]["logprob"]))
                score.ranks.append(rank if isinstance(rank, int) else 0)
            scores.append(score)
        return scores

    def shutdown(self) -> None:
        if self._service is not None:
            self._service.close()
