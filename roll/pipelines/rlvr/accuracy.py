"""Accuracy of responses, in validations and evaluations: pass@k, majority@k, best of k, mean rewards, with intervals.

The prompts are the sample: answers to one prompt are not independent.  Intervals of 95% are Wilson's or percentiles of
resampled prompts (B. Efron, Annals of Statistics 7, 1979).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np

from roll.datasets.forms import last_boxed, last_marked
from roll.rewards.answers import after_thought, isolated_number, stated_answer, tagged_answer
from roll.rewards.base import parse_number
from roll.rewards.math_rule import MathVerifier, compare_quickly, equivalent
from roll.rewards.notation import canonical
from roll.rollout.groups import SampleGroup

READERS = (last_boxed, last_marked, tagged_answer, stated_answer, isolated_number)
LONGEST = 200  # characters: what is longer is no answer that two samples would share
Z_95 = 1.959963984540054  # standard normal quantile of a two-sided interval of 95%
MOST_PARTIAL_CREDITS = 5
RESAMPLES = 2000
CHUNK = 1 << 22  # drawn indices in memory at a time


def voted_answer(response: str, prompt: str = "") -> str | None:
    """The boxed answer, else the one after ``####``, in ``<answer>`` tags, else the stated one or the last number, as
    ``math_rule`` finds them; equal numbers are spelled alike. None: the response holds none of these.
    """
    text = after_thought(response, prompt)
    if text is None:
        return None
    found = next((answer for read in READERS if (answer := read(text)) is not None), None)
    if found is None or len(found) > LONGEST:
        return None
    number = None if "%" in found else parse_number(found)  # 50% is 0.5 to some and 50 to others
    return str(number) if number is not None else found.strip().strip(".$").strip()


MOST_COMPARISONS = 64  # by algebra, of the answers to one prompt; a model may give a different formula each time


@cache
def verifier() -> MathVerifier:
    """One process for all votes; it ends with this one."""
    return MathVerifier(timeout=2.0)


def merged_votes(votes: Sequence[str | None], correct: Sequence[bool] | np.ndarray) -> list[str | None]:
    """The votes, those of equal value in the spelling of the first: ``1/2``, ``0.5`` and ``\\frac12`` are one vote, and
    so are ``x+1`` and ``1+x``. Equality is that of ``math_rule``; answers of different verdicts (``correct``) are
    different."""
    merged: dict[tuple[str, bool], str] = {}
    distinct: dict[bool, list[str]] = {True: [], False: []}
    left = MOST_COMPARISONS
    for vote, verdict in zip(votes, map(bool, correct), strict=True):
        if vote is None or (vote, verdict) in merged:
            continue
        answer, found = canonical(vote), vote
        for other in distinct[verdict]:
            quick = compare_quickly(canonical(other), answer)
            if quick is None and left > 0:
                left -= 1
                quick = equivalent(canonical(other), answer, verifier()).equal
            if quick:
                found = other
                break
        else:
            distinct[verdict].append(vote)
        merged[vote, verdict] = found
    return [None if vote is None else merged[vote, bool(one)] for vote, one in zip(votes, correct, strict=True)]


@dataclass(frozen=True)
class Estimate:
    """A mean over questions of values between 0 and 1, with its interval of 95%."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Answers:
    """All samples of one prompt in one pass."""

    prompt_id: str
    tag: str
    scores: np.ndarray  # float64 (n,); NaN where the reward failed
    ranks: np.ndarray  # float64 (n,): the number by which the best sample is chosen; NaN counts as the smallest
    correct: np.ndarray  # bool (n,)
    # The answer that each sample gives (:func:`voted_answer`), equal ones spelled alike (:func:`merged_votes`); None:
    # it gives none.
    votes: Sequence[str | None]
    lengths: np.ndarray  # int64 (n,): response tokens
    truncated: np.ndarray  # bool (n,): ended by the length limit
    # Further numbers that the reward returned, of the samples that have them.
    numbers: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, group: SampleGroup) -> Answers:
        """Samples of a validation during training: a score of 1 or more is correct, so one whose reward
        failed is not."""
        scores, prompt = group.scores(), group.item
        texts = [one.text for one in group.members]
        votes = [voted_answer(text, prompt.prompt_text) for text in texts] if len(texts) > 1 else [None]
        votes = merged_votes(votes, scores >= 1.0)
        truncated = np.array([one.finish_reason == "length" for one in group.members])
        numbers: dict[str, list[float]] = defaultdict(list)
        for one in group.members:
            for name, number in one.reward.metrics.items():
                numbers[name].append(number)
        lengths = np.array([len(one.response_ids) for one in group.members])
        return cls(prompt.prompt_id, prompt.tag, scores, scores, scores >= 1.0, votes, lengths, truncated, numbers)

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())


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


