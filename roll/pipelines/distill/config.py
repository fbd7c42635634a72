"""The distillation pipeline's configuration, plan and checks. Torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from roll.config.checks.base import Checks
from roll.config.checks.roles import check_roles
from roll.config.losses import DivergenceConfig
from roll.config.names import TEMPLATE_ENDINGS, TEMPLATES
from roll.config.pipelines import PipelineDefinition, Written
from roll.config.reading.fields import parse_dtype, setting
from roll.config.roles import DataArguments, ReferenceWorkerConfig, WorkerConfig
from roll.config.run import RunConfig
from roll.pipelines.supervised import SupervisedPlan, check_rows, check_supervised, supervised_plan
from roll.pipelines.teachers import check_temperature, finished_teacher


@dataclass(frozen=True)
class DistillValidationConfig(WorkerConfig):
    """``validation`` of a distillation run: held-out rows. Only ``data_args`` counts of the role's keys."""


@dataclass(frozen=True)
class DistillConfig(DivergenceConfig, RunConfig):
    """The keys of a distillation run. Loaded by :func:`roll.config.loader.load_config`; never changed afterwards."""

    student_pretrain: str = ""
    """Model that the student starts from: a folder or a hub name."""
    teacher_pretrain: str = ""
    """Model of the teacher."""
    distill_loss_weight: float = setting(0.5, ge=0, le=1)
    """Weight w of the divergence in (1 - w) x negative log-likelihood + w x divergence, each a mean over the tokens of
    the optimizer step."""
    distill_on_prompt: bool = False
    """Both terms also count the prompt's tokens (all but the first, which nothing predicts)."""
    max_steps: int | None = setting(None, ge=1)
    """Optimizer steps; null: ``num_train_epochs`` passes over the data."""
    sequence_length: int = setting(1024, ge=2)
    """Longest prompt plus response in tokens; longer rows are left out and counted."""
    global_template: str | None = setting(None, choices=TEMPLATES, endings=TEMPLATE_ENDINGS)
    """Chat template; null: ``data_args.template`` of the student, whose token ids the teacher is given."""
    question_key: str = "question"
    """Column of the question, where ``student.data_args`` names neither ``messages`` nor ``prompt``."""
    answer_key: str = "answer"
    """Column of the response, where ``student.data_args`` names none."""
    teacher_cache: str | None = None
    """Folder of the teacher's log-probs by row: read where they are there, written where the teacher computed them, so
    that one pass of the teacher serves many epochs and students. null: none."""
    teacher_log_probs_dtype: Literal["fp32", "fp16", "bf16"] = setting("fp32", parse=parse_dtype)
    """Type in which the teacher's log-probs travel and are stored: with fp16 an entry takes 6 bytes, not 8."""
    student: WorkerConfig = field(default_factory=WorkerConfig)
    """The model that learns; its ``data_args`` name the rows."""
    teacher: ReferenceWorkerConfig | None = None
    """The model that it learns from; not needed where ``teacher_cache`` has every row."""
    validation: DistillValidationConfig | None = None
    """Held-out rows; null: none."""


@dataclass(frozen=True)
class DistillPlan(SupervisedPlan):
    """Plan of a distillation run."""

    teacher_runs_ahead: bool
    """The teacher computes the next step's rows while the student learns from this one's."""


def distill_data(config: DistillConfig) -> DataArguments:
    """The training data section, with the columns that the top-level keys name."""
    own, columns = config.student.data_args, DataArguments()
    prompt = own.prompt if own.messages is not None else own.prompt or config.question_key
    response = own.response if own.response != columns.response or own.messages is not None else config.answer_key
    return replace(own, prompt=prompt, response=response)


def plan_distill(definition: PipelineDefinition, config: DistillConfig, exp_name: str, written: Written) -> DistillPlan:
    """The plan of a checked distillation configuration."""
    shared = supervised_plan(definition, config, exp_name, written, "student", distill_data(config))
    roles = shared["roles"]
    if "teacher" in roles:
        finished = finished_teacher(roles["teacher"].section, config.sequence_length)
        roles["teacher"] = replace(roles["teacher"], section=finished)
    alone = "teacher" in roles and not roles["teacher"].colocated_with
    return DistillPlan(**shared, teacher_runs_ahead=alone)


def check_distill(config: DistillConfig, checks: Checks) -> None:
    """Every check; mistakes and notes go to ``checks.problems``."""
    options = check_roles(config, checks)
    check_rows(config, "student", checks)
    if config.teacher is None and not has_index(config.teacher_cache):
        rule = (
            "is needed: a section with the strategy and devices of the teacher, or a teacher_cache that it has filled"
        )
        checks.missing("teacher", rule, "{strategy_args: {strategy_name: fsdp2_infer}, device_mapping: [0]}")
    if config.teacher is not None:
        temperature, whole = config.kd_temperature * config.teacher_temperature, config.logits_topk == 0
        key = "kd_temperature" if config.kd_temperature != 1.0 else "teacher_temperature"
        instead = "; logits_topk 0 (the whole vocabulary) allows any"
        check_temperature("teacher", config.teacher, temperature, whole, key, instead, checks)
    check_supervised(config, "student", options, checks)


INDEX = "index.json"
"""The file that makes a folder a cache of a teacher's log-probs."""


def has_index(folder: str | None) -> bool:
    return folder is not None and os.path.isfile(Path(folder).expanduser() / INDEX)
