"""The definitions of RLVR, and of on-policy distillation: RLVR without learning from the rewards. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from roll.config.algorithm import PolicyLossConfig, PPOConfig
from roll.config.checks.base import Checks
from roll.config.pipelines import (
    COMPUTES_LOG_PROBS,
    GENERATES,
    POLICY_KEYS,
    READ_KEYS,
    SCORES,
    TEACHES,
    TRAINS,
    Headline,
    Panel,
    PipelineDefinition,
    ReadableSet,
    Role,
    Task,
    Written,
)
from roll.config.plan.planning import finished_section, with_cache_length
from roll.config.policy import PolicyRunConfig, RouterConfig, WeightSyncConfig
from roll.config.rewards import (
    CLASSIFIER,
    INFERENCE,
    REWARD_MODEL,
    FilterConfig,
    RewardComponentConfig,
    RewardConfig,
    judge_types,
    section_of,
)
from roll.config.roles import WorkerConfig
from roll.config.run import OlderRLVRKeys, RunConfig
from roll.config.strategies.base import own_weights
from roll.pipelines.policy import is_taught, needs_critic, needs_reference, pg_variant, taught_by_advantage
from roll.pipelines.policy_preflight import check_transport
from roll.pipelines.rlvr.checks import check_rlvr
from roll.pipelines.rlvr.config import HarnessConfig, RLVRConfig, ValidationConfig, ValidationSetConfig
from roll.pipelines.rlvr.plan import (
    RLVRPlan,
    batch_facts,
    lengths,
    model_roles,
    plan_rlvr,
    reward_name,
    reward_pretrain,
    rlvr_facts,
    started_roles,
)
from roll.pipelines.rlvr.preflight import check_harness_is_there, check_rewards, own_functions, samples_ahead_problems
from roll.pipelines.rlvr.teachers import TEACHER, check_teachers_of, check_vocabularies_of

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig
    from roll.config.roles import DataArguments
    from roll.datasets import PromptDataset
    from roll.pipelines.batches import RecordedBatch


class RLVR(PipelineDefinition):
    """Reinforcement learning from verifiable rewards."""

    name = "rlvr"
    config_class: ClassVar[type] = RLVRConfig
    roles: ClassVar[tuple[Role, ...]] = (
        Role("actor_train", TRAINS),
        Role("actor_infer", GENERATES),
        Role("reference", COMPUTES_LOG_PROBS, optional=True),
        Role("critic", TRAINS, optional=True),
        Role(REWARD_MODEL, GENERATES, optional=True),
    )
    headlines: ClassVar[tuple[Headline, ...]] = (
        Headline("critic/score/mean", "reward"),
        Headline("val_correct/all/mean", "accuracy"),
        Headline("token/response_length/mean", "length", "{:.1f}"),
        Headline("critic/kl", "kl", "{:.4f}"),
        Headline("system/tps", "tok/s", "{:,.0f}"),
    )
    panels: ClassVar[tuple[Panel, ...]] = (
        Panel("Reward", ("critic/score/mean", "critic/rewards/mean"), first_only=True, smooth=True),
        Panel("Validation accuracy", ("val/*/accuracy",), unit_range=True),
        Panel("Response length (tokens)", ("token/response_length/mean",), smooth=True),
        Panel("KL", ("critic/kl", "actor/kl_loss", "actor/approxkl"), first_only=True, smooth=True),
        Panel("Entropy", ("actor/entropy", "critic/entropy/mean"), first_only=True, smooth=True),
    )
    compares_log_probs = True
    section_aliases: ClassVar[Mapping[str, str]] = {"student_train": "actor_train", "student_infer": "actor_infer"}
    reference: ClassVar[tuple[tuple[str, type, tuple[type, ...]], ...]] = (
        ("RLVR: batches, lengths, roles (top level)", RLVRConfig, (PolicyRunConfig, OlderRLVRKeys)),
        ("RLVR and agentic: roles, engines, asynchronous rollout (top level)", PolicyRunConfig, (RunConfig, PPOConfig)),
        ("RLVR and agentic: algorithm (top level)", PPOConfig, (PolicyLossConfig,)),
        ("RLVR and agentic: options of single policy losses (top level)", PolicyLossConfig, ()),
        ("RLVR and agentic: keys of older files (top level)", OlderRLVRKeys, ()),
    )
    section_tables: ClassVar[tuple[tuple[str, type, tuple[type, ...]], ...]] = (
        ("`rewards.<name>` (in addition to the keys of a role)", RewardConfig, (WorkerConfig,)),
        ("`rewards.<name>.components.<component>`", RewardComponentConfig, ()),
        ("`query_filter_config` and `response_filter_config`", FilterConfig, ()),
        ("`validation` (in addition to the keys of a role)", ValidationConfig, (WorkerConfig,)),
        ("`validation.sets.<name>`", ValidationSetConfig, ()),
        ("`validation.harness`", HarnessConfig, ()),
        ("`router_args`", RouterConfig, ()),
        ("`weight_sync`", WeightSyncConfig, ()),
    )

    def check(self, config: RLVRConfig, checks: Checks) -> None:
        check_rlvr(config, checks)

    def plan(self, config: RLVRConfig, exp_name: str, written: Written) -> RLVRPlan:
        return plan_rlvr(self, config, exp_name, written)

    def run(self, loaded: LoadedConfig[RLVRConfig]) -> int | None:
        from roll.pipelines.rlvr.pipeline import RLVRPipeline

        RLVRPipeline(loaded).run()
        return None

    def replay(self, loaded: LoadedConfig[RLVRConfig], recorded: RecordedBatch) -> tuple[int, dict[str, float]]:
        from roll.pipelines.rlvr.pipeline import RLVRPipeline

        return RLVRPipeline(loaded).replay(recorded)

    def models(self, config: RLVRConfig) -> dict[str, WorkerConfig]:
        return model_roles(config)

    def started(self, config: RLVRConfig) -> dict[str, WorkerConfig]:
        return started_roles(config)

    def task_of(self, key: str, section: WorkerConfig) -> Task:
        """A ``reward_model`` with a classifier's head scores; without, it is a judge, which generates, as one on the
        devices of its own reward section does."""
        if key.partition(".")[0] == TEACHER:
            return TEACHES
        if key == REWARD_MODEL and section.model_args.model_type == CLASSIFIER:
            return SCORES
        return super().task_of(REWARD_MODEL if key.startswith("rewards.") else key, section)

    def section_key(self, role: str) -> str:
        return section_of(role)

    def default_model(self, config: RLVRConfig, role: str) -> tuple[str, str | None]:
        scorer = reward_pretrain(config, role)
        return ("reward_pretrain", scorer) if scorer else super().default_model(config, role)

    def longest_row(self, config: RLVRConfig) -> int:
        return lengths(config)[1]

    def worker_name(self, role: str, section: WorkerConfig) -> str | None:
        return reward_name(role, section) if isinstance(section, RewardConfig) else super().worker_name(role, section)

    def reads(self, key: str, section: WorkerConfig, config: RLVRConfig) -> frozenset[str]:
        if key == "validation":
            return frozenset(("data_args", "generating_args"))
        if isinstance(section, RewardConfig):
            is_judge = INFERENCE in judge_types(key.removeprefix("rewards."), section)
            own = frozenset(("name", "worker_cls", "world_size", "system_envs", "max_concurrency", "tag_included"))
            return own | (READ_KEYS[GENERATES] if is_judge else frozenset())
        return READ_KEYS[self.task_of(key, section)] | (POLICY_KEYS if key == "actor_train" else frozenset())

    def effective(self, config: RLVRConfig) -> dict[str, Any]:
        return {
            "pg_variant": pg_variant(config),
            "critic": needs_critic(config) and config.critic is not None,
            "reference": needs_reference(config) or taught_by_advantage(config),
            "teacher": config.teacher if is_taught(config) else {},
        }

    def batch_facts(self, plan: RLVRPlan) -> list[tuple[str, str]]:
        return batch_facts(plan)

    def facts(self, plan: RLVRPlan) -> list[tuple[str, str]]:
        return rlvr_facts(plan)

    def validation_words(self, plan: RLVRPlan) -> str:
        return " (concurrent with training)" if plan.validates_concurrently else ""

    def check_parts(self, loaded: LoadedConfig[RLVRConfig]) -> None:
        check_rewards(loaded)
        check_harness_is_there(loaded)
        check_vocabularies_of(self, loaded)

    def check_services(self, loaded: LoadedConfig[RLVRConfig]) -> None:
        check_teachers_of(self, loaded)

    def check_host(self, loaded: LoadedConfig[RLVRConfig]) -> None:
        check_transport(loaded)

    def own_functions(self, loaded: LoadedConfig[RLVRConfig]) -> Iterator[tuple[str, Any, Callable[[], object]]]:
        return own_functions(loaded.config)

    def filtered_sections(self, config: RLVRConfig) -> dict[str, Any]:
        sections: dict[str, Any] = {"actor_train": config.actor_train, "validation": config.validation}
        if config.validation is not None:
            sections |= {f"validation.sets.{name}": one for name, one in config.validation.sets.items()}
        return {name: section for name, section in sections.items() if section is not None}

    def resumption_problems(
        self, loaded: LoadedConfig[RLVRConfig], checkpoint: str, state: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any, str]]:
        return samples_ahead_problems(loaded, checkpoint, state)

    def readable_sets(self, loaded: LoadedConfig[RLVRConfig]) -> dict[str, ReadableSet]:
        from roll.pipelines.rlvr.data import read_prompts, remarks

        def read(data_args: DataArguments, limit: int, tokenizer: Any) -> PromptDataset:
            assert isinstance(loaded.plan, RLVRPlan)
            return read_prompts(loaded.config, loaded.plan, data_args, limit, tokenizer)

        assert isinstance(loaded.plan, RLVRPlan)
        sets = {"train": (loaded.config.actor_train.data_args, loaded.plan.prompt_length)}
        sets |= {one.name or "validation": (one.data_args, one.prompt_length) for one in loaded.plan.validation_sets}
        return {
            name: ReadableSet(name, data, limit, partial(read, data, limit), partial(remarks, loaded.config))
            for name, (data, limit) in sets.items()
        }

    def served_section(self, loaded: LoadedConfig[RLVRConfig], role: str) -> WorkerConfig:
        """With its model's own weights and a KV cache for the run's longest sequence, unless its
        ``strategy_config.max_model_len`` says otherwise."""
        assert isinstance(loaded.plan, RLVRPlan)
        section = finished_section(model_roles(loaded.config)[role], loaded.plan.roles[role])
        return own_weights(with_cache_length(section, loaded.plan.max_sequence_length))

    def running_requests(self, config: RLVRConfig) -> int:
        return config.router_args.max_running_requests or config.max_running_requests


@dataclass(frozen=True)
class OPDConfig(RLVRConfig):
    """RLVR's keys with other defaults."""

    adv_estimator: str = "reinforce"
    is_pure_opd: bool = True
    """Always, in this pipeline."""


class OPD(RLVR):
    """Learning from teachers on the student's own samples."""

    name = "opd"
    config_class = OPDConfig
    headlines = (Headline("opd/kl", "kl", "{:.4f}"), *RLVR.headlines)
    panels = (Panel("Divergence from the teacher", ("opd/*/kl",), smooth=True), *RLVR.panels)
    reference = ()
    section_tables = ()
