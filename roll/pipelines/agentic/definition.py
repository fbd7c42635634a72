"""The definition of the agentic pipeline. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from roll.agents.agent_options import ToolWrapperArguments
from roll.config.pipelines import COMPUTES_LOG_PROBS, GENERATES, TRAINS, Headline, Panel, Role, Written
from roll.config.plan.planning import shared_plan, validation_sampling
from roll.config.reading.errors import count
from roll.config.reading.fields import DOTTED_PATH
from roll.config.roles import WorkerConfig
from roll.methods.policy_plan import POLICY_PANELS, PolicyConfig, PolicyDefinition, policy_plan, policy_training_plans
from roll.pipelines.agentic.checks import check_agentic
from roll.pipelines.agentic.config import (
    AgenticConfig,
    CustomEnvConfig,
    EnvManagerConfig,
    RewardNormalizationConfig,
    ToolArgumentsConfig,
    ToolWrapperConfig,
)
from roll.pipelines.agentic.plan import (
    REWARD,
    AgenticPlan,
    ManagerPlan,
    entry_plan,
    finished,
    managers,
    model_roles,
    norm_types,
    partition,
    played_sentence,
    training_sampling,
    used_entries,
)
from roll.pipelines.agentic.preflight import check_chat_template, check_environments, own_group_filter
from roll.pipelines.policy_preflight import BUILD_FILTER, check_policy_host, late, policy_functions

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig


class Agentic(PolicyDefinition[AgenticConfig, AgenticPlan]):
    """Reinforcement learning from episodes of many turns."""

    name = "agentic"
    config_class = AgenticConfig
    pipeline_class = "roll.pipelines.agentic.pipeline.AgenticPipeline"
    roles: ClassVar[tuple[Role, ...]] = (
        Role("actor_train", TRAINS),
        Role("actor_infer", GENERATES),
        Role("reference", COMPUTES_LOG_PROBS, optional=True),
        Role("critic", TRAINS, optional=True, has_own_head=True),
        Role(REWARD, GENERATES, optional=True),
    )
    headlines: ClassVar[tuple[Headline, ...]] = (
        Headline("critic/score/mean", "reward"),
        Headline("episode/success", "success"),
        Headline("episode/turns", "turns", "{:.1f}"),
        Headline("critic/kl", "kl", "{:.4f}"),
        Headline("system/tps", "tok/s", "{:,.0f}"),
    )
    panels: ClassVar[tuple[Panel, ...]] = (
        Panel("Return", ("critic/score/mean",), smooth=True),
        Panel("Success", ("episode/*/success", "val/*/success"), unit_range=True, smooth=True),
        Panel("Turns", ("episode/*/turns",), smooth=True),
        *POLICY_PANELS,
    )
    reference: ClassVar[tuple[tuple[str, type, tuple[type, ...]], ...]] = (
        ("Agentic: batches, environments (top level)", AgenticConfig, (PolicyConfig,)),
    )
    section_tables: ClassVar[tuple[tuple[str, type, tuple[type, ...]], ...]] = (
        (
            "`train_env_manager` and `val_env_manager` (in addition to the keys of a role)",
            EnvManagerConfig,
            (WorkerConfig,),
        ),
        ("`custom_envs.<tag>`", CustomEnvConfig, ()),
        ("`custom_envs.<tag>.tool_wrapper`", ToolWrapperConfig, ()),
        ("`custom_envs.<tag>.tool_wrapper.wrapper_args`", ToolWrapperArguments, ()),
        ("`custom_envs.<tag>.tool_wrapper.tool_configs[]`", ToolArgumentsConfig, ()),
        ("`reward_normalization`", RewardNormalizationConfig, ()),
    )

    check = staticmethod(check_agentic)
    models = staticmethod(model_roles)

    def plan(self, config: AgenticConfig, exp_name: str, written: Written) -> AgenticPlan:
        sampling = training_sampling(config, written)
        plans = {
            key: ManagerPlan(
                section=section,
                groups_by_tag=partition(section),
                group_size=section.group_size,
                redundancy=section.group_size_redundancy,
                episodes=episodes,
                # Of validation, keys that are left out are those of training.
                generating_args=sampling
                if key == "train_env_manager"
                else validation_sampling(f"{key}.generating_args", section.generating_args, sampling, written),
            )
            for key, section, episodes in managers(config)
        }
        entries = {tag: entry_plan(config, tag, sampling.max_new_tokens) for tag in used_entries(config)}
        train, section = plans["train_env_manager"], config.reward_normalization
        longest = max(entries[tag].new_tokens for tag in train.groups_by_tag)
        return AgenticPlan(
            **shared_plan(self, config, exp_name, written, partial(finished, config)),
            **policy_plan(config) | {"norm_types": norm_types(config)},
            training=policy_training_plans(config),
            max_steps=config.max_steps,
            eval_steps=max(0, config.eval_steps) if config.val_env_manager is not None else 0,
            prompts_per_step=train.groups,
            group_size=train.group_size,
            max_new_tokens=longest,
            norm_length=config.loss_norm_length or config.sequence_length,
            validates_concurrently=False,
            num_additional_prompts=0,
            entries=entries,
            train=train,
            validation=plans.get("val_env_manager"),
            normalizes_by_tag=section is not None and section.grouping == "tags",
        )

    def default_model(self, config: AgenticConfig, role: str) -> tuple[str, str | None]:
        if role in ("critic", REWARD) and config.reward_pretrain:
            return "reward_pretrain", config.reward_pretrain
        return super().default_model(config, role)

    def reads(self, key: str, section: WorkerConfig, config: AgenticConfig) -> frozenset[str]:
        if isinstance(section, EnvManagerConfig):
            return frozenset(("generating_args", "system_envs"))
        return super().reads(key, section, config)

    def batch_facts(self, plan: AgenticPlan) -> list[tuple[str, str]]:
        """Optimizer steps are counted in episodes; their rows may be of any number."""
        # Of an episode whose conversation does not branch.
        entries = (plan.entries[tag] for tag in plan.train.groups_by_tag)
        most = plan.train.episodes * max(entry.turns if entry.samples == "step" else 1 for entry in entries)
        rows = f"{count(plan.train.episodes, 'episode')}, at most {count(most, 'row')}"
        return [
            ("batch" if name == "actor_train" else name, f"{rows}; {training.sentence()} (by episodes)")
            for name, training in plan.training.items()
        ]

    def facts(self, plan: AgenticPlan) -> list[tuple[str, str]]:
        facts = [("episodes", played_sentence(plan, plan.train, "step"))]
        if plan.validation is not None and plan.eval_steps:
            facts.append(("validation", played_sentence(plan, plan.validation, "validation")))
        for entry in plan.entries.values():
            seconds = f", {entry.seconds:g} s" if entry.seconds is not None else ""
            rows = "a row a conversation" if entry.samples == "trajectory" else "a row a turn"
            name = entry.section.env_type or f"agent {entry.agent}"
            limits = f"at most {count(entry.turns, 'turn')} of {entry.new_tokens} tokens, {plan.sequence_length} tokens"
            text = f"{entry.tag}: {name}; {limits} of context{seconds}; context {entry.context}, {rows}"
            facts.append(("environment", text))
        return facts + self.shared_facts(plan, "episodes", "group")

    def filtered_sections(self, config: AgenticConfig) -> dict[str, Any]:
        return {}

    def check_parts(self, loaded: LoadedConfig[AgenticConfig]) -> None:
        check_environments(loaded)
        super().check_parts(loaded)

    def check_host(self, loaded: LoadedConfig[AgenticConfig]) -> None:
        check_policy_host(loaded)
        check_chat_template(loaded)

    def own_functions(self, loaded: LoadedConfig[AgenticConfig]) -> Iterator[tuple[str, Any, Callable[[], object]]]:
        config = loaded.config
        yield from policy_functions(config)
        for name, section, _ in managers(config):
            own, path = section.group_filter_config, section.group_filter_cls
            if DOTTED_PATH.fullmatch(own.type):
                yield f"{name}.group_filter_config", own.type, partial(late, BUILD_FILTER, own.type, own.filter_args)
            if path is not None:
                yield f"{name}.group_filter_cls", path, partial(own_group_filter, path)
