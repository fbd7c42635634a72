"""``python benchmarks/reproduce.py NAME``: run a documented table again, and say for each row whether it agrees.

A table is a file of ``benchmarks/tables``: which recipes with which changes, how a number is read from a run's metrics,
and the figures that were measured, by seed.  The tables of the pages are written from these files.

Agreement is a statement with an interval.  A seed that is recorded starts from the same model and draws the same
prompts, so its figures are compared pair by pair: the mean of the differences lies within z sqrt(2/k) standard errors
of one figure, for k seeds.  Other seeds have other models: their mean lies within the prediction interval of the
recorded ones, t s sqrt(1/n + 1/m) around their mean, for n recorded and m new seeds.  Both hold for all rows of a
command together with 95% (Bonferroni), so that a table of thirty rows does not differ by chance.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import NormalDist, fmean, median_low, stdev
from typing import Any

import numpy as np
from rich.console import Console

from roll.config.reading.errors import ConfigError, Problem
from roll.tracking.records import read_metrics

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "benchmarks/tables"
LEVEL = 0.95
CURVE = "curve"
"""Of a result: the metric ``Table.curve`` of every step, three digits."""
SAME_START = 0.0006
"""Recorded figures have three digits."""
TAKES = ("first", "last", "mean")


@dataclass(frozen=True)
class Figure:
    """A number of a run.

    Attributes:
        metric: its name in ``metrics.jsonl``.
        take: the ``first`` or ``last`` value, or the ``mean`` over the steps without the first, which sets up.
        heading: of its column.
        format: of its value.
    """

    metric: str
    take: str
    heading: str
    format: str = ".3f"

    def of(self, rows: Sequence[dict[str, Any]]) -> float:
        """Raises ``KeyError`` where no step has the metric."""
        values = [float(row[self.metric]) for row in rows if self.metric in row]
        if not values:
            raise KeyError(self.metric)
        return {"first": values[0], "last": values[-1], "mean": fmean(values[1:] or values)}[self.take]


@dataclass
class Row:
    """A run of the table, under any seed.

    Attributes:
        name: by which ``--rows`` finds it.
        config: its recipe, relative to the root of the clone.
        overrides: changes to it; ``{seed}`` stands for the seed.
        cells: its first columns, Markdown.
        needs: a module that must be there.
        quick: ``--quick`` runs it.
        results: measured figures, each with its ``seed``.
    """

    name: str
    config: str
    overrides: list[str]
    cells: list[str]
    needs: str = ""
    quick: bool = False
    results: list[dict[str, Any]] = field(default_factory=list)

    def recorded(self, figure: str) -> dict[int, float]:
        """By seed."""
        return {result["seed"]: result[figure] for result in self.results if figure in result}


@dataclass
class Table:
    """A documented table.

    Attributes:
        page: where its block stands, between :meth:`marks`.
        about: one line for ``--list``.
        judged: the figure that must agree.
        standard_error: of that figure of one run, from the finite number of answers.
        prepare: what Python runs before the first run of a seed; ``{seed}`` stands for it.
        overrides: of every run.
        heads: headings of ``Row.cells``.
        curve: a metric whose course is kept.
        start: a figure of the model before training. Where it differs, a seed has led to another model (other
            versions or processors round differently), and its runs count as those of another seed.
    """

    name: str
    page: str
    about: str
    judged: str
    standard_error: float
    figures: dict[str, Figure]
    heads: list[str]
    rows: list[Row]
    prepare: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    curve: str = ""
    start: str = ""

    @property
    def marks(self) -> tuple[str, str]:
        return f"<!-- reproduce {self.name} -->", f"<!-- end of reproduce {self.name} -->"

    @property
    def seeds(self) -> list[int]:
        return sorted({result["seed"] for row in self.rows for result in row.results}) or [0]


@dataclass(frozen=True)
class Verdict:
    """Outcome of a row: ``agrees``, ``differs``, ``new`` (nothing to compare with), ``not run``, ``failed``."""

    row: str
    word: str
    why: str
    recorded: float | None = None
    measured: float | None = None
    half_width: float | None = None


def read_table(name: str) -> Table:
    """The table ``name`` of this clone, or that of a file.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    file = Path(name) if name.endswith(".json") else TABLES / f"{name}.json"
    if not file.is_file():
        rule = "no such table; those of the documentation are in benchmarks/tables"
        raise ConfigError([Problem("NAME", name, rule, ", ".join(table_names()) or None)])
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        figures = {key: Figure(**value) for key, value in data.pop("figures").items()}
        table = Table(name=file.stem, figures=figures, rows=[Row(**row) for row in data.pop("rows")], **data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError([Problem("NAME", name, f"{file} is not a table: {error}")]) from None
    wrong = [figure.take for figure in figures.values() if figure.take not in TAKES]
    if wrong or table.judged not in figures or table.start not in ("", *figures):
        rule = f"takes are {', '.join(TAKES)}, judged and start are among {', '.join(figures)}"
        raise ConfigError([Problem("NAME", name, rule)])
    return table


def write_table(table: Table, file: Path) -> None:
    """A line of the file a result, so that changes of one read well."""
    data = asdict(table)
    del data["name"]
    figures = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in data.pop("figures").items())
    rows = []
    for row in data.pop("rows"):
        results = ",\n".join(f"   {json.dumps(result)}" for result in row.pop("results"))
        text = json.dumps(row, ensure_ascii=False)[:-1]
        rows.append(f'  {text}, "results": [\n{results}\n  ]}}' if results else f'  {text}, "results": []}}')
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in data.items())
    body = ",\n".join(rows)
    text = f'{{\n{head},\n "figures": {{\n{figures}\n }},\n "rows": [\n{body}\n ]\n}}\n'
    file.write_text(text, encoding="utf-8")


