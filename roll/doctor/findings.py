"""A finding: what was looked at, its value, the rule that judges it, and what to do about it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll import __version__
from roll.config.reading.masking import masked


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

_SHOWN = {
    Severity.OK: ("ok", "green"),
    Severity.NOTE: ("note", "cyan"),
    Severity.WARNING: ("warning", "yellow"),
    Severity.ERROR: ("ERROR", "red"),
}


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
    seconds: float | None = None
    """The duration of a trial."""
    data: dict[str, Any] | None = None
    """Figures, for programs."""


def judge(
    what: str, value: str, rule: str, holds: bool, remedy: str, severity: Severity = Severity.WARNING, **more: Any
) -> Finding:
    """The finding of a rule that ``holds``, or that is broken with ``severity`` and asks for ``remedy``."""
    return Finding(what, value, rule, Severity.OK if holds else severity, "" if holds else remedy, **more)


def gravest(findings: Sequence[Finding]) -> Severity:
    return max((finding.severity for finding in findings), default=Severity.OK)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The report for programs; secrets masked."""
    worst = gravest(findings)
    listed = [
        {
            key: value.name.lower() if isinstance(value, Severity) else value
            for key, value in asdict(finding).items()
            if value is not None
        }
        for finding in findings
    ]
    report = {
        "roll": __version__,
        "host": socket.gethostname(),
        "status": worst.name.lower(),
        "exit_status": EXIT[worst],
        "findings": listed,
    }
    hidden: dict[str, Any] = masked(report)
    return hidden


def render(findings: Sequence[Finding], console: Console) -> None:
    """A table of all findings, then the rule and the remedy of each that is not in order."""
    table = Table("", "checked", "found", "", box=None, pad_edge=False)
    section = ""
    for finding in findings:
        word, style = _SHOWN[finding.severity]
        took = "" if finding.seconds is None else f" ({finding.seconds:.1f} s)"
        head = finding.section if finding.section != section else ""
        section = finding.section
        # Text, since messages of errors hold brackets, which Rich would take for markup.
        table.add_row(head, Text(finding.what), Text(f"{masked(finding.value)}{took}"), Text(word, style))
    console.print(table)
    for finding in sorted(findings, key=lambda finding: -finding.severity):
        if finding.severity > Severity.OK:
            word, style = _SHOWN[finding.severity]
            console.print(f"\n{word}: {finding.section}: {finding.what}", style=style, markup=False, highlight=False)
            console.print(f"  rule: {finding.rule}", markup=False, highlight=False, soft_wrap=True)
            console.print(f"  remedy: {finding.remedy}", markup=False, highlight=False, soft_wrap=True)
    counts = {severity: sum(finding.severity is severity for finding in findings) for severity in Severity}
    verdicts = {
        Severity.OK: "runs work here",
        Severity.NOTE: "runs work here",
        Severity.WARNING: "runs work here, with the warnings above",
        Severity.ERROR: "runs do not work here",
    }
    console.print(
        f"\n{verdicts[gravest(findings)]}: {counts[Severity.OK]} in order, {counts[Severity.NOTE]} notes, "
        f"{counts[Severity.WARNING]} warnings, {counts[Severity.ERROR]} errors",
        style="bold",
        highlight=False,
    )
