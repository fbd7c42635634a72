"""A finding: what was looked at, its value, the rule that judges it, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Severity(IntEnum):
    """Gravity of a finding; the exit status follows the gravest."""

    OK = 0
    NOTE = 1
    """Something optional is not there."""
    WARNING = 2
    """Runs work, but slower, with less, or less safely than they could."""
    ERROR = 3
    """No run works here."""


EXIT = {Severity.OK: 0, Severity.NOTE: 0, Severity.WARNING: 1, Severity.ERROR: 2}
"""Exit status by the gravest finding."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    section: str = field(default="", kw_only=True)
    """Part of the report; :func:`roll.doctor.command.examine` fills it in."""
    what: str
    value: str
    rule: str
    """The condition that ``value`` was held against."""
    severity: Severity = Severity.OK
    remedy: str = ""
    """The remedy where the rule is broken."""
    data: dict[str, Any] | None = None
    """Figures, for programs."""


def judge(
    what: str,
    value: str,
    rule: str,
    holds: bool,
    remedy: str,
    severity: Severity = Severity.WARNING,
    data: dict[str, Any] | None = None,
) -> Finding:
    """The finding of a rule that ``holds``, or that is broken with ``severity`` and asks for ``remedy``."""
    return Finding(what, value, rule, Severity.OK if holds else severity, "" if holds else remedy, data)


def gravest(findings: Sequence[Finding]) -> Severity:
    return max((finding.severity for finding in findings), default=Severity.OK)
