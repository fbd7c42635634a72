"""The samples of an evaluation on disk, written as prompts are done and resumed where an evaluation was interrupted;
and its results: metrics of each model, comparisons, thresholds, as JSON and as tables for people.

Two models are compared by their differences on the same prompts, whose sign is random if neither is better (R. A.
Fisher's permutation test).
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.checkpoint.folders import atomic_file
from roll.config.loader import LoadedConfig
from roll.config.model_files import model_folder
from roll.config.reading.errors import ConfigError
from roll.datasets.types import DataError
from roll.pipelines.evaluate.config import EvaluationConfig, ModelsPlan
from roll.pipelines.files import sample_table
from roll.pipelines.rlvr.accuracy import (
    CHUNK,
    Answers,
    bootstrap,
    merged_votes,
    overall,
    pass_metrics,
    voted_answer,
    with_ends,
)
from roll.rollout.groups import SampleGroup

logger = logging.getLogger(__name__)

SAMPLES, SETTINGS, RESULTS = "samples.jsonl", "evaluation.json", "results.json"
Record = dict[str, Any]
Place = tuple[str, str]  # model and pass


def settings_of(loaded: LoadedConfig[Any]) -> dict[str, Any]:
    """Everything that the samples depend on, as plain JSON values: equal for evaluations of which one may reuse the
    other's samples."""
    config: Any = loaded.config
    plan: Any = loaded.plan
    pipeline: Any = loaded.pipeline
    data, own = pipeline.own_settings(config, plan)
    written = [one.file_name for one in data]
    files = [name for names in written for name in ([names] if isinstance(names, str) else names or ())]
    weights: dict[str, list[Path]] = {}
    for one in plan.models:
        folder = one.checkpoint or model_folder(one.path)
        weights[one.name] = []
        if folder is not None:
            weights[one.name] = [*sorted(folder.rglob("*.safetensors")), *sorted(folder.rglob("trainer_state.json"))]
    shared = {
        "models": {one.name: [one.path, one.base, *map(_state, weights[one.name])] for one in plan.models},
        "data files": {name: _state(Path(name).expanduser()) for name in files},
        "evaluate.num_samples, evaluate.temperatures": [asdict(one) for one in plan.passes],
        "seed": config.seed,
        "actor_infer.strategy_args.strategy_name": config.actor_infer.strategy_args.strategy_name,
        "actor_infer.model_args.dtype": config.actor_infer.model_args.dtype,
    }
    plain: dict[str, Any] = json.loads(json.dumps({**shared, **own}, default=str))
    return plain


def _state(path: Path) -> list[Any]:
    """Size and time of a file, as far as it is on this machine."""
    if not path.is_file():
        return [str(path)]
    found = path.stat()
    return [str(path), found.st_size, found.st_mtime_ns]


def differing(folder: Path, wanted: Mapping[str, Any]) -> list[str] | None:
    """Keys in which the evaluation in ``folder`` has other settings; None: there is none to continue."""
    file = folder / SETTINGS
    if not file.is_file() or not (folder / SAMPLES).is_file():
        return None
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return [SETTINGS]
    return [key for key in wanted if written.get(key) != wanted[key]]


def check_taken_up(loaded: LoadedConfig[Any]) -> None:
    """ConfigError: the samples in the output folder are those of an evaluation with other settings."""
    folder = loaded.plan.output_dir
    if loaded.config.evaluate.resume and (found := differing(folder, settings_of(loaded))):
        rule = (
            f"{folder / SAMPLES} holds samples of an evaluation with other settings ({'; '.join(found)}); "
            "begin anew (the file is kept as .previous), or choose another output_dir"
        )
        raise ConfigError([loaded.problem("evaluate.resume", True, rule, False)])


