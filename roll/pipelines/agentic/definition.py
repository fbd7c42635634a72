"""The definition of the agentic pipeline. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from roll.agents.agent_options import ToolWrapperArguments
from roll.config.pipelines import (
    COMPUTES_LOG_PROBS,
    GENERATES,
    TRAINS,
    Headline,
    Panel,
    Role,
    Written,
)
from roll.config.reading.errors import count
from roll.config.roles import WorkerConfig
from roll.methods.policy_plan import POLICY_PANELS, PolicyConfig, PolicyDefinition
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
    entry_sentence,
    model_roles,
    plan_agentic,
    played_sentence,
)
from roll.pipelines.agentic.preflight import check_chat_template, check_environments, own_functions
from roll.pipelines.policy_checks import check_transport
from roll.pipelines.strict_checks import check_strict_host

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig

MANAGER_KEYS = frozenset(("generating_args", "system_envs"))


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
        return plan_agentic(self, config, exp_name, written)

    def default_model(self, config: AgenticConfig, role: str) -> tuple[str, str | None]:
        if role in ("critic", REWARD) and config.reward_pretrain:
            return "reward_pretrain", config.reward_pretrain
        return super().default_model(config, role)

    def reads(self, key: str, section: WorkerConfig, config: AgenticConfig) -> frozenset[str]:
        if isinstance(section, EnvManagerConfig):
            return MANAGER_KEYS
        return super().reads(key, section, config)

    def batch_facts(self, plan: AgenticPlan) -> list[tuple[str, str]]:
        """Optimizer steps are counted in episodes; their rows may be of any number."""
        rows = f"{count(plan.train.episodes, 'episode')}, at most {count(plan.most_rows, 'row')}"
        return [
            ("batch" if name == "actor_train" else name, f"{rows}; {training.sentence()} (by episodes)")
            for name, training in plan.training.items()
        ]

    def facts(self, plan: AgenticPlan) -> list[tuple[str, str]]:
        facts = [("episodes", played_sentence(plan, plan.train, "step"))]
        if plan.validation is not None and plan.eval_steps:
            facts.append(("validation", played_sentence(plan, plan.validation, "validation")))
        for entry in plan.entries.values():
            facts.append(("environment", f"{entry.tag}: {entry_sentence(entry, plan.sequence_length)}"))
        return facts + self.shared_facts(plan, "episodes", "group")

    def filtered_sections(self, config: AgenticConfig) -> dict[str, Any]:
        return {}

    def check_parts(self, loaded: LoadedConfig[AgenticConfig]) -> None:
        check_environments(loaded)
        super().check_parts(loaded)

    def check_host(self, loaded: LoadedConfig[AgenticConfig]) -> None:
        check_transport(loaded)
        check_strict_host(loaded)
        check_chat_template(loaded)

    def own_functions(self, loaded: LoadedConfig[AgenticConfig]) -> Iterator[tuple[str, Any, Callable[[], object]]]:
        return own_functions(loaded.config)
