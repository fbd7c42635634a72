"""The definitions of the pipelines that compare models: on prompts, and in environments. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from roll.config.checks.base import Checks, check_template_file
from roll.config.checks.roles import check_roles
from roll.config.pipelines import GENERATES, Headline, Panel, PipelineDefinition, Role, Written
from roll.config.plan.planning import shared_plan, with_cache_length
from roll.config.reading.errors import count
from roll.config.rewards import REWARD_MODEL, own_judges
from roll.config.roles import DataArguments, WorkerConfig
from roll.config.strategies.base import own_weights
from roll.pipelines.agentic.checks import check_lengths as check_conversation_lengths
from roll.pipelines.agentic.checks import check_managers
from roll.pipelines.agentic.checks_entries import check_entries
from roll.pipelines.agentic.config import AgenticConfig, AgenticPlan, ManagerPlan, judged_entries
from roll.pipelines.agentic.definition import Agentic, check_chat_template
from roll.pipelines.evaluate.config import (
    EvaluateConfig,
    EvaluatePlan,
    EvaluationConfig,
    ModelsPlan,
    Pass,
    check_models,
    first_model,
    models_of,
    own_folders,
    passes_of,
)
from roll.pipelines.rlvr.checks import check_judges, check_lengths, check_rewards, check_templates, check_validation
from roll.pipelines.rlvr.config import RLVRConfig, finished, model_roles, validation_sets
from roll.pipelines.rlvr.definition import RLVR

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig


class ModelsDefinition(PipelineDefinition[Any, Any]):
    """Common parts of the pipelines that compare models, on top of the pipelines whose files they read."""

    headlines: ClassVar[tuple[Headline, ...]] = ()
    compares_log_probs = False
    # Those of a policy are about its training.
    batch_facts = PipelineDefinition.batch_facts
    effective = PipelineDefinition.effective
    own_functions = PipelineDefinition.own_functions
    validation_words = PipelineDefinition.validation_words
    resumption_problems = PipelineDefinition.resumption_problems

    def default_model(self, config: Any, role: str) -> tuple[str, str | None]:
        first = first_model(config, config.evaluate) if role == "actor_infer" else None
        return first or super().default_model(config, role)

    def named_models(self, loaded: LoadedConfig[Any]) -> Iterator[tuple[str, str]]:
        yield from super().named_models(loaded)
        plan: Any = loaded.plan
        yield from ((f"evaluate.models.{one.name}", one.base) for one in plan.models)

    @abstractmethod
    def own_settings(self, config: Any, plan: Any) -> tuple[list[DataArguments], dict[str, Any]]:
        """The sections whose files are read, and whatever else of this pipeline's own its samples depend on."""

    def check_host(self, loaded: LoadedConfig[Any]) -> None:
        from roll.pipelines.evaluate.samples import check_taken_up

        check_taken_up(loaded)

    def facts(self, plan: Any) -> list[tuple[str, str]]:
        swaps = len(plan.models) - len(plan.groups())
        starts = count(len(plan.groups()) - sum(one.url is not None for one in plan.models), "engine start")
        models = f"{', '.join(one.name for one in plan.models)} ({starts}, {count(swaps, 'exchange')} of weights)"
        passes = ", ".join(f"{one.name} x {one.num_samples}" for one in plan.passes)
        facts = [("models", models), ("passes", passes)]
        return facts + ([("compared", f"with {plan.baseline}")] if len(plan.models) > 1 else [])


class Evaluate(ModelsDefinition, RLVR):
    """Models and checkpoints on the validation prompts of an RLVR file."""

    name = "evaluate"
    config_class = EvaluateConfig
    pipeline_class = "roll.pipelines.evaluate.pipeline.EvaluatePipeline"
    roles = (Role("actor_infer", GENERATES), Role(REWARD_MODEL, GENERATES, optional=True))
    panels = (Panel("Accuracy", ("val/*/accuracy",), unit_range=True), Panel("Mean reward", ("val/*/reward",)))
    reference = (("Evaluation (top level, in addition to RLVR's)", EvaluateConfig, (RLVRConfig,)),)
    section_tables = (("`evaluate`", EvaluationConfig, ()),)

    def check(self, config: RLVRConfig, checks: Checks) -> None:
        assert isinstance(config, EvaluateConfig)
        check_models(config, config.evaluate, checks)
        options = check_roles(config, checks)
        check_lengths(config, options, config.pretrain or None, checks)
        check_rewards(config, checks)
        check_judges(config, checks)
        if config.validation is None:
            example = "validation.data_args.file_name: [val.jsonl]"
            checks.missing("validation", "is needed: the prompts that are asked", example)
        check_validation(config, checks)
        check_templates(config, checks)

    def plan(self, config: RLVRConfig, exp_name: str, written: Written) -> Any:
        assert isinstance(config, EvaluateConfig)
        sets = validation_sets(config, config.response_and_sequence[1], written)
        longest = max(one.sequence_length for one in sets)
        models = tuple(models_of(config, config.evaluate))

        def finished_role(name: str, section: WorkerConfig) -> WorkerConfig:
            if name != "actor_infer":
                return finished(config, longest, name, section)
            # Engines load weights themselves, since there is no trainer.
            return own_weights(with_cache_length(section, longest))

        plan = shared_plan(self, config, exp_name, written, finished_role)
        return EvaluatePlan(
            **plan | {"sequence_length": longest, "save_steps": 0, **own_folders(**plan)},
            training={},
            max_steps=len(models),
            eval_steps=0,
            models=models,
            validation_sets=sets,
            passes=tuple(passes_of(config, sets)),
            baseline=config.evaluate.baseline or (models[0] if config.evaluate.against is None else models[-1]).name,
        )

    def models(self, config: RLVRConfig) -> dict[str, WorkerConfig]:
        answering = ("actor_infer", REWARD_MODEL, *own_judges(config.rewards))
        return {name: role for name, role in model_roles(config).items() if name in answering}

    def own_settings(self, config: EvaluateConfig, plan: EvaluatePlan) -> tuple[list[DataArguments], dict[str, Any]]:
        return [one.data_args for one in plan.validation_sets], {
            "validation": [asdict(one) for one in plan.validation_sets],
            "rewards": {name: asdict(one) for name, one in config.rewards.items()},
            "templates": [config.global_template, config.tag_to_template],
        }


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
    pipeline_class = "roll.pipelines.evaluate.pipeline.AgenticRolloutPipeline"
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
        check_conversation_lengths(played, options, config.pretrain or None, checks)
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
        super().check_host(loaded)

    def own_settings(
        self, config: AgenticRolloutConfig, plan: AgenticRolloutPlan
    ) -> tuple[list[DataArguments], dict[str, Any]]:
        data = [entry.section.data_args for entry in plan.entries.values() if entry.section.data_args is not None]
        return data, {
            "custom_envs": {tag: asdict(entry) for tag, entry in plan.entries.items()},
            "val_env_manager" if plan.is_validation else "train_env_manager": asdict(plan.played),
            "sequence_length": config.sequence_length,
            "templates": [config.global_template, asdict(config.actor_train.data_args)],
        }
