"""A model that is served elsewhere (``evaluate.against``): an OpenAI-compatible service that gets chat requests."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.config.roles import DataArguments
from roll.config.strategies.remote import RemoteStrategyConfig
from roll.datasets.columns import Columns
from roll.datasets.reading import SourceRow
from roll.datasets.templates import TemplateChoice
from roll.datasets.types import PromptRow
from roll.pipelines.evaluate.config import EvaluateConfig
from roll.rollout.groups import Group, Sample, SampleGroup
from roll.rollout.loops import RolloutContext
from roll.strategies.engines.requests import FinishReason, SamplingParams
from roll.strategies.remote import RemoteService, ServiceRefused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class NoEngines:
    """Replaces the engine client where nothing in this run generates."""

    num_turns = 0


class ServedModel:
    """A rollout loop whose samples come from the service: the row's conversation goes there as it is, and the
    service's own template renders it.

    Args:
        url: of the service, with the model's name after a ``#``.
        tokenizer: of the file's model; it counts tokens.

    Raises:
        ServiceRefused: the service cannot be reached, or refuses; of :meth:`answer` as well.
    """

    def __init__(
        self,
        config: EvaluateConfig,
        url: str,
        data_args: DataArguments,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        base_url, _, model = url.partition("#")
        address = RemoteStrategyConfig(
            base_url=base_url,
            model=model or None,
            api_key_env=config.evaluate.against_api_key_env,
            concurrency=config.val_batch_size,
            request_timeout=min(600.0, config.rpc_timeout),
        )
        self._service = RemoteService(address, "chat/completions", config.rpc_timeout)
        # A thread for each prompt in flight: a request blocks until all of its samples are there.
        self._pool = ThreadPoolExecutor(config.val_batch_size, thread_name_prefix="served")
        self._data_args = data_args
        self._templates = TemplateChoice.of_settings(data_args, config.global_template, config.tag_to_template)
        self._tokenizer = tokenizer

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        if prompt.vision is not None:
            raise ServiceRefused(f"prompt {prompt.prompt_id} has images, which are not sent to evaluate.against")
        body = self.body(prompt, context.params, context.group_size)
        choices = await asyncio.get_running_loop().run_in_executor(self._pool, self._ask, body)
        group = Group(context.order, prompt, [self._sample(prompt, *one) for one in choices])
        return await context.compute_rewards(group)

    def body(self, prompt: PromptRow, params: SamplingParams, count: int) -> dict[str, Any]:
        """The request; what is off is left out, since services differ in what they know."""
        source = SourceRow(Path(f"prompt {prompt.prompt_id}"), 0, prompt.row)
        messages = Columns.of(self._data_args, source).read_messages(source)
        optional = {
            "top_p": (params.top_p, params.top_p < 1),
            "top_k": (params.top_k, params.top_k > 0),
            "min_p": (params.min_p, params.min_p > 0),
            "repetition_penalty": (params.repetition_penalty, params.repetition_penalty != 1),
            "seed": (params.seed, params.seed is not None),
            "stop": (list(params.stop_strings), bool(params.stop_strings)),
        }
        return {
            "model": self._service.model,
            "messages": self._templates.with_system(messages),
            "n": count,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            **{name: value for name, (value, is_set) in optional.items() if is_set},
        }

    def _ask(self, body: dict[str, Any]) -> list[tuple[str, str]]:
        """Text and finish reason of every sample."""
        answer = self._service.post([body])[0]
        try:
            # Half a surrogate pair, which JSON can hold, has no UTF-8.
            texts = [str(one["message"]["content"] or "").encode(errors="replace") for one in answer["choices"]]
            reasons = [str(one["finish_reason"]) for one in answer["choices"]]
        except (KeyError, TypeError) as error:
            raise ServiceRefused(f"the answer is no chat completion: {type(error).__name__}: {error}") from error
        if len(texts) != body["n"]:
            raise ServiceRefused(f"the service gave {len(texts)} samples where n is {body['n']}")
        return [(text.decode(), reason) for text, reason in zip(texts, reasons, strict=True)]

    def _sample(self, prompt: PromptRow, text: str, reason: str) -> Sample:
        ids: Any = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        log_probs, versions = np.zeros(len(ids), np.float32), [(0, 0, len(ids))]
        kept = np.array(ids, np.int32)
        return Sample(prompt, prompt.token_ids, kept, log_probs, versions, REASONS.get(reason, "stop"), text)

    def close(self) -> None:
        self._service.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
