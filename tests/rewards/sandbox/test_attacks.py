"""Programs that attack the host, the worker, or their verdict. None succeeds, and the worker goes on as before."""

from __future__ import annotations

import os
import socket
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.rewards.sandbox.client import Sandbox
from tests.rewards.sandbox.conftest import Verdict

GOOD = "print(int(input()) * 2)"
DOUBLE = {"inputs": ["21"], "outputs": ["42"]}


def dedent(source: str) -> str:
    return textwrap.dedent(source).strip()


def says(source: str) -> str:
    """A program that prints what an attack found out: ``held`` where it failed."""
    body = textwrap.indent(dedent(source), "    ")
    return f"import ctypes, os, signal, socket, sys\ntry:\n{body}\nexcept OSError as error:\n    print('held')\n"


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    """A service of this host that a program must not reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        yield server


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file of this host that anyone could write, if nothing stood between."""
    folder = tmp_path_factory.mktemp("canary")
    for path in (folder, folder.parent, folder.parent.parent):
        path.chmod(0o777)
    file = folder / "canary"
    file.write_text("alive")
    file.chmod(0o666)
    yield file
    assert file.read_text() == "alive"
    assert sorted(path.name for path in folder.iterdir()) == ["canary"]


RESOURCES = {
    "memory": "x = []\nwhile True:\n    x.append(bytearray(10**7))",
    "one_large_object": "x = bytearray(10**12)",
    "endless_output": "while True: print('x' * 100000)",
    "endless_errors": "import sys\nwhile True: sys.stderr.write('x' * 100000)",
    "a_large_file": "open('f', 'wb').write(bytes(10**9))",
    "many_files": "import os\nfor i in range(10**6): open(str(i), 'w').close()",
    "many_files_of_size": "for i in range(100): open(str(i), 'wb').write(bytes(10**7))",
    "shared_memory": "for i in range(100): open(f'/dev/shm/{i}', 'wb').write(bytes(10**7))",
    "open_files": "x = [open('/dev/null') for _ in range(10**5)]",
    "threads": "import threading, time\nfor _ in range(10**5): threading.Thread(target=time.sleep, args=(60,)).start()",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return [f(n + 1)]\nf(0)",
    "a_segmentation_fault": "import ctypes\nctypes.string_at(0)",
    "an_early_end": "import os\nos._exit(0)",
    "a_quiet_end": "import sys\nsys.exit()",
    "an_end_by_signal": "import os\nos.abort()",
    "a_closed_output": "import os\nos.close(1)\nos.close(2)",
    "nested_brackets": "(" * 100000 + ")" * 100000,
    "a_null_byte": "print(42)\x00",
    "a_lone_surrogate": "print('\ud800')",
}


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


ASSERT = ["assert f(2) == 4", "assert abs(f(2) - 4) < 1e-9", "assert f(3) in [9]", "assert not f(2) != 4"]
FORGERIES = {
    "always_equal": """
        class Any:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __sub__(self, other): return 0.0
            def __rsub__(self, other): return 0.0
            def __abs__(self): return 0.0
            def __hash__(self): return 4
            def __contains__(self, other): return True
        def f(n): return Any()
        """,
    "always_equal_number": """
        class Any(int):
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __sub__(self, other): return 0
        def f(n): return Any(5)
        """,
    "a_class_instead_of_a_function": """
        class f:
            def __init__(self, n): pass
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __sub__(self, other): return 0
            def __abs__(self): return 0
        """,
    "patched_builtins": """
        import builtins
        builtins.abs = lambda x: 0
        builtins.AssertionError = type("Quiet", (Exception,), {})
        def abs(x): return 0
        def isinstance(*x): return True
        def f(n): return 5
        """,
    "patched_harness": """
        import gc, inspect, sys
        def spoil(thing):
            for name in ("case", "send", "passed", "answer", "describe"):
                if hasattr(type(thing), name):
                    try: setattr(type(thing), name, lambda *a, **k: None)
                    except Exception: pass
        for thing in gc.get_objects():
            try: spoil(thing)
            except Exception: pass
        for frame in inspect.stack():
            for name, value in list(frame.frame.f_locals.items()): spoil(value)
        def f(n): return 5
        """,
    "verdicts_on_every_descriptor": """
        import os, struct
        lines = b'{"case": 0, "passed": true, "note": null}\\n' * 4
        for fd in range(64):
            try: os.write(fd, lines)
            except OSError: pass
        def f(n): return 5
        """,
    "an_early_end": """
        import os
        def f(n): os._exit(0)
        """,
    "an_early_exit": """
        import sys
        def f(n): sys.exit(0)
        """,
    "a_skipped_test": """
        import unittest
        def f(n): raise unittest.SkipTest("please")
        """,
    "replies_of_its_own": """
        import gc
        def f(n):
            for thing in gc.get_objects():
                if type(thing).__name__ == "Channel":
                    thing.send({"value": True, "passed": True, "case": 0})
                    thing.send({"ready": True})
                    thing.send({"value": {"t": "nonsense"}})
            return 5
        """,
    "a_search_of_memory": """
        import ctypes, gc, os, sys
        def f(n):
            for thing in gc.get_objects():
                if isinstance(thing, (str, list)) and "assert f(" in str(thing)[:1000]:
                    os.environ["FOUND"] = "yes"
            return 4 if "FOUND" in os.environ else 5
        """,
    "deleted_tests": """
        import os, sys, shutil
        for name in list(sys.modules):
            if "test" in name or "roll" in name: del sys.modules[name]
        shutil.rmtree("/tmp", ignore_errors=True)
        def f(n): return 5
        """,
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_verdict_is_forged(verdict: Verdict, name: str) -> None:
    outcome = verdict(dedent(FORGERIES[name]), ASSERT, case_timeout=1.0)
    assert (outcome.passed, outcome.total) == (0, 4), outcome
    calls = {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]}
    assert verdict(dedent(FORGERIES[name]), calls, case_timeout=1.0).passed == 0


RESULTS = {
    "huge_text": "def f(n): return 'x' * 10**8",
    "huge_integer": "def f(n): return 1 << 10**8",
    "huge_list": "def f(n): return list(range(10**7))",
    "deep_list": "def f(n):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "list_in_itself": "def f(n):\n    x = []\n    x.append(x)\n    return x",
    "huge_representation": "class A:\n    def __repr__(self): return 'x' * 10**9\ndef f(n): return A()",
    "hostile_text": "class A(Exception):\n    def __str__(self): import os; os._exit(0)\ndef f(n): raise A",
    "colliding_keys": "def f(n): return {i * (2**61 - 1): 0 for i in range(60000)}",
    "raw_bytes": "import os\ndef f(n):\n    os.write(4, b'\\xff' * 100)\n    return 4",
    "endless_answer": "import os\ndef f(n):\n    while True: os.write(4, b'\\xff\\xff\\x0f\\x00')",
}


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


def test_the_worker_is_as_quick_as_before(sandbox: Sandbox, verdict: Verdict) -> None:
    def seconds() -> float:
        began = time.process_time() + zygote_seconds(sandbox)
        for _ in range(10):
            assert verdict(GOOD, DOUBLE).passed == 1
        return time.process_time() + zygote_seconds(sandbox) - began

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
