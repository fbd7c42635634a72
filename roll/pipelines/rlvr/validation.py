"""Validation: every question answered greedily and by sampling; accuracy by tag, and pass@k."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from roll.datasets.types import PromptRow
from roll.rollout.groups import SampleGroup
from roll.rollout.scheduler import DrawPrompts, RolloutScheduler
from roll.strategies.generation import SamplingParams


@dataclass(frozen=True)
class ValidationPass:
    """One way of answering the questions."""

    name: str
    """``sampled`` or ``greedy``; part of the metrics' names."""
    params: SamplingParams
    num_samples: int


def validate(
    scheduler: RolloutScheduler, rows: Sequence[PromptRow], passes: Sequence[ValidationPass], batch_size: int
) -> tuple[dict[str, float], list[SampleGroup]]:
    """Answer and score all ``rows`` in each way.

    The draws are counted from 0 in every validation, so the same seeds are used each time and two validations differ
    by the policy alone.

    Returns:
        Metrics (see :func:`accuracy_metrics`) and the groups of the first pass.
    """
    metrics: dict[str, float] = {}
    shown: list[SampleGroup] = []
    for one in passes:
        groups: list[SampleGroup] = []
        for begin in range(0, len(rows), batch_size):
            part = list(rows[begin : begin + batch_size])
            groups += scheduler.collect(draw_from(part), len(part), one.num_samples, one.params, begin).groups
        metrics |= accuracy_metrics(groups, one.name, is_primary=one is passes[0])
        shown = shown or groups
    return metrics, shown


def draw_from(rows: list[PromptRow]) -> DrawPrompts:
    """Gives ``rows`` in order, once."""
    remaining = iter(rows)
    return lambda count: list(islice(remaining, count))


def accuracy_metrics(groups: Sequence[SampleGroup], name: str, is_primary: bool) -> dict[str, float]:
    """Shares of correct answers (score 1), by tag and over all.

    ``val/<name>/accuracy``, ``val/<name>/<tag>/accuracy``, mean response length, truncated share, and for several
    samples ``val/<name>/pass@k`` for k = 1, 2, 4 ... up to the number of samples.  The primary pass is also reported
    as ``val_correct/all/mean`` and ``val_correct/<tag>/mean``.
    """
    by_tag: dict[str, list[SampleGroup]] = defaultdict(list)
    for group in groups:
        by_tag[group.prompt.tag].append(group)
    metrics = {f"val/{name}/{tag}/accuracy": _accuracy(members) for tag, members in by_tag.items()}
    metrics[f"val/{name}/accuracy"] = _accuracy(groups)
    if is_primary:
        metrics |= {f"val_correct/{tag}/mean": _accuracy(members) for tag, members in by_tag.items()}
        metrics["val_correct/all/mean"] = metrics[f"val/{name}/accuracy"]
    lengths = np.concatenate([group.finished.lengths for group in groups])
    reasons = [reason for group in groups for reason in group.finished.finish_reasons]
    metrics[f"val/{name}/response_length"] = float(lengths.mean())
    metrics[f"val/{name}/truncated"] = reasons.count("length") / len(reasons)
    num_samples = min(group.num_samples for group in groups)
    for k in (2**power for power in range(num_samples.bit_length()) if num_samples > 1):
        metrics[f"val/{name}/pass@{k}"] = float(np.mean([pass_at_k(_correct(group), k) for group in groups]))
    return metrics


def pass_at_k(correct: np.ndarray, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from n >= k samples (arXiv 2107.03374, eq. 1).

    Args:
        correct: bool (n,).
    """
    n, c = len(correct), int(correct.sum())
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def _correct(group: SampleGroup) -> np.ndarray:
    return group.scores() == 1.0


def _accuracy(groups: Sequence[SampleGroup]) -> float:
    return float(np.mean(np.concatenate([_correct(group) for group in groups])))
