"""The definition of the distillation pipeline. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.config.checks.base import Checks
from roll.config.losses import DivergenceConfig
from roll.config.model_files import check_vocabularies
from roll.config.pipelines import (
    TEACHES,
    TRAINS,
    Headline,
    Panel,
    Role,
    Written,
)
from roll.config.run import RunConfig
from roll.pipelines.distill.config import DistillConfig, DistillPlan, check_distill, plan_distill
from roll.pipelines.supervised import SupervisedDefinition
from roll.pipelines.teachers import check_teachers

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig
    from roll.pipelines.distill.pipeline import DistillPipeline


class Distill(SupervisedDefinition):
    """Learning a teacher's distributions on given responses."""

    name = "distill"
    config_class = DistillConfig
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
        ("Distillation (top level)", DistillConfig, (RunConfig, DivergenceConfig)),
        ("Distillation: divergences (top level)", DivergenceConfig, ()),
    )

    def check(self, config: DistillConfig, checks: Checks) -> None:
        check_distill(config, checks)

    def plan(self, config: DistillConfig, exp_name: str, written: Written) -> DistillPlan:
        return plan_distill(self, config, exp_name, written)

    def pipeline(self) -> type[DistillPipeline]:
        from roll.pipelines.distill.pipeline import DistillPipeline

        return DistillPipeline

    def default_model(self, config: DistillConfig, role: str) -> tuple[str, str | None]:
        key = f"{role}_pretrain"
        return key, getattr(config, key) or None

    def check_parts(self, loaded: LoadedConfig[DistillConfig]) -> None:
        roles = loaded.plan.roles
        if "teacher" in roles:
            key, _ = self.model(loaded.config, "teacher", roles["teacher"].section)
            student, teacher = (str(roles[name].model_path) for name in ("student", "teacher"))
            check_vocabularies(student, teacher, key, loaded.source)

    def check_services(self, loaded: LoadedConfig[DistillConfig]) -> None:
        roles, config = loaded.plan.roles, loaded.config
        if "teacher" in roles:
            key, _ = self.model(config, "teacher", roles["teacher"].section)
            student = str(roles["student"].model_path)
            teachers = {"teacher": (key, roles["teacher"])}
            check_teachers(student, teachers, config.logits_topk, config.sequence_length, loaded.source)

    def facts(self, plan: DistillPlan) -> list[tuple[str, str]]:
        ahead = "computes the next step's rows while the student learns" if plan.teacher_runs_ahead else "takes turns"
        return [("teacher", ahead if "teacher" in plan.roles else "none: its log-probs are all in teacher_cache")]
