"""The definitions of RLVR, and of on-policy distillation: RLVR without learning from the rewards. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from roll.config.algorithm import ESTIMATOR, PPOConfig
from roll.config.choices import ADV_ESTIMATORS, POLICY_LOSSES, DiscountOptions, option_tables, traits
from roll.config.pipelines import (
    COMPUTES_LOG_PROBS,
    GENERATES,
    READ_KEYS,
    SCORES,
    TRAINS,
    Headline,
    Panel,
    ReadableSet,
    Role,
    Task,
    Written,
    find_own_modules,
)
from roll.config.plan.planning import finished_section, shared_plan, with_cache_length
from roll.config.reading.errors import ConfigError, count
from roll.config.reading.fields import DOTTED_PATH, Choice
from roll.config.reading.masking import masked
from roll.config.reading.yaml_files import shown
from roll.config.rewards import (
    CLASSIFIER,
    INFERENCE,
    JUDGE_ROLE,
    OWN_PREFIX,
    REWARD_MODEL,
    FilterConfig,
    RewardComponentConfig,
    RewardConfig,
    judge_types,
    rewards_of,
    section_of,
    worker_name,
)
from roll.config.roles import WorkerConfig
from roll.config.run import PolicyRunConfig, RouterConfig, RunConfig, WeightSyncConfig
from roll.config.strategies.base import own_weights
from roll.methods.policy_plan import POLICY_PANELS, PolicyConfig, PolicyDefinition, policy_plan, policy_training_plans
from roll.pipelines.policy_preflight import BUILD_FILTER, check_policy_host, late, policy_functions
from roll.pipelines.rlvr.checks import check_rlvr
from roll.pipelines.rlvr.config import (
    RLVRConfig,
    RLVRPlan,
    ValidationConfig,
    ValidationSetConfig,
    finished,
    max_new_tokens,
    model_roles,
    reward_roles,
    started_roles,
    validates_concurrently,
    validation_sets,
)
from roll.serving.harness import HARNESSES, HarnessConfig

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig
    from roll.config.roles import DataArguments
    from roll.datasets.reading import SourceRow


class RLVR(PolicyDefinition[RLVRConfig, RLVRPlan]):
    """Reinforcement learning from verifiable rewards."""

    name = "rlvr"
    config_class: ClassVar[type] = RLVRConfig
    pipeline_class = "roll.pipelines.rlvr.pipeline.RLVRPipeline"
    roles: ClassVar[tuple[Role, ...]] = (
        Role("actor_train", TRAINS),
        Role("actor_infer", GENERATES),
        Role("reference", COMPUTES_LOG_PROBS, optional=True),
        Role("critic", TRAINS, optional=True, has_own_head=True),
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
        Panel("Validation reward", ("val/*/reward",)),
        Panel("Response length (tokens)", ("token/response_length/mean",), smooth=True),
        *POLICY_PANELS,
    )
    section_aliases: ClassVar[Mapping[str, str]] = {"student_train": "actor_train", "student_infer": "actor_infer"}
    reference: ClassVar[tuple[tuple[str, type, tuple[type, ...]], ...]] = (
        ("RLVR: batches, lengths, roles (top level)", RLVRConfig, (PolicyConfig,)),
        ("RLVR and agentic: roles, engines, asynchronous rollout (top level)", PolicyRunConfig, (RunConfig, PPOConfig)),
        *PolicyDefinition.reference,
        ("RLVR and agentic: algorithm (top level)", PPOConfig, ()),
        *option_tables(ADV_ESTIMATORS),
        *option_tables(POLICY_LOSSES),
    )
    section_tables: ClassVar[tuple[tuple[str, type, tuple[type, ...]], ...]] = (
        ("`rewards.<name>` (in addition to the keys of a role)", RewardConfig, (WorkerConfig,)),
        ("`rewards.<name>.components.<component>`", RewardComponentConfig, ()),
        ("`query_filter_config` and `response_filter_config`", FilterConfig, ()),
        ("`validation` (in addition to the keys of a role)", ValidationConfig, (WorkerConfig,)),
        ("`validation.sets.<name>`", ValidationSetConfig, ()),
        ("`validation.harness`", HarnessConfig, ()),
        *PolicyDefinition.section_tables,
        ("`router_args`", RouterConfig, ()),
        ("`weight_sync`", WeightSyncConfig, ()),
    )

    check = staticmethod(check_rlvr)
    models = staticmethod(model_roles)
    section_key = staticmethod(section_of)
    check_host = staticmethod(check_policy_host)

    def plan(self, config: RLVRConfig, exp_name: str, written: Written) -> RLVRPlan:
        response, sequence = config.response_and_sequence
        validation = config.validation
        sets = validation_sets(config, sequence, written)
        longest = max(sequence, *(one.sequence_length for one in sets), 0)
        eval_steps = config.eval_steps if validation is None or validation.eval_steps is None else validation.eval_steps
        return RLVRPlan(
            **shared_plan(self, config, exp_name, written, partial(finished, config, longest)),
            **policy_plan(config),
            training=policy_training_plans(config),
            max_steps=config.max_steps,
            eval_steps=max(0, eval_steps) if validation is not None else 0,
            prompts_per_step=config.rollout_batch_size,
            group_size=config.num_return_sequences_in_group,
            prompt_length=config.prompt_length,
            response_length=response,
            norm_length=config.loss_norm_length or response,
            max_new_tokens=max_new_tokens(config),
            validation_sets=sets,
            validates_concurrently=validates_concurrently(config, started_roles(config)),
            num_additional_prompts=config.max_additional_running_prompts if config.is_use_additional_prompts else 0,
            needs_greedy_baseline=traits(config.estimator).needs_greedy,
        )

    def started(self, config: RLVRConfig) -> dict[str, WorkerConfig]:
        return self.models(config) | reward_roles(config)

    def task_of(self, key: str, section: WorkerConfig) -> Task:
        """A ``reward_model`` with a classifier's head scores; without, it is a judge, which generates, as one on the
        devices of its own reward section does."""
        if key == REWARD_MODEL and section.model_args.model_type == CLASSIFIER:
            return SCORES
        return super().task_of(REWARD_MODEL if key.startswith("rewards.") else key, section)

    def default_model(self, config: RLVRConfig, role: str) -> tuple[str, str | None]:
        is_scorer = role in ("critic", JUDGE_ROLE) or role.startswith(OWN_PREFIX)
        if is_scorer and config.reward_pretrain:
            return "reward_pretrain", config.reward_pretrain
        return super().default_model(config, role)

    def longest_row(self, config: RLVRConfig) -> int:
        return config.longest_sequence

    def worker_name(self, role: str, section: WorkerConfig) -> str | None:
        """A reward domain without ``worker_cls`` is scored by the reward of its own name, or by its components."""
        if not isinstance(section, RewardConfig):
            return super().worker_name(role, section)
        return " + ".join(section.components) or worker_name(section.worker_cls) or role.removeprefix("rewards.")

    def reads(self, key: str, section: WorkerConfig, config: RLVRConfig) -> frozenset[str]:
        if key == "validation":
            return frozenset(("data_args", "generating_args"))
        if isinstance(section, RewardConfig):
            is_judge = INFERENCE in judge_types(key.removeprefix("rewards."), section)
            own = frozenset(("name", "worker_cls", "world_size", "system_envs", "max_concurrency", "tag_included"))
            return own | (READ_KEYS[GENERATES] if is_judge else frozenset())
        return super().reads(key, section, config)

    def batch_facts(self, plan: RLVRPlan) -> list[tuple[str, str]]:
        samples = count(plan.samples_per_step, "sample")
        total = f"{count(plan.prompts_per_step, 'prompt')} x {plan.group_size} = {samples}"
        trained = {"batch" if name == "actor_train" else name: one for name, one in plan.training.items()}
        return [(name, f"{total}; {training.sentence()}") for name, training in trained.items()]

    def facts(self, plan: RLVRPlan) -> list[tuple[str, str]]:
        lengths = (
            f"prompt {plan.prompt_length} + response {plan.response_length} = {plan.sequence_length} tokens"
            f" (at most {plan.max_new_tokens} new)"
        )
        for one in plan.validation_sets if plan.eval_steps else ():
            total = f"{one.prompt_length} + {one.sequence_length - one.prompt_length} = {one.sequence_length}"
            name = f"validation {one.name} " if one.name else "validation "
            lengths += f"; {name}{total} (at most {one.max_new_tokens} new)"
        return [("lengths", lengths), *self.shared_facts(plan, "generation", "prompt", plan.needs_greedy_baseline)]

    def validation_words(self, plan: RLVRPlan) -> str:
        return " (concurrent with training)" if plan.validates_concurrently else ""

    def check_parts(self, loaded: LoadedConfig[RLVRConfig]) -> None:
        check_rewards(loaded)
        validation = loaded.config.validation
        if validation is not None and validation.harness is not None:
            HARNESSES[validation.harness.name].require("validation.harness.name", shown(loaded.source))
        super().check_parts(loaded)

    def own_functions(self, loaded: LoadedConfig[RLVRConfig]) -> Iterator[tuple[str, Any, Callable[[], object]]]:
        yield from policy_functions(loaded.config)
        if loop := loaded.config.user_defined_rollout_loop_cls:
            yield "user_defined_rollout_loop_cls", loop, partial(late, "roll.rollout.loops.rollout_loops.resolve", loop)
        for name, section in loaded.config.rewards.items():
            for key in ("query_filter_config", "response_filter_config"):
                own = getattr(section, key)
                if DOTTED_PATH.fullmatch(own.type):
                    yield f"rewards.{name}.{key}", own.type, partial(late, BUILD_FILTER, own.type, own.filter_args)

    def filtered_sections(self, config: RLVRConfig) -> dict[str, Any]:
        sections: dict[str, Any] = {"actor_train": config.actor_train} if self.is_role("actor_train") else {}
        if config.validation is not None:
            sections |= {"validation": config.validation}
            sections |= {f"validation.sets.{name}": one for name, one in config.validation.sets.items()}
        return sections

    def resumption_problems(
        self, loaded: LoadedConfig[RLVRConfig], checkpoint: str, state: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any, str]]:
        """A synchronous run would lose the samples that a checkpoint holds for later steps."""
        assert isinstance(loaded.plan, RLVRPlan)
        ahead = state.get("rollout", {}).get("ahead", {})
        if not loaded.plan.is_async and (ahead.get("unfinished") or ahead.get("complete")):
            rule = f"{checkpoint} holds samples that were generated ahead, which a synchronous run has no use for"
            yield "async_generation_ratio", loaded.config.async_generation_ratio, rule

    def first_row_readers(
        self, loaded: LoadedConfig[RLVRConfig]
    ) -> Iterator[tuple[str, DataArguments, Callable[[Any], object]]]:
        from roll.datasets.columns import Columns, DomainRouter

        config: RLVRConfig = loaded.config
        plan: Any = loaded.plan
        tags = {name: section.tag_included for name, section in config.rewards.items()}

        def read(data_args: DataArguments, source: SourceRow) -> None:
            columns = Columns.of(data_args, source)
            columns.read_messages(source)
            if tags and data_args.dataset_filter is None:  # a filter may leave this row out
                domain = DomainRouter(tags).route(source, columns.read_tag(source))
                require_scorable(domain, config.rewards[domain], source)

        sections = {"actor_train.data_args": config.actor_train.data_args} if isinstance(plan, RLVRPlan) else {}
        for one in plan.validation_sets:
            sections[f"validation.{f'sets.{one.name}.' if one.name else ''}data_args"] = one.data_args
        for key, data_args in sections.items():
            yield key, data_args, partial(read, data_args)

    def readable_sets(self, loaded: LoadedConfig[RLVRConfig]) -> dict[str, ReadableSet]:
        from roll.pipelines.rlvr.data import read_prompts, read_training_prompts, remarks

        config: RLVRConfig = loaded.config
        plan: Any = loaded.plan
        found: dict[str, ReadableSet] = {}
        if isinstance(plan, RLVRPlan):  # an evaluation trains on nothing
            training, data = partial(read_training_prompts, config, plan), config.actor_train.data_args
            found["train"] = ReadableSet("train", data, plan.prompt_length, training, partial(remarks, config))
        for one in plan.validation_sets:
            name, limit = one.name or "validation", one.prompt_length
            read = partial(read_prompts, config, plan, one.data_args, limit)
            found[name] = ReadableSet(name, one.data_args, limit, read, partial(remarks, config))
        return found

    def served_section(self, loaded: LoadedConfig[RLVRConfig], role: str) -> WorkerConfig:
        """The section with its model's own weights and a KV cache for the run's longest sequence, unless its
        ``strategy_config.max_model_len`` says otherwise."""
        plan = loaded.plan
        longest = plan.max_sequence_length if isinstance(plan, RLVRPlan) else plan.sequence_length
        section = finished_section(self.models(loaded.config)[role], plan.roles[role])
        return own_weights(with_cache_length(section, longest))


@dataclass(frozen=True)
class OPDConfig(RLVRConfig):
    """RLVR's keys with other defaults."""

    estimator: Choice = field(default=Choice("reinforce", DiscountOptions()), metadata=ESTIMATOR)
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


