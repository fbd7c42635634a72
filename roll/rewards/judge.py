"""The LLM judge: a language model served by an OpenAI-compatible service scores responses."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal

from jinja2 import StrictUndefined, Template, TemplateError, meta
from jinja2.sandbox import SandboxedEnvironment

from roll.config.reading.errors import did_you_mean
from roll.rewards.answers import after_thought
from roll.rewards.base import RewardOptionError, RewardResult, RewardSample, failure, read_json
from roll.rewards.http_reward import JsonClient, Reply, ServiceOptions, ServiceRule
from roll.rewards.judge_reading import Extract, NoScore, ScoreReader

MAX_ANSWERS = 100_000  # answers that are kept in memory
TOP_LOG_PROBS = 20  # the most that OpenAI's interface gives


@dataclass
class LLMJudge(ServiceOptions, ScoreReader, ServiceRule):
    """Asks a judge about each response. Requests of a batch are sent concurrently, up to ``concurrency``.

    A request that fails, an answer without a score and a score out of bounds are errors of the sample, never a 0.
    """

    numbers: ClassVar[tuple[str, ...]] = ("raw_score", "cached", "tries")

    model_type: Literal["api", "cluster", "inference"] = "api"
    """``api``: the service at ``base_url``; ``cluster``: the run's own role ``reward_model``; ``inference``: engines on
    the devices of the reward's own section."""
    base_url: str = ""  # address of the service up to and with `/v1`
    model: str = ""  # the model's name at the service
    api_key: str = field(default="", repr=False)  # the key itself; better `api_key_env`
    api_key_env: str = ""  # environment variable that holds the key
    prompt: str = "correctness"
    """``correctness``, ``score_1_to_10``, ``yes_or_no``, a file with a Jinja template, or the template itself."""
    system_prompt: str = ""  # the system message; empty: none
    unanswered_score: float = 0.0  # score of a response whose thought never ended; the judge is not called
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 1024  # most tokens of the judge's answer; 1 with `extract: logprob`
    seed: int | None = None
    top_logprobs: int = TOP_LOG_PROBS  # most probable tokens requested with `extract: logprob`
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request, such as ``chat_template_kwargs: {enable_thinking: false}``."""
    cache: bool = True  # do not ask the same twice

    def __post_init__(self) -> None:
        if self.model_type == "api" and not self.base_url:
            rule = "judge_api_url must be set with judge_model_type: api, for example http://127.0.0.1:8000/v1"
            raise RewardOptionError(rule)
        if self.model_type == "api" and not self.model:
            raise RewardOptionError("judge_model_name must be set: the model's name at the service")
        if self.api_key_env and not self.api_key and self.api_key_env not in os.environ:
            raise RewardOptionError(f"api_key_env = {self.api_key_env!r}: no such variable in the environment")
        self._template: Template = load_template(self.prompt)
        _, usual, *bounds = BUILT_IN.get(self.prompt, ("", None, None, None))
        self.extract = self.extract or usual
        if self.extract is None:
            raise RewardOptionError("extract must be set for a prompt of your own: how the answer states its score")
        if self.min_score is None and self.max_score is None:
            self.min_score, self.max_score = bounds
        self.check_reading()
        self._answers: dict[bytes, Any] = {}
        self._lock = threading.Lock()
        key = self.api_key or os.environ.get(self.api_key_env, "")
        self._client = JsonClient(f"{self.base_url.rstrip('/')}/chat/completions", self, key)

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        results: dict[int, RewardResult] = {}
        bodies: dict[int, dict[str, Any]] = {}
        for index, sample in enumerate(samples):
            answer = after_thought(sample.response, sample.prompt)
            if answer is None:
                results[index] = RewardResult(self.unanswered_score)
                continue
            try:
                bodies[index] = self._body(sample, answer.strip())
            except (TemplateError, TypeError, ValueError, LookupError) as error:
                results[index] = failure(f"llm_judge: the prompt cannot be made: {type(error).__name__}: {error}")
        results |= self._ask(bodies)
        return [results[index] for index in range(len(samples))]

    def _body(self, sample: RewardSample, answer: str) -> dict[str, Any]:
        """The request of one sample; ``answer`` is its response without the thought."""
        text = self._template.render(
            question=question_of(sample),
            prompt=sample.prompt,
            response=answer,
            full_response=sample.response,
            reference="" if sample.ground_truth is None else sample.ground_truth,
            finish_reason=sample.finish_reason,
            row=sample.row,
            positive=self.positive,
            negative=self.negative,
        )
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        by_log_prob = self.extract == "logprob"
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": text}],
            "temperature": 1.0 if by_log_prob else self.temperature,
            "top_p": self.top_p,
            "max_tokens": 1 if by_log_prob else self.max_tokens,
        }
        if by_log_prob:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.seed is not None:
            body["seed"] = self.seed
        return body | self.extra_body

    def _ask(self, bodies: dict[int, dict[str, Any]]) -> dict[int, RewardResult]:
        """Send each distinct request once, unless its answer is cached."""
        if not self.cache:  # equal requests are sent one by one: at a temperature their answers differ
            one_by_one = self._client.post(list(bodies.values()))
            return {index: self._result(reply) for index, reply in zip(bodies, one_by_one, strict=True)}
        texts = {index: json.dumps(body, sort_keys=True, default=str) for index, body in bodies.items()}
        keys = {index: hashlib.sha256(text.encode()).digest() for index, text in texts.items()}
        with self._lock:
            # Put back at the end: the least recently used are dropped.
            found = {key: self._answers.pop(key) for key in set(keys.values()) if key in self._answers}
            self._answers |= found
        to_send = {key: bodies[index] for index, key in keys.items() if key not in found}
        replies = dict(zip(to_send, self._client.post(list(to_send.values())), strict=True))
        by_key = {key: self._result(reply) for key, reply in replies.items()}
        by_key |= {key: self._result(Reply(answer, tries=0)) for key, answer in found.items()}
        with self._lock:
            # A cached failure would never be tried again.
            self._answers |= {key: reply.body for key, reply in replies.items() if by_key[key].error is None}
            for key in list(self._answers)[:-MAX_ANSWERS]:
                del self._answers[key]
        return {index: by_key[key] for index, key in keys.items()}

    def _result(self, reply: Reply) -> RewardResult:
        if reply.error is not None:
            return failure(f"llm_judge: {reply.error}")
        try:
            score, raw = self.read(reply.body["choices"][0])
        except NoScore as error:
            return failure(f"llm_judge: {error}")
        except (KeyError, IndexError, TypeError, AttributeError):
            return failure("llm_judge: the answer is no chat completion")
        numbers = {"raw_score": raw, "cached": float(reply.tries == 0), "tries": float(reply.tries)}
        return RewardResult(score, numbers)


VARIABLES = (
    *("question", "prompt", "response", "full_response", "reference", "finish_reason", "row"),
    *("positive", "negative"),
)
"""Variables of a template."""


BUILT_IN: dict[str, tuple[str, Extract, float | None, float | None]] = {
    "correctness": ("correctness.jinja", "yes_no", None, None),
    "score_1_to_10": ("score_1_to_10.jinja", "number", 1.0, 10.0),
    "yes_or_no": ("yes_or_no.jinja", "logprob", None, None),
    # The name in ROLL's published files, of a prompt that asks for correctness too.
    "Qwen2.5-7B-Instruct-RLVR-prompt": ("correctness.jinja", "yes_no", None, None),
}
"""Templates of the package by name: file, ``extract``, ``min_score`` and ``max_score`` where they are not set."""


def load_template(prompt: str) -> Template:
    """The template that the option ``prompt`` means: a built-in name, a file, or the text itself. Raises
    ``RewardOptionError``: no such name or file, a mistake in the template, or a variable that it is not given."""
    text = prompt
    if prompt in BUILT_IN:
        template = resources.files(__package__) / "judge_templates" / BUILT_IN[prompt][0]
        text = template.read_text(encoding="utf-8")
    elif "{{" not in prompt and "{%" not in prompt:
        file = Path(prompt).expanduser()
        if not file.is_file():
            rule = "is no file, no template text (with {{ response }}), and no built-in prompt"
            raise RewardOptionError(f"prompt = {prompt!r}: {rule}; those are {', '.join(BUILT_IN)}")
        text = file.read_text(encoding="utf-8")
    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False, trim_blocks=True)
    try:
        used = meta.find_undeclared_variables(environment.parse(text))
        compiled = environment.from_string(text)
    except TemplateError as error:
        raise RewardOptionError(f"prompt: not a Jinja template: {error}") from error
    for name in sorted(used - {*VARIABLES}):
        hint = did_you_mean(name, VARIABLES)
        raise RewardOptionError(f"prompt: no variable {name!r}; {hint}there are {', '.join(VARIABLES)}")
    return compiled


def question_of(sample: RewardSample) -> str:
    """The user's question: the last user message of the row (its text, without images), else the row's ``question``,
    else the prompt as templated."""
    messages = read_json(sample.row.get("messages"))
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content", "")
            if isinstance(content, list):
                texts = (part.get("text") if isinstance(part, dict) else part for part in content)
                return "\n".join(text for text in texts if isinstance(text, str))
            return str(content)
    return str(sample.row.get("question") or sample.prompt)
