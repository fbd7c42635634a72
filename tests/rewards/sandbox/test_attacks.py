"""Programs that attack the host, the worker, or their verdict. None succeeds, and the worker goes on as before."""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path

import pytest

from roll.rewards.sandbox.client import Sandbox
from tests.rewards.sandbox.conftest import Verdict, cases_of

GOOD = "print(int(input()) * 2)"
DOUBLE = {"inputs": ["21"], "outputs": ["42"]}


def dedent(source: str) -> str:
    return textwrap.dedent(source).strip()


RESOURCES = {name: case["program"] for name, case in cases_of("attacks").items() if "program" in case}
RESOURCES |= {
    "nested_brackets": "(" * 100000 + ")" * 100000,
    "a_null_byte": "print(42)\x00",
    "a_lone_surrogate": "print('\ud800')",
}
RESULTS = {name: case["result"] for name, case in cases_of("attacks").items() if "result" in case}


@pytest.mark.parametrize("name", RESOURCES)
def test_what_takes_too_much_or_breaks_scores_nothing(verdict: Verdict, name: str) -> None:
    outcome = verdict(RESOURCES[name], DOUBLE, case_timeout=1.0, memory=2**28)
    assert outcome.passed == 0


def test_an_endless_loop_is_killed_in_time(verdict: Verdict) -> None:
    began = time.monotonic()
    outcome = verdict(
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        DOUBLE,
        case_timeout=0.5,
        wall=90.0,
    )
    assert outcome.timed_out
    assert time.monotonic() - began < 60, "before the limit of all cases together"


@pytest.mark.parametrize("name", RESULTS)
def test_no_result_harms_the_reader(verdict: Verdict, name: str) -> None:
    outcome = verdict(RESULTS[name], ["assert f(2) == 4"], wall=2.0, case_timeout=1.0, memory=2**28, file_size=2**21)
    assert outcome.passed == 0


def test_names_under_the_tests_are_the_real_ones(verdict: Verdict) -> None:
    source = """
        class math:
            isclose = staticmethod(lambda *a, **k: True)
        class pytest:
            approx = staticmethod(lambda x: 5)
        def approx(x): return 5
        def sorted(x): return [1, 2]
        def f(n): return 5
        __all__ = ["math", "approx", "f", "sorted"]
        """
    tests = [
        "assert math.isclose(f(2), 4)",
        "from solution import *\nassert sorted([f(2)]) == [1, 2]",
        "def approx(x): return x\nfrom solution import *\nassert f(2) == approx(4)",
    ]
    assert verdict(dedent(source), tests).passed == 0


def test_a_stateful_response_keeps_nothing_for_the_next_one(verdict: Verdict) -> None:
    for folder in ("/tmp", "/dev/shm"):
        verdict(f"open('{folder}/note', 'w').write('42')", DOUBLE)
        assert verdict(f"print(open('{folder}/note').read())", DOUBLE).passed == 0


@pytest.mark.long
def test_the_worker_is_as_quick_as_before(sandbox: Sandbox, verdict: Verdict) -> None:
    def seconds() -> float:
        began = time.process_time() + zygote_seconds(sandbox)
        for _ in range(10):
            assert verdict(GOOD, DOUBLE).passed == 1
        return time.process_time() + zygote_seconds(sandbox) - began

    verdict(GOOD, DOUBLE)  # which starts its processes
    seconds()
    before = min(seconds(), seconds())
    for name in ("memory", "endless_output", "threads", "a_segmentation_fault"):
        verdict(RESOURCES[name], DOUBLE, case_timeout=1.0, memory=2**28)
    # Processor time, not wall time: other work of this machine does not count.
    assert min(seconds(), seconds()) < 3 * before + 0.1


def zygote_seconds(sandbox: Sandbox) -> float:
    """Processor seconds of the sandbox and all its ended processes."""
    assert sandbox._zygote is not None
    total = 0.0
    for pid in [sandbox._zygote.pid, *children(sandbox._zygote.pid)]:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