def table_names() -> list[str]:
    return sorted(file.stem for file in TABLES.glob("*.json"))


# Runs


@dataclass(frozen=True)
class Bench:
    """Where the runs of a command go, and when no further one is started."""

    table: Table
    output: Path
    stop_at: float

    def result(self, row: Row, seed: int) -> dict[str, Any] | str | None:
        """Figures of a run, which is made unless it is there; why it failed; None: there was no time."""
        folder = self.output / f"{row.name}-seed{seed}".replace(" ", "_").replace(",", "")
        done = folder / "result.json"
        if done.exists():
            return dict(json.loads(done.read_text(encoding="utf-8")))
        if time.monotonic() > self.stop_at:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        words = [f"seed={seed}", f"output_dir={folder}", f"logging_dir={folder}/logs", "track_with=[jsonl]"]
        # One that was interrupted has left a checkpoint; to go on from it changes no figure.
        words += ["resume_from_checkpoint=true", *self.table.overrides, *row.overrides]
        command = [sys.executable, "-m", "roll.cli", "run", row.config]
        command += [word.replace("{seed}", str(seed)) for word in words]
        log = folder / "console.log"
        with log.open("w", encoding="utf-8") as file:
            status = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT).returncode
        if status:
            return f"exit status {status}, see {log}"
        try:
            result = self._read(folder, seed)
        except KeyError as error:
            return f"no metric {error} in {folder}/logs"
        done.write_text(json.dumps(result), encoding="utf-8")
        return result

    def _read(self, folder: Path, seed: int) -> dict[str, Any]:
        rows = read_metrics(folder / "logs/metrics.jsonl")
        result: dict[str, Any] = {"seed": seed}
        result |= {name: float(f"{figure.of(rows):.6g}") for name, figure in self.table.figures.items()}
        if self.table.curve:
            result[CURVE] = [round(float(row[self.table.curve]), 3) for row in rows if self.table.curve in row]
        return result

    def prepare(self, seed: int) -> None:
        """Prepare the start of a seed's runs.

        Raises:
            CalledProcessError: it could not be made.
        """
        if self.table.prepare:
            words = [word.replace("{seed}", str(seed)) for word in self.table.prepare]
            subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def run_rows(bench: Bench, rows: Sequence[Row], seeds: Sequence[int], jobs: int) -> dict[str, list[Any]]:
    """Outcomes by row, in the order of ``seeds``: figures, a reason, or None.  All rows of a seed, then the next."""
    possible = [row for row in rows if not row.needs or find_spec(row.needs) is not None]
    outcomes: dict[str, list[Any]] = {
        row.name: [] if row in possible else [f"needs {row.needs}, which is not installed"] for row in rows
    }
    for seed in seeds:
        if possible and time.monotonic() <= bench.stop_at:
            bench.prepare(seed)
        with ThreadPoolExecutor(jobs) as pool:
            for row, outcome in zip(possible, pool.map(bench.result, possible, [seed] * len(possible)), strict=True):
                outcomes[row.name].append(outcome)
    return outcomes


