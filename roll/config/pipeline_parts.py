"""Parts of a pipeline's definition: roles and their tasks, charts, sets of rows. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from roll.config.roles import DataArguments


@dataclass(frozen=True)
class Task:
    """Work that a role does with its model, and the strategies that can do it."""

    name: str
    able: Callable[[], tuple[str, ...]]
    """Values of ``strategy_name``; a call, since installed packages add strategies of their own."""


@dataclass(frozen=True)
class Role:
    """A role of a pipeline, which is a section of its files."""

    name: str
    """Key of the section."""
    task: Task
    optional: bool = False
    """A file may leave the section out."""
    has_own_head: bool = False
    """Its model has a head of its own (values, scores) in place of an output matrix."""


@dataclass(frozen=True, slots=True)
class Headline:
    """A number worth a place in the progress line: metric ``key``, shown after ``label`` as ``format`` says."""

    key: str
    label: str
    format: str = "{:.3f}"


@dataclass(frozen=True)
class Panel:
    """One chart of the report."""

    title: str
    keys: tuple[str, ...]  # the metrics drawn, where the log has them; `*` matches one part between slashes
    first_only: bool = False  # draw only the first key that the log has
    unit_range: bool = False  # the axis shows 0 to 1
    smooth: bool = False  # draw a moving average over the raw curve
    # A metric that is 0 in every step says nothing, such as the KL of a run without a reference whose updates are
    # on-policy.
    zero_is_none: bool = False


@dataclass(frozen=True)
class ReadableSet:
    """A set of rows that a run reads, for ``roll inspect-data``."""

    name: str
    data_args: DataArguments
    limit: int
    """Most tokens of a row."""
    read: Callable[[Any], Any]
    """From a tokenizer to the data set."""
    remarks: Callable[[Any], list[str]] = field(default=lambda counts: [])
    """Remarks on the counts of the data set."""
