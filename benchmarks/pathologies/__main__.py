"""Measure ``roll diagnose``: seeded pathologies of the tiny example, and healthy runs of it.

    python -m benchmarks.pathologies [NAME ...] [--output DIR]   # run them (all without names), print the table
    python -m benchmarks.pathologies --write                     # and put table and records into the repository
    python -m benchmarks.pathologies --seed 11 --held-out        # runs that no threshold was chosen with

A run that has ended is not made a second time: stopped, or bounded by ``--seconds``, the command goes on where it was;
``--fresh`` forgets what there is.  Needs a clone (runs share a Ray of the test suite) and what
``examples/tiny/warm_start.py`` makes.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.pathologies.cases import HEALTHY, PATHOLOGIES, ROOT, Case
from roll.config.loader import load_config
from roll.report.diagnosis import diagnose
from roll.report.evidence import Finding
from roll.report.run_files import read_run

PAGE = ROOT / "docs/diagnosis.md"
RECORDS = ROOT / "tests/report/records"
BEGIN, END = "<!-- pathologies -->", "<!-- end of pathologies -->"
HELD_OUT = ("<!-- held-out pathologies -->", "<!-- end of held-out pathologies -->")
DONE = "done.json"
"""In the folder of a run that has ended, with the seed that it ran under."""
SAMPLES = "record/samples.jsonl"
RECORDED = ("config.yaml", "record/run.json", SAMPLES, "record/timeline.jsonl", "logs/metrics.jsonl")
CALLS = "logs/workers/*.calls.jsonl"

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled"}
"""Of the shared Ray and of all that join it."""

logger = logging.getLogger("pathologies")


@contextmanager
def shared_ray() -> Iterator[None]:
    """A Ray that all runs join, whose workers are forks of a process that has imported torch."""
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "address"
        command = [sys.executable, "-m", "tests.support.serve_ray", str(file)]
        server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)
        while not file.exists():
            if server.poll() is not None:
                raise RuntimeError("Ray did not start")
            time.sleep(0.05)
        os.environ["RAY_ADDRESS"] = file.read_text()
        yield
        server.communicate(timeout=60)


def run_case(case: Case, output: Path, seed: int | None) -> list[Finding]:
    """Run it, whatever comes of it, and diagnose what it has left."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    try:
        loaded = load_config(None, ROOT / "examples" / case.config, None, case.overrides(output, seed))
        loaded.pipeline.run(loaded)
    except Exception:
        logger.error("%s ended early:\n%s", case.name, traceback.format_exc())
    (output / DONE).write_text(json.dumps({"seed": seed}), encoding="utf-8")
    return diagnose(read_run(output))


def is_done(output: Path, seed: int | None) -> bool:
    """It has been run to its end, with this seed."""
    file = output / DONE
    return file.is_file() and json.loads(file.read_text(encoding="utf-8"))["seed"] == seed


def counts(results: Sequence[tuple[Case, list[Finding]]]) -> str:
    """How often the rules are right, and the runs in which they are not."""
    sick = [(case, found) for case, found in results if case.cause is not None]
    healthy = [(case, found) for case, found in results if case.cause is None]
    wrong = [f"{case.what}: {first(found)}, not `{case.cause}`" for case, found in sick if not is_right(case, found)]
    loud = [f"{case.what}: {first(found)}" for case, found in healthy if found]
    text = (
        f"The right cause is named first in {len(sick) - len(wrong)} of {len(sick)} runs with a seeded pathology; "
        f"nothing is named in {len(healthy) - len(loud)} of {len(healthy)} healthy runs."
    )
    return "\n".join([text, *(f"- {line}" for line in (*wrong, *loud))])


def is_right(case: Case, found: list[Finding]) -> bool:
    return bool(found) and found[0].cause == case.cause


def first(found: list[Finding]) -> str:
    return f"`{found[0].cause}`" if found else "nothing"


def table(results: Sequence[tuple[Case, list[Finding]]]) -> str:
    """As it is in the page."""
    lines = [counts(results), "", "| what is wrong | named first | also named |", "|---|---|---|"]
    for case, found in results:
        if case.cause is not None:
            more = ", ".join(f"`{finding.cause}`" for finding in found[1:])
            lines.append(f"| {case.what} | {first(found)} | {more} |")
    healthy = [f"{case.what} ({case.steps} steps)" for case, _ in results if case.cause is None]
    return "\n".join([*lines, "", f"Healthy runs: {'; '.join(healthy)}."])


def keep_record(name: str, output: Path) -> None:
    """Archive of a run that a test diagnoses again, without a word of where it was made."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    files = [output / part for part in RECORDED] + sorted(output.glob(CALLS))
    with tarfile.open(RECORDS / f"{name}.tar.xz", "w:xz") as archive:
        for file in filter(Path.is_file, files):
            data = file.read_bytes()
            if file != output / SAMPLES:
                for own, other in ((str(output), "output"), (f"{ROOT}/", ""), (socket.gethostname(), "host")):
                    data = data.replace(own.encode(), other.encode())
            entry = tarfile.TarInfo(str(file.relative_to(output)))
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--output", type=Path, help="default: output/pathologies, with the seed if one is named")
    parser.add_argument("--write", action="store_true", help="put the table into docs/diagnosis.md, and the records")
    parser.add_argument(
        "--held-out", action="store_true", help="put the counts into that page, as those of held-out runs"
    )
    parser.add_argument("--seed", type=int, help="of all runs, in place of each one's own: rules not fitted to them")
    parser.add_argument("--again", action="store_true", help="diagnose the runs that are there already, make none")
    parser.add_argument("--fresh", action="store_true", help="make runs again that are there")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further run after this time")
    arguments = parser.parse_args()
    if arguments.output is None:
        arguments.output = ROOT / ("output/pathologies" + (f"-{arguments.seed}" if arguments.seed is not None else ""))
    cases = [case for case in (*PATHOLOGIES, *HEALTHY) if not arguments.names or case.name in arguments.names]
    if not arguments.again:
        run_missing(cases, arguments)
    results = [
        (case, diagnose(read_run(arguments.output / case.name)))
        for case in cases
        if is_done(arguments.output / case.name, arguments.seed)
    ]
    text = table(results)
    sys.stdout.write(f"\n{text}\n")
    if arguments.held_out:
        put_into_page(f"Seed {arguments.seed}. {counts(results)}", *HELD_OUT)
    if arguments.write:
        put_into_page(text, BEGIN, END)
        for case, _ in results:
            keep_record(case.name, arguments.output / case.name)


def run_missing(cases: Sequence[Case], arguments: argparse.Namespace) -> None:
    missing = [case for case in cases if arguments.fresh or not is_done(arguments.output / case.name, arguments.seed)]
    if not missing:
        return
    began = time.monotonic()
    with shared_ray():
        for case in missing:
            if time.monotonic() - began > arguments.seconds:
                break
            found = run_case(case, arguments.output / case.name, arguments.seed)
            named = ", ".join(finding.cause for finding in found) or "nothing"
            sys.stdout.write(f"{case.name}: {named} (expected {case.cause or 'nothing'})\n")
            sys.stdout.flush()


def put_into_page(text: str, begin: str, end: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(begin)[0], page.split(end)[1]
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
