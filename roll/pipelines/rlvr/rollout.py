"""The rollout phase: prompts in, a batch of scored samples out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from roll.config.rewards import model_inputs
from roll.distributed import PendingCall
from roll.pipelines.files import pad_token_id
from roll.pipelines.rlvr.clusters import Clusters
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.data import RunData
from roll.pipelines.rlvr.plan import RLVRPlan
from roll.pipelines.rlvr.validation import Validation, ValidationPlan, draw_from
from roll.protocol import DataProto
from roll.protocol.metrics import Max, Mean, Metrics, Min
from roll.rewards import failure_rates
from roll.rollout.batch import build_batch, greedy_baseline, reward_components
from roll.rollout.engines import EnginePool
from roll.rollout.filters import build_filter
from roll.rollout.groups import SampleGroup
from roll.rollout.loops import rollout_loops
from roll.rollout.model_scores import ModelScorer
from roll.rollout.rewarding import RewardRouter
from roll.rollout.routing import build_router
from roll.rollout.sampling import greedy, sampling_params
from roll.rollout.scheduler import RolloutScheduler


class RolloutPhase:
    """Draws prompts, has them answered and scored; counts the draws, which seeds and order depend on."""

    def __init__(self, config: RLVRConfig, plan: RLVRPlan, clusters: Clusters, data: RunData) -> None:
        self._config = config
        self._plan = plan
        self._data = data
        limit = config.router_args.max_running_requests or config.max_running_requests
        router = build_router(config.router_args.router_name, config.router_args.router_config)
        role = config.actor_infer
        # A new process would load its model while others have the device, and threads would not wait for it.
        may_restart = not plan.roles["actor_infer"].colocated_with and (role.max_concurrency or 1) == 1
        max_restarts = role.max_restarts if may_restart else 0
        self._engines = EnginePool(
            clusters.actor_infer,
            limit,
            router=router,
            max_restarts=max_restarts,
            turn_timeout=min(role.engine_timeout, config.rpc_timeout),
        )
        scorer = model_scorer(config, plan, clusters)
        self._rewards = RewardRouter(clusters.rewards, scorer)
        self._validation_rewards = RewardRouter(clusters.rewards, scorer)
        self._validation_plan = ValidationPlan(plan.validation_sets, data.validation, config.val_batch_size)
        self._validation: Validation | None = None
        self._scheduler = RolloutScheduler(self._engines, self._rewards, config.seed, deadline=config.rpc_timeout)
        self._params = sampling_params(config.actor_infer.generating_args, plan.max_new_tokens)
        self._filters = {
            name: build_filter(section.query_filter_config.type, section.query_filter_config.filter_args)
            for name, section in config.rewards.items()
        }
        path = config.user_defined_rollout_loop_cls
        self._loop = None if path is None else rollout_loops.resolve(path)()
        self._busy_before = 0.0
        self.num_drawn = 0
        """Prompts drawn since the run began."""

    def collect(self, step: int) -> tuple[DataProto, list[SampleGroup], Metrics]:
        """A step's samples as a batch, as groups, and what it took to get them."""
        groups, metrics = self._groups_of(step)
        batch = build_batch(groups, pad_token_id(self._data.tokenizer))
        metrics |= self._size_metrics(groups) | _loss_metrics(self._engines) | reward_metrics(groups)
        if self._config.reward_weights:
            batch.batch["reward_components"] = reward_components(groups, list(self._config.reward_weights))
        if self._plan.needs_greedy_baseline:
            metrics |= self._add_greedy_baseline(batch, groups)
        return batch, groups, metrics

    def exchange(self, version: int, transfer: Callable[[], Metrics]) -> Metrics:
        """Bring the engines to ``version`` of the weights by ``transfer``, which needs them between two turns."""
        self._engines.readmit()
        return transfer()

    def work_until(self, call: PendingCall) -> None:
        """What the rollout does while others compute: a validation, where one is under way. What fails, on either side,
        is raised."""
        while self._is_at_work and call not in self._work(None, [call]):
            pass

    @property
    def _is_at_work(self) -> bool:
        """Something goes on beside what others compute."""
        return self._validation is not None and not self._validation.complete

    def _work(self, timeout: float | None, others: Sequence[PendingCall] = ()) -> list[PendingCall]:
        """Wait until something is done, of the validation under way or of ``others``, and act on it; the calls that are
        done. ``timeout`` in seconds; None: as long as the calls' own deadlines allow."""
        return self._advanced(self._engines.wait([*others, *self._validation_calls()], timeout))

    def _validation_calls(self) -> list[PendingCall]:
        return [] if self._validation is None else self._validation.pending

    def _advanced(self, done: list[PendingCall]) -> list[PendingCall]:
        if self._validation is not None:
            self._validation.advance(done)
        return done

    def _groups_of(self, step: int) -> tuple[list[SampleGroup], Metrics]:
        self._busy_before = self._engines.busy_seconds
        result = self._scheduler.collect(
            draw=self._data.sampler.next_batch,
            num_prompts=self._plan.prompts_per_step,
            group_size=self._plan.group_size,
            params=self._params,
            first_draw=self.num_drawn,
            filters=self._filters,
            num_additional=self._plan.num_additional_prompts,
            loop=self._loop,
        )
        self.num_drawn += result.num_drawn
        return result.groups, {
            "scheduler/collect_query_count": Mean(result.num_drawn),
            "scheduler/query_use_count": Mean(len(result.groups)),
            "scheduler/filtered_query_count": Mean(result.num_filtered),
            "scheduler/aborted_query_count": Mean(result.num_aborted),
        }

    def _size_metrics(self, groups: list[SampleGroup]) -> Metrics:
        """Samples and tokens of the step, and what the engines did since the last one."""
        tokens = float(sum(group.finished.sampled.sum() for group in groups))
        given = sum(group.finished.lengths.sum() for group in groups) - tokens
        prompt_tokens = sum(len(group.prompt.token_ids) * group.num_samples for group in groups) + float(given)
        busy = self._engines.busy_seconds - self._busy_before
        self._busy_before = self._engines.busy_seconds
        return {
            "system/samples": Mean(sum(group.num_samples for group in groups)),
            "system/tokens": Mean(tokens + prompt_tokens),
            "system/actor_infer/response/tps_dp": Mean(tokens / busy if busy else 0.0),
        }

    def _add_greedy_baseline(self, batch: DataProto, groups: list[SampleGroup]) -> Metrics:
        """Answer the prompts of ``groups`` once more, greedily. Samples whose baseline cannot be scored lose their own
        score: without it nothing is known of them."""
        prompts = [group.prompt for group in groups]
        params = greedy(self._plan.max_new_tokens, self._params)
        baselines = self._scheduler.collect(draw_from(prompts), len(prompts), 1, params, first_draw=0).groups
        batch.batch.update(greedy_baseline(groups, baselines))
        scores = batch.batch["baseline_scores"]
        batch.batch["scores"] = batch.batch["scores"].masked_fill(scores.isnan(), float("nan"))
        scored = scores[~scores.isnan()]
        return {"critic/baseline_score/mean": Mean(float(scored.sum()), len(scored))}

    def validate(self) -> Validation:
        """Answer and score the questions of every set, before anything else."""
        self.begin_validation()
        return self.finish_validation()

    def begin_validation(self) -> None:
        """Ask the questions of every set, behind what the engines have to do. They are answered in :meth:`work_until`,
        and must be done (:meth:`finish_validation`) before the next weights."""
        assert self._validation is None, "one validation at a time"
        self._validation = Validation(self._validation_plan, self._engines, self._validation_rewards, self._config.seed)

    def finish_validation(self) -> Validation:
        """Wait for the rest of what :meth:`begin_validation` began."""
        validation = self._validation
        assert validation is not None, "none was begun"
        while not validation.complete:
            self._work(self._config.rpc_timeout)
        self._validation = None
        return validation

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"num_drawn": self.num_drawn, "sampler": self._data.sampler.state_dict()}

    def state_between_steps(self) -> dict[str, Any]:
        """As :meth:`state_dict`, without a word to the engines."""
        return self.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_drawn = int(state["num_drawn"])
        self._data.sampler.load_state_dict(state["sampler"])


