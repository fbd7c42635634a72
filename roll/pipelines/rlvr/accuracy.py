"""Accuracy of responses: pass@k, majority@k, best-of-k, with confidence intervals over the prompts."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from roll.rewards.answers import (
    after_thought,
    isolated_number,
    last_boxed,
    last_marked,
    parse_number,
    stated_answer,
    tagged_answer,
)
from roll.rollout.groups import SampleGroup

LONGEST = 200
"""Characters: what is longer is no answer that two samples would share."""


def voted_answer(response: str, prompt: str = "") -> str | None:
    """The boxed answer, else the one behind ``####``, in ``<answer>`` tags, else the stated one or the last number, as
    ``math_rule`` finds them; equal numbers are spelled alike. None: the response holds none of these.

    Equivalence is of spellings and of numbers: ``1/2`` and ``0.5`` are one vote, ``x+1`` and ``1+x`` are two.
    """
    text = after_thought(response, prompt)
    if text is None:
        return None
    found = next((answer for read in READERS if (answer := read(text)) is not None), None)
    if found is None or len(found) > LONGEST:
        return None
    number = parse_number(found)
    return str(number) if number is not None else "".join(found.split()).strip(".$").lower()


READERS = (last_boxed, last_marked, tagged_answer, stated_answer, isolated_number)


Z_95 = 1.959963984540054
"""Standard normal quantile of a two-sided interval of 95%."""


@dataclass(frozen=True)
class Estimate:
    """A mean over questions of values between 0 and 1, with its interval of 95%."""

    mean: float
    low: float
    high: float


def accuracy_metrics(groups: Sequence[SampleGroup], name: str, is_primary: bool) -> dict[str, float]:
    """Shares of correct answers (score 1), by tag and over all.

    ``val/<name>/accuracy`` with its interval ``accuracy_low`` and ``accuracy_high``, mean response length and truncated
    share; for several samples, for k = 1, 2, 4 ... up to their number, ``pass@k``, ``maj@k`` (where answers can be
    read off the responses) and ``best@k``, the mean of the best of k scores.  By tag the same stands under
    ``val/<name>/<tag>/``, lengths excepted.  The primary pass is also reported as ``val_correct/all/mean`` and
    ``val_correct/<tag>/mean``.
    """
    by_tag: dict[str, list[SampleGroup]] = defaultdict(list)
    for group in groups:
        by_tag[group.prompt.tag].append(group)
    metrics = {f"val/{name}/{metric}": value for metric, value in quality(groups).items()}
    for tag, members in by_tag.items():
        metrics |= {f"val/{name}/{tag}/{metric}": value for metric, value in quality(members).items()}
    if is_primary:
        metrics |= {f"val_correct/{tag}/mean": metrics[f"val/{name}/{tag}/accuracy"] for tag in by_tag}
        metrics["val_correct/all/mean"] = metrics[f"val/{name}/accuracy"]
    lengths = np.concatenate([group.finished.lengths for group in groups])
    reasons = [reason for group in groups for reason in group.finished.finish_reasons]
    metrics[f"val/{name}/response_length"] = float(lengths.mean())
    metrics[f"val/{name}/truncated"] = reasons.count("length") / len(reasons)
    return metrics


def quality(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Accuracy with its interval and, for several samples a question, what k of them reach."""
    correct = [is_correct(group) for group in groups]
    accuracy = estimate([float(answers.mean()) for answers in correct])
    metrics = {"accuracy": accuracy.mean, "accuracy_low": accuracy.low, "accuracy_high": accuracy.high}
    num_samples = min(len(answers) for answers in correct)
    if num_samples < 2:
        return metrics
    votes = [[voted_answer(text, group.prompt.prompt_text) for text in group.finished.texts] for group in groups]
    has_votes = any(vote is not None for answers in votes for vote in answers)
    for k in powers_of_two(num_samples):
        passed = estimate([pass_at_k(answers, k) for answers in correct])
        metrics |= {f"pass@{k}": passed.mean, f"pass@{k}_low": passed.low, f"pass@{k}_high": passed.high}
        if has_votes:
            pairs = zip(votes, correct, strict=True)
            metrics[f"maj@{k}"] = float(np.mean([majority_at_k(answers, right, k) for answers, right in pairs]))
        metrics[f"best@{k}"] = float(np.mean([best_at_k(group.scores(), k) for group in groups]))
    return metrics


def powers_of_two(limit: int) -> Iterator[int]:
    """1, 2, 4 ... up to ``limit``."""
    return (2**power for power in range(limit.bit_length()))


def is_correct(group: SampleGroup) -> np.ndarray:
    """bool (num_samples,): the score is 1. An answer whose reward failed is not right."""
    return group.scores() == 1.0


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value a question, and Wilson's interval of 95% (E. B. Wilson, JASA 22, 1927).

    The questions are the sample: answers to the same question are not independent.  Where values are fractions
    (several answers a question) the number of questions in Wilson's formula is replaced by the effective one,
    p (1 - p) / Var(mean), which is never smaller (E. L. Korn, B. I. Graubard, Survey Methodology 24, 1998).  Unlike a
    bootstrap, the interval keeps its width where all questions are right or wrong.
    """
    sample = np.asarray(values, dtype=np.float64)
    n, p = len(sample), float(sample.mean())
    variance = float(sample.var())
    effective = n * p * (1 - p) / variance if variance > 0 else float(n)
    centre = p + Z_95**2 / (2 * effective)
    spread = Z_95 * math.sqrt(p * (1 - p) / effective + Z_95**2 / (4 * effective**2))
    scale = 1 + Z_95**2 / effective
    # Where no or every answer is right one end is the mean itself, but for rounding.
    low, high = max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
    return Estimate(p, min(p, low), max(p, high))


def pass_at_k(correct: np.ndarray, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from n >= k samples (arXiv 2107.03374, eq. 1).

    Args:
        correct: bool (n,).
    """
    n, c = len(correct), int(correct.sum())
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def best_at_k(scores: np.ndarray, k: int) -> float:
    """Mean over all choices of k of the n samples of their best score; unbiased for the best of k.

    Args:
        scores: float (n,); NaN, a reward that failed, counts as the smallest score there is, 0 if there is none.
    """
    worst = 0.0 if np.isnan(scores).all() else float(np.nanmin(scores))
    ordered = np.sort(np.nan_to_num(scores, nan=worst).astype(np.float64))
    n = len(ordered)
    # The i-th smallest (from 0) is the best of C(i, k - 1) choices.
    weights = np.array([math.comb(i, k - 1) for i in range(n)], dtype=np.float64) / math.comb(n, k)
    return float(weights @ ordered)


def majority_at_k(votes: Sequence[str | None], correct: np.ndarray, k: int) -> float:
    """Share of right answers among majorities of k samples (self-consistency, arXiv 2203.11171).

    The samples are cut into blocks of k; a block answers what most of its votes say, a tie is shared, and no vote at
    all is wrong.  An answer is right when most of its samples are.

    Args:
        votes: the answer in each response, None where there is none.
        correct: bool (n,).
    """
    shares = []
    for begin in range(0, len(votes) - k + 1, k):
        block = range(begin, begin + k)
        counts = Counter(votes[i] for i in block if votes[i] is not None)
        most = max(counts.values(), default=0)
        winners = [answer for answer, count in counts.items() if count == most]
        right = [2 * sum(bool(correct[i]) for i in block if votes[i] == answer) > most for answer in winners]
        shares.append(sum(right) / len(right) if right else 0.0)
    return float(np.mean(shares))
