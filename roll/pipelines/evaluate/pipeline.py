"""The evaluation on prompts: every model answers the prompts of every set, and rewards score the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.config.loader import LoadedConfig
from roll.config.plan.plan import RolePlan
from roll.config.rewards import REWARD_MODEL, model_inputs
from roll.datasets import PromptDataset
from roll.pipelines.clusters import ClusterStarter, Scorers
from roll.pipelines.evaluate.config import EvaluateConfig, EvaluatedModel, EvaluatePlan, Pass
from roll.pipelines.evaluate.models import ModelRun
from roll.pipelines.evaluate.samples import sample_records, settings_of
from roll.pipelines.evaluate.served import NoEngines, ServedModel
from roll.pipelines.rlvr.data import read_prompts
from roll.pipelines.run_context import GENERATION, WEIGHTS
from roll.rollout.engines import EngineClient
from roll.rollout.flow import GroupFlow, greedy, sampling_params
from roll.rollout.loops import GroupSettings
from roll.rollout.rewarding import ModelScorer, RewardClient

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        one, prompts = next(one for one in self.plan.validation_sets if one.name == way.set_name), self.prompts
        params = sampling_params(one.generating_args, one.max_new_tokens)
        if way.is_greedy:
            params = greedy(one.max_new_tokens, params)
        elif way.temperature is not None:
            params = replace(params, temperature=way.temperature)
        served = None if model.url is None else ServedModel(self.config, model.url, one.data_args, self.tokenizer)
        flow = GroupFlow(
            client,
            self.reward_client(),
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

    def client_of(self, model: EvaluatedModel) -> EngineClient | None:
        if model.url is None:
            return None
        self.start_scorers()
        self.bring()
        client: Any = NoEngines()
        return client

    def bring(self) -> None:
        assert self.scorers is not None
        generating = dict.fromkeys(("actor_infer", *self.scorers.judges), GENERATION)
        self.residency.bring({REWARD_MODEL: WEIGHTS, **generating})
        for judge in self.scorers.judges.values():
            judge.resume()

    def start_scorers(self) -> None:
        """Reward workers, judges and the reward model."""
        if self.scorers is not None:
            return
        starter = ClusterStarter(self.config, self.plan, self.resources)
        self.scorers = Scorers(**starter.start_scorers(self.config))
        self.context.watch(self.scorers.all())
        for judge in self.scorers.judges.values():
            self.context.at_end(judge.close)
        starter.begin(self.residency)
        starter.finish(self.residency)

    def reward_client(self) -> RewardClient:
        assert self.scorers is not None
        scorer = None
        if self.scorers.reward_model is not None:
            columns = [one.data_args for one in self.plan.validation_sets]
            scorer = ModelScorer(self.scorers.reward_model, model_inputs(self.config.rewards), columns)
        return RewardClient(self.scorers.rewards, scorer)
