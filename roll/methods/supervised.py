"""Definition, plan and checks of the methods that learn from given rows (SFT, preferences, reward models,
distillation): one role that trains, rows from files, held-out rows under ``validation``, a step that is an optimizer
step. Torch-free; their run is in :mod:`roll.pipelines.rows`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from typing_extensions import TypeVar

from roll.config.checks.base import Checks, check_columns, check_data_files, check_resume, check_schedule
from roll.config.checks.keys import note_unread
from roll.config.checks.roles import check_roles, note_positions
from roll.config.data import TEMPLATE_ENDINGS, TEMPLATES
from roll.config.pipelines import PipelineDefinition, ReadableSet, Written
from roll.config.plan.plan import Plan
from roll.config.plan.planning import shared_plan, training_plan, validation_data
from roll.config.reading.fields import setting
from roll.config.roles import DataArguments, WorkerConfig
from roll.config.run import RunConfig

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig


@dataclass(frozen=True)
class HeldOutConfig(WorkerConfig):
    """``validation`` of a run on given rows: held-out rows. Only ``data_args`` counts of the role's keys."""


@dataclass(frozen=True)
class SupervisedConfig(RunConfig):
    """Keys that all runs on given rows have."""

    max_steps: int | None = setting(None, ge=1)
    """Optimizer steps; null: ``num_train_epochs`` passes over the data."""
    sequence_length: int = setting(1024, ge=2)
    """Most tokens of a prompt with one response; longer rows, and pairs with a longer side, are left out and
    counted."""
    global_template: str | None = setting(None, choices=TEMPLATES, endings=TEMPLATE_ENDINGS)
    """Chat template; null: ``data_args.template`` of the role that learns. Distillation uses it for both models; of
    reward models it counts under ``score_input: tokens``."""
    validation: HeldOutConfig | None = None
    """Held-out rows, pairs or prompts; null: none."""


C = TypeVar("C", bound=SupervisedConfig, default=Any)


@dataclass(frozen=True)
class SupervisedPlan(Plan):
    """Plan of a run whose steps are optimizer steps on given rows."""

    global_batch_size: int
    """Rows of one optimizer step: samples, pairs or prompts, as ``per_device_train_batch_size`` counts them."""
    data_args: DataArguments
    """The training data section, columns that top-level keys name included."""
    val_data_args: DataArguments | None
    """The validation's; columns and template that it leaves out are those of the role that trains."""
    needs_reference: bool = False
    """The loss compares the policy with a reference (DPO)."""
    frozen_runs_ahead: bool = False
    """The frozen model computes the next step's rows while the other learns from this one's (distillation)."""


class SupervisedDefinition(PipelineDefinition[C, SupervisedPlan], Generic[C]):
    """A pipeline that learns from given rows by a :class:`roll.methods.rows.RowMethod`."""

    pipeline_class = "roll.pipelines.rows.RowsPipeline"
    role: ClassVar[str]
    """The role that trains."""
    method_class: ClassVar[str]
    """Dotted path of the method, which is imported late: it needs torch."""

    def check(self, config: C, checks: Checks) -> None:
        options = check_roles(config, checks)
        section: WorkerConfig = getattr(config, self.role)
        for name, rows in {self.role: section, "validation": config.validation}.items():
            if rows is not None:
                check_data_files(f"{name}.data_args", rows.data_args, checks)
                check_columns(f"{name}.data_args", rows.data_args, checks)
        self.check_keys(config, checks)
        check_schedule(self.role, section, config.max_steps, checks)
        check_resume(config, checks)
        _, path = self.model(config, self.role, section)
        note_positions("sequence_length", path, config.sequence_length, checks)
        note_unread(config, options, checks)

    def check_keys(self, config: C, checks: Checks) -> None:
        """Check the keys that only this pipeline has."""

    def training_data(self, config: C) -> DataArguments:
        """The data section to train on, with the columns that top-level keys name."""
        section: WorkerConfig = getattr(config, self.role)
        return section.data_args

    def plan(self, config: C, exp_name: str, written: Written) -> SupervisedPlan:
        training = training_plan(getattr(config, self.role), self.longest_row(config), 0, 1, config.max_steps)
        training = replace(training, samples_per_step=training.mini_batch_size)
        data, validation = self.training_data(config), config.validation
        held_out = None
        if validation is not None:
            held_out = validation_data("validation.data_args", validation.data_args, data, written)
        return SupervisedPlan(
            **shared_plan(self, config, exp_name, written) | {"sequence_length": config.sequence_length},
            training={self.role: training},
            max_steps=config.max_steps,
            eval_steps=0 if validation is None else max(0, config.eval_steps),
            global_batch_size=training.mini_batch_size,
            data_args=data,
            val_data_args=held_out,
        )

    def readable_sets(self, loaded: LoadedConfig[C]) -> dict[str, ReadableSet]:
        config, plan = loaded.config, loaded.plan
        assert isinstance(plan, SupervisedPlan)
        read = partial(resolve_name(self.method_class).read, config, plan)
        sets = {"train": plan.data_args, "validation": plan.val_data_args}
        return {
            name: ReadableSet(name, data_args, config.sequence_length, partial(read, data_args))
            for name, data_args in sets.items()
            if data_args is not None
        }