def model_scorer(config: RLVRConfig, plan: RLVRPlan, clusters: Clusters) -> ModelScorer | None:
    """The way to the role ``reward_model``, where a domain asks it."""
    if clusters.reward_model is None:
        return None
    columns = [config.actor_train.data_args, *(one.data_args for one in plan.validation_sets)]
    return ModelScorer(clusters.reward_model, model_inputs(config.rewards), columns)


def _loss_metrics(engines: EnginePool) -> Metrics:
    """Engines that were lost, and requests that others took over, since the run began (or was continued)."""
    return {
        "scheduler/engines": Mean(engines.num_engines),
        "scheduler/engine_deaths": Mean(engines.num_deaths),
        "scheduler/reissued": Mean(engines.num_reissued),
    }


def reward_metrics(groups: list[SampleGroup]) -> Metrics:
    """By domain: score, further numbers of the reward, and shares of samples whose reward failed or timed out."""
    by_domain: dict[str, list[SampleGroup]] = defaultdict(list)
    for group in groups:
        by_domain[group.prompt.domain].append(group)
    metrics: Metrics = {}
    for domain, members in by_domain.items():
        scores = np.concatenate([group.scores() for group in members])
        scores = scores[~np.isnan(scores)]
        if len(scores):
            metrics[f"{domain}/score/mean"] = Mean(float(scores.sum()), len(scores))
            metrics[f"{domain}/score/max"] = Max(float(scores.max()))
            metrics[f"{domain}/score/min"] = Min(float(scores.min()))
        results = [result for group in members for result in group.rewards]
        metrics |= {f"reward/{domain}/{name}": Mean(rate) for name, rate in failure_rates(results).items()}
        numbers: dict[str, list[float]] = defaultdict(list)
        for result in results:
            for name, number in result.metrics.items():
                numbers[name].append(number)
        metrics |= {f"reward/{domain}/{name}": Mean(sum(n), len(n)) for name, n in numbers.items()}
    return metrics
