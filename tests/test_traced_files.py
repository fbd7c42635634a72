"""``benchmarks/traced_files.py`` counts what every process of a run calls, in the phase in which it is called."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.traced_files import BEGIN, END, FOLDER, PAGE, PHASES, ROOT, prepare, read, table

PROGRAM = """
from benchmarks.traced_files import _mapped
from roll.config.reading.errors import Problems, count
from pathlib import Path
from threading import Thread
import os

problems = Problems()
phase = _mapped(Path(os.environ["ROLL_TRACE_FOLDER"]))
count(1, "file")
phase[0] = 1
count(1, "file"), count(2, "file"), [count(n, "file") for n in range(3)]
phase[0] = 2
thread = Thread(target=problems.add, args=("key", 1, "rule"))
thread.start()
thread.join()
phase[0] = 0
problems.note("key", "text")
"""


def test_functions_are_counted_by_phase_in_all_threads(tmp_path: Path) -> None:
    environment = os.environ | prepare(tmp_path)
    assert environment[FOLDER] == str(tmp_path)
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, check=True)
    found = read(tmp_path)
    assert found[PHASES[0]] == {"config/reading/errors.py": {"count"}}
    assert found[PHASES[1]] == {"config/reading/errors.py": {"Problems.add"}}
    assert found[PHASES[2]] == {}


def test_the_page_holds_the_table() -> None:
    """Its rows and aims; the counts are those of the last ``python -m benchmarks.traced_files --write``."""
    written = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    counts = r"\d+ \| \d+ \| (\d+) \| \d+"
    assert re.sub(counts, r"\1", written) == re.sub(counts, r"\1", table({name: {} for name in PHASES}))
