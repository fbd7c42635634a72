"""The definition of the evaluation pipeline. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from roll.config.checks.base import Checks
from roll.config.checks.roles import check_roles
from roll.config.pipelines import GENERATES, Headline, Panel, PipelineDefinition, Role, Written
from roll.config.plan.planning import shared_plan, with_cache_length
from roll.config.reading.errors import count
from roll.config.rewards import REWARD_MODEL, own_judges
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import own_weights
from roll.pipelines.evaluate.config import (
    EvaluateConfig,
    EvaluatePlan,
    EvaluationConfig,
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

    def check_host(self, loaded: LoadedConfig[Any]) -> None:
        from roll.pipelines.evaluate.samples import check_taken_up, settings_of

        assert isinstance(loaded.plan, EvaluatePlan)
        check_taken_up(loaded, partial(settings_of, loaded.config, loaded.plan))