# Verdicts


def judge(table: Table, row: Row, outcomes: Sequence[Any], rows: int) -> Verdict:
    """A row against its record; ``rows``: how many are judged together."""
    results = [outcome for outcome in outcomes if isinstance(outcome, dict)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if failures:
        return Verdict(row.name, "not run" if failures[0].startswith("needs ") else "failed", failures[0])
    if not results:
        return Verdict(row.name, "not run", "no time was left")
    old = row.recorded(table.judged)
    new = {result["seed"]: result[table.judged] for result in results}
    tail = (1 - LEVEL) / (2 * max(rows, 1))
    starts, new_starts = row.recorded(table.start), {result["seed"]: result.get(table.start) for result in results}
    shared = sorted(seed for seed in old.keys() & new.keys() if _is_same(starts.get(seed), new_starts[seed]))
    if shared:
        half = NormalDist().inv_cdf(1 - tail) * table.standard_error * math.sqrt(2 / len(shared))
        before, now = fmean(old[seed] for seed in shared), fmean(new[seed] for seed in shared)
        why = f"seed{'s' * (len(shared) > 1)} {', '.join(map(str, shared))}"
    elif len(old) > 1:
        spread = stdev(old.values()) * math.sqrt(1 / len(old) + 1 / len(new))
        half = student_quantile(1 - tail, len(old) - 1) * spread
        before, now = fmean(old.values()), fmean(new.values())
        why = f"{len(new)} other starts than the {len(old)} recorded"
    else:
        reason = "one start is recorded, which says nothing about others" if old else "nothing is recorded"
        return Verdict(row.name, "new", reason, next(iter(old.values()), None), fmean(new.values()))
    word = "agrees" if abs(now - before) <= half + 1e-12 else "differs"
    return Verdict(row.name, word, why, before, now, half)


def _is_same(start: float | None, other: float | None) -> bool:
    return start is None or other is None or abs(start - other) <= SAME_START


def student_quantile(probability: float, freedom: int) -> float:
    """Of Student's distribution, for probabilities above 0.5.

    With t = sqrt(freedom) tan(angle) its density is proportional to cos(angle)^(freedom - 1), over a finite range.
    """
    angles = np.linspace(0.0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = float(np.interp(2 * probability - 1, mass / mass[-1], angles))
    return math.sqrt(freedom) * math.tan(angle)


def show(verdicts: Sequence[Verdict], judged: str, console: Console) -> None:
    """A line a row, as wide as it is, and the count of each verdict."""
    lines = [["row", "recorded", "measured", "interval", "verdict", ""]]
    for one in verdicts:
        numbers = ["" if value is None else f"{value:.4g}" for value in (one.recorded, one.measured)]
        width = "" if one.half_width is None else f"+-{one.half_width:.3g}"
        lines.append([one.row, *numbers, width, one.word, one.why])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for cells in lines:
        text = "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
        console.print(text.rstrip(), soft_wrap=True)
    counted = [f"{sum(v.word == word for v in verdicts)} {word}" for word in dict.fromkeys(v.word for v in verdicts)]
    console.print(f"{judged}: {', '.join(counted)}", soft_wrap=True)


# The page


def page_lines(table: Table) -> Iterator[str]:
    """The block between the marks: how many seeds there are, and the table."""
    counts = [len(row.recorded(table.judged)) for row in table.rows]
    rows = {
        "are means of three seeds or more": sum(count >= 3 for count in counts),
        "are of one seed or two": sum(0 < count < 3 for count in counts),
        "have not been run": counts.count(0),
    }
    summary = ", ".join(f"{number} of {len(counts)} {text}" for text, number in rows.items() if number)
    fixed, figures = constant_figures(table)
    said = "".join(f" {table.figures[name].heading.capitalize()}: {value}." for name, value in fixed.items())
    yield f"`python benchmarks/reproduce.py {table.name}` runs this table again. Of its rows, {summary}.{said}"
    yield ""
    seeds = {tuple(sorted(row.recorded(table.judged))) for row in table.rows} - {()}
    named = f" {', '.join(map(str, *seeds))}" if len(seeds) == 1 else ""
    by_seed = f"{table.figures[table.judged].heading}, by seed{named}"
    yield f"| {' | '.join([*table.heads, *(table.figures[name].heading for name in figures), by_seed])} |"
    yield "|" + "---|" * (len(table.heads) + len(figures) + 1)
    for row in table.rows:
        cells = [*row.cells, *(mean_of(row, name, table.figures[name]) for name in figures)]
        judged = table.figures[table.judged].format
        each = sorted(row.recorded(table.judged).items())
        own = ", ".join(f"{value:{judged}}" if named else f"{seed}: {value:{judged}}" for seed, value in each)
        yield f"| {' | '.join([*cells, own])} |"


def mean_of(row: Row, name: str, figure: Figure) -> str:
    values = row.recorded(name)
    return f"{fmean(values.values()):{figure.format}}" if values else ""


def constant_figures(table: Table) -> tuple[dict[str, str], list[str]]:
    """Figures with the same mean in all rows of a table, which is said once, and the names of the others."""
    shown = {name: {mean_of(row, name, figure) for row in table.rows} for name, figure in table.figures.items()}
    fixed = {name: means.pop() for name, means in shown.items() if len(means) == 1 < len(table.rows)}
    return fixed, [name for name in table.figures if name not in fixed]


def update_page(table: Table) -> Path:
    """Write the block into its page.

    Raises:
        ConfigError: the page has no marks.
    """
    page = Path(table.page) if Path(table.page).is_absolute() else ROOT / table.page
    begin, end = table.marks
    text = page.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise ConfigError([Problem("NAME", table.name, f"{page} has no marks {begin} and {end}")])
    before, after = text.split(begin)[0], text.split(end)[1]
    lines = "\n".join(page_lines(table))
    page.write_text(f"{before}{begin}\n{lines}\n{end}{after}", encoding="utf-8")
    return page


def keep_results(table: Table, outcomes: dict[str, list[Any]]) -> None:
    """Put results into their rows. They replace older ones of the same seed, also those of another start."""
    for row in table.rows:
        new = {result["seed"]: result for result in outcomes.get(row.name, []) if isinstance(result, dict)}
        kept = {result["seed"]: result for result in row.results} | new
        row.results = [kept[seed] for seed in sorted(kept)]


def mixed_starts(table: Table) -> Iterator[str]:
    """A sentence for each seed whose rows start from different models: they cannot be compared row by row."""
    for seed in table.seeds if table.start else []:
        starts = {row.name: row.recorded(table.start).get(seed) for row in table.rows}
        usual = median_low([start for start in starts.values() if start is not None] or [0.0])
        others = [name for name, start in starts.items() if not _is_same(start, usual)]
        if others:
            yield (
                f"seed {seed}: {', '.join(others)} started from other models than the rest ({table.start} is not "
                f"{usual:g}); measure all rows of a seed on one kind of processor"
            )


# The command


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Run a documented table again, and say for each row whether it agrees with what is recorded, "
        "within an interval of 95% for all rows together. Runs that are there are not made again. Exit status: 0 all "
        "rows that could be compared agree, 1 a row differs or failed or none could be compared.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a table (see --list), or a file of one (.json)")
    parser.add_argument("--list", action="store_true", help="name the tables, or the rows of one, with their seeds")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="seeds to run (default: those recorded)")
    parser.add_argument("--rows", nargs="+", default=[], metavar="TEXT", help="only rows whose name has one of these")
    parser.add_argument("--quick", action="store_true", help="the table's quick rows under its first seed")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further run after this time")
    parser.add_argument("--output", type=Path, help="folder of the runs (default: output/reproduce/NAME)")
    parser.add_argument("--record", action="store_true", help="put what was measured into the table's file and page")
    parser.add_argument("--page", action="store_true", help="run nothing; write the page's block from the table's file")
    return parser


