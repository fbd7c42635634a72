"""The definition of the evaluation pipeline. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.config.checks.base import Checks
from roll.config.pipelines import GENERATES, READ_KEYS, Panel, Role, Written
from roll.config.rewards import REWARD_MODEL, own_judges
from roll.config.roles import WorkerConfig
from roll.pipelines.evaluate.config import (
    EvaluateConfig,
    EvaluatePlan,
    EvaluationConfig,
    check_evaluation,
    evaluation_facts,
    first_model,
    plan_evaluation,
)
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.definition import RLVR
from roll.pipelines.rlvr.plan import model_roles

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig


class Evaluate(RLVR):
    """Models and checkpoints on the validation prompts of an RLVR file."""

    name = "evaluate"
    config_class = EvaluateConfig
    roles = (Role("actor_infer", GENERATES), Role(REWARD_MODEL, GENERATES, optional=True))
    headlines = ()
    panels = (
        Panel("Accuracy", ("val/*/accuracy",), unit_range=True),
        Panel("Mean reward", ("val/*/reward",)),
    )
    compares_log_probs = False
    reference = (("Evaluation (top level, in addition to RLVR's)", EvaluateConfig, (RLVRConfig,)),)
    section_tables = (("`evaluate`", EvaluationConfig, ()),)

    def check(self, config: RLVRConfig, checks: Checks) -> None:
        assert isinstance(config, EvaluateConfig)
        check_evaluation(config, checks)

    def plan(self, config: RLVRConfig, exp_name: str, written: Written) -> Any:
        assert isinstance(config, EvaluateConfig)
        return plan_evaluation(self, config, exp_name, written)

    def run(self, loaded: LoadedConfig[Any]) -> int:
        """3 where a model stays below a threshold."""
        from roll.pipelines.evaluate.pipeline import EvaluatePipeline

        return EvaluatePipeline(loaded).run()

    def models(self, config: RLVRConfig) -> dict[str, WorkerConfig]:
        answering = ("actor_infer", REWARD_MODEL, *own_judges(config.rewards))
        return {name: role for name, role in model_roles(config).items() if name in answering}

    def default_model(self, config: RLVRConfig, role: str) -> tuple[str, str | None]:
        assert isinstance(config, EvaluateConfig)
        first = first_model(config) if role == "actor_infer" else None
        return first or super().default_model(config, role)

    def named_models(self, loaded: LoadedConfig[RLVRConfig]) -> Iterator[tuple[str, str]]:
        yield from super().named_models(loaded)
        assert isinstance(loaded.plan, EvaluatePlan)
        yield from ((f"evaluate.models.{one.name}", one.base) for one in loaded.plan.models)

    def effective(self, config: RLVRConfig) -> dict[str, Any]:
        return {}

    def reads(self, key: str, section: WorkerConfig, config: RLVRConfig) -> frozenset[str]:
        return READ_KEYS[GENERATES] if key == "actor_infer" else super().reads(key, section, config)

    def batch_facts(self, plan: object) -> list[tuple[str, str]]:
        return []

    def facts(self, plan: object) -> list[tuple[str, str]]:
        assert isinstance(plan, EvaluatePlan)
        return evaluation_facts(plan)

    def validation_words(self, plan: object) -> str:
        return ""

    def check_host(self, loaded: LoadedConfig[Any]) -> None:
        from roll.pipelines.evaluate.samples import check_taken_up, settings_of

        assert isinstance(loaded.plan, EvaluatePlan)
        check_taken_up(loaded, partial(settings_of, loaded.config, loaded.plan))

    def own_functions(self, loaded: LoadedConfig[Any]) -> Iterator[tuple[str, Any, Callable[[], object]]]:
        yield from ()

    def filtered_sections(self, config: RLVRConfig) -> dict[str, Any]:
        sections = super().filtered_sections(config)
        return {name: section for name, section in sections.items() if name != "actor_train"}

    def resumption_problems(self, *_: object) -> Iterator[tuple[str, Any, str]]:
        yield from ()

    def reading_role(self) -> str:
        return "actor_infer"
