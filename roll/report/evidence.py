"""Facts of a run for the rules of :mod:`roll.report.diagnosis`, each computed once, and the form of their findings."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any

from roll.report.run_files import Run
from roll.tracking.run_record import decoded

LEAST_STEPS = 3  # steps that a run must have for its course to be judged
MAX_BLOCKS = 40  # steps whose samples are read, spread evenly over the run
MARKER = re.compile(r"<[|/]?[A-Za-z_\u2581/][\w\u2581|]*[|]?>|<\uff5c[^<>]{1,40}\uff5c>")
"""Looks like a special token: ``<|im_end|>``, ``</s>``, ``<end_of_turn>``, ``<bos>``."""
END_WORDS = re.compile(r"im_end|eot|eos|end|/s>", re.IGNORECASE)


@dataclass(frozen=True)
class Sample:
    """A sample with what the rules ask about it."""

    step: int
    group: tuple[int, str]
    prompt: Mapping[str, Any]
    pieces: tuple[str, ...]  # text of each token after the prompt; empty where only the text is known
    fields: Mapping[str, Any]
    text: str
    score: float | None
    length: int


@dataclass
class Facts:
    """A run as numbers."""

    run: Run

    # Metrics

    def values(self, name: str) -> list[float]:
        """Finite values of a metric over the training steps."""
        return [value for value in self.run.values(name) if math.isfinite(value)]

    def matching(self, pattern: str) -> dict[str, list[float]]:
        """Like :meth:`values` for every name that the pattern matches whole."""
        names = {name for row in self.run.steps for name in row if re.fullmatch(pattern, name)}
        return {name: found for name in sorted(names) if (found := self.values(name))}

    def setting(self, key: str, default: object = None) -> Any:
        """A key of the configuration, by its dotted path."""
        value: Any = self.run.config
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value

    @property
    def outcome(self) -> str:
        """End of the run; empty where it has not ended, or nobody knows."""
        return str(self.run.about.get("outcome") or "")

    # Samples

    @cached_property
    def samples(self) -> list[Sample]:
        """Samples of training steps; those of at most :data:`MAX_BLOCKS` steps."""
        payloads = spread(list(self.run.payloads()), 2 * MAX_BLOCKS)
        blocks = [block for block in map(decoded, payloads) if block["kind"] == "train"]
        found = []
        for number, block in enumerate(spread(blocks, MAX_BLOCKS)):
            pieces = block["pieces"]
            for sample in block["samples"]:
                own = tuple(pieces[place] for place in sample.get("tokens", ()))
                group = (number, str(sample.get("group", "")))
                text = "".join(own) or str(sample.get("response", ""))
                judged = text, sample.get("score"), int(sample.get("response_tokens") or 0)
                found.append(Sample(block["step"], group, block["prompts"][sample["prompt"]], own, sample, *judged))
        return found

    @cached_property
    def sampled(self) -> list[Sample]:
        """Samples that the policy itself has made."""
        return [sample for sample in self.samples if "kind" not in sample.fields and "log_probs" in sample.fields]

    @cached_property
    def groups(self) -> list[list[Sample]]:
        """Groups of two and more."""
        by_group: dict[tuple[int, str], list[Sample]] = defaultdict(list)
        for sample in self.sampled:
            by_group[sample.group].append(sample)
        return [members for members in by_group.values() if len(members) > 1]

    @cached_property
    def prompts(self) -> list[tuple[int, str, Mapping[str, Any]]]:
        """Step, text and all of the prompt of every group, single samples included."""
        seen: dict[tuple[int, str], Sample] = {}
        for sample in self.samples:
            seen.setdefault(sample.group, sample)
        return [(one.step, str(one.prompt.get("text", "")), one.prompt) for one in seen.values()]

    @cached_property
    def end_markers(self) -> set[str]:
        """Special tokens that end a turn in the prompts."""
        counts = Counter(mark for _, text, _ in self.prompts[:200] for mark in set(MARKER.findall(text)))
        return {mark for mark in counts if END_WORDS.search(mark)}

    # Times

    @cached_property
    def busy(self) -> dict[str, dict[int, list[float]]]:
        """Seconds that each rank of a role was busy, by step."""
        windows = [(row["begin"], row["end"]) for row in self.run.timeline if row["step"] >= 0]
        found: dict[str, dict[int, list[float]]] = defaultdict(dict)
        for worker in self.run.calls:
            totals = [0.0] * len(windows)
            spans = sorted(worker.spans, key=lambda span: span[1])
            place = 0
            for number, (begin, end) in enumerate(windows):
                while place < len(spans) and spans[place][2] <= begin:
                    place += 1
                at = place
                while at < len(spans) and spans[at][1] < end:
                    totals[number] += max(0.0, min(end, spans[at][2]) - max(begin, spans[at][1]))
                    at += 1
            found[worker.role][worker.rank] = totals
        return dict(found)


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` of the items, evenly, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last quarter."""
    size = max(1, len(values) // 4)
    return fmean(values[:size]), fmean(values[-size:])


def correlation(pairs: Iterable[tuple[float, float]]) -> float:
    """Pearson's; 0 where one of the two does not vary."""
    points = list(pairs)
    if len(points) < 3:
        return 0.0
    x, y = zip(*points, strict=True)
    varies = min(statistics.pvariance(x), statistics.pvariance(y)) * len(points) >= 1e-12
    return statistics.correlation(x, y) if varies else 0.0


@dataclass(frozen=True)
class Finding:
    """A cause with what speaks for it."""

    cause: str  # short name, as docs/diagnosis.md has it
    title: str  # the cause in a sentence
    evidence: tuple[str, ...]  # what was seen, with numbers
    remedy: str  # what to change


def typical_of(facts: Facts, name: str) -> str:
    """The median of a metric over the steps, as a text."""
    values = facts.values(name)
    return f"{median(values):.3g}" if values else "unknown"


def quoted(text: str, most: int = 160) -> str:
    shown = " ".join(text.split())
    return repr(shown if len(shown) <= most else f"{shown[: most // 2]} ... {shown[-most // 2 :]}")