def main(words: Sequence[str]) -> int:
    """Raises ``ConfigError`` for a name or row that is not there."""
    parser = build_parser()
    arguments = parser.parse_args(list(words))
    console = Console(emoji=False, markup=False, highlight=False)
    if arguments.name is None and not arguments.list:
        parser.error(f"name a table: {', '.join(table_names()) or 'there are none'}")
    if arguments.list:
        for line in listing(arguments.name):
            console.print(line, soft_wrap=True)
        return 0
    table = read_table(arguments.name)
    if arguments.page:
        console.print(f"wrote {update_page(table)}", soft_wrap=True)
        return 0
    rows = selected(table, arguments.rows, arguments.quick)
    seeds = arguments.seeds or (table.seeds[:1] if arguments.quick else table.seeds)
    output = (arguments.output or ROOT / "output/reproduce" / table.name).resolve()
    bench = Bench(table, output, time.monotonic() + arguments.seconds)
    outcomes = run_rows(bench, rows, seeds, arguments.jobs)
    verdicts = [judge(table, row, outcomes[row.name], len(rows)) for row in rows]
    show(verdicts, table.figures[table.judged].metric, console)
    if arguments.record:
        keep_results(table, outcomes)
        file = Path(arguments.name) if arguments.name.endswith(".json") else TABLES / f"{table.name}.json"
        write_table(table, file)
        console.print(f"wrote {file} and {update_page(table)}", soft_wrap=True)
        for sentence in mixed_starts(table):
            console.print(sentence, soft_wrap=True)
    outcome = {verdict.word for verdict in verdicts}
    return 0 if "agrees" in outcome and not outcome & {"differs", "failed"} else 1


def selected(table: Table, words: Sequence[str], quick: bool) -> list[Row]:
    rows = [row for row in table.rows if not words or any(word in row.name for word in words)]
    rows = [row for row in rows if row.quick or not quick]
    if not rows:
        names = ", ".join(row.name for row in table.rows if row.quick or not quick)
        raise ConfigError([Problem("--rows", " ".join(words), "no row's name contains that", names)])
    return rows


def listing(name: str | None) -> Iterator[str]:
    if name is None:
        for table in map(read_table, table_names()):
            yield f"{table.name:14s} {len(table.rows)} rows, seeds {', '.join(map(str, table.seeds))}: {table.about}"
        return
    table = read_table(name)
    for row in table.rows:
        seeds = ", ".join(map(str, sorted(row.recorded(table.judged)))) or "none"
        yield f"{row.name:30s} {row.config}  seeds {seeds}{'  (quick)' if row.quick else ''}"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(str(error))
