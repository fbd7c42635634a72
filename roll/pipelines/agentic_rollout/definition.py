"""The definition of the pipeline that only plays. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.config.checks.base import Checks
from roll.config.pipelines import GENERATES, Panel, Role, Written
from roll.config.roles import WorkerConfig
from roll.pipelines.agentic.config import AgenticConfig
from roll.pipelines.agentic.definition import Agentic
from roll.pipelines.agentic.preflight import check_chat_template
from roll.pipelines.agentic_rollout.config import AgenticRolloutConfig, AgenticRolloutPlan, check_playing, plan_playing
from roll.pipelines.evaluate.config import evaluation_facts, first_model

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig

ROLES = ("actor_infer",)


class AgenticRollout(Agentic):
    """Episodes of models and checkpoints, without training."""

    name = "agentic_rollout"
    config_class = AgenticRolloutConfig
    roles = tuple(Role(name, GENERATES) for name in ROLES)
    headlines = ()
    panels = (
        Panel("Success", ("val/*/accuracy",), unit_range=True),
        Panel("Return", ("val/*/reward",)),
    )
    compares_log_probs = False
    reference = (
        ("Playing without training (top level, in addition to agentic)", AgenticRolloutConfig, (AgenticConfig,)),
    )
    section_tables = ()

    def check(self, config: AgenticConfig, checks: Checks) -> None:
        assert isinstance(config, AgenticRolloutConfig)
        check_playing(config, checks)

    def plan(self, config: AgenticConfig, exp_name: str, written: Written) -> AgenticRolloutPlan:
        assert isinstance(config, AgenticRolloutConfig)
        return plan_playing(self, config, exp_name, written)

    def run(self, loaded: LoadedConfig[Any]) -> int:
        """3 where a model stays below a threshold."""
        from roll.pipelines.agentic_rollout.pipeline import AgenticRolloutPipeline

        return AgenticRolloutPipeline(loaded).run()

    def models(self, config: AgenticConfig) -> dict[str, WorkerConfig]:
        return {name: role for name, role in super().models(config).items() if name in ROLES}

    def default_model(self, config: AgenticConfig, role: str) -> tuple[str, str | None]:
        assert isinstance(config, AgenticRolloutConfig)
        first = first_model(config) if role == "actor_infer" else None
        return first or super().default_model(config, role)

    def named_models(self, loaded: LoadedConfig[AgenticConfig]) -> Iterator[tuple[str, str]]:
        yield from super().named_models(loaded)
        assert isinstance(loaded.plan, AgenticRolloutPlan)
        yield from ((f"evaluate.models.{one.name}", one.base) for one in loaded.plan.models)

    def effective(self, config: AgenticConfig) -> dict[str, Any]:
        return {}

    def batch_facts(self, plan: object) -> list[tuple[str, str]]:
        return []

    def facts(self, plan: object) -> list[tuple[str, str]]:
        assert isinstance(plan, AgenticRolloutPlan)
        tasks = f"{plan.played.groups} x {plan.played.group_size} = {plan.played.episodes} episodes of every model"
        return [*evaluation_facts(plan), ("episodes", f"{tasks} ({', '.join(plan.played.groups_by_tag)})")]

    def check_host(self, loaded: LoadedConfig[Any]) -> None:
        check_chat_template(loaded)
        from roll.pipelines.agentic_rollout.pipeline import settings_of
        from roll.pipelines.evaluate.samples import check_taken_up

        assert isinstance(loaded.plan, AgenticRolloutPlan)
        check_taken_up(loaded, partial(settings_of, loaded.config, loaded.plan))

    def own_functions(self, loaded: LoadedConfig[Any]) -> Iterator[tuple[str, Any, Callable[[], object]]]:
        yield from ()
