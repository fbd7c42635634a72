"""The bounds, and the table as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.parity.layouts import Layout
from benchmarks.parity.measure import Errors, Numbers, RunRanks, layout_numbers, plain_numbers
from tests.strategies.families import write_family
from tests.strategies.samples import make_batch

BOUNDS = {"fp32": Errors(1e-5, 1e-5, 1e-5), "bf16": Errors(1.5e-2, 1.5e-2, 1.5e-2)}
"""float32: sums of some hundred terms in another order differ by some units in the last place (6e-8), more after five
optimizer steps.  bf16 has 8 bits, so a rounding is up to 4e-3: the plain model's own numbers move by about one such
rounding when it computes in bf16 (first row of the table); a backend that rounds elsewhere may move by four."""

BEGIN, END = "<!-- parity table -->", "<!-- end of parity table -->"


@dataclass(frozen=True)
class Row:
    """Errors of one layout, by type: at step 1, and after five optimizer steps."""

    strategy: str
    layout: str
    batch: str
    errors: dict[str, list[Errors]]

    @classmethod
    def of(cls, layout: Layout, errors: dict[str, list[Errors]]) -> Row:
        return cls(layout.strategy, layout.name, layout.batch, errors)

    def violations(self) -> Iterator[str]:
        for dtype, steps in self.errors.items():
            for when, errors in zip(("at step 1", "after 5 steps"), steps, strict=True):
                if errors.exceeds(BOUNDS[dtype]):
                    yield f"{self.strategy} {self.layout}, {self.batch}, {dtype} {when}: {errors}"

    def cells(self) -> Iterator[str]:
        yield from (self.strategy, self.layout, self.batch)
        for dtype in BOUNDS:
            for name in ("loss", "grad_norm", "log_probs"):
                steps = self.errors.get(dtype)
                yield " / ".join(f"{getattr(errors, name):.0e}" for errors in steps) if steps else ""


def compare(run: RunRanks, layouts: list[Layout], dtypes: list[str], folder: Path) -> list[Row]:
    """A row for the plain model in bf16, where that is asked for, then one a layout."""
    model, batch = write_family(folder, "qwen2"), make_batch()
    wanted = plain_numbers(model, batch)

    def errors(actual: list[Numbers]) -> list[Errors]:
        return [Errors.between(one, other) for one, other in zip(actual, wanted, strict=True)]

    rows = []
    if "bf16" in dtypes:
        rows.append(
            Row("plain model", "1 process", "padded", {"bf16": errors(plain_numbers(model, batch, torch.bfloat16))})
        )
    for layout in layouts:
        rows.append(Row.of(layout, {d: errors(layout_numbers(run, layout, model, batch, d)) for d in dtypes}))
    return rows


def markdown(rows: Iterable[Row]) -> str:
    heads = ["strategy", "layout", "batch"]
    heads += [f"{dtype} {name}" for dtype in BOUNDS for name in ("loss", "gradient norm", "log-probs")]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    return "\n".join(lines)


def summary(rows: Iterable[Row]) -> str:
    """The largest figures of each strategy over its layouts, batches and both steps: the page's table."""
    by_strategy: dict[str, list[Row]] = {}
    for row in rows:
        by_strategy.setdefault(row.strategy, []).append(row)
    heads = ["strategy", "layouts"]
    heads += [f"{dtype} {name}" for dtype in BOUNDS for name in ("loss", "gradient norm", "log-probs")]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for strategy, found in by_strategy.items():
        cells = [strategy, "; ".join(dict.fromkeys(row.layout for row in found))]
        for dtype in BOUNDS:
            errors = [one for row in found for one in row.errors.get(dtype, ())]
            for name in ("loss", "grad_norm", "log_probs"):
                cells.append(f"{max(getattr(one, name) for one in errors):.0e}" if errors else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def insert(page: Path, table: str) -> None:
    """Put the table between its markers.

    Raises:
        ValueError: the page has no markers.
    """
    text = page.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: no place for the table; write {BEGIN} and {END} where it belongs")
    page.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}", encoding="utf-8")
