"""Runs programs that a model has written, confined, and judges them by cases.

A reward worker starts one zygote (:mod:`~roll.rewards.sandbox.zygote`) and asks it for processes.  Each is forked ready
to run, gives up what the host lets it give up (:mod:`~roll.rewards.sandbox.confinement`), and runs one program.  Tests
run in one process and the response in another (:mod:`~roll.rewards.sandbox.remote`): a verdict is never the response's
own word.
"""

from roll.rewards.sandbox.cases import Cases, read_cases
from roll.rewards.sandbox.client import Sandbox, SandboxError, Settings
from roll.rewards.sandbox.judging import Judging, Outcome, judge
from roll.rewards.sandbox.protections import PROTECTIONS, Limits, MissingProtection, Report
from roll.rewards.sandbox.snippets import CaseError

__all__ = [
    "PROTECTIONS",
    "CaseError",
    "Cases",
    "Judging",
    "Limits",
    "MissingProtection",
    "Outcome",
    "Report",
    "Sandbox",
    "SandboxError",
    "Settings",
    "judge",
    "read_cases",
]
