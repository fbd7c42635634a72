"""Results of an evaluation: metrics of each model, comparisons, thresholds; as JSON, and as tables for people.

Two models are compared by their differences on the same prompts, whose sign is random if neither is better (R. A.
Fisher's permutation test).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.datasets.types import DataError
from roll.pipelines.evaluate.config import EvaluationConfig, ModelsPlan
from roll.pipelines.evaluate.samples import RESULTS, SampleFile, answers_of
from roll.pipelines.rlvr.accuracy import CHUNK, Answers, bootstrap, overall, pass_metrics, with_ends

WIDTH = 160
"""Columns of a table in a file or a log."""
COLUMNS = (("accuracy", "accuracy"), ("reward", "mean reward"))
"""Metrics with intervals that the table has, and their headings; pass@k and its relatives follow for the largest k."""
EXACT = 12
"""Differences other than 0 up to which every choice of signs is tried."""
PERMUTATIONS = 20_000


class Results:
    """Metrics by model, in the order in which models are done."""

    def __init__(self, keys: EvaluationConfig, plan: ModelsPlan, samples: SampleFile) -> None:
        self._config, self._plan, self._samples = keys, plan, samples
        self.metrics: dict[str, dict[str, float]] = {}
        self._answers: dict[str, dict[str, list[Answers]]] = {}

    def of_model(self, model: str) -> dict[str, float]:
        """The metrics of a model all of whose prompts are answered.

        Raises:
            DataError: no reward has the number ``select_by``.
        """
        answers: dict[str, list[Answers]] = {}
        metrics: dict[str, float] = {}
        for way in self._plan.passes:
            records = self._samples.records(model, way.name)
            try:
                answers[way.name] = answers_of(records, self._config.correct_from, self._config.select_by)
            except KeyError as error:
                raise DataError(f"evaluate.select_by: {error.args[0]}") from error
            metrics |= pass_metrics(answers[way.name], way.name, way.is_primary)
        primary = {way.set_name: answers[way.name] for way in self._plan.passes if way.is_primary}
        metrics |= overall(primary) if len(primary) > 1 else {}
        self._answers[model], self.metrics[model] = answers, metrics
        return metrics

    def finish(self) -> list[str]:
        """Compare, write ``results.json`` and print the tables; a sentence for every threshold that was missed."""
        baseline = self._plan.baseline
        for model in self.metrics:
            for way in self._plan.passes if model != baseline else ():
                found = compare(self._answers[model][way.name], self._answers[baseline][way.name])
                self.metrics[model] |= {f"compare/{baseline}/{way.name}/{name}": one for name, one in found.items()}
        failed = list(missed(self._config.thresholds, self.metrics))
        content = {
            "models": {one.name: one.path for one in self._plan.models},
            "baseline": self._plan.baseline,
            "metrics": self.metrics,
            "below_threshold": failed,
        }
        file = self._plan.output_dir / RESULTS
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        console = Console(emoji=False)
        if not console.is_terminal:
            console = Console(emoji=False, width=WIDTH)
        console.print(self._table())
        if len(self.metrics) > 1:
            console.print(self._comparisons())
        for name, path in {"results": file, "samples": self._samples.path}.items():
            console.print(Text(f"{name:<10}{path}"), soft_wrap=True)
        for sentence in failed:
            console.print(Text(f"below its threshold: {sentence}", style="red"), soft_wrap=True)
        return failed

    def _table(self) -> Table:
        largest = {way.name: way.num_samples for way in self._plan.passes}
        several = sorted({count for count in largest.values() if count > 1})
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("model", "set", "prompts"):
            table.add_column(heading, no_wrap=True, justify="right" if heading == "prompts" else "left")
        for _, heading in COLUMNS:
            table.add_column(heading, no_wrap=True)
        kinds = [f"{kind}@{k}" for k in several for kind in ("pass", "maj", "chosen")]
        known = {name.rpartition("/")[2] for found in self.metrics.values() for name in found}
        kinds = [kind for kind in kinds if kind in known]
        for kind in kinds:
            table.add_column(kind, justify="right", no_wrap=True)
        for model, metrics in self.metrics.items():
            for way in self._plan.passes:
                prefix = f"val/{way.name}/"
                cells = [_with_interval(metrics, prefix + name) for name, _ in COLUMNS]
                cells += [f"{metrics[prefix + kind]:.3f}" if prefix + kind in metrics else "" for kind in kinds]
                prompts = str(len(self._answers[model][way.name]))
                table.add_row(*map(Text, (model, f"{way.name} x {way.num_samples}", prompts, *cells)))
        return table

    def _comparisons(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        headings = ("model", f"against {self._plan.baseline}", "difference", "p", "wins", "ties", "losses")
        for heading in headings:
            table.add_column(heading, no_wrap=True)
        for model, metrics in self.metrics.items():
            for way in self._plan.passes:
                prefix = f"compare/{self._plan.baseline}/{way.name}/"
                if f"{prefix}difference" not in metrics:
                    continue
                counts = [f"{metrics[prefix + name]:.0f}" for name in ("wins", "ties", "losses")]
                cells = (_with_interval(metrics, f"{prefix}difference", sign="+"), f"{metrics[prefix + 'p_value']:.3f}")
                table.add_row(*map(Text, (model, way.name, *cells, *counts)))
        return table


def _with_interval(metrics: Mapping[str, float], name: str, sign: str = "") -> str:
    """``.812 (.781 to .840)``; empty where the metric is not there."""
    if name not in metrics:
        return ""
    low, high = metrics[f"{name}_low"], metrics[f"{name}_high"]
    return f"{metrics[name]:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def compare(first: Sequence[Answers], second: Sequence[Answers]) -> dict[str, float]:
    """Two models on the prompts that both have answered: the first's accuracy less the second's, with its interval; the
    chance of a difference at least as large if neither is better, two-sided; and the prompts of which the first has
    more correct, equally many, or fewer. Empty if there are none."""
    others = {one.prompt_id: one.accuracy for one in second}
    differences = np.array([one.accuracy - others[one.prompt_id] for one in first if one.prompt_id in others])
    if not len(differences):
        return {}
    return with_ends("difference", bootstrap(differences.tolist())) | {
        "p_value": sign_flip_p_value(differences),
        "wins": float((differences > 0).sum()),
        "losses": float((differences < 0).sum()),
        "ties": float((differences == 0).sum()),
    }


def sign_flip_p_value(differences: np.ndarray) -> float:
    """Share of the choices of signs whose mean is at least as far from 0; sampled where there are many."""
    sizes = np.abs(differences[differences != 0])
    if not len(sizes):
        return 1.0
    # With a margin: sums of the same numbers in another order may differ in their last bits.
    observed = abs(float(differences.sum())) - 1e-9
    if len(sizes) <= EXACT:
        signs = np.array(list(product((-1.0, 1.0), repeat=len(sizes))))
        return float((np.abs(signs @ sizes) >= observed).mean())
    # A fixed seed: the same answers always give the same p-value.
    random = np.random.default_rng(0)
    reached, rows = 0, max(1, CHUNK // len(sizes))
    for begin in range(0, PERMUTATIONS, rows):
        signs = random.integers(0, 2, (min(rows, PERMUTATIONS - begin), len(sizes))) * 2.0 - 1.0
        reached += int((np.abs(signs @ sizes) >= observed).sum())
    # The observed signs are one of the possible choices, which also keeps the estimate above 0.
    return (reached + 1) / (PERMUTATIONS + 1)


def missed(thresholds: Mapping[str, float], results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for every threshold that a model stays below.

    Args:
        results: metrics by model; those that compare two models are listed under the model that is compared.
    """
    for key, least in thresholds.items():
        name, _, rest = key.partition("/")
        metrics = {name: rest} if name in results and rest in results[name] else dict.fromkeys(results, key)
        found = {model: results[model][metric] for model, metric in metrics.items() if metric in results[model]}
        if not found:
            yield f"{key}: there is no such metric"
        for model, value in found.items():
            # Not `value < least`, which is false for NaN.
            if not value >= least:
                yield f"{model}: {metrics[model]} is {value:.4f}, below {least:g}"
