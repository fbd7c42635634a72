"""Checks of an agentic configuration across keys."""

from __future__ import annotations

from roll.config.checks.base import Checks, check_resume
from roll.config.checks.keys import note_unread
from roll.config.checks.roles import check_roles
from roll.pipelines.agentic.config import AgenticConfig


def check_agentic(config: AgenticConfig, checks: Checks) -> None:
    """Every check; mistakes and notes go to ``checks.problems``."""
    options = check_roles(config, checks)
    check_resume(config, checks)
    note_unread(config, options, checks)