class SampleFile:
    """``samples.jsonl``: a line a sample. A prompt counts as answered when all of its samples are there."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], resume: bool) -> None:
        """Open the file for appending; what an interrupted evaluation left of a prompt is removed."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / SAMPLES
        self._groups: dict[Place, dict[int, list[Record]]] = defaultdict(dict)
        if resume and differing(folder, settings) == []:
            records = defaultdict(list)
            for record in read_samples(self.path):
                records[record["model"], record["pass"], record["order"]].append(record)
            whole = {key: group for key, group in records.items() if len(group) == group[0]["of"]}
            for (model, name, order), group in whole.items():
                self._groups[model, name][order] = group
            _write_whole(self.path, "".join(_line(record) for group in whole.values() for record in group))
        elif self.path.exists():
            self.path.replace(self.path.with_name(f"{SAMPLES}.previous"))
        _write_whole(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def answered(self, model: str, name: str) -> set[int]:
        """Numbers of the prompts that a pass has answered."""
        return set(self._groups[model, name])

    def records(self, model: str, name: str) -> list[list[Record]]:
        """The samples of a pass by prompt, in the order of the set."""
        return [group for _, group in sorted(self._groups[model, name].items())]

    def write(self, model: str, name: str, order: int, records: Sequence[Record]) -> None:
        """Add the samples of a prompt, in one piece, each with ``model``, ``pass``, ``order``, and ``of``, their
        number."""
        self._file.write("".join(map(_line, records)))
        self._file.flush()
        # Numbers as they are read back: a resumed evaluation gives the same results, bit for bit.
        self._groups[model, name][order] = [json.loads(_line(record)) for record in records]

    def close(self) -> None:
        self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, default=str) + "\n"