def require_scorable(domain: str, section: RewardConfig, source: SourceRow) -> None:
    """Check that a row has the columns that its rewards need; DataError: it lacks one."""
    from roll.datasets.forms import FOREIGN_TRUTHS
    from roll.datasets.types import DataError
    from roll.rewards.registry import needed_columns

    for worker_cls, options in rewards_of(domain, section):
        given = {*options, *section.reward_kwargs, *source.row}
        for column in sorted(needed_columns(worker_cls) - given):
            hint = "; data_args.ground_truth may name another" if column == "ground_truth" else ""
            if not hint or not source.row.keys() & set(FOREIGN_TRUTHS):
                needed = f"rewards.{domain} ({worker_cls}) needs the column {column}"
                raise DataError(f"{source.place}: {needed}, found {', '.join(source.row)}{hint}")


def check_rewards(loaded: LoadedConfig[RLVRConfig]) -> None:
    """Build each domain's reward once. Raises ``ConfigError``: a reward that cannot be built, or not on this host, an
    option that it does not have, or ``weights`` of the estimator that it does not return."""
    find_own_modules()
    from roll.rewards import RewardOptionError, build_section

    problems = []
    for name, section in loaded.config.rewards.items():
        try:
            reward = build_section(name, section)
            reward.check_host()
            reward.close()
            known = (*getattr(reward, "numbers", ()), "score")
            weights = loaded.config.estimator.get("weights", {})
            unknown = next((number for number in weights if number not in known), None)
            # Only a rule that is known to return some numbers can be said not to return another.
            if unknown is not None and len(known) > 1:
                key, rule = f"estimator.weights.{unknown}", f"rewards.{name} returns no such number; it returns "
                problems.append(loaded.problem(key, None, rule + ", ".join(known), has_value=False))
        except RewardOptionError as error:
            inside = f"components.{error.component}." if error.component is not None else ""
            part = section if error.component is None else section.components[error.component]
            key, value = f"rewards.{name}.{inside}{error.key}", getattr(part, error.key)
            rule = str(error).removeprefix(f"worker_cls {value!r}: ")
            problems.append(loaded.problem(key, masked(value), rule, has_value=bool(value)))
    if problems:
        raise ConfigError(problems)
