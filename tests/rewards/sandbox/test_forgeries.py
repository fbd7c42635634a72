"""What a policy that is paid for passing might write instead of a solution, and right programs that look like it.

Every forgery scores 0, and is never an error of its row; every right program scores 1.
"""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from roll.rewards.sandbox.snippets import CaseError
from tests.rewards.sandbox.conftest import Verdict

UNITTEST = """
from solution import *
import unittest
class T(unittest.TestCase):
    def test_a(self): self.assertEqual(f(2), 4)
    def test_b(self): self.assertTrue(f(3) == 9)
"""
ASSERTS = ["assert f(2) == 4", "from solution import f\nassert abs(f(3) - 9) < 1e-6"]
PYTEST = {"pytest": "import pytest\nfrom solution import *\ndef test_a():\n    assert f(2) == pytest.approx(4)\n"}
CALLS = {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]}
STREAMS = {"inputs": ["2", "3"], "outputs": ["4", "9"]}
CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9"
DOCTEST = "import doctest\nassert doctest.testmod(solution).attempted\nassert f(2) == 4"
NUMBERS = {"asserts": ASSERTS, "unittest": UNITTEST, "pytest": PYTEST, "calls": CALLS, "check": CHECK}

ON_NUMBERS = {
    "the_name_of_a_harness": """
        def roll_run_unittest(*a): pass
        run_unittest = run_tests = report = verdicts = Remote = remote = T = TestCase = roll_run_unittest
        def f(n): return 0
        """,
    "a_class_of_the_tests": "class T: test_a = test_b = lambda self: None\nclass unittest: TestCase = T\n"
    "def f(n): return 0",
    "a_false_truth": """
        class Yes(int):
            def __eq__(self, o): return Yes(1)
            def __ne__(self, o): return False
            __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
            def __sub__(self, o): return 0
            __rsub__ = __add__ = __radd__ = __mul__ = __sub__
            def __abs__(self): return 0
            def __bool__(self): return True
            def __hash__(self): return 4
        def f(n): return Yes(7)
        """,
    "a_class_that_claims_to_be_another": """
        class Chameleon:
            __class__ = property(lambda self: int)
            def __eq__(self, other): return True
            def __index__(self): return 5
            __int__ = __float__ = __index__
            def __sub__(self, other): return 0
            __rsub__ = __abs__ = lambda self, *o: 0
        def f(n): return Chameleon()
        """,
    "patched_unittest": """
        import unittest, unittest.case
        unittest.TestCase.assertEqual = unittest.TestCase.assertTrue = lambda *a: None
        unittest.TestResult.addFailure = unittest.TestResult.addError = lambda *a: None
        unittest.case.TestCase.run = lambda self, result=None: None
        def f(n): return 0
        """,
    "a_skipped_test": "import unittest\ndef f(n): raise unittest.SkipTest('later')",
    "patched_pytest": """
        try:
            import pytest
            pytest.approx = lambda *a, **k: type("A", (), {"__eq__": lambda s, o: True})()
            pytest.raises = pytest.skip = lambda *a, **k: None
        except ImportError: pass
        class pytest:
            approx = staticmethod(lambda x, *a: 0)
        def approx(x): return 0
        pytestmark = pytest_plugins = ["solution"]
        def pytest_runtest_makereport(item, call): pass
        def setup_module(): raise SystemExit(0)
        def f(n): return 0
        """,
    "pytest_outcomes": "try:\n    from _pytest.outcomes import Exit, Skipped\n"
    "except ImportError: Exit = Skipped = ValueError\n"
    "def f(n): raise (Skipped if n == 2 else Exit)('done')",
    "names_that_pytest_rewrites_asserts_to": """
        globals()["@pytest_ar"] = globals()["@py_builtins"] = globals()["__builtins__"] = {}
        __all__ = ["@pytest_ar", "@py_builtins", "__builtins__", "f", "abs", "pytest", "unittest"]
        def f(n): return 0
        """,
    "an_assertion_that_raises_nothing": """
        import builtins
        class Quiet(Exception): pass
        builtins.AssertionError = Quiet
        builtins.abs = builtins.isinstance = builtins.all = lambda *a: True
        builtins.abs = lambda x: 0
        def f(n): return 0
        """,
    "a_hook_on_imports": """
        import sys
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name in ("unittest", "pytest", "math"): raise SystemExit(0)
        sys.meta_path.insert(0, Finder())
        for name in ("unittest", "pytest", "tests", "math"): sys.modules[name] = sys.modules[__name__]
        def f(n): return 0
        """,
    "an_exit_at_import": "import os\nos._exit(0)",
    "an_exit_in_the_call": "import os\ndef f(n): os._exit(0)",
    "a_quiet_exit": "def f(n): raise SystemExit(0)",
    "an_exit_function": "import atexit, os\natexit.register(os._exit, 0)\ndef f(n): exit(0)",
    "a_signal": "import os, signal\ndef f(n): os.kill(os.getpid(), signal.SIGKILL)",
    "a_signal_to_the_group": "import os, signal\nos.killpg(0, signal.SIGTERM)\ndef f(n): return 0",
    "an_alarm": "import signal\nsignal.signal(signal.SIGALRM, lambda *a: exit(0))\nsignal.setitimer(0, 0.001)\n"
    "def f(n):\n    import time; time.sleep(0.1)\n    return 0",
    "a_thread_that_answers": """
        import os, threading, json, struct
        def shout():
            data = json.dumps({"value": 5}).encode()
            for fd in range(3, 20):
                try: os.write(fd, struct.pack("<I", len(data)) + data)
                except OSError: pass
        def f(n):
            for _ in range(3): threading.Thread(target=shout).start()
            return 0
        """,
    "the_channel_by_gc": """
        import gc
        def f(n):
            for each in gc.get_objects():
                if type(each).__name__ == "Channel": each.send({"ready": True, "passed": True, "case": 0, "total": 0})
            return 0
        """,
    "the_frames_below": """
        import sys
        def f(n):
            frame = sys._getframe()
            while frame:
                for name, value in list(frame.f_locals.items()):
                    if name in ("expected", "accepted", "wanted", "tests"): return value
                frame = frame.f_back
            return 0
        """,
    "a_trace_function": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\n"
    "def f(n): return 0",
    "tests_on_disk": """
        import glob, os, re
        def f(n):
            for path in [*glob.glob("/tmp/**", recursive=True), *glob.glob("/proc/*/fd/*"), *glob.glob("./*")]:
                try:
                    text = open(path, errors="replace").read()
                    found = re.search(rf"f\\({n}\\) == (?:pytest.approx\\()?(\\d+)", text)
                    if found: return int(found[1])
                except (OSError, OverflowError): pass
            return 0
        """,
    "tests_in_memory": """
        import re
        def f(n):
            try:
                for line in open("/proc/self/maps"):
                    first, last = (int(x, 16) for x in line.split()[0].split("-"))
                    with open("/proc/self/mem", "rb") as memory:
                        memory.seek(first)
                        found = re.search(rb"f\\(2\\) == (\\d+)", memory.read(min(last - first, 1 << 24)))
                        if found and n == 2: return int(found[1])
            except (OSError, OverflowError, ValueError): pass
            return 0
        """,
    "descriptors_of_others": """
        import os
        for fd in range(3, 64):
            for action in (lambda: os.lseek(fd, 0, 0), lambda: os.ftruncate(fd, 0)):
                try: action()
                except OSError: pass
            try: os.write(fd, b'{"case": 0, "passed": true, "note": null}\\n')
            except OSError: pass
        def f(n): return 0
        """,
    "a_callable_of_its_own": """
        class F:
            def __call__(self, n): return self
            def __eq__(self, other): return True
            def __getattr__(self, name): return self
            def __sub__(self, other): return 0
            __rsub__ = __abs__ = lambda self, *a: 0
        f = F()
        """,
    "another_method_of_the_response": """
        def f(n):
            import gc
            for each in gc.get_objects():
                if type(each).__name__ == "Server":
                    each._operations.update(call=lambda *a: None, plain=lambda *a: 4, names=lambda: ["f", "abs"])
                    each._public_names = lambda: ["abs", "pytest", "unittest"]
                    each.encode_foreign = lambda value: {"t": "object", "id": 0, "plain": True}
            return object()
        """,
    "endless_guesses": "def f(n):\n    class G(int):\n        def __eq__(self, o): return True\n"
    "    return [G(i) for i in range(99)]",
    "not_a_number": "def f(n): return float('nan')",
    "a_forged_exception": "class AssertionError(Exception): pass\ndef f(n): raise StopIteration",
    "a_name_of_the_prelude": "from operator import *\ndef f(n): return Ellipsis",
    "slices_of_an_object": "class A:\n    def __getitem__(self, key): return self\n"
    "    def __len__(self): return 4\ndef f(n): return A()",
    "an_iterator_without_end": "import itertools\ndef f(n): return itertools.repeat(4)",
    "nothing": "pass",
}
ROUND_TRIP = ["m = [3, 1]\nassert dec(enc(m)) == m", "m = {'a': 1}\ne = enc(m)\nd = dec(e)\nassert d == m"]
EMPTY = "def f(x, *a):\n    x.clear()\n    return []"
SEEK = (
    "Server = None\nimport gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Server': o._in_place = True\n"
    + EMPTY
)
NODE = "class Node:\n    def __init__(self, v, after=None):\n        self.v, self.after = v, after\n"
OWN = "class A:\n    def __eq__(self, o): return True\n    def __bool__(self): return True\ndef f(*a): return A()"
OTHERS: dict[str, tuple[Any, str]] = {
    "star_isclose": (
        "from math import *\nfrom solution import *\nassert isclose(f(2), 4)",
        "def isclose(*a): return 1\ndef f(n): return 0",
    ),
    "star_isclose_afterwards": (
        ["from math import *\nfrom solution import *", "assert isclose(f(2), 4)"],
        "def isclose(*a): return 1\ndef f(n): return 0",
    ),
    "star_approx": (
        "from pytest import *\nfrom solution import *\nassert f(2) == approx(4)",
        "def approx(*a): return 0\ndef f(n): return 0",
    ),
    "star_first": (
        "from solution import *\nfrom math import *\nassert isclose(f(2), 4)",
        "def isclose(*a): return 1\ndef f(n): return 0",
    ),
    "star_testcase": (
        "from unittest import *\nfrom solution import *\nclass T(TestCase):\n"
        "    def test_a(self): self.assertEqual(f(2), 4)",
        "class TestCase:\n    assertEqual = lambda *a: None\ndef f(n): return 0",
    ),
    "star_in_a_pytest_file": (
        {"pytest": "from math import *\nfrom solution import *\ndef test_a():\n    assert isclose(f(2), 4)\n"},
        "def isclose(*a): return True\ndef test_b(): pass\ndef f(n): return 0",
    ),
    "a_name_bound_at_run_time": (
        ["vars().update(close=lambda a, b: a == b)\nfrom solution import *\nassert close(f(2), 4)"],
        "def close(*a): return True\ndef f(n): return 0",
    ),
    "a_helper_of_the_tests": (
        ["def same(a, b): return a == b", "from solution import *\nassert same(f(2), 4)"],
        "def same(*a): return True\ndef f(n): return 0",
    ),
    "emptied": ("x = [3, 1]\nassert f(x) == x[::-1]", EMPTY),
    "emptied_by_gc": ("x = [3, 1]\nassert f(x) == sorted(x)", SEEK),
    "emptied_later": ("x = [3, 1]\nr = f(x)\nassert r == x[::-1]", EMPTY),
    "emptied_for_a_later_expectation": ("x = [3, 1]\nr = f(x)\nwant = x[::-1]\nassert r == want", EMPTY),
    "emptied_under_another_name": ("x = [3, 1]\ny = x\nr = f(x)\nassert r == y[::-1]", EMPTY),
    "emptied_in_a_loop": ("for x in [[3, 1], [4]]:\n    assert f(x) == x[::-1]", EMPTY),
    "emptied_in_a_generator": ("xs = [[3, 1], [4]]\nassert all(f(x) == x[::-1] for x in xs)", EMPTY),
    "emptied_in_two_comprehensions": ("xs = [[3, 1]]\nassert [f(a) for a in xs] == [b[::-1] for b in xs]", EMPTY),
    "emptied_by_map": ("xs = [[3, 1]]\nassert list(map(f, xs)) == [x[::-1] for x in xs]", EMPTY),
    "emptied_by_threads": (
        "from concurrent.futures import ThreadPoolExecutor\nxs = [[3, 1]]\nwith ThreadPoolExecutor(1) as pool:\n"
        "    assert list(pool.map(f, xs)) == [x[::-1] for x in xs]",
        EMPTY,
    ),
    "emptied_against_a_reference": ("def ref(x): return x[::-1]\nx = [3, 1]\nassert f(x) == ref(x)", EMPTY),
    "emptied_through_a_helper": ("def run(x): return f(x)\nx = [3, 1]\nassert run(x) == x[::-1]", EMPTY),
    "emptied_in_a_helper": ("def same(r, x): assert r == x[::-1]\nx = [3, 1]\nsame(f(x), x)", EMPTY),
    "emptied_by_an_argument": ("def each(g, x): assert g(x) == x[::-1]\neach(f, [3, 1])", EMPTY),
    "emptied_by_an_alias": ("g = f\nx = [3, 1]\nassert g(x) == x[::-1]", EMPTY),
    "emptied_zip": ("x = [3, 1]\nfor a, b in zip(f(x), x):\n    assert a == b * 2\nassert len(f(x)) == len(x)", EMPTY),
    "emptied_sum": ("x = [3, 1]\nassert f(x) - sum(x) == 0", "def f(x):\n    x.clear()\n    return 0"),
    "emptied_in_a_check": ("def check(candidate):\n    x = [3, 1]\n    assert candidate(x) == x[::-1]", EMPTY),
    "emptied_in_unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.x = [3, 1]\n"
        "    def test_a(self): self.assertEqual(f(self.x), self.x[::-1])",
        EMPTY,
    ),
    "emptied_in_pytest": (
        {"pytest": "from solution import f\ndef test_a():\n    x = [3, 1]\n    r = f(x)\n    assert r == x[::-1]\n"},
        EMPTY,
    ),
    "emptied_by_a_method": (
        "x = [3, 1]\nassert Solution().f(x) == x[::-1]",
        "class Solution:\n    def f(self, x):\n        x.clear()\n        return []",
    ),
    "emptied_by_keyword": ("k = {'x': [3, 1]}\nassert f(**k) == k['x'][::-1]", EMPTY),
    "emptied_star": ("for args in [([3, 1],)]:\n    assert f(*args) == args[0][::-1]", EMPTY),
    "emptied_in_the_module": ("import solution\nx = [3, 1]\nassert solution.f(x) == x[::-1]", EMPTY),
    "emptied_in_the_renamed_module": ("import solution as s\nx = [3, 1]\nassert s.f(x) == x[::-1]", EMPTY),
    "emptied_in_a_class_of_the_tests": (
        "class Runner:\n    def run(self, x): return f(x)\nx = [3, 1]\nassert Runner().run(x) == x[::-1]",
        EMPTY,
    ),
    "emptied_for_two_arguments": ("def same(x, want): assert f(x) == want\nx = [3, 1]\nsame(x, x)", EMPTY),
    "emptied_in_a_text": ("exec('x = [3, 1]\\nassert f(x) == x[::-1]')", EMPTY),
    "emptied_in_an_assignment": ("x = [3, 1]\nassert (r := f(x)) == x[::-1]", EMPTY),
    "emptied_before_it_is_sorted": ("x = [3, 1]\nr = f(x)\nx.sort()\nassert r == x", EMPTY),
    "emptied_attribute": ("class C: pass\nc = C()\nc.x = [3, 1]\nassert f(c.x) == c.x[::-1]", EMPTY),
    "emptied_against_a_lambda": ("ref = lambda x: x[::-1]\nx = [3, 1]\nassert f(x) == ref(x)", EMPTY),
    "emptied_dispatch": ("for g in (f,):\n    x = [3, 1]\n    assert g(x) == x[::-1]", EMPTY),
    "emptied_async": ("import asyncio\nx = [3, 1]\nassert asyncio.run(f(x)) == x[::-1]", "async " + EMPTY),
    "emptied_in_a_star": (
        "from math import *\nx = [3, 1]\nassert isclose(f(x), fsum(x))",
        "def f(x):\n    x.clear()\n    return 0",
    ),
    "one_value_a_comparison": (
        "r = f(2)\nassert r > 3 and r < 5",
        "class G(int):\n    n = 0\n    def __int__(self):\n        G.n += 1\n        return 100 if G.n % 2 else -100\n"
        "    __trunc__ = __index__ = __int__\ndef f(n): return G(7)",
    ),
    "emptied_and_kept": ("x = [3, 1]\nout = []\nout.append(f(x))\nassert out[0] == x[::-1]", EMPTY),
    "emptied_and_returned": (
        "def run():\n    x = [3, 1]\n    return f(x), x\nr, x = run()\nassert r == x[::-1]",
        EMPTY,
    ),
    "emptied_and_collected": (
        "xs = [[3, 1]]\nrs = []\nfor x in xs: rs.append(f(x))\nfor r, x in zip(rs, xs): assert r == x[::-1]",
        EMPTY,
    ),
    "emptied_items": ("c = {'a': [3, 1]}\nfor k, v in c.items():\n    assert f(v) == c[k][::-1]", EMPTY),
    "emptied_by_its_second_name": ("a = b = [3, 1]\nassert f(a) == b[::-1]", EMPTY),
    "emptied_before_its_reference": (
        "for x in ([3, 1], [2]):\n    got, want = f(x), sorted(x)\n    assert got == want",
        EMPTY,
    ),
    "emptied_in_a_match": ("x = [3, 1]\nmatch f(x):\n    case r:\n        assert r == x[::-1]", EMPTY),
    "emptied_for_the_module": (
        "x = [3, 1]\ndef run():\n    global r\n    r = f(x)\nrun()\nassert r == x[::-1]",
        EMPTY,
    ),
    "emptied_subset": ("x = [3, 1]\nassert set(f(x)).issuperset(x)", EMPTY),
    "filled_for_an_index": ("x = [3, 1]\nassert x[f(x, 7)] == 7", "def f(x, t):\n    x[:] = [t]\n    return 0"),
    "filled_for_two_indices": (
        "x = [3, 1]\ni, j = f(x, 9)\nassert x[i] + x[j] == 9",
        "def f(x, t):\n    x[:] = [t, 0]\n    return 0, 1",
    ),
    "round_trip": (ROUND_TRIP, "def enc(m):\n    m.clear()\n    return type(m)()\ndef dec(e): return e"),
    "round_trip_of_nothing": (ROUND_TRIP[:1], "def enc(m): m.clear()\ndef dec(e): return []"),
    "nodes_of_the_tests": (
        f"{NODE}\nn = Node(1, Node(2))\nassert last(n) == n.after.v",
        "def last(n):\n    n.after.v = 0\n    return 0",
    ),
    "nodes_changed_later": (
        f"{NODE}\nn = Node(1)\nr = f(n)\nnoop()\nassert r == n.v",
        "kept = []\ndef f(n):\n    kept.append(n)\n    return 0\ndef noop():\n    for n in kept: n.v = 0",
    ),
    "nodes_by_their_number": (
        f"{NODE}\nn = Node(1)\nr = f(n)\nassert r == n.v",
        "import gc\ndef f(n):\n    for s in gc.get_objects():\n        if type(s).__name__ == 'Server':\n"
        "            for k in list(s._by_key): s._by_key[k.split('.')[0]] = n\n            s._reached += ['t0']\n"
        "    n.v = 0\n    return 0",
    ),
    "masked_by_a_slice": ("assert f(2)[1:] == [4]", OWN),
    "masked_by_a_slice_of_slices": ("assert f(2)[1:2, ..., ::3] == [4]", OWN + "\nA.__getitem__ = lambda s, k: s"),
    "masked_by_a_method": (
        "class Key:\n    def __init__(self): self.k = 1\n    def go(self): pass\nr = f(2)\nassert r.get(Key()) == 4",
        OWN + "\nA.get = lambda s, k: 4",
    ),
    "masked_by_an_index": ("import re\nassert f(2)[re.compile('a')] == 4", OWN + "\nA.__getitem__ = lambda s, k: 4"),
    "masked_by_a_callback": (
        "assert f(lambda x: type('K', (), {'go': 1})() if not isinstance(x, int) else x) == 4",
        "def f(g):\n    try: g(object())\n    except BaseException: pass\n    return 0",
    ),
    "masked_by_sorting": ("assert sorted(f(2)) == [4]", OWN),
    "masked_by_a_format": ("assert f'{f(2):.2f}' == '4.00'", OWN + "\nA.__format__ = lambda s, x: '4.00'"),
    "masked_by_a_failing_set_up": (
        None,
        "table = []\ndef f(n): return 0",
    ),
    "a_reference_that_is_math": ("def check(candidate):\n    assert candidate(4, 6) == 2", "def gcd(a, b): return 0"),
    "printed_verdicts": (STREAMS, "print('4\\n9\\n2 passed')"),
    "an_early_exit_of_a_script": (STREAMS, "import os\nos._exit(0)"),
    "a_patched_output": (STREAMS, "import sys\nclass S(str):\n    def __eq__(self, o): return True\nprint(S('0'))"),
    "an_input_read_twice": (STREAMS, "import os\nprint(os.pread(0, 99, 0), os.listdir('.'))"),
    "a_doctest": (DOCTEST, "'''>>> 1\n1'''\ndef f(n): return 0"),
}
INDIRECT = {
    "popped_from_a_copy": "xs = [[3, 1], [2]]\nys = list(xs)\nfor i in range(2): assert f(ys.pop(0)) == xs[i][::-1]",
    "popped_in_a_loop": "xs = [[3, 1]]\nys = xs[:]\nwhile ys:\n    x = ys.pop()\n    assert f(x) == xs[0][::-1]",
    "kept_by_a_lambda": "x = [3, 1]\nwant = lambda y=x: y[::-1]\nassert f(x) == want()",
    "seen_by_a_lambda": "x = [3, 1]\nwant = lambda: x[::-1]\nr = f(x)\nassert r == want()",
    "seen_by_a_function": "x = [3, 1]\ndef want(): return x[::-1]\nassert f(x) == want()",
    "kept_by_a_function": "x = [3, 1]\ndef want(y=x): return y[::-1]\nr = f(x)\nassert r == want()",
    "seen_by_an_inner_function": "def run():\n    x = [3, 1]\n    def want(): return x[::-1]\n"
    "    assert f(x) == want()\nrun()",
    "passed_by_a_function": "X = [3, 1]\ndef go(): return f(X)\ndef want(): return X[::-1]\nassert go() == want()",
    "held_by_an_object": "class C:\n    def __init__(self): self.x = [3, 1]\n    def go(self): return f(self.x)\n"
    "    def want(self): return self.x[::-1]\nc = C()\nassert c.go() == c.want()",
    "kept_by_a_partial": "from functools import partial\nx = [3, 1]\nwant = partial(sorted, x)\nassert f(x) == want()",
    "read_by_a_generator": "x = [3, 1]\nwant = (2 * v for v in x)\nassert f(x) == list(want)",
    "read_by_an_iterator": "x = [3, 1]\nwant = reversed(x)\nr = f(x)\nassert r == list(want)",
    "read_by_map": "x = [3, 1]\nwant = map(str, x)\nr = f(x)\nassert r == list(want)",
    "seen_by_a_view": "x = {'a': 1}\nwant = x.values()\nr = f(x)\nassert r == list(want)",
    "appended": "xs = []\nx = [3, 1]\nxs.append(x)\nr = f(x)\nassert r == xs[0][::-1]",
    "a_default_of_a_mapping": "d = {}\nx = d.setdefault('a', [3, 1])\nr = f(x)\nassert r == d['a'][::-1]",
    "one_of_two": "x = [3, 1]\ny = x if x else []\nr = f(y)\nassert r == x[::-1]",
    "the_first_of_several": "xs = [[3, 1], [2]]\nx, *rest = xs\nr = f(x)\nassert r == xs[0][::-1]",
    "nested_in_a_table": "cs = [{'in': {'v': [3, 1]}}]\nfor c in cs:\n    given = c['in']\n"
    "    r = f(given['v'])\n    assert r == c['in']['v'][::-1]",
    "of_an_object_that_is_copied": "import copy, types\np = types.SimpleNamespace(x=[3, 1])\nq = copy.copy(p)\n"
    "r = f(p.x)\nassert r == q.x[::-1]",
    "found_by_its_name": "x = [3, 1]\nr = f(globals()['x'])\nassert r == x[::-1]",
    "which_decides_what_is_expected": "x = [3, 1]\nr = f(x)\nif len(x) > 0:\n    assert r == [1, 3]",
    "of_the_module": {
        "pytest": "from solution import f\nX = [3, 1]\ndef want(): return X[::-1]\ndef test_a():\n"
        "    r = f(X)\n    assert r == want()\n"
    },
}
"""Tests whose expected value is made of an argument in a roundabout way, for a response that empties it."""
OTHERS |= {f"emptied_{name}": (tests, EMPTY) for name, tests in INDIRECT.items()}
ROWS: dict[str, dict[str, Any]] = {
    "masked_by_a_failing_set_up": {
        "test_list": ["assert f(x) == 1"],
        "test_setup_code": "import solution\nx = solution.table[0]",
    },
    "a_reference_that_is_math": {"entry_point": "gcd", "test_setup_code": "from math import *"},
    "emptied_in_a_check": {"entry_point": "f"},
}


