"""The definition of the pipeline that only plays: configuration, checks and plan. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.config.checks.base import Checks, check_template_file
from roll.config.checks.models import note_positions
from roll.config.checks.roles import check_roles, note_engine_length
from roll.config.pipelines import GENERATES, Panel, Role, Written
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import own_weights
from roll.pipelines.agentic.checks import LENGTHS, check_lengths, check_managers, longest_response
from roll.pipelines.agentic.checks_entries import check_entries
from roll.pipelines.agentic.config import AgenticConfig
from roll.pipelines.agentic.definition import Agentic
from roll.pipelines.agentic.plan import AgenticPlan
from roll.pipelines.agentic.planning import plan_agentic
from roll.pipelines.agentic.preflight import check_chat_template
from roll.pipelines.agentic_rollout.config import AgenticRolloutConfig, AgenticRolloutPlan
from roll.pipelines.evaluate.checks import check_models, check_taken_up
from roll.pipelines.evaluate.plan import Pass, evaluation_facts, models_of, own_folders

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
        played = with_training(config)
        check_models(config, checks)
        options = check_roles(config, checks)
        check_managers(played, checks)
        check_entries(played, checks)
        if not checks.broken(*LENGTHS, "train_env_manager", "val_env_manager"):
            check_lengths(played, checks)
            longest = config.sequence_length
            note_engine_length(options, longest - longest_response(played, checks), longest, checks)
            note_positions("pretrain", config.pretrain or None, longest, checks)
        check_template_file("global_template", config.global_template, checks)
        if config.evaluate.against is not None:
            rule = "is for prompts; episodes are played through engines of this run"
            checks.add("evaluate.against", config.evaluate.against, rule, "~")
        if config.evaluate.temperatures:
            rule = "is for prompts; of episodes the generating_args of val_env_manager decide"
            checks.add("evaluate.temperatures", config.evaluate.temperatures, rule, [])

    def plan(self, config: AgenticConfig, exp_name: str, written: Written) -> AgenticRolloutPlan:
        assert isinstance(config, AgenticRolloutConfig)
        base = plan_agentic(self, with_training(config), exp_name, written)
        values = {item.name: getattr(base, item.name) for item in fields(AgenticPlan)}
        roles = {name: replace(role, section=own_weights(role.section)) for name, role in base.roles.items()}
        models = tuple(models_of(config))
        validation = base.validation
        steps = 1 if config.val_env_manager is not None else config.max_steps
        manager = base.train if validation is None else validation
        size = config.evaluate.num_samples or manager.group_size
        played = replace(manager, group_size=size, episodes=manager.groups * steps * size)
        return AgenticRolloutPlan(
            **values
            | {
                "roles": roles,
                "training": {},
                "max_steps": len(models),
                "eval_steps": 0,
                "save_steps": 0,
                "folders": own_folders(base.folders),
            },
            models=models,
            passes=(Pass("episodes", "", None, played.group_size, False, True),),
            baseline=config.evaluate.baseline or models[0].name,
            played=played,
            is_validation=validation is not None,
        )

    def run(self, loaded: LoadedConfig[Any]) -> int:
        """3 where a model stays below a threshold."""
        from roll.pipelines.agentic_rollout.pipeline import AgenticRolloutPipeline

        return AgenticRolloutPipeline(loaded).run()

    def models(self, config: AgenticConfig) -> dict[str, WorkerConfig]:
        return {name: role for name, role in super().models(config).items() if name in ROLES}

    def default_model(self, config: AgenticConfig, role: str) -> tuple[str, str | None]:
        assert isinstance(config, AgenticRolloutConfig)
        if role == "actor_infer" and config.evaluate.models:
            try:
                first = next(models_of(config))
            except ValueError:  # reported where models are checked
                return super().default_model(config, role)
            key = f"evaluate.models.{next(iter(config.evaluate.models))}"
            return "pretrain" if first.checkpoint else key, first.base
        return super().default_model(config, role)

    def effective(self, config: AgenticConfig) -> dict[str, Any]:
        return {}

    def batch_facts(self, plan: Any) -> list[tuple[str, str]]:
        return []

    def facts(self, plan: Any) -> list[tuple[str, str]]:
        assert isinstance(plan, AgenticRolloutPlan)
        tasks = f"{plan.played.groups} x {plan.played.group_size} = {plan.played.episodes} episodes of every model"
        return [*evaluation_facts(plan), ("episodes", f"{tasks} ({', '.join(plan.played.groups_by_tag)})")]

    def check_host(self, loaded: LoadedConfig[Any]) -> None:
        check_chat_template(loaded)
        from roll.pipelines.agentic_rollout.pipeline import settings_of

        assert isinstance(loaded.plan, AgenticRolloutPlan)
        check_taken_up(loaded, partial(settings_of, loaded.config, loaded.plan))

    def own_functions(self, loaded: LoadedConfig[Any]) -> Iterator[tuple[str, Any, Callable[[], object]]]:
        yield from ()


def with_training(config: AgenticRolloutConfig) -> AgenticRolloutConfig:
    """A file that has a validation only as if it trained on it: plans and checks begin with ``train_env_manager``."""
    if config.train_env_manager.tags or config.val_env_manager is None:
        return config
    return replace(config, train_env_manager=config.val_env_manager, rollout_batch_size=config.val_batch_size)
