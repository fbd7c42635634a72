"""Numbers of an evaluation: accuracy, pass@k, maj@k, best of k, mean rewards, and the comparison of two models.

The prompts are the sample: answers to one prompt are not independent.  Intervals of 95% are Wilson's or percentiles of
resampled prompts (B. Efron, Annals of Statistics 7, 1979); two models are compared by their differences on the same
prompts, whose sign is random if neither is better (R. A. Fisher's permutation test).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from roll.pipelines.rlvr.accuracy import Estimate, best_at_k, estimate, majority_at_k, pass_at_k, powers_of_two

RESAMPLES = 2000
_CHUNK = 1 << 22
"""Drawn indices in memory at a time."""
EXACT = 12
"""Differences other than 0 up to which every choice of signs is tried."""
PERMUTATIONS = 20_000
Intervals = Callable[[Sequence[float]], Estimate]


@dataclass(frozen=True, eq=False)
class Answers:
    """All samples of one prompt in one pass."""

    prompt_id: str
    tag: str
    scores: np.ndarray
    """float64 (n,); NaN where the reward failed."""
    ranks: np.ndarray
    """float64 (n,): the number by which the best sample is chosen; NaN counts as the smallest."""
    correct: np.ndarray
    """bool (n,)."""
    votes: Sequence[str | None]
    lengths: np.ndarray
    """int64 (n,): response tokens."""
    truncated: np.ndarray
    """bool (n,): ended by the length limit."""

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())


def pass_metrics(answers: Sequence[Answers], name: str, is_primary: bool, interval: str = "wilson") -> dict[str, float]:
    """The metrics of one pass over a set, whose names begin with ``val/<name>/``; by tag under ``val/<name>/<tag>/``.

    A primary pass also gives ``val_correct/all/mean`` and ``val_correct/<tag>/mean``, as training runs do.
    """
    by_tag: dict[str, list[Answers]] = defaultdict(list)
    for one in answers:
        by_tag[one.tag].append(one)
    of = estimate if interval == "wilson" else bootstrap
    metrics = {f"val/{name}/{key}": value for key, value in quality(answers, of).items()}
    for tag, members in by_tag.items():
        metrics |= {f"val/{name}/{tag}/{key}": value for key, value in quality(members, of).items()}
    if is_primary:
        metrics |= {f"val_correct/{tag}/mean": metrics[f"val/{name}/{tag}/accuracy"] for tag in by_tag}
        metrics["val_correct/all/mean"] = metrics[f"val/{name}/accuracy"]
    metrics[f"val/{name}/response_length"] = float(np.concatenate([one.lengths for one in answers]).mean())
    metrics[f"val/{name}/truncated"] = float(np.concatenate([one.truncated for one in answers]).mean())
    return metrics


def quality(answers: Sequence[Answers], interval: Intervals) -> dict[str, float]:
    """Accuracy and mean reward with their intervals; for several samples a prompt, what k of them reach.

    ``pass@k``: one of k is correct; ``maj@k``: the majority of k is; ``best@k``: the highest score of k; ``chosen@k``:
    the sample of k with the highest rank is correct.
    """
    metrics = {**_with_ends("accuracy", interval([one.accuracy for one in answers]))}
    means = [float(np.nanmean(one.scores)) for one in answers if not np.isnan(one.scores).all()]
    if means:
        metrics |= _with_ends("reward", bootstrap(means))
    failed = float(np.isnan(np.concatenate([one.scores for one in answers])).mean())
    metrics |= {"reward_failed": failed} if failed else {}
    num_samples = min(len(one.correct) for one in answers)
    if num_samples < 2:
        return metrics
    has_votes = any(vote is not None for one in answers for vote in one.votes)
    for k in dict.fromkeys((*powers_of_two(num_samples), num_samples)):
        metrics |= _with_ends(f"pass@{k}", interval([pass_at_k(one.correct, k) for one in answers]))
        if has_votes:
            metrics[f"maj@{k}"] = float(np.mean([majority_at_k(one.votes, one.correct, k) for one in answers]))
        metrics[f"best@{k}"] = float(np.mean([best_at_k(one.scores, k) for one in answers]))
        metrics[f"chosen@{k}"] = float(np.mean([chosen_at_k(one.ranks, one.correct, k) for one in answers]))
    return metrics


def _with_ends(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


def overall(primary: Mapping[str, Sequence[Answers]]) -> dict[str, float]:
    """``val_correct/...`` of several sets by set, by tag and over all prompts, each with the same weight.

    Args:
        primary: the answers of each set's primary pass.
    """
    everything = [one for answers in primary.values() for one in answers]
    parts = {tag: [one for one in everything if one.tag == tag] for tag in dict.fromkeys(one.tag for one in everything)}
    parts |= {name: list(answers) for name, answers in primary.items() if name} | {"all": everything}
    means = {name: float(np.mean([one.accuracy for one in part])) for name, part in parts.items()}
    return {f"val_correct/{name}/mean": mean for name, mean in means.items()}


def chosen_at_k(ranks: np.ndarray, correct: np.ndarray, k: int) -> float:
    """Chance that the best of k of the n samples by rank is correct, over all choices of k; ties are shared.

    The best of k has the value v when all of them are at most v and not all are below: C(#<=v, k) - C(#<v, k) of the
    C(n, k) choices; among samples of equal rank each is as probable.
    """
    values = np.where(np.isnan(ranks), -np.inf, ranks)
    total, below, chance = math.comb(len(values), k), 0, 0.0
    for value in np.unique(values):
        tied = values == value
        upto = below + int(tied.sum())
        chance += (math.comb(upto, k) - math.comb(below, k)) / total * float(correct[tied].mean())
        below = upto
    return chance


def bootstrap(values: Sequence[float]) -> Estimate:
    """The mean of one value a prompt, and the interval of 95% of the means of resampled prompts; always the same."""
    sample = np.asarray(values, dtype=np.float64)
    random, n = np.random.default_rng(0), len(sample)
    rows = max(1, min(RESAMPLES, _CHUNK // n))
    means: list[float] = []
    while len(means) < RESAMPLES:
        count = min(rows, RESAMPLES - len(means))
        means += sample[random.integers(0, n, (count, n))].mean(axis=1).tolist()
    low, high = np.percentile(means, [2.5, 97.5])
    mean = float(sample.mean())
    return Estimate(mean, min(mean, float(low)), max(mean, float(high)))


@dataclass(frozen=True)
class Comparison:
    """Two models on the same prompts: the first's accuracy less the second's."""

    difference: Estimate
    p_value: float
    """Chance of a difference at least as large if neither is better, two-sided."""
    wins: int
    """Prompts of which the first has more correct."""
    losses: int
    ties: int

    def metrics(self) -> dict[str, float]:
        return _with_ends("difference", self.difference) | {
            "p_value": self.p_value,
            "wins": float(self.wins),
            "losses": float(self.losses),
            "ties": float(self.ties),
        }


def compare(first: Sequence[Answers], second: Sequence[Answers]) -> Comparison | None:
    """The prompts that both have answered, by id; None: there are none."""
    others = {one.prompt_id: one.accuracy for one in second}
    pairs = [(one.accuracy, others[one.prompt_id]) for one in first if one.prompt_id in others]
    if not pairs:
        return None
    differences = np.array([mine - theirs for mine, theirs in pairs])
    wins, losses = int((differences > 0).sum()), int((differences < 0).sum())
    found = bootstrap(differences.tolist())
    return Comparison(found, sign_flip_p_value(differences), wins, losses, len(pairs) - wins - losses)


def sign_flip_p_value(differences: np.ndarray) -> float:
    """Share of the choices of signs whose mean is at least as far from 0; sampled where there are many."""
    sizes = np.abs(differences[differences != 0])
    if not len(sizes):
        return 1.0
    observed = abs(float(differences.sum())) - 1e-9
    if len(sizes) <= EXACT:
        signs = np.array(list(product((-1.0, 1.0), repeat=len(sizes))))
        return float((np.abs(signs @ sizes) >= observed).mean())
    random = np.random.default_rng(0)
    reached, rows = 0, max(1, _CHUNK // len(sizes))
    for begin in range(0, PERMUTATIONS, rows):
        signs = random.integers(0, 2, (min(rows, PERMUTATIONS - begin), len(sizes))) * 2.0 - 1.0
        reached += int((np.abs(signs @ sizes) >= observed).sum())
    return (reached + 1) / (PERMUTATIONS + 1)


def missed(thresholds: Mapping[str, float], results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for every threshold that a model stays below.

    Args:
        results: metrics by model; those that compare two models stand with the model that is compared.
    """
    for key, least in thresholds.items():
        name, _, rest = key.partition("/")
        asked = {name: rest} if name in results and rest in results[name] else dict.fromkeys(results, key)
        found = {model: results[model][metric] for model, metric in asked.items() if metric in results[model]}
        if not found:
            yield f"{key}: there is no such metric"
        for model, value in found.items():
            if not value >= least:
                yield f"{model}: {asked[model]} is {value:.4f}, below {least:g}"
