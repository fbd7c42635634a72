"""Definition, plan and checks of the pipelines that learn from given rows (SFT, preferences, reward models,
distillation): one role that trains, rows from files, held-out rows under ``validation``, a step that is an optimizer
step. Torch-free; their run is in :mod:`roll.pipelines.supervised_pipeline`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.config.checks.base import Checks, check_columns, check_data_files, check_resume, check_schedule
from roll.config.checks.keys import note_unread
from roll.config.checks.roles import note_positions
from roll.config.pipelines import PipelineDefinition, ReadableSet, Written
from roll.config.plan.plan import Plan
from roll.config.plan.planning import shared_plan, training_plan, validation_data
from roll.config.roles import DataArguments

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig
    from roll.pipelines.batches import RecordedBatch


@dataclass(frozen=True)
class SupervisedPlan(Plan):
    """Plan of a run whose steps are optimizer steps on given rows."""

    global_batch_size: int
    """Rows of one optimizer step: samples, pairs or prompts, as ``per_device_train_batch_size`` counts them."""
    data_args: DataArguments
    """The training data section, columns that top-level keys name included."""
    val_data_args: DataArguments | None
    """The validation's; columns and template that it leaves out are those of the role that trains."""


def supervised_plan(
    definition: PipelineDefinition, config: Any, exp_name: str, written: Written, role: str, data: DataArguments
) -> dict[str, Any]:
    """The fields of a :class:`SupervisedPlan`.

    Args:
        role: name of the role that trains.
        data: its data section, as the run reads it.
    """
    training = training_plan(getattr(config, role), definition.longest_row(config), 0, 1, config.max_steps)
    training = replace(training, samples_per_step=training.mini_batch_size)
    validation = config.validation
    held_out = None
    if validation is not None:
        held_out = validation_data("validation.data_args", validation.data_args, data, written)
    return {
        **shared_plan(definition, config, exp_name, written),
        "sequence_length": config.sequence_length,
        "training": {role: training},
        "max_steps": config.max_steps,
        "eval_steps": 0 if validation is None else max(0, config.eval_steps),
        "global_batch_size": training.mini_batch_size,
        "data_args": data,
        "val_data_args": held_out,
    }


def check_rows(config: Any, role: str, checks: Checks) -> None:
    """Files and columns of the rows to train on and of those held out."""
    sections = {role: getattr(config, role), "validation": config.validation}
    for name, section in sections.items():
        if section is not None:
            check_data_files(f"{name}.data_args", section.data_args, checks)
            check_columns(f"{name}.data_args", section.data_args, checks)


def check_supervised(config: Any, role: str, options: Mapping[str, Any], checks: Checks) -> None:
    """Schedule, resumption and lengths, and a note for every key that nothing reads.

    Args:
        options: of :func:`roll.config.checks.roles.check_roles`.
    """
    section = getattr(config, role)
    check_schedule(role, section, config.max_steps, checks)
    check_resume(config, checks)
    _, path = checks.pipeline.model(config, role, section)
    note_positions("sequence_length", path, config.sequence_length, checks)
    note_unread(config, options, checks)


class SupervisedDefinition(PipelineDefinition):
    """A pipeline whose run is a :class:`roll.pipelines.supervised_pipeline.SupervisedPipeline`."""

    @abstractmethod
    def pipeline(self) -> Any:
        """Its class, imported here: that needs torch."""

    def run(self, loaded: LoadedConfig[Any]) -> None:
        self.pipeline()(loaded).run()

    def replay(self, loaded: LoadedConfig[Any], recorded: RecordedBatch) -> tuple[int, dict[str, float]]:
        metrics: tuple[int, dict[str, float]] = self.pipeline()(loaded).replay(recorded)
        return metrics

    def readable_sets(self, loaded: LoadedConfig[Any]) -> dict[str, ReadableSet]:
        config, plan = loaded.config, loaded.plan
        assert isinstance(plan, SupervisedPlan)
        read = partial(self.pipeline().read, config, plan)
        sets = {"train": plan.data_args, "validation": plan.val_data_args}
        return {
            name: ReadableSet(name, data_args, config.sequence_length, partial(read, data_args))
            for name, data_args in sets.items()
            if data_args is not None
        }