def _write_whole(path: Path, text: str) -> None:
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_samples(path: Path) -> Iterator[Record]:
    """The lines of a file of samples; a torn last one is left out, and so are damaged ones, which are logged."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                logger.warning("%s, line %d is damaged and left out: %s", path, number, error)


def sample_records(group: SampleGroup, shared: Mapping[str, Any]) -> Iterator[Record]:
    for row, one in zip(sample_table([group]), group.members, strict=True):
        yield {
            **shared,
            "order": group.order,
            "of": len(group.members),
            "numbers": one.reward.metrics,
            "vote": voted_answer(row["response"], row["prompt"]),
            "tokens": row.pop("response_tokens"),
            **row,
        }


def answers_of(groups: Iterable[Sequence[Record]], correct_from: float, select_by: str) -> list[Answers]:
    """The samples of each prompt as numbers. Raises ``DataError``: no sample has the number ``select_by``; the message
    lists those that there are."""
    found: list[Answers] = []
    known: set[str] = set()
    has_any = select_by == "score"
    for group in groups:
        scores = np.array([np.nan if one["score"] is None else one["score"] for one in group], dtype=np.float64)
        numbers = [one["numbers"] or {} for one in group]
        known.update(name for one in numbers for name in one)
        has_any = has_any or any(select_by in one for one in numbers)
        ranks = np.array([one.get(select_by, np.nan) for one in numbers], dtype=np.float64)
        # Success by the environment, if it says so; else by the score.
        succeeded = [one.get("success") for one in group]
        by_score = [one["score"] is not None and one["score"] >= correct_from for one in group]
        correct = np.array([by if own is None else bool(own) for own, by in zip(succeeded, by_score, strict=True)])
        found.append(
            Answers(
                prompt_id=group[0]["prompt_id"],
                tag=group[0]["tag"],
                scores=scores,
                ranks=scores if select_by == "score" else ranks,
                correct=correct,
                votes=merged_votes([one["vote"] for one in group], correct),
                lengths=np.array([one["tokens"] for one in group]),
                truncated=np.array([one["finish_reason"] == "length" for one in group]),
            )
        )
    if found and not has_any:
        there = ", ".join(sorted(known | {"score"}))
        raise DataError(f"evaluate.select_by: no reward returns {select_by}; there is {there}")
    return found


WIDTH = 160  # columns of a table in a file or a log
# Metrics with intervals that the table has, and their headings; pass@k and its relatives follow for the largest k.
COLUMNS = (("accuracy", "accuracy"), ("reward", "mean reward"))
EXACT = 12  # differences other than 0 up to which every choice of signs is tried
PERMUTATIONS = 20_000


@dataclass
class Results:
    """Metrics by model, in the order in which models are done."""

    keys: EvaluationConfig
    plan: ModelsPlan
    samples: SampleFile
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    answers: dict[str, dict[str, list[Answers]]] = field(default_factory=dict)

    def of_model(self, model: str) -> dict[str, float]:
        """The metrics of a model all of whose prompts are answered; DataError: see :func:`answers_of`."""
        answers: dict[str, list[Answers]] = {}
        metrics: dict[str, float] = {}
        for way in self.plan.passes:
            records = self.samples.records(model, way.name)
            answers[way.name] = answers_of(records, self.keys.correct_from, self.keys.select_by)
            metrics |= pass_metrics(answers[way.name], way.name, way.is_primary)
        primary = {way.set_name: answers[way.name] for way in self.plan.passes if way.is_primary}
        metrics |= overall(primary) if len(primary) > 1 else {}
        self.answers[model], self.metrics[model] = answers, metrics
        return metrics

    def finish(self) -> list[str]:
        """Compare, write ``results.json`` and print the tables; a sentence for every threshold that was missed."""
        baseline = self.plan.baseline
        for model in self.metrics:
            for way in self.plan.passes if model != baseline else ():
                found = compare(self.answers[model][way.name], self.answers[baseline][way.name])
                self.metrics[model] |= {f"compare/{baseline}/{way.name}/{name}": one for name, one in found.items()}
        tables = [self._table(), *([self._comparisons()] if len(self.metrics) > 1 else [])]
        facts = {"models": {one.name: one.path for one in self.plan.models}, "baseline": self.plan.baseline}
        files = {"results": self.plan.output_dir / RESULTS, "samples": self.samples.path}
        return show_results(tables, files, facts, self.metrics, self.keys.thresholds)

    def _table(self) -> Table:
        several = sorted({way.num_samples for way in self.plan.passes if way.num_samples > 1})
        kinds = [f"{kind}@{k}" for k in several for kind in ("pass", "maj", "chosen")]
        known = {name.rpartition("/")[2] for found in self.metrics.values() for name in found}
        kinds = [kind for kind in kinds if kind in known]
        table = plain_table("model", "set", "prompts", *(heading for _, heading in COLUMNS), *kinds)
        for column in table.columns:
            if column.header == "prompts" or column.header in kinds:
                column.justify = "right"
        for model, metrics in self.metrics.items():
            for way in self.plan.passes:
                prefix = f"val/{way.name}/"
                cells = [_with_interval(metrics, prefix + name) for name, _ in COLUMNS]
                cells += [f"{metrics[prefix + kind]:.3f}" if prefix + kind in metrics else "" for kind in kinds]
                prompts = str(len(self.answers[model][way.name]))
                table.add_row(*map(Text, (model, f"{way.name} x {way.num_samples}", prompts, *cells)))
        return table

    def _comparisons(self) -> Table:
        table = plain_table("model", f"against {self.plan.baseline}", "difference", "p", "wins", "ties", "losses")
        for model, metrics in self.metrics.items():
            for way in self.plan.passes:
                prefix = f"compare/{self.plan.baseline}/{way.name}/"
                if f"{prefix}difference" not in metrics:
                    continue
                counts = [f"{metrics[prefix + name]:.0f}" for name in ("wins", "ties", "losses")]
                cells = (_with_interval(metrics, f"{prefix}difference", sign="+"), f"{metrics[prefix + 'p_value']:.3f}")
                table.add_row(*map(Text, (model, way.name, *cells, *counts)))
        return table


def plain_table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def show_results(
    tables: Sequence[Table],
    files: Mapping[str, Path],
    facts: Mapping[str, Any],
    metrics: Mapping[str, Mapping[str, float]],
    thresholds: Mapping[str, float],
) -> list[str]:
    """Write ``files["results"]``, print tables, the places of files, and a sentence for every threshold that was
    missed, which are returned."""
    failed = list(missed(thresholds, metrics))
    content = {**facts, "metrics": metrics, "below_threshold": failed}
    files["results"].write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console = Console(emoji=False)
    if not console.is_terminal:  # rich takes 80 columns for a file or a log
        console = Console(emoji=False, width=WIDTH)
    for table in tables:
        console.print(table)
    for name, path in files.items():
        console.print(Text(f"{name:<10}{path}"), soft_wrap=True)
    for sentence in failed:
        console.print(Text(f"below its threshold: {sentence}", style="red"), soft_wrap=True)
    return failed


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
    """A sentence for every threshold that a model stays below; ``results``: metrics by model, of which those that
    compare two models are listed under the one that is compared."""
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
