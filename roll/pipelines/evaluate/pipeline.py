"""The evaluations. On prompts every model answers those of every set, and rewards score the answers; a model that is
served elsewhere (``evaluate.against``), by an OpenAI-compatible service, gets chat requests. In environments every
model plays the same tasks from the same seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
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
from roll.config.strategies.engines import RemoteStrategyConfig
from roll.datasets import PromptDataset
from roll.datasets.columns import Columns
from roll.datasets.reading import SourceRow
from roll.datasets.templates import TemplateChoice
from roll.datasets.types import PromptRow
from roll.environments.off_loop import EnvironmentProcesses
from roll.pipelines.agentic.metrics import episode_table
from roll.pipelines.agentic.pipeline import SLICE_SECONDS
from roll.pipelines.agentic.players import TaskSource, build_players, close_players, read_tasks
from roll.pipelines.clusters import ClusterStarter, Scorers
from roll.pipelines.evaluate.config import EvaluateConfig, EvaluatedModel, EvaluatePlan, Pass
from roll.pipelines.evaluate.definition import AgenticRolloutConfig, AgenticRolloutPlan
from roll.pipelines.evaluate.models import ModelRun
from roll.pipelines.evaluate.samples import Record, sample_records
from roll.pipelines.model_calls import GENERATION, WEIGHTS
from roll.pipelines.rlvr.data import read_prompts
from roll.rollout.engines import EngineClient
from roll.rollout.episodes import TRUNCATED, EpisodeGroup, EpisodeLoop, Player
from roll.rollout.flow import GroupFlow, greedy, sampling_params
from roll.rollout.groups import Group, Sample, SampleGroup
from roll.rollout.loops import GroupSettings, RolloutContext
from roll.rollout.rewarding import ModelScorer, RewardClient
from roll.strategies.engines.requests import FinishReason, SamplingParams
from roll.strategies.engines.scoring import RemoteService, ServiceRefused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ServedModel:
    """A rollout loop whose samples come from the service at ``url`` (with the model's name after a ``#``): the row's
    conversation goes there as it is, and the service's own template renders it; ``tokenizer``, of the file's model,
    counts tokens. ServiceRefused, also of :meth:`answer`: it cannot be reached, or refuses."""

    def __init__(
        self, config: EvaluateConfig, url: str, data_args: DataArguments, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        base_url, _, model = url.partition("#")
        address = RemoteStrategyConfig(
            base_url=base_url,
            model=model or None,
            api_key_env=config.evaluate.against_api_key_env,
            concurrency=config.val_batch_size,
        )
        longest = min(600.0, config.rpc_timeout)
        self._service = RemoteService(address, "chat/completions", config.rpc_timeout, request_seconds=longest)
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
        samples = []
        for text, reason in choices:
            ids: Any = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            log_probs, versions = np.zeros(len(ids), np.float32), [(0, 0, len(ids))]
            ended: FinishReason = "length" if reason == "length" else "stop"
            kept = np.array(ids, np.int32)
            samples.append(Sample(prompt, prompt.token_ids, kept, log_probs, versions, ended, text))
        return await context.compute_rewards(Group(context.order, prompt, samples))

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

    def close(self) -> None:
        self._service.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


class EvaluatePipeline(ModelRun[EvaluateConfig, EvaluatePlan]):
    """An evaluation on the validation prompts of an RLVR file."""

    prompts: Mapping[str, PromptDataset]
    tokenizer: PreTrainedTokenizerBase
    scorers: Scorers | None = None

    def read(self, tokenizer: PreTrainedTokenizerBase, role: RolePlan) -> dict[str, int]:
        self.tokenizer = tokenizer
        plan = replace(self.plan, roles={**self.plan.roles, "actor_infer": role})
        self.prompts = {
            one.name: read_prompts(self.config, plan, one.data_args, one.prompt_length, tokenizer)
            for one in self.plan.validation_sets
        }
        return {way.name: len(self.prompts[way.set_name]) for way in self.plan.passes}

    async def answer(self, model: EvaluatedModel, way: Pass, numbers: Sequence[int], client: EngineClient) -> None:
        """``val_batch_size`` prompts are in flight at a time.

        The seed of a prompt's samples depends on its number alone: not on what else is in flight, nor on how often the
        evaluation was interrupted.
        """
        one, prompts = next(one for one in self.plan.validation_sets if one.name == way.set_name), self.prompts
        params = sampling_params(one.generating_args, one.max_new_tokens)
        if way.is_greedy:
            params = greedy(one.max_new_tokens, params)
        elif way.temperature is not None:
            params = replace(params, temperature=way.temperature)
        served = None if model.url is None else ServedModel(self.config, model.url, one.data_args, self.tokenizer)
        assert self.scorers is not None
        scorer = None
        if self.scorers.reward_model is not None:
            columns = [one.data_args for one in self.plan.validation_sets]
            scorer = ModelScorer(self.scorers.reward_model, model_inputs(self.config.rewards), columns)
        flow = GroupFlow(
            client,
            RewardClient(self.scorers.rewards, scorer),
            # complete() sets the number before it starts a prompt, one at a time.
            lambda count: [prompts[way.set_name][flow.next_order]],
            GroupSettings(way.num_samples, params, self.config.seed),
            loop=served,
        )
        shared = {"model": model.name, "pass": way.name, "temperature": params.temperature}
        records = partial(sample_records, shared=shared)
        try:
            await self.complete(flow, model, way, numbers, self.config.val_batch_size, records)
        finally:
            if served is not None:
                served.close()

    def bring(self) -> None:
        assert self.scorers is not None
        generating = dict.fromkeys(("actor_infer", *self.scorers.judges), GENERATION)
        self.residency.bring({REWARD_MODEL: WEIGHTS, **generating})
        for judge in self.scorers.judges.values():
            judge.resume()

    def start_scorers(self) -> None:
        if self.scorers is not None:
            return
        starter = ClusterStarter(self.config, self.plan, self.resources)
        self.scorers = Scorers(**starter.start_scorers(self.config))
        self.context.watch(self.scorers.all())
        for judge in self.scorers.judges.values():
            self.context.at_end(judge.close)
        starter.begin(self.residency)
        starter.finish(self.residency)


class AgenticRolloutPipeline(ModelRun[AgenticRolloutConfig, AgenticRolloutPlan]):
    """The episodes of ``val_env_manager`` as a training run's validation plays them, or those of
    ``train_env_manager``, of every model."""

    slice_seconds = SLICE_SECONDS
    router = "EnvAffinityRouter"
    players: dict[str, Player]
    tasks: TaskSource

    def __init__(self, loaded: LoadedConfig[AgenticRolloutConfig]) -> None:
        super().__init__(loaded)
        self._processes: list[EnvironmentProcesses] = []
        self._shared: dict[str, Any] = {}

    def read(self, tokenizer: PreTrainedTokenizerBase, role: RolePlan) -> dict[str, int]:
        plan, played = self.plan, self.plan.played
        self.players = build_players(self.config, plan, played, tokenizer, self._processes, self._shared)
        name = "validation" if plan.is_validation else f"train/{self.config.seed}"
        self.tasks = TaskSource(played, name, *read_tasks(plan, self.players))
        return {way.name: played.groups for way in plan.passes}

    async def answer(self, model: EvaluatedModel, way: Pass, numbers: Sequence[int], client: EngineClient) -> None:
        """``num_env_groups`` tasks are in flight at a time. Tasks and seeds are those of a training run."""
        played = self.plan.played
        name = "validation/" if self.plan.is_validation else f"{self.config.seed}/"
        loop = EpisodeLoop(self.players, name, played.redundancy, played.num_groups)
        settings = GroupSettings(played.group_size)
        flow = GroupFlow(client, None, lambda count: [self.tasks.task(flow.next_order)], settings, loop=loop)
        await self.complete(flow, model, way, numbers, played.num_groups, partial(self.records, model, way))

    def records(self, model: EvaluatedModel, way: Pass, group: EpisodeGroup) -> Iterator[Record]:
        templates = {tag: player.template for tag, player in self.players.items()}
        for row, episode in zip(episode_table([group], templates), group.members, strict=True):
            yield {
                **row,
                "model": model.name,
                "pass": way.name,
                "order": group.order,
                "prompt_id": f"{group.item.tag}/{group.order}",
                "sample": row["member"],
                "of": len(group.members),
                "score": None if episode.failed else episode.reward,
                "numbers": {**episode.metrics, "turns": float(len(episode.calls))},
                "vote": None,
                "tokens": sum(len(call.response_ids) for call in episode.calls),
                "finish_reason": "length" if episode.outcome in TRUNCATED else "stop",
            }

    def close(self) -> None:
        close_players(self.driver, self._processes, self._shared.values())
