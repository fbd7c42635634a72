"""The distillation pipeline: its configuration, checks and definition. Torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from roll.config.checks.base import Checks
from roll.config.losses import DivergenceConfig
from roll.config.pipelines import TEACHES, TRAINS, Headline, Panel, Role, Written
from roll.config.reading.fields import parse_dtype, setting
from roll.config.roles import DataArguments, ReferenceWorkerConfig, WorkerConfig
from roll.methods.supervised import SupervisedConfig, SupervisedDefinition, SupervisedPlan
from roll.methods.teachers import check_teachers_of, check_temperature, check_vocabularies_of, finished_teacher

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig

# The file that makes a folder a cache of a teacher's log-probs.
INDEX = "index.json"


@dataclass(frozen=True)
class DistillConfig(DivergenceConfig, SupervisedConfig):
    """The keys of a distillation run. Loaded by :func:`roll.config.loader.load_config`; never changed afterwards."""

    student_pretrain: str = ""
    """Model that the student starts from: a folder or a hub name."""
    teacher_pretrain: str = ""
    """Model of the teacher."""
    distill_loss_weight: float = setting(0.5, ge=0, le=1)
    """Weight w in (1 - w) x negative log-likelihood + w x divergence, each a mean over the step's tokens."""
    distill_on_prompt: bool = False
    """Both terms also count the prompt's tokens (all but the first, which nothing predicts)."""
    system_key: str | None = None
    """Column of the system message of rows that have none in their ``messages``; null: ``data_args.system_prompt``."""
    question_key: str | None = None
    """Column of the question, where ``student.data_args`` names neither ``messages`` nor ``prompt``; null: as the first
    row has it."""
    answer_key: str | None = None
    """Column of the response, where ``student.data_args`` names none; null: as the first row has it."""
    teacher_cache: str | None = None
    """Folder of the teacher's log-probs by row, read where they are there and written where not, so that one pass of
    the teacher serves many epochs and students. null: none."""
    teacher_log_probs_dtype: Literal["fp32", "fp16", "bf16"] = setting("fp32", parse=parse_dtype)
    """Type in which the teacher's log-probs travel and are stored: with fp16 an entry takes 6 bytes, not 8."""
    student: WorkerConfig = field(default_factory=WorkerConfig)
    """The model that learns; its ``data_args`` name the rows."""
    teacher: ReferenceWorkerConfig | None = None
    """The model that it learns from; not needed where ``teacher_cache`` has every row."""


class Distill(SupervisedDefinition[DistillConfig]):
    """Learning a teacher's distributions on given responses."""

    name = "distill"
    config_class = DistillConfig
    role = "student"
    method_class = "roll.methods.distill.Distillation"
    roles = (Role("student", TRAINS), Role("teacher", TEACHES, optional=True))
    headlines = (
        Headline("student/loss", "loss", "{:.4f}"),
        Headline("student/kd_loss", "kd", "{:.4f}"),
        Headline("val/kd_loss", "val kd", "{:.4f}"),
        Headline("student/agreement@1", "agree"),
        Headline("system/tps", "tok/s", "{:,.0f}"),
    )
    panels = (
        Panel("Divergence from the teacher", ("student/kd_loss", "val/kd_loss"), smooth=True),
        Panel("Negative log-likelihood", ("student/nll", "val/nll"), smooth=True),
        Panel("Mass of the compared tokens", ("student/*_top_k_mass",), unit_range=True, smooth=True),
        Panel("Same most probable token", ("student/agreement@1", "val/agreement@1"), unit_range=True, smooth=True),
    )
    published_workers = ("StudentWorker", "TeacherWorker")
    reference = (
        ("Distillation (top level)", DistillConfig, (SupervisedConfig, DivergenceConfig)),
        ("Distillation: divergences (top level)", DivergenceConfig, ()),
    )

    def training_data(self, config: DistillConfig) -> DataArguments:
        own, columns = config.student.data_args, DataArguments()
        prompt = own.prompt if own.messages is not None else own.prompt or config.question_key
        named = own.response != columns.response or own.messages is not None
        response = own.response if named else config.answer_key or own.response
        return replace(own, prompt=prompt, response=response)

    def check_keys(self, config: DistillConfig, checks: Checks) -> None:
        cache = config.teacher_cache
        if config.teacher is None and not (cache and os.path.isfile(Path(cache).expanduser() / INDEX)):
            rule = (
                "is needed: a section with the strategy and devices of the teacher, or a teacher_cache that it has "
                "filled"
            )
            checks.missing("teacher", rule, "{strategy_args: {strategy_name: fsdp2_infer}, device_mapping: [0]}")
        if config.teacher is not None:
            temperature, whole = config.kd_temperature * config.teacher_temperature, config.logits_topk == 0
            key = "kd_temperature" if config.kd_temperature != 1.0 else "teacher_temperature"
            instead = "; logits_topk 0 (the whole vocabulary) allows any"
            check_temperature("teacher", config.teacher, temperature, whole, key, instead, checks)

    def plan(self, config: DistillConfig, exp_name: str, written: Written) -> SupervisedPlan:
        plan = super().plan(config, exp_name, written)
        if "teacher" not in plan.roles:
            return plan
        teacher = plan.roles["teacher"]
        finished = replace(teacher, section=finished_teacher(teacher.section, config.sequence_length))
        return replace(plan, roles={**plan.roles, "teacher": finished}, frozen_runs_ahead=not teacher.colocated_with)

    def distributions(self, config: DistillConfig, role: str) -> tuple[int | None, int | None]:
        count = config.logits_topk
        return (count, None) if role == self.role else (None, count)

    def default_model(self, config: DistillConfig, role: str) -> tuple[str, str | None]:
        key = f"{role}_pretrain"
        return key, getattr(config, key) or None

    def check_parts(self, loaded: LoadedConfig[DistillConfig]) -> None:
        check_vocabularies_of(self, loaded, self.role)

    def check_services(self, loaded: LoadedConfig[DistillConfig]) -> None:
        check_teachers_of(self, loaded, self.role, loaded.config.logits_topk)

    def facts(self, plan: SupervisedPlan) -> list[tuple[str, str]]:
        ahead = "computes the next step's rows while the student learns" if plan.frozen_runs_ahead else "takes turns"
        return [("teacher", ahead if "teacher" in plan.roles else "none: its log-probs are all in teacher_cache")]
