"""Keys, plan, checks and definition of the pipeline that only plays. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.config.checks.base import Checks, check_template_file
from roll.config.checks.roles import check_roles
from roll.config.pipelines import GENERATES, Panel, Role, Written
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import own_weights
from roll.pipelines.agentic.checks import check_lengths, check_managers
from roll.pipelines.agentic.checks_entries import check_entries
from roll.pipelines.agentic.config import AgenticConfig, AgenticPlan, ManagerPlan, judged_entries
from roll.pipelines.agentic.definition import Agentic, check_chat_template
from roll.pipelines.evaluate.config import EvaluationConfig, ModelsPlan, Pass, check_models, models_of, own_folders
from roll.pipelines.evaluate.definition import ModelsDefinition

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig


@dataclass(frozen=True)
class AgenticRolloutConfig(AgenticConfig):
    """Keys of a run that only plays: those of an agentic file, whose training keys are not read, and ``evaluate``."""

    evaluate: EvaluationConfig = field(default_factory=EvaluationConfig)
    """The models that play, and thresholds for their results."""


@dataclass(frozen=True)
class AgenticRolloutPlan(ModelsPlan, AgenticPlan):
    played: ManagerPlan  # `val_env_manager`, or `train_env_manager` for as many steps as the file has
    is_validation: bool


def with_training(config: AgenticRolloutConfig) -> AgenticRolloutConfig:
    """The configuration with ``val_env_manager`` as ``train_env_manager`` where the file has only the former: plans and
    checks start from ``train_env_manager``."""
    if config.train_env_manager.tags or config.val_env_manager is None:
        return config
    return replace(config, train_env_manager=config.val_env_manager, rollout_batch_size=config.val_batch_size)


class AgenticRollout(ModelsDefinition, Agentic):
    """Episodes of models and checkpoints, without training."""

    name = "agentic_rollout"
    config_class = AgenticRolloutConfig
    pipeline_class = "roll.pipelines.agentic_rollout.pipeline.AgenticRolloutPipeline"
    roles = (Role("actor_infer", GENERATES),)
    panels = (Panel("Success", ("val/*/accuracy",), unit_range=True), Panel("Return", ("val/*/reward",)))
    reference = (
        ("Playing without training (top level, in addition to agentic)", AgenticRolloutConfig, (AgenticConfig,)),
    )
    section_tables = ()

    def check(self, config: AgenticConfig, checks: Checks) -> None:
        assert isinstance(config, AgenticRolloutConfig)
        played = with_training(config)
        check_models(config, config.evaluate, checks)
        options = check_roles(config, checks)
        check_managers(played, checks)
        check_entries(played, checks)
        for tag in judged_entries(played):
            rule = "asks the role reward, which an evaluation does not start: give a service"
            remedy = "{model_type: api, base_url: http://host:8000/v1, model: name}"
            checks.add(f"custom_envs.{tag}.verifier.reward_kwargs.model_type", "cluster", rule, remedy)
        check_lengths(played, options, config.pretrain or None, checks)
        check_template_file("global_template", config.global_template, checks)
        if config.evaluate.against is not None:
            rule = "is for prompts; episodes are played through engines of this run"
            checks.add("evaluate.against", config.evaluate.against, rule, "~")
        if config.evaluate.temperatures:
            rule = "is for prompts; of episodes the generating_args of val_env_manager decide"
            checks.add("evaluate.temperatures", config.evaluate.temperatures, rule, [])

    def plan(self, config: AgenticConfig, exp_name: str, written: Written) -> AgenticRolloutPlan:
        assert isinstance(config, AgenticRolloutConfig)
        base = super().plan(with_training(config), exp_name, written)
        values = {item.name: getattr(base, item.name) for item in fields(AgenticPlan)}
        roles = {name: replace(role, section=own_weights(role.section)) for name, role in base.roles.items()}
        models = tuple(models_of(config, config.evaluate))
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
                **own_folders(base.output_dir, base.log_dir),
            },
            models=models,
            passes=(Pass("episodes", "", None, played.group_size, False, True),),
            baseline=config.evaluate.baseline or models[0].name,
            played=played,
            is_validation=validation is not None,
        )

    def models(self, config: AgenticConfig) -> dict[str, WorkerConfig]:
        return {"actor_infer": super().models(config)["actor_infer"]}

    def facts(self, plan: object) -> list[tuple[str, str]]:
        assert isinstance(plan, AgenticRolloutPlan)
        tasks = f"{plan.played.groups} x {plan.played.group_size} = {plan.played.episodes} episodes of every model"
        return [*super().facts(plan), ("episodes", f"{tasks} ({', '.join(plan.played.groups_by_tag)})")]

    def check_host(self, loaded: LoadedConfig[Any]) -> None:
        check_chat_template(loaded)
        from roll.pipelines.evaluate.samples import check_taken_up

        assert isinstance(loaded.plan, AgenticRolloutPlan)
        check_taken_up(loaded, partial(settings_of, loaded.config, loaded.plan))


def settings_of(config: AgenticRolloutConfig, plan: AgenticRolloutPlan) -> dict[str, Any]:
    from roll.pipelines.evaluate.samples import shared_settings

    data = [entry.section.data_args for entry in plan.entries.values() if entry.section.data_args is not None]
    own = {
        "custom_envs": {tag: asdict(entry) for tag, entry in plan.entries.items()},
        "val_env_manager" if plan.is_validation else "train_env_manager": asdict(plan.played),
        "sequence_length": config.sequence_length,
        "templates": [config.global_template, asdict(config.actor_train.data_args)],
    }
    return shared_settings(config, plan, data, own)
