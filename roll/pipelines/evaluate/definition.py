"""The definition of the evaluation pipeline. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.config.checks.base import Checks
from roll.config.pipelines import GENERATES, READ_KEYS, Panel, ReadableSet, Role, Written
from roll.config.plan.planning import finished_section, with_cache_length
from roll.config.rewards import REWARD_MODEL, own_judges, reward_workers
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import own_weights
from roll.config.strategies.registry import with_engine_size
from roll.pipelines.evaluate.checks import check_evaluation, check_taken_up
from roll.pipelines.evaluate.config import (
    EvaluateConfig,
    EvaluatePlan,
    EvaluationConfig,
    evaluation_facts,
    first_model,
    plan_evaluation,
)
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.definition import RLVR
from roll.pipelines.rlvr.plan import model_roles

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig
    from roll.config.roles import DataArguments
    from roll.datasets import PromptDataset


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

    def started(self, config: RLVRConfig) -> dict[str, WorkerConfig]:
        rewards = {f"rewards.{name}": reward_workers(name, role) for name, role in config.rewards.items()}
        return {**self.models(config), **rewards}

    def default_model(self, config: RLVRConfig, role: str) -> tuple[str, str | None]:
        assert isinstance(config, EvaluateConfig)
        first = first_model(config) if role == "actor_infer" else None
        return first or super().default_model(config, role)

    def effective(self, config: RLVRConfig) -> dict[str, Any]:
        return {}

    def reads(self, key: str, section: WorkerConfig, config: RLVRConfig) -> frozenset[str]:
        return READ_KEYS[GENERATES] if key == "actor_infer" else super().reads(key, section, config)

    def batch_facts(self, plan: Any) -> list[tuple[str, str]]:
        return []

    def facts(self, plan: Any) -> list[tuple[str, str]]:
        return evaluation_facts(plan)

    def validation_words(self, plan: Any) -> str:
        return ""

    def check_host(self, loaded: LoadedConfig[Any]) -> None:
        from roll.pipelines.evaluate.samples import settings_of

        assert isinstance(loaded.plan, EvaluatePlan)
        check_taken_up(loaded, partial(settings_of, loaded.config, loaded.plan))

    def own_functions(self, loaded: LoadedConfig[Any]) -> Iterator[tuple[str, Any, Callable[[], object]]]:
        yield from ()

    def filtered_sections(self, config: RLVRConfig) -> dict[str, Any]:
        sections = super().filtered_sections(config)
        return {name: section for name, section in sections.items() if name != "actor_train"}

    def resumption_problems(self, *_: Any) -> Iterator[tuple[str, Any, str]]:
        yield from ()

    def readable_sets(self, loaded: LoadedConfig[Any]) -> dict[str, ReadableSet]:
        from roll.pipelines.rlvr.data import read_prompts, remarks

        plan = loaded.plan
        assert isinstance(plan, EvaluatePlan)

        def read(data_args: DataArguments, limit: int, tokenizer: Any) -> PromptDataset:
            return read_prompts(loaded.config, plan, data_args, limit, tokenizer)

        sets = {one.name or "validation": (one.data_args, one.prompt_length) for one in plan.validation_sets}
        return {
            name: ReadableSet(name, data, limit, partial(read, data, limit), partial(remarks, loaded.config))
            for name, (data, limit) in sets.items()
        }

    def reading_role(self) -> str:
        return "actor_infer"

    def served_section(self, loaded: LoadedConfig[Any], role: str) -> WorkerConfig:
        section = finished_section(with_engine_size(self.models(loaded.config)[role]), loaded.plan.roles[role])
        return own_weights(with_cache_length(section, loaded.plan.sequence_length))
