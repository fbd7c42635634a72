"""Configuration and plan of the pipeline that only plays. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.pipelines.agentic.config import AgenticConfig
from roll.pipelines.agentic.plan import AgenticPlan, ManagerPlan
from roll.pipelines.evaluate.config import EvaluationConfig
from roll.pipelines.evaluate.plan import ModelsPlan


@dataclass(frozen=True)
class AgenticRolloutConfig(AgenticConfig):
    """The keys of a run that only plays: those of an agentic file, of which nothing of training is read, and
    ``evaluate``."""

    evaluate: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Which models play, and what must come of it."""


@dataclass(frozen=True)
class AgenticRolloutPlan(ModelsPlan, AgenticPlan):
    """Plan of a run that only plays."""

    played: ManagerPlan
    """``val_env_manager``, or ``train_env_manager`` for as many steps as the file has."""
    is_validation: bool
