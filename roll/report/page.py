"""The report: one static HTML file that needs no server, no network and nothing but a browser; and the commands
``roll report`` and ``roll diagnose``.

All data of the file is base64 of zlib streams, which the browser inflates by itself (``DecompressionStream``), the
blocks of samples only when somebody looks at them; an index of numbers answers the filters.  The page's policy
(``Content-Security-Policy``) lets it run its own script, known by its hash, show images that it brings along, and load
nothing; the script writes text only as text.  So what a model has written cannot act in the page.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import logging
import math
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any, TextIO

from roll import __version__
from roll.checkpoint.folders import atomic_file
from roll.config.reading.errors import ConfigError
from roll.report.diagnosis import diagnose
from roll.report.run_files import REPORT_NAME, Run, read_run
from roll.tracking.records import flattened
from roll.tracking.run_record import decoded

logger = logging.getLogger(__name__)


MAX_SAMPLES = 100_000
MAX_CALLS = 200_000  # spans of workers on the timeline; of longer runs the last ones


def write_page(runs: Sequence[Run], file: Path, max_samples: int = MAX_SAMPLES) -> int:
    """Write the report of one or more runs, whole or not at all; the number of samples in it. ``max_samples``: of all
    runs together. Of more, whole steps are left out, evenly over each run, and the page says so."""
    static = resources.files("roll.report") / "static"
    script, style = ((static / name).read_text(encoding="utf-8") for name in ("report.js", "report.css"))
    labels = run_labels(runs)
    allowed_script, allowed_style = (
        base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii") for text in (script, style)
    )
    policy = (
        f"default-src 'none'; script-src 'sha256-{allowed_script}'; style-src 'sha256-{allowed_style}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    title = html.escape(", ".join(labels))
    about = []
    count = 0
    with atomic_file(file) as part, part.open("w", encoding="utf-8", errors="replace") as out:
        out.write(
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title} - report</title>\n<style>{style}</style>\n</head>\n<body>\n"
            '<div id="app"><p>Opening the report needs a browser with scripts switched on.</p></div>\n'
        )
        for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
            index = _Index()
            for block, payload in enumerate(_thinned(run, index, max_samples // len(runs))):
                _data(out, f"s{number}-{block}", payload)
            _json(out, f"i{number}", index.columns())
            # Small copies of the images of prompts by name, PNG in base64.
            images = {name: data for one in run.blocks() for name, data in one.get("images", {}).items()}
            _json(out, f"p{number}", images)
            _json(out, f"m{number}", metric_columns(run))
            _json(out, f"t{number}", _timeline(run))
            about.append(_about(run, label) | {"samples": index.size, "left_out": index.left_out})
            count += index.size
        made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        _json(out, "about", {"runs": about, "version": __version__, "made": made})
        out.write(f"<script>{script}</script>\n</body>\n</html>\n")
    return count


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Names of runs; with as much of their path as tells them apart."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        labels = ["/".join(path[-depth:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def _about(run: Run, label: str) -> dict[str, Any]:
    return {
        "label": label,
        "pipeline": run.pipeline,
        "folder": str(run.folder),
        "outcome": run.about.get("outcome"),
        "began": run.about.get("began"),
        "ended": run.about.get("ended"),
        "steps": len(run.steps),
        "panels": [asdict(panel) for panel in run.panels],
        "config": {key: _shown(value) for key, value in flattened(run.config)},
        "defaults": run.about.get("defaults") or {},
        "findings": [asdict(finding) for finding in diagnose(run)],
    }


def metric_columns(run: Run) -> dict[str, list[list[float | None]]]:
    """By metric its steps and values; null for what is not finite."""
    found: dict[str, list[list[float | None]]] = {}
    for row in run.metrics:
        for name, value in row.items():
            if name in ("step", "time") or not isinstance(value, int | float):
                continue
            steps, values = found.setdefault(name, [[], []])
            steps.append(row["step"])
            values.append(float(f"{value:.6g}") if math.isfinite(value) else None)
    return found


def _shown(value: object) -> Any:
    """A value as JSON has it: NaN and infinities, which browsers do not parse, as texts."""
    try:
        json.dumps(value, default=str, allow_nan=False)
    except ValueError:
        return str(value)
    return value


def _timeline(run: Run) -> dict[str, Any]:
    """Times relative to the first one, in seconds."""
    steps = run.timeline
    if not steps:
        return {"origin": 0, "steps": [], "workers": []}
    origin = min(row["begin"] for row in steps)
    workers = []
    share = MAX_CALLS // max(1, len(run.calls))
    for one in run.calls:
        methods = list(dict.fromkeys(name for name, _, _ in one.spans))
        place = {name: number for number, name in enumerate(methods)}
        spans = [
            [place[name], round(begin - origin, 4), round(end - begin, 4)] for name, begin, end in one.spans[-share:]
        ]
        who = {"role": one.role, "rank": one.rank, "devices": one.devices, "host": one.host}
        workers.append({**who, "methods": methods, "spans": spans})
    rows = [
        {
            "step": row["step"],
            "begin": round(row["begin"] - origin, 4),
            "end": round(row["end"] - origin, 4),
            "phases": [[name, round(begin - origin, 4), round(end - begin, 4)] for name, begin, end in row["phases"]],
        }
        for row in steps
    ]
    return {"origin": origin, "steps": rows, "workers": workers}


_WORDS = ("finish", "domain", "tag", "kind")
_COLUMNS = (
    *_WORDS,
    *("block", "place", "step", "group", "prompt", "score", "reward", "tokens", "error", "logprob"),
    *("mismatch", "advantage", "version"),
)


@dataclass
class _Index:
    """Numbers of every sample, by column; words are places in lists."""

    size: int = 0
    left_out: int = 0
    _columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    _words: dict[str, dict[str, int]] = field(default_factory=lambda: {name: {} for name in _WORDS})

    def add(self, block: int, content: Mapping[str, Any]) -> None:
        prompts = content["prompts"]
        keys = [zlib.crc32(str(prompt.get("text", "")).encode("utf-8", "replace")) for prompt in prompts]
        groups: dict[str, int] = {}
        for place, sample in enumerate(content["samples"]):
            prompt = prompts[sample["prompt"]]
            log_probs = sample.get("log_probs") or sample.get("ref_log_probs")
            mismatch, advantage, version = (sample.get(name) for name in ("mismatch", "advantages", "versions"))
            if isinstance(advantage, list):
                advantage = float(f"{sum(advantage) / max(1, len(advantage)):.4g}")
            row = {
                "finish": sample.get("outcome") or sample.get("finish_reason") or "",
                "domain": prompt.get("domain", ""),
                "tag": prompt.get("tag", ""),
                "kind": f"{content['kind']} {sample['kind']}" if "kind" in sample else content["kind"],
                "block": block,
                "place": place,
                "step": content["step"],
                "group": groups.setdefault(str(sample.get("group", place)), len(groups)),
                "prompt": keys[sample["prompt"]],
                "score": sample.get("score"),
                "reward": sample.get("reward"),
                "tokens": sample.get("response_tokens"),
                "error": 1 if sample.get("error") else 0,
                "logprob": round(sum(log_probs) / len(log_probs)) if log_probs else None,
                "mismatch": max(max(mismatch), -min(mismatch)) if mismatch else None,
                "advantage": advantage,
                "version": min(v for v, _ in version) if isinstance(version, list) else version,
            }
            for name, known in self._words.items():
                row[name] = known.setdefault(str(row[name]), len(known))
            for name, value in row.items():
                self._columns[name].append(value)
        self.size += len(content["samples"])

    def columns(self) -> dict[str, Any]:
        words = {name: list(known) for name, known in self._words.items()}
        return {"size": self.size, "columns": self._columns, "words": words}


def _thinned(run: Run, index: _Index, limit: int) -> Iterator[str]:
    sizes = [len(block["samples"]) for block in run.blocks()]
    total, taken, seen = sum(sizes), 0, 0
    number = 0
    for size, payload in zip(sizes, run.payloads(), strict=False):
        seen += size
        if not size:
            continue  # images, which all samples share
        # Evenly: never more than the share of the limit that the samples so far are due.
        if total > limit and taken + size > seen * limit / total:
            index.left_out += size
            continue
        index.add(number, decoded(payload))
        taken += size
        number += 1
        yield payload


def _json(out: TextIO, name: str, value: object) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    compressed = zlib.compress(text.encode("utf-8", "replace"), 6)
    _data(out, name, base64.b64encode(compressed).decode("ascii"))


def _data(out: TextIO, name: str, data: str) -> None:
    out.write(f'<script type="text/plain" id="{name}">{data}</script>\n')


def write_report(output_dir: Path) -> None:
    """``report.html`` in the folder of the run; errors are logged and do not fail the run."""
    try:
        write_page([read_run(output_dir)], output_dir / REPORT_NAME)
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        logger.warning("the report could not be written: %s: %s", type(error).__name__, error)


def report_command(output_dir: Path) -> list[str]:
    """The command of :func:`write_report`, for a process that has nothing of this one."""
    return [sys.executable, "-m", "roll.report.page", str(output_dir.resolve())]


def report(words: Sequence[str]) -> int:
    """Write the report of one or more runs. Raises ``ConfigError``: a folder that holds no run."""
    parser = argparse.ArgumentParser(
        prog="roll report",
        description="Write one HTML file with everything that runs have recorded: curves, timeline, samples, "
        "configuration, diagnosis. It may be asked for while a run goes on.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="output_dir of a run; several are laid over")
    parser.add_argument("--out", type=Path, help="the file; without it, report.html in the folder of the first run")
    parser.add_argument(
        "--max-samples",
        type=int,
        default=MAX_SAMPLES,
        metavar="N",
        help=f"samples in the file at most, whole steps evenly left out of more (default {MAX_SAMPLES:,})",
    )
    arguments = parser.parse_args(list(words))
    if arguments.max_samples < 1:
        parser.error(f"--max-samples {arguments.max_samples}: must be at least 1")
    runs = [read_run(path) for path in arguments.runs]
    file = arguments.out or runs[0].folder / REPORT_NAME
    count = write_page(runs, file, arguments.max_samples)
    sys.stdout.write(f"{file}  {count:,} samples, {file.stat().st_size / 1e6:.1f} MB\n")
    return 0


def diagnosis(words: Sequence[str]) -> int:
    """Print what is wrong with a run: 0 where no rule finds anything, 1 where one does. Raises ``ConfigError``: a
    folder that holds no run."""
    parser = argparse.ArgumentParser(
        prog="roll diagnose",
        description="Name what is wrong with a run, with evidence and remedy, the most probable cause first. "
        "Exit status: 0 nothing found, 1 something found.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="output_dir of a run, also of one that goes on")
    parser.add_argument("--json", action="store_true", help="a list of findings as JSON")
    arguments = parser.parse_args(list(words))
    run = read_run(arguments.run)
    findings = diagnose(run)
    if arguments.json:
        text = json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False)
    else:
        parts = []
        for one in findings:
            seen = [f"  - {line}" for line in one.evidence]
            parts.append("\n".join([f"{one.title}  ({one.cause})", *seen, f"  remedy: {one.remedy}"]))
        text = "\n\n".join(parts) or f"{run.name}: no rule found anything wrong in {len(run.steps)} steps"
    sys.stdout.write(text + "\n")
    return 1 if findings else 0


if __name__ == "__main__":
    write_report(Path(sys.argv[1]))
