"""The definition of the distillation pipeline. Torch-free."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from roll.config.checks.base import Checks
from roll.config.distillation import DivergenceConfig
from roll.config.pipelines import (
    COMPUTES_LOG_PROBS,
    TRAINS,
    Headline,
    Panel,
    PipelineDefinition,
    ReadableSet,
    Role,
    Written,
)
from roll.config.run import RunConfig
from roll.config.vocabularies import check_vocabularies
from roll.pipelines.distill.config import DistillConfig, DistillPlan, check_distill, plan_distill

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig
    from roll.config.roles import DataArguments
    from roll.datasets import SftDataset
    from roll.pipelines.batches import RecordedBatch


class Distill(PipelineDefinition):
    """Learning a teacher's distributions on given responses."""

    name = "distill"
    config_class = DistillConfig
    roles = (Role("student", TRAINS), Role("teacher", COMPUTES_LOG_PROBS, optional=True))
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

    def run(self, loaded: LoadedConfig[DistillConfig]) -> None:
        from roll.pipelines.distill.pipeline import DistillPipeline

        DistillPipeline(loaded).run()

    def replay(self, loaded: LoadedConfig[DistillConfig], recorded: RecordedBatch) -> tuple[int, dict[str, float]]:
        from roll.pipelines.distill.pipeline import DistillPipeline

        return DistillPipeline(loaded).replay(recorded)

    def default_model(self, config: DistillConfig, role: str) -> tuple[str, str | None]:
        key = f"{role}_pretrain"
        return key, getattr(config, key) or None

    def check_parts(self, loaded: LoadedConfig[DistillConfig]) -> None:
        roles = loaded.plan.roles
        if "teacher" in roles:
            key, _ = self.model(loaded.config, "teacher", roles["teacher"].section)
            student, teacher = (str(roles[name].model_path) for name in ("student", "teacher"))
            check_vocabularies(student, teacher, key, loaded.source)

    def facts(self, plan: DistillPlan) -> list[tuple[str, str]]:
        ahead = "computes the next step's rows while the student learns" if plan.teacher_runs_ahead else "takes turns"
        return [("teacher", ahead if "teacher" in plan.roles else "none: its log-probs are all in teacher_cache")]

    def readable_sets(self, loaded: LoadedConfig[DistillConfig]) -> dict[str, ReadableSet]:
        from roll.pipelines.distill.pipeline import read_rows

        def read(data_args: DataArguments, tokenizer: Any) -> SftDataset:
            assert isinstance(loaded.plan, DistillPlan)
            return read_rows(loaded.config, loaded.plan, data_args, tokenizer)

        assert isinstance(loaded.plan, DistillPlan)
        sets = {"train": loaded.plan.data_args, "validation": loaded.plan.val_data_args}
        limit = loaded.config.sequence_length
        return {
            name: ReadableSet(name, data_args, limit, partial(read, data_args))
            for name, data_args in sets.items()
            if data_args is not None
        }