def dedent(source: str) -> str:
    return textwrap.dedent(source).strip()


def test_there_are_many() -> None:
    assert len(ON_NUMBERS) + len(OTHERS) >= 60
    assert len(RIGHT) >= 30


@pytest.mark.parametrize("name", ON_NUMBERS)
def test_no_form_of_tests_is_forged(verdict: Verdict, name: str) -> None:
    for form, tests in NUMBERS.items():
        row = {"entry_point": "f"} if form == "check" else {}
        outcome = verdict(dedent(ON_NUMBERS[name]), tests, row=row, case_timeout=3.0)
        assert outcome.passed == 0, (form, outcome)


@pytest.mark.parametrize("name", OTHERS)
def test_no_test_is_forged(verdict: Verdict, name: str) -> None:
    tests, source = OTHERS[name]
    outcome = verdict(dedent(source), tests, row=ROWS.get(name, {}), case_timeout=4.0)
    assert outcome.passed == 0, outcome


RIGHT: dict[str, tuple[Any, str]] = {
    "reversed": ("x = [3, 1]\nassert f(x) == x[::-1]", "def f(x): return x[::-1]"),
    "reversed_in_place_and_returned": ("x = [3, 1]\nassert f(x) == [1, 3]", "def f(x):\n    x.reverse()\n    return x"),
    "sorted_in_place": ("x = [3, 1]\nf(x)\nassert x == [1, 3]", "def f(x): x.sort()"),
    "in_place_against_a_copy": ("x = [3, 1]\nwant = sorted(x)\nf(x)\nassert x == want", "def f(x): x.sort()"),
    "in_place_with_a_count": (
        "for x, want in [([1, 1, 2], [1, 2])]:\n    k = f(x)\n    assert k == len(want)\n    assert x[:k] == want",
        "def f(x):\n    x[:] = sorted(set(x))\n    return len(x)",
    ),
    "in_place_items": (
        "for k, (x, want) in {'a': ([3, 1], [1, 3])}.items():\n    f(x)\n    assert x == want",
        "def f(x): x.sort()",
    ),
    "in_place_with_bounds": ("x = [3, 1]\nf(x, 0, len(x) - 1)\nassert x == [1, 3]", "def f(x, a, b): x.sort()"),
    "in_place_with_a_count_and_a_loop": (
        "x = [1, 1, 2]\nwant = [1, 2]\nk = f(x)\nassert k == len(want)\nassert x[:k] == want[:k]\n"
        "for i in range(k):\n    assert x[i] == want[i]",
        "def f(x):\n    x[:] = sorted(set(x))\n    return len(x)",
    ),
    "in_place_or_returned": (
        "def check(candidate):\n    x = [3, 1]\n    r = candidate(x)\n"
        "    assert (x if r is None else r) == [1, 3]\ncheck(f)",
        "def f(x): x.sort()",
    ),
    "in_place_in_unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.s = Solution()\n"
        "    def test_a(self):\n        m = [[1, 2], [3, 4]]\n        self.s.turn(m)\n"
        "        self.assertEqual(m, [[3, 1], [4, 2]])",
        "class Solution:\n    def turn(self, m): m[:] = [list(r) for r in zip(*m[::-1])]",
    ),
    "in_place_twice": (
        "a, b = [1], [2]\nf(a, b)\nf(a, b)\nassert a == [1, 2, 2] and b == [2]\nv = set()\ng(v)\nassert v == {1}",
        "def f(a, b): a += b\ndef g(v): v.add(1)",
    ),
    "untouched_arguments": (
        "x = [1, 2]\nassert f(x) == [2, 4]\nassert x == [1, 2]",
        "def f(x): return [2 * v for v in x]",
    ),
    "memo": (
        "m = {}\nassert f(10, m) == 55\nassert f(11, m) == 89 and len(m) > 5",
        "def f(n, m):\n    if n < 2: return n\n    if n not in m: m[n] = f(n - 1, m) + f(n - 2, m)\n    return m[n]",
    ),
    "in_place_in_a_method": (
        "x = [2, 0, 1]\nSolution().f(x)\nassert x == [0, 1, 2]",
        "class Solution:\n    def f(self, x: List[int]) -> None: x.sort()",
    ),
    "in_place_and_a_round_trip": (
        "def test_a():\n    x = [3, 1]\n    order(x)\n    assert x == [1, 3]\n"
        "def test_b():\n    x = [3, 1]\n    assert dec(enc(x)) == x",
        "def order(x): x.sort()\ndef enc(x): return tuple(x)\ndef dec(x): return list(x)",
    ),
    "a_stack_of_the_tests": (
        "s = []\npush(s, 1)\npush(s, 2)\nassert pop(s) == 2\nassert s == [1]",
        "def push(s, x): s.append(x)\ndef pop(s): return s.pop()",
    ),
    "round_trip": (ROUND_TRIP, "import json\nenc, dec = json.dumps, json.loads"),
    "tuples": ("assert f(2) == (1, 2) and f(2)[1:] == (2,)", "def f(n): return 1, n"),
    "generators": ("assert list(f(3)) == [0, 1, 2]", "def f(n): yield from range(n)"),
    "slices_of_an_object": (
        "v = Vec([1, 2, 3])\nassert v[1:] == [2, 3] and v[-1] == 3",
        "class Vec:\n    def __init__(self, x): self.x = x\n    def __getitem__(self, k): return self.x[k]",
    ),
    "slice_of_an_object_as_an_object": (
        "assert list(Vec([1, 2, 3])[::2]) == [1, 3]",
        "class Vec:\n    def __init__(self, x): self.x = x\n    def __iter__(self): return iter(self.x)\n"
        "    def __getitem__(self, k): return Vec(self.x[k])",
    ),
    "numpy_arrays": (
        "import numpy as np\nx = np.array([1, 2])\nassert (f(x) == x * 2).all()",
        "import numpy as np\ndef f(x): return np.asarray(x) * 2",
    ),
    "data_classes": (
        "p = Point(1, 2)\nassert p.x == 1 and p.y == 2 and str(p) == 'Point(x=1, y=2)'",
        "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: int",
    ),
    "named_tuples": ("assert f() == (1, 2)", "P = namedtuple('P', 'x y')\ndef f(): return P(1, 2)"),
    "recursion": ("assert f(5000) == 12502500", "def f(n): return n + f(n - 1) if n else 0"),
    "recursion_with_a_cache": (
        "assert f(3000) % 10 == 0",
        "@lru_cache(None)\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)",
    ),
    "star_import": (
        "from solution import *\nassert f(2) == 4 and g(2) == 5",
        "def f(n): return n * 2\ndef g(n): return f(n) + 1",
    ),
    "star_imports": (
        "from math import *\nfrom solution import *\nassert isclose(f(2), 4) and f(3) == floor(9.5)",
        "def f(n): return n * n\ndef floor(x): return 0",
    ),
    "star_import_in_unittest": (UNITTEST, "def f(n): return n * n"),
    "star_import_in_pytest": (
        {
            "pytest": "import pytest\nfrom solution import *\n@pytest.mark.parametrize('g', [f])\n"
            "def test_a(g):\n    assert g(2) == 4\n"
        },
        "def f(n): return n * n",
    ),
    "the_name_of_a_module": ("assert copy([1]) == [1]", "def copy(x): return list(x)"),
    "a_function_like_math": (
        "def check(candidate):\n    assert candidate(4, 6) == 2",
        "def gcd(a, b):\n    return gcd(b, a % b) if b else a",
    ),
    "list_of_int": (CALLS, "class Solution:\n    def f(self, n: List[int]) -> Optional[int]: return n * n"),
    "the_module_sys": (STREAMS, "n = int(sys.stdin.readline())\nsys.stdout.write(str(n * n))"),
    "names_of_sys": (STREAMS, "n = int(stdin.readline())\nprint(n ** 2)"),
    "deque_and_math": ("assert f(16) == 4", "def f(n):\n    q = deque([n])\n    return int(math.sqrt(q.popleft()))"),
    "usual_functions": (
        "assert f([3, 1, 2]) == 6",
        "def f(x):\n    heapify(x)\n    assert heappop(x) == 1 and bisect_left([1, 2], 2) == 1 and inf > 1\n"
        "    return reduce(lambda a, b: a * b, [1, *x]) * gcd(1, 3) * len(list(chain(x))) // 2",
    ),
    "usual_types_of_tests": (
        "assert Counter(f('aab')) == Counter('aab')\nx: List[int] = f('a')",
        "def f(s): return list(s)",
    ),
    "a_pow_of_three": ("assert f() == 1", "def f(): return pow(2, 4, 5)"),
    "an_imported_solution": ("assert gcd(4, 6) == 2", "from math import gcd"),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\nxs = [[3, 1], [2]]\nwith ThreadPoolExecutor(2) as pool:\n"
        "    assert list(pool.map(f, xs)) == [x[::-1] for x in xs]",
        "def f(x): return x[::-1]",
    ),
    "nodes_reversed": (
        f"{NODE}\nn = Node(1, Node(2))\nr = f(n)\nassert (r.v, r.after.v, r.after.after) == (2, n.v, None)",
        "def f(n):\n    last = None\n    while n: n.after, last, n = last, n, n.after\n    return last",
    ),
    "a_value_of_nodes": (
        f"{NODE}\nn = Node(1, Node(2))\nassert f(n) == n.v + n.after.v",
        "def f(n): return n.v + (f(n.after) if n.after else 0)",
    ),
    "own_exceptions": (
        "import pytest\ndef test_a():\n    with pytest.raises(Bad):\n        f(-1)",
        "class Bad(ValueError): pass\ndef f(n): raise Bad(n)",
    ),
    "asynchronous": (
        "import asyncio\nx = [3, 1]\nassert asyncio.run(f(x)) == x[::-1]",
        "async def f(x): return x[::-1]",
    ),
    "keywords": ("d = {'a': 1}\nassert f(d=d) == {**d, 'b': 2}", "def f(d): return {**d, 'b': 2}"),
    "in_place_cases_by_name": (
        "cases = [([1, 1, 2], [1, 2]), ([0, 0], [0])]\nfor x, want in cases:\n    k = f(x)\n"
        "    assert k == len(want)\n    assert x[:k] == want",
        "def f(x):\n    x[:] = sorted(set(x))\n    return len(x)",
    ),
    "in_place_cases_by_key": (
        "cases = [{'x': [1, 1, 2], 'k': 2, 'want': [1, 2]}]\nfor c in cases:\n    x = c['x']\n    k = f(x)\n"
        "    assert k == c['k']\n    assert x[:k] == c['want']",
        "def f(x):\n    x[:] = sorted(set(x))\n    return len(x)",
    ),
    "in_place_cases_by_index": (
        "for c in [([1, 1, 2], [1, 2])]:\n    x = c[0][:]\n    k = f(x)\n"
        "    assert k == len(c[1])\n    assert x[:k] == c[1]",
        "def f(x):\n    x[:] = sorted(set(x))\n    return len(x)",
    ),
    "in_place_against_a_sorted_copy": (
        "x = [3, 1, 3]\nwant = sorted(set(x))\nk = f(x)\nassert k == len(want)\nassert x[:k] == want",
        "def f(x):\n    x[:] = sorted(set(x))\n    return len(x)",
    ),
    "in_place_where_nothing_is_returned": (
        "x = [3, 1]\nr = f(x)\nif r is None: r = x\nassert r == [1, 3]",
        "def f(x): x.sort()",
    ),
    "in_place_under_a_condition": ("x = [3, 1]\nif len(x) > 1: f(x)\nassert x == [1, 3]", "def f(x): x.sort()"),
    "an_iterator_of_a_call": (
        {"fn_name": "f", "inputs": [[3]], "outputs": [[0, 1, 2]]},
        "def f(n): yield from range(n)",
    ),
    "an_array_of_a_call": (
        {"fn_name": "f", "inputs": [[3]], "outputs": [[0, 1, 2]]},
        "import numpy as np\ndef f(n): return np.arange(n)",
    ),
    "members_of_enumerations": (
        "assert f(0) == 'a' and f(1) == 1",
        "from enum import Enum, IntEnum\nclass A(str, Enum): X = 'a'\nclass B(IntEnum): Y = 1\n"
        "def f(n): return [A.X, B.Y][n]",
    ),
    "shuffled": (
        "import random\nx = list(range(20))\nrandom.shuffle(x)\nassert f(x) == sorted(x)",
        "def f(x): return sorted(x)",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass(verdict: Verdict, name: str) -> None:
    tests, source = RIGHT[name]
    row = {"entry_point": "gcd", "test_setup_code": "from math import *"} if name == "a_function_like_math" else {}
    outcome = verdict(source, tests, row=row, wall=20.0, case_timeout=15.0, memory=2**31)
    assert outcome.pass_rate == 1.0, outcome


def test_tests_of_a_module_alone_are_an_error_of_their_row(verdict: Verdict) -> None:
    with pytest.raises(CaseError, match="test nothing"):
        verdict("def gcd(a, b): return 0", "from math import *\nfrom solution import *\nassert gcd(4, 6) == 2")
