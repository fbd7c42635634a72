"""Starts the clusters that a plan names, all at once: importing and loading take most of a start; and the services
that LLM judges ask, in front of engines of the run."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import ray

from roll.config.plan.plan import Plan
from roll.config.rewards import REWARD_MODEL, judge_role, model_inputs
from roll.config.run import PolicyRunConfig
from roll.distributed import Cluster, ResourceManager
from roll.methods.policy_plan import PolicyPlan
from roll.pipelines.files import load_tokenizer
from roll.pipelines.model_calls import GENERATION, TRAINING, WEIGHTS, Residency, start_cluster
from roll.pipelines.rlvr.config import RLVRConfig, judge_roles
from roll.rollout.rewarding import RewardSettings, RewardWorker
from roll.serving.server import FrontOptions, HttpFront
from roll.strategies.base import ModelHead, StateKind
from roll.workers import GENERATION_WORKER, REFERENCE_WORKER, REWARD_MODEL_WORKER, REWARD_WORKER, TRAIN_WORKER
from roll.workers.generation import GenerationWorker
from roll.workers.model import ModelSettings, ModelWorker

logger = logging.getLogger(__name__)


class JudgeService(HttpFront):
    """One address for the reward workers that ask the role ``name``, with a key that only this run knows; bound at
    once, so that they can have it while the engines still load."""

    def __init__(self, config: PolicyRunConfig, plan: Plan, name: str) -> None:
        self._key = secrets.token_urlsafe(32)
        options = FrontOptions(
            model=name,
            api_key=self._key,
            max_running_requests=config.max_running_requests,
            max_open_requests=1 << 20,  # reward workers are bounded themselves
            # A new process would load its model while others have the devices.
            max_restarts=0 if plan.roles[name].colocated_with else config.actor_infer.max_restarts,
        )
        # Reward workers of several nodes must reach it; else nobody outside this host needs to.
        super().__init__(options, ray.util.get_node_ip_address() if plan.num_nodes > 1 else "127.0.0.1")

    @property
    def options(self) -> dict[str, str]:
        return {"base_url": self.base_url, "api_key": self._key, "model": self.model}

    @property
    def address(self) -> dict[str, str]:
        """Keys of a reward section, for the workers whose judges ask this service: known only while it runs."""
        return {"judge_api_url": self.base_url, "judge_api_key": self._key, "judge_model_name": self.model}


@dataclass(frozen=True, kw_only=True)
class Scorers:
    """The roles that score responses; a role that nothing consumes is not started."""

    rewards: Mapping[str, Cluster] = field(default_factory=dict)  # by domain
    # A classifier that scores conversations; the role may be a judge instead, and is among `judge_engines` then.
    reward_model: Cluster | None = None
    # By role: `reward_model`, and those that belong to one domain.
    judge_engines: Mapping[str, Cluster] = field(default_factory=dict)
    judges: Mapping[str, JudgeService] = field(default_factory=dict)  # the services of `judge_engines`

    def all(self) -> list[Cluster]:
        models = [self.reward_model] if self.reward_model is not None else []
        return [*self.judge_engines.values(), *models, *self.rewards.values()]


@dataclass(frozen=True, kw_only=True)
class Clusters(Scorers):
    """The roles of a run. Without ``reference``, reference log-probs (if any) come from ``actor_train``, without its
    adapters."""

    actor_train: Cluster
    actor_infer: Cluster
    reference: Cluster | None = None
    critic: Cluster | None = None
    # Roles that a method adds, which look at samples, by name.
    added: Mapping[str, Cluster] = field(default_factory=dict)

    def all(self) -> list[Cluster]:
        return [*self.computing.values(), self.actor_infer, *super().all()]

    @cached_property
    def computing(self) -> dict[str, Cluster]:
        """The roles that learn or look at samples, by name."""
        roles = (self.actor_train, self.reference, self.critic, *self.added.values())
        return {role.name: role for role in roles if role is not None}


@dataclass(frozen=True)
class StartingModel:
    """A role's cluster, the states that it will hold on its devices, and the call that has its model built, whose
    answer is waited for by another call."""

    cluster: Cluster
    states: frozenset[StateKind]
    begin: Callable[[], Callable[[], list[Any]]]

    def build(self) -> None:
        self.begin()()


class ClusterStarter:
    """Starts the processes of one cluster after the other, then has their models built."""

    def __init__(self, config: PolicyRunConfig, plan: Plan, resources: ResourceManager) -> None:
        self._config, self._plan, self._resources = config, plan, resources
        self._pending: list[Callable[[], list[Any]]] = []
        self._judges: dict[str, tuple[JudgeService, Cluster]] = {}
        self.models: dict[str, StartingModel] = {}

    def start_computing(self) -> dict[str, Any]:
        """The roles that learn or look at samples, by field of :class:`Clusters`."""
        plan = self._plan
        assert isinstance(plan, PolicyPlan)
        offloads = self._config.is_offload_optimizer_states_in_train_step
        actor = ModelSettings(self._config.max_grad_norm, offload_optimizer_in_steps=offloads)
        critic = replace(actor, head=ModelHead.VALUE)
        has_reference = "reference" in plan.roles
        return {
            "actor_train": self.start("actor_train", TRAIN_WORKER, actor),
            "reference": self.start("reference", REFERENCE_WORKER) if has_reference else None,
            "critic": self.start("critic", TRAIN_WORKER, critic) if plan.needs_critic else None,
            "added": {name: self.start(name, worker) for name, worker in plan.added_workers.items()},
        }

    def start_judges(self, names: Iterable[str]) -> dict[str, Any]:
        """The engines of roles that LLM judges ask, and the services in front of them."""
        services = {name: JudgeService(self._config, self._plan, name) for name in names}
        self._judges |= {name: (one, self.start(name, GENERATION_WORKER)) for name, one in services.items()}
        return {"judges": services, "judge_engines": {name: engines for name, (_, engines) in self._judges.items()}}

    def start_scorers(self, config: RLVRConfig) -> dict[str, Any]:
        """The roles that score responses, by field of :class:`Scorers`."""
        has_model, judging = bool(model_inputs(config.rewards)), judge_roles(config)
        scores = ModelSettings(head=ModelHead.VALUE)
        model = self.start(REWARD_MODEL, REWARD_MODEL_WORKER, scores) if has_model else None
        judges = self.start_judges(name for name in self._plan.roles if name in judging)
        rewards = {}
        for name, section in config.rewards.items():
            judge = judges["judges"].get(judge_role(name, section))
            settings = RewardSettings(judge.address) if judge is not None else None
            role = f"rewards.{name}"
            rewards[name] = start_cluster(
                self._config, role, REWARD_WORKER, self._resources, self._plan.roles[role].section, settings
            )
            self._pending.append(rewards[name].call_once_built(RewardWorker.initialize))
        return {"reward_model": model, "rewards": rewards, **judges}

    def start_engines(self) -> dict[str, Any]:
        """The policy's engines; after all others, since they may size their caches by what is free on the device."""
        return {"actor_infer": self.start("actor_infer", GENERATION_WORKER)}

    def start(self, name: str, worker: str, settings: ModelSettings | None = None) -> Cluster:
        """A role with a model, which is yet to be built."""
        section = self._plan.roles[name].section
        worker_cls = section.worker_cls or worker
        cluster = start_cluster(self._config, name, worker_cls, self._resources, section, settings)
        if worker == GENERATION_WORKER:
            begin, states = partial(cluster.call_once_built, GenerationWorker.initialize), GENERATION
        else:
            training = self._plan.training.get(name)
            steps = (training.total_optimizer_steps if training is not None else None) or 0
            begin = partial(cluster.call_once_built, ModelWorker.initialize, steps)
            states = TRAINING if training is not None else WEIGHTS
        self.models[name] = StartingModel(cluster, states, begin)
        return cluster

    def begin(self, residency: Residency) -> None:
        """Let the roles that have their devices to themselves load, all at once, while the caller does other work."""
        self._pending += [one.begin() for name, one in self.models.items() if not residency.moves(name)]

    def finish(self, residency: Residency) -> None:
        """Wait for them, then build the roles that share devices one by one: each leaves before the next comes."""
        results = [wait() for wait in self._pending]
        # All workers of a host report the same about it: each line once.
        for line in dict.fromkeys(line for lines in results for line in lines if line and isinstance(line, str)):
            logger.info("%s", line)
        for name, model in self.models.items():
            if residency.moves(name):
                model.build()
                residency.admit(model.cluster, model.states)
        for judge, engines in self._judges.values():
            arguments = engines.role.model_args
            judge.open(engines, load_tokenizer(arguments.model_name_or_path, arguments.trust_remote_code))
