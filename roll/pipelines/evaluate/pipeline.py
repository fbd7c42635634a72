"""The evaluation on prompts: every model answers the prompts of every set, and rewards score the answers.

A model that is served elsewhere (``evaluate.against``) is an OpenAI-compatible service that gets chat requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.config.loader import LoadedConfig
from roll.config.plan.plan import RolePlan
from roll.config.rewards import REWARD_MODEL, model_inputs
from roll.config.roles import DataArguments
from roll.config.strategies.remote import RemoteStrategyConfig
from roll.datasets import PromptDataset
from roll.datasets.columns import Columns
from roll.datasets.reading import SourceRow
from roll.datasets.templates import TemplateChoice
from roll.datasets.types import PromptRow
from roll.pipelines.clusters import Scorers, start_scorers
from roll.pipelines.evaluate.config import EvaluateConfig, EvaluatedModel, EvaluatePlan, Pass
from roll.pipelines.evaluate.models import ModelRun
from roll.pipelines.evaluate.samples import sample_records, settings_of
from roll.pipelines.rlvr.data import read_prompts
from roll.pipelines.run_context import GENERATION, WEIGHTS
from roll.rollout.engines import EngineClient
from roll.rollout.flow import GroupSettings, PromptFlow, greedy, sampling_params
from roll.rollout.groups import FinishedGroup, SampleGroup
from roll.rollout.loops import RolloutContext
from roll.rollout.rewarding import ModelScorer, RewardClient
from roll.strategies.engines.requests import FinishReason, SamplingParams
from roll.strategies.remote import RemoteService, ServiceRefused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class EvaluatePipeline(ModelRun[EvaluateConfig, EvaluatePlan]):
    """An evaluation on the validation prompts of an RLVR file."""

    prompts: Mapping[str, PromptDataset]
    tokenizer: PreTrainedTokenizerBase
    scorers: Scorers | None = None

    def __init__(self, loaded: LoadedConfig[EvaluateConfig]) -> None:
        assert isinstance(loaded.plan, EvaluatePlan)
        super().__init__(loaded, loaded.plan, loaded.config.evaluate)

    def settings(self) -> dict[str, Any]:
        return settings_of(self.config, self.plan)

    def read(self, tokenizer: PreTrainedTokenizerBase, role: RolePlan) -> None:
        self.tokenizer = tokenizer
        plan = replace(self.plan, roles={**self.plan.roles, "actor_infer": role})
        self.prompts = {
            one.name: read_prompts(self.config, plan, one.data_args, one.prompt_length, tokenizer)
            for one in self.plan.validation_sets
        }

    def num_asked(self, way: Pass) -> int:
        return len(self.prompts[way.set_name])

    async def answer(self, model: EvaluatedModel, way: Pass, numbers: Sequence[int], client: EngineClient) -> None:
        """``val_batch_size`` prompts are in flight at a time.

        The seed of a prompt's samples depends on its number alone: not on what else is in flight, nor on how often the
        evaluation was interrupted.
        """
        params, prompts = self.params_of(way), self.prompts[way.set_name]
        served = None if model.url is None else self.served(model.url, way)
        flow = PromptFlow(
            client,
            self.reward_client(),
            # complete() sets the number before it starts a prompt, one at a time.
            lambda count: [prompts[flow.next_order]],
            GroupSettings(way.num_samples, params, self.config.seed),
            first_draw=0,
            loop=served,
        )
        shared = {"model": model.name, "pass": way.name, "temperature": params.temperature}
        records = partial(sample_records, shared=shared)
        try:
            await self.complete(flow, model, way, numbers, self.config.val_batch_size, records)
        finally:
            if served is not None:
                served.close()

    def client_of(self, model: EvaluatedModel) -> EngineClient | None:
        if model.url is None:
            return None
        self.start_scorers()
        self.bring()
        client: Any = NoEngines()
        return client

    def served(self, url: str, way: Pass) -> ServedModel:
        data_args = next(one.data_args for one in self.plan.validation_sets if one.name == way.set_name)
        return ServedModel(self.config, url, data_args, self.tokenizer)

    def params_of(self, way: Pass) -> SamplingParams:
        """Sampling parameters of a pass."""
        one = next(one for one in self.plan.validation_sets if one.name == way.set_name)
        params = sampling_params(one.generating_args, one.max_new_tokens)
        if way.is_greedy:
            return greedy(one.max_new_tokens, params)
        return params if way.temperature is None else replace(params, temperature=way.temperature)

    def judges(self) -> list[str]:
        return list(self.scorers.judges) if self.scorers is not None else []

    def bring(self) -> None:
        assert self.scorers is not None
        generating = dict.fromkeys(("actor_infer", *self.judges()), GENERATION)
        self.residency.bring({REWARD_MODEL: WEIGHTS, **generating})
        for judge in self.scorers.judges.values():
            judge.resume()

    def start_scorers(self) -> None:
        """Reward workers, judges and the reward model."""
        if self.scorers is not None:
            return
        starting = start_scorers(self.config, self.plan, self.resources)
        self.context.watch(starting.clusters.all())
        for judge in starting.clusters.judges.values():
            self.context.at_end(judge.close)
        starting.begin(self.residency)
        self.scorers = starting.finish(self.residency)

    def reward_client(self) -> RewardClient:
        assert self.scorers is not None
        scorer = None
        if self.scorers.reward_model is not None:
            columns = [one.data_args for one in self.plan.validation_sets]
            scorer = ModelScorer(self.scorers.reward_model, model_inputs(self.config.rewards), columns)
        return RewardClient(self.scorers.rewards, scorer)


def address_of(config: EvaluateConfig, url: str) -> RemoteStrategyConfig:
    """The service of ``evaluate.against``, whose model is named after a ``#``."""
    base_url, _, model = url.partition("#")
    return RemoteStrategyConfig(
        base_url=base_url,
        model=model or None,
        api_key_env=config.evaluate.against_api_key_env,
        concurrency=config.val_batch_size,
        total_timeout=config.rpc_timeout,
        request_timeout=min(600.0, config.rpc_timeout),
    )


class NoEngines:
    """Replaces the engine client where nothing in this run generates."""

    num_turns = 0

    def abort(self, generations: Collection[Any]) -> None:
        assert not generations


class ServedModel:
    """A rollout loop whose samples come from the service: the row's conversation goes there as it is, and the
    service's own template renders it.

    Tokens are counted by the tokenizer of the file's model.

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
        self._service = RemoteService(address_of(config, url), "chat/completions")
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
        group = SampleGroup(context.order, prompt, self._finished(context.order, choices))
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
            "messages": self._templates.with_system(messages, prompt.tag),
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

    def _finished(self, order: int, choices: Sequence[tuple[str, str]]) -> FinishedGroup:
        texts = [text for text, _ in choices]
        ids: list[list[int]] = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        return FinishedGroup(
            request_id=str(order),
            token_ids=np.array([token for own in ids for token in own], dtype=np.int32),
            log_probs=np.zeros(sum(map(len, ids)), dtype=np.float32),
            lengths=np.array([len(own) for own in ids], dtype=np.int64),
            finish_reasons=[REASONS.get(reason, "stop") for _, reason in choices],
            texts=texts,
            weight_versions=[[(0, 0, len(own))] for own in ids],
        )

    def close(self) -> None:
        self._service.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