def bootstrap(values: Sequence[float]) -> Estimate:
    """The mean of one value a prompt, and the interval of 95% of the means of resampled prompts; always the same."""
    sample = np.asarray(values, dtype=np.float64)
    random, n = np.random.default_rng(0), len(sample)
    rows = max(1, min(RESAMPLES, CHUNK // n))
    means: list[float] = []
    while len(means) < RESAMPLES:
        count = min(rows, RESAMPLES - len(means))
        means += sample[random.integers(0, n, (count, n))].mean(axis=1).tolist()
    low, high = np.percentile(means, [2.5, 97.5])
    mean = float(sample.mean())
    return Estimate(mean, min(mean, float(low)), max(mean, float(high)))


def is_graded(answers: Sequence[Answers]) -> bool:
    """Return whether scores say how good a response is, and not whether it is right: more than five different ones lie
    between 0 and 1. A few such values are partial credit, as for the format."""
    scores = np.concatenate([one.scores for one in answers])
    return len(np.unique(scores[(scores > 0) & (scores < 1)])) > MOST_PARTIAL_CREDITS


def pass_metrics(
    answers: Sequence[Answers], name: str, is_primary: bool, in_training: bool = False
) -> dict[str, float]:
    """The metrics of one pass over a set, whose names begin with ``val/<name>/``; by tag under ``val/<name>/<tag>/``,
    lengths excepted.

    A primary pass also gives ``val_correct/all/mean`` and ``val_correct/<tag>/mean``. In training, graded scores
    (:func:`is_graded`) have rewards and no accuracy.
    """
    graded = in_training and is_graded(answers)
    by_tag: dict[str, list[Answers]] = defaultdict(list)
    for one in answers:
        by_tag[one.tag].append(one)
    of = partial(quality, in_training=in_training, graded=graded)
    metrics = {f"val/{name}/{key}": value for key, value in of(answers).items()}
    for tag, members in by_tag.items():
        metrics |= {f"val/{name}/{tag}/{key}": value for key, value in of(members).items()}
    if is_primary and not graded:
        metrics |= {f"val_correct/{tag}/mean": metrics[f"val/{name}/{tag}/accuracy"] for tag in by_tag}
        metrics["val_correct/all/mean"] = metrics[f"val/{name}/accuracy"]
    for number in dict.fromkeys(number for one in answers for number in one.numbers):
        means = [float(np.mean(one.numbers[number])) for one in answers if number in one.numbers]
        metrics |= with_ends(f"val/{name}/reward/{number}", bootstrap(means))
    metrics[f"val/{name}/response_length"] = float(np.concatenate([one.lengths for one in answers]).mean())
    metrics[f"val/{name}/truncated"] = float(np.concatenate([one.truncated for one in answers]).mean())
    return metrics


def quality(answers: Sequence[Answers], in_training: bool = False, graded: bool = False) -> dict[str, float]:
    """Accuracy and mean reward with their intervals; for several samples a prompt, what k = 1, 2, 4 ... of them reach,
    and all of them.

    ``pass@k``: one of k is correct; ``maj@k``: the majority of k is, where answers can be read off the responses;
    ``best@k``: the highest score of k; ``chosen@k``: the sample of k with the highest rank is correct.

    Args:
        in_training: leave out ``chosen@k`` and a number of samples that is no power of two.
        graded: leave out what asks whether a response is correct.
    """
    metrics = {} if graded else with_ends("accuracy", estimate([one.accuracy for one in answers]))
    means = [float(np.nanmean(one.scores)) for one in answers if not np.isnan(one.scores).all()]
    metrics |= with_ends("reward", bootstrap(means)) if means else {}
    failed = float(np.isnan(np.concatenate([one.scores for one in answers])).mean())
    metrics |= {"reward_failed": failed} if failed else {}
    num_samples = min(len(one.correct) for one in answers)
    if num_samples < 2:
        return metrics
    has_votes = any(vote is not None for one in answers for vote in one.votes)
    powers = [2**power for power in range(num_samples.bit_length())]
    for k in powers if in_training else dict.fromkeys((*powers, num_samples)):
        if not graded:
            metrics |= with_ends(f"pass@{k}", estimate([pass_at_k(one.correct, k) for one in answers]))
        if has_votes and not graded:
            metrics[f"maj@{k}"] = float(np.mean([majority_at_k(one.votes, one.correct, k) for one in answers]))
        metrics[f"best@{k}"] = float(np.mean([best_at_k(one.scores, k) for one in answers]))
        if not in_training:
            metrics[f"chosen@{k}"] = float(np.mean([chosen_at_k(one.ranks, one.correct, k) for one in answers]))
    return metrics


def with_ends(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


def overall(primary: Mapping[str, Sequence[Answers]]) -> dict[str, float]:
    """``val_correct/...`` of several sets (the answers of each one's primary pass) by set, by tag and over all prompts,
    each with the same weight; sets with graded scores are left out."""
    primary = {name: answers for name, answers in primary.items() if not is_graded(answers)}
    everything = [one for answers in primary.values() for one in answers]
    if not everything:
        return {}
    parts = {tag: [one for one in everything if one.tag == tag] for tag in dict.fromkeys(one.tag for one in everything)}
    parts |= {name: list(answers) for name, answers in primary.items() if name} | {"all": everything}
    means = {name: float(np.mean([one.accuracy for one in part])) for name, part in parts.items()}
    return {f"val_correct/{name}/mean": mean for name, mean in means.items()}


def pass_at_k(correct: np.ndarray, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from n >= k samples, ``correct`` bool (n,)
    (arXiv 2107.03374, eq. 1)."""
    n, c = len(correct), int(correct.sum())
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def best_at_k(scores: np.ndarray, k: int) -> float:
    """Mean over all choices of k of the n samples of their best score; unbiased for the best of k. Of ``scores``, float
    (n,), NaN, a reward that failed, counts as the smallest there is, 0 if there is none."""
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
