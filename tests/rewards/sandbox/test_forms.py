"""Forms in which data sets write tests and models write programs: a right program scores 1, a wrong one 0.

A form that cannot work between two processes is an error of its row for every program, never a score.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import pytest

from roll.rewards.sandbox.cases import read_cases
from roll.rewards.sandbox.snippets import CaseError
from tests.rewards.sandbox.conftest import Verdict


@dataclass(frozen=True)
class Form:
    tests: Any
    right: str
    wrong: str
    row: tuple[tuple[str, Any], ...] = ()


ADD, BAD_ADD = "def add(a, b): return a + b", "def add(a, b): return a - b - 1"
DOUBLE, BAD_DOUBLE = "def double(n): return n * 2", "def double(n): return n + 3"
LIST_NODE = """
class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next
def build(values):
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head
def values(node):
    found = []
    while node:
        found.append(node.val)
        node = node.next
    return found
"""
REVERSE = """
def reverse(head: "ListNode"):
    last = None
    while head:
        head.next, last, head = last, head, head.next
    return last
"""
TREE = """
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
"""


def add_form(tests: Any, **row: Any) -> Form:
    return Form(tests, ADD, BAD_ADD, tuple(row.items()))


FORMS = {
    # Definitions that nothing calls
    "check": add_form("def check(candidate):\n    assert candidate(1, 2) == 3", entry_point="add"),
    "check_named_by_the_case": add_form(
        [{"assert_code": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"}]
    ),
    "check_of_another_name": add_form("def check_add(candidate):\n    assert candidate(1, 2) == 3", entry_point="add"),
    "check_that_is_called": add_form(
        "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)", entry_point="add"
    ),
    "check_of_a_method": Form(
        "def check(candidate):\n    assert candidate(1, 2) == 3",
        "class Solution:\n    def add(self, a, b): return a + b",
        "class Solution:\n    def add(self, a, b): return a",
        (("entry_point", "Solution().add"),),
    ),
    "humaneval_columns": Form(
        None,
        ADD,
        BAD_ADD,
        (("test", "M = {}\n\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n"), ("entry_point", "add")),
    ),
    "test_function": add_form("def test_add():\n    assert add(1, 2) == 3"),
    "test_functions": add_form("def test_a():\n    assert add(1, 2) == 3\ndef test_b():\n    assert add(2, 2) == 4"),
    "test_function_with_import": add_form("from solution import add\ndef test_a():\n    assert add(1, 2) == 3"),
    "test_function_that_is_called": add_form("def test_a():\n    assert add(1, 2) == 3\ntest_a()"),
    "test_function_with_helper": add_form("def same(a, b): assert a == b\ndef test_a():\n    same(add(1, 2), 3)"),
    "test_behind_a_main_guard": add_form(
        "def test_a():\n    assert add(1, 2) == 3\nif __name__ == '__main__':\n    test_a()"
    ),
    "unittest": add_form(
        "import unittest\nclass TestAdd(unittest.TestCase):\n    def test_a(self):\n"
        "        self.assertEqual(add(1, 2), 3)"
    ),
    "unittest_with_main": add_form(
        "import unittest\nfrom solution import *\nclass T(unittest.TestCase):\n    def setUp(self):\n"
        "        self.n = 3\n"
        "    def test_a(self):\n        self.assertEqual(add(1, 2), self.n)\n"
        "if __name__ == '__main__':\n    unittest.main()"
    ),
    "unittest_main_at_the_end": add_form(
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(add(1, 2), 3)\n"
        "unittest.main()"
    ),
    "unittest_base_by_name": add_form(
        "from unittest import TestCase\nclass T(TestCase):\n    def test_a(self):\n        assert add(1, 2) == 3"
    ),
    "pytest_class": add_form("class TestAdd:\n    def test_a(self):\n        assert add(1, 2) == 3"),
    "pytest_parameters": add_form(
        "import pytest\n@pytest.mark.parametrize('a,b,c', [(1, 2, 3), (2, 2, 4)])\n"
        "def test_a(a, b, c):\n    assert add(a, b) == c"
    ),
    "pytest_fixture": add_form(
        "import pytest\n@pytest.fixture\ndef three():\n    return 3\ndef test_a(three):\n    assert add(1, 2) == three"
    ),
    "imports_in_a_case_of_their_own": add_form(["import math", "assert math.isclose(add(1, 2), 3)"]),
    "helper_in_a_case_of_its_own": add_form(["def twice(n):\n    return add(n, n)", "assert twice(2) == 4"]),
    "loop": add_form("for a, b, c in [(1, 2, 3), (2, 2, 4)]:\n    assert add(a, b) == c, (a, b)"),
    "numpy_assertion": add_form("import numpy as np\nnp.testing.assert_allclose(add(1.0, 2.0), 3.0)"),
    "string_of_asserts": add_form("assert add(1, 2) == 3\nassert add(0, 0) == 0"),
    "expected_error": Form(
        "try:\n    div(1, 0)\n    assert False\nexcept ZeroDivisionError:\n    pass",
        "def div(a, b): return a / b",
        "def div(a, b): return 0",
    ),
    "assert_raises": Form(
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
        "        with self.assertRaises(ValueError):\n"
        "            check_age(-1)",
        "def check_age(n):\n    if n < 0: raise ValueError('negative')",
        "def check_age(n): pass",
    ),
    # Iterators
    "map": Form("assert list(map(double, [1, 2])) == [2, 4]", DOUBLE, "def double(n): raise StopIteration"),
    "all_map": Form(
        "assert all(map(even, [2, 4]))", "def even(n): return n % 2 == 0", "def even(n): raise StopIteration"
    ),
    "any_filter": Form(
        "assert not any(map(odd, [2, 4]))", "def odd(n): return n % 2 == 1", "def odd(n): raise StopIteration"
    ),
    "zip_map": Form(
        "for a, b in zip(map(double, [1, 2]), [2, 4]):\n    assert a == b", DOUBLE, "def double(n): raise StopIteration"
    ),
    "expected_stop": Form(
        "it = numbers(1)\nnext(it)\ntry:\n    next(it)\n    assert False\nexcept StopIteration:\n    pass",
        "def numbers(n): return iter(range(n))",
        "def numbers(n): return iter([0, 0])",
    ),
    "generator": Form(
        "assert [x for x in up_to(3)] == [0, 1, 2]",
        "def up_to(n):\n    yield from range(n)",
        "def up_to(n):\n    yield n",
    ),
    "generator_as_argument": Form(
        "assert total(x * x for x in range(4)) == 14",
        "def total(xs): return sum(xs)",
        "def total(xs): return len(list(xs))",
    ),
    "iterator_as_argument": Form(
        "assert total(iter([1, 2])) == 3", "def total(xs): return next(xs) + next(xs)", "def total(xs): return next(xs)"
    ),
    # Classes of the tests and of the response
    "list_node": Form(
        f"{LIST_NODE}\nassert values(reverse(build([1, 2, 3]))) == [3, 2, 1]", REVERSE, "def reverse(head): return head"
    ),
    "list_node_of_both": Form(
        f"{LIST_NODE}\nassert values(reverse(build([1, 2, 3]))) == [3, 2, 1]",
        "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val, self.next = val, next\n"
        + REVERSE,
        "class ListNode:\n    pass\ndef reverse(head): return ListNode()",
    ),
    "list_node_annotated": Form(
        f"{LIST_NODE}\nassert values(reverse(build([1, 2]))) == [2, 1]",
        "from typing import Optional\ndef reverse(head: Optional[ListNode]) -> Optional[ListNode]:\n"
        "    return ListNode(head.next.val, ListNode(head.val))",
        "def reverse(head: ListNode): return None",
    ),
    "list_node_in_the_set_up": Form(
        ["assert values(reverse(build([1, 2, 3]))) == [3, 2, 1]"],
        REVERSE,
        "def reverse(head): return head",
        (("test_setup_code", LIST_NODE),),
    ),
    "list_node_made": Form(
        f"{LIST_NODE}\nassert values(make([1, 2])) == [1, 2]",
        "def make(xs):\n    return ListNode(xs[0], make(xs[1:])) if xs else None",
        "def make(xs): return ListNode(3)",
    ),
    "list_node_cycle": Form(
        f"{LIST_NODE}\nhead = build([1, 2])\nhead.next.next = head\nassert has_cycle(head)\n"
        "assert not has_cycle(build([1]))",
        "def has_cycle(head):\n    seen = set()\n    while head:\n        if id(head) in seen: return True\n"
        "        seen.add(id(head)); head = head.next\n    return False",
        "def has_cycle(head): return True",
    ),
    "list_node_in_place": Form(
        f"{LIST_NODE}\nhead = build([1, 2, 3])\ndrop_second(head)\nassert values(head) == [1, 3]",
        "def drop_second(head): head.next = head.next.next",
        "def drop_second(head): head.next = None",
    ),
    "tree_node": Form(
        f"{TREE}\nassert depth(TreeNode(1, TreeNode(2), None)) == 2",
        "def depth(n): return 1 + max(depth(n.left), depth(n.right)) if n else 0",
        "def depth(n): return 1",
    ),
    "tree_node_inverted": Form(
        f"{TREE}\nroot = invert(TreeNode(1, TreeNode(2), TreeNode(3)))\n"
        "assert (root.left.val, root.right.val) == (3, 2)",
        "def invert(n):\n    if n: n.left, n.right = invert(n.right), invert(n.left)\n    return n",
        "def invert(n): return n",
    ),
    "data_class": Form(
        "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: int\n"
        "assert move(Point(1, 2)) == Point(2, 2)",
        "def move(p): return Point(p.x + 1, p.y)",
        "def move(p): return p",
    ),
    "data_class_forged": Form(
        "class Point:\n    def __init__(self, x):\n        self.x = x\n    def __eq__(self, other):\n"
        "        return self.x == other.x\n"
        "assert move(Point(1)) == Point(2)",
        "def move(p): return Point(p.x + 1)",
        "Point.__eq__ = lambda self, other: True\ndef move(p): return Point(5)",
    ),
    "subclass": Form(
        "assert issubclass(Dog, Animal)",
        "class Animal: pass\nclass Dog(Animal): pass",
        "class Animal: pass\nclass Dog: pass",
    ),
    "subclass_of_an_exception": Form(
        "assert issubclass(Broken, ValueError)", "class Broken(ValueError): pass", "class Broken(KeyError): pass"
    ),
    "subclass_of_an_abstract_class": Form(
        "from abc import ABC\nassert issubclass(Shape, ABC)",
        "from abc import ABC\nclass Shape(ABC): pass",
        "class Shape: pass",
    ),
    "instances": Form(
        "assert isinstance(Dog(), Animal) and not isinstance(3, Animal)",
        "class Animal: pass\nclass Dog(Animal): pass",
        "class Animal: pass\nclass Dog: pass",
    ),
    "type_as_result": Form("assert kind(3) is int", "def kind(x): return type(x)", "def kind(x): return str"),
    "deep_copy_of_an_object": Form(
        "import copy\na = Box([1])\nb = copy.deepcopy(a)\nb.items.append(2)\nassert a.items == [1]\n"
        "assert a.count() == 1",
        "class Box:\n    def __init__(self, items): self.items = items\n    def count(self): return len(self.items)",
        "class Box:\n    def __init__(self, items): self.items = items\n    def count(self): return 2",
    ),
    "deep_copy_of_the_input": Form(
        "from copy import deepcopy\ndata = [[1, 2], [3]]\nkept = deepcopy(data)\n"
        "assert flat(data) == [1, 2, 3]\nassert data == kept",
        "def flat(xs): return [x for row in xs for x in row]",
        "def flat(xs):\n    found = [x for row in xs for x in row]\n    xs.clear()\n    return found",
    ),
    "shallow_copy": Form(
        "import copy\na = Box(1)\nb = copy.copy(a)\nb.n = 2\nassert a.n == 1 and a.twice() == 2",
        "class Box:\n    def __init__(self, n): self.n = n\n    def twice(self): return self.n * 2",
        "class Box:\n    def __init__(self, n): self.n = n\n    def twice(self): return self.n",
    ),
    # Output and input
    "redirected_output": Form(
        "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    hello('you')\n"
        "assert out.getvalue() == 'Hello, you\\n'",
        "def hello(name): print(f'Hello, {name}')",
        "def hello(name): print('Hello')",
    ),
    "patched_output": Form(
        "from io import StringIO\nfrom unittest.mock import patch\nwith patch('sys.stdout', new=StringIO()) as out:\n"
        "    hello()\nassert out.getvalue().strip() == 'Hello'",
        "def hello(): print('Hello')",
        "def hello(): print('Bye')",
    ),
    "patched_output_by_decorator": Form(
        "from io import StringIO\nimport unittest\nfrom unittest.mock import patch\nclass T(unittest.TestCase):\n"
        "    @patch('sys.stdout', new_callable=StringIO)\n    def test_a(self, out):\n        hello()\n"
        "        self.assertEqual(out.getvalue(), 'Hello\\n')",
        "def hello(): print('Hello')",
        "def hello(): return 'Hello'",
    ),
    "capsys": Form(
        "def test_a(capsys):\n    hello()\n    assert capsys.readouterr().out == 'Hello\\n'",
        "def hello(): print('Hello')",
        "def hello(): return 'Hello'",
    ),
    "patched_input": Form(
        "from unittest.mock import patch\nwith patch('builtins.input', side_effect=['3', '4']):\n    assert ask() == 7",
        "def ask(): return int(input('a')) + int(input('b'))",
        "def ask(): return int(input('a'))",
    ),
    "patched_input_by_monkeypatch": Form(
        "def test_a(monkeypatch):\n    monkeypatch.setattr('builtins.input', lambda prompt='': '5')\n"
        "    assert ask() == 5",
        "def ask(): return int(input())",
        "def ask(): return 4",
    ),
    "patched_standard_input": Form(
        "import io, sys\nfrom unittest import mock\nwith mock.patch('sys.stdin', io.StringIO('1\\n2\\n')):\n"
        "    assert total() == 3",
        "import sys\ndef total(): return sum(int(line) for line in sys.stdin)",
        "import sys\ndef total(): return int(sys.stdin.readline())",
    ),
    "replaced_standard_input": Form(
        "import io, sys\nsys.stdin = io.StringIO('7')\nassert read() == 7",
        "def read(): return int(input())",
        "def read(): return 8",
    ),
    "mock_as_a_function": Form(
        "from unittest.mock import Mock\ncall = Mock()\neach([1, 2], call)\nassert call.call_count == 2\n"
        "call.assert_called_with(2)",
        "def each(xs, f):\n    for x in xs: f(x)",
        "def each(xs, f): f(2)",
    ),
    "partial_as_a_function": Form(
        "import functools\nassert apply(functools.partial(pow, 2), 3) == 8",
        "def apply(f, x): return f(x)",
        "def apply(f, x): return x",
    ),
    # Asynchronous functions
    "async_run": Form("import asyncio\nassert asyncio.run(double(2)) == 4", "async " + DOUBLE, "async " + BAD_DOUBLE),
    "async_test": Form(
        "async def test_a():\n    assert await double(2) == 4", "async " + DOUBLE, "async " + BAD_DOUBLE
    ),
    "async_gather": Form(
        "import asyncio\nasync def main():\n    return await asyncio.gather(double(1), double(2))\n"
        "assert asyncio.run(main()) == [2, 4]",
        "import asyncio\nasync def double(n):\n    await asyncio.sleep(0)\n    return n * 2",
        "async " + BAD_DOUBLE,
    ),
    "async_iteration": Form(
        "import asyncio\nasync def main():\n    return [x async for x in up_to(2)]\n"
        "assert asyncio.run(main()) == [0, 1]",
        "async def up_to(n):\n    for i in range(n): yield i",
        "async def up_to(n):\n    yield n",
    ),
    "async_context": Form(
        "import asyncio\nasync def main():\n    async with Door() as door:\n        assert door.state() == 'open'\n"
        "    assert door.state() == 'shut'\nasyncio.run(main())",
        "class Door:\n    async def __aenter__(self):\n        self.s = 'open'; return self\n"
        "    async def __aexit__(self, *a): self.s = 'shut'\n    def state(self): return self.s",
        "class Door:\n    async def __aenter__(self):\n        self.s = 'open'; return self\n"
        "    async def __aexit__(self, *a): pass\n    def state(self): return self.s",
    ),
    "async_pytest": Form(
        "import pytest\n@pytest.mark.asyncio\nasync def test_a():\n    assert await double(2) == 4",
        "async " + DOUBLE,
        "async " + BAD_DOUBLE,
    ),
    "async_unittest": Form(
        "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def test_a(self):\n"
        "        self.assertEqual(await double(2), 4)",
        "async " + DOUBLE,
        "async " + BAD_DOUBLE,
    ),
    "async_call": Form(
        {"fn_name": "double", "inputs": [[2]], "outputs": [4]}, "async " + DOUBLE, "async " + BAD_DOUBLE
    ),
    # Changes in place
    "in_place": Form(
        "xs = [3, 1]\norder(xs)\nassert xs == [1, 3]", "def order(xs): xs.sort()", "def order(xs): sorted(xs)"
    ),
    "in_place_with_a_result": Form(
        "xs = [1, 1, 2]\nk = dedupe(xs)\nassert k == 2 and xs[:2] == [1, 2]",
        "def dedupe(xs):\n    xs[:] = sorted(set(xs))\n    return len(xs)",
        "def dedupe(xs): return len(set(xs))",
    ),
    "in_place_nested": Form(
        "m = [[1, 2], [3, 4]]\nturn(m)\nassert m == [[3, 1], [4, 2]]",
        "def turn(m): m[:] = [list(r) for r in zip(*m[::-1])]",
        "def turn(m): m.reverse()",
    ),
    "in_place_by_name": Form(
        "d = {}\nput(d=d)\nassert d == {'a': 1}", "def put(d): d['a'] = 1", "def put(d): d = {'a': 1}"
    ),
    "in_place_deque": Form(
        "from collections import deque\nq = deque([1, 2])\nturn(q)\nassert list(q) == [2, 1]",
        "def turn(q): q.rotate(1)",
        "def turn(q): pass",
    ),
    "in_place_method": Form(
        {"fn_name": "sortColors", "inputs": [[[2, 0, 1]], [[0, 1]]], "outputs": [[0, 1, 2], [0, 1]]},
        "class Solution:\n    def sortColors(self, nums): nums.sort()",
        "class Solution:\n    def sortColors(self, nums): nums.reverse()",
    ),
    "oracle_of_the_input": Form(
        "xs = [3, 1]\nassert order(xs) == sorted(xs)",
        "def order(xs): return sorted(xs)",
        "def order(xs):\n    xs.clear()\n    return []",
    ),
    # Numbers
    "whole_number": Form(
        {"fn_name": "f", "inputs": [[1]], "outputs": [123456789]},
        "def f(n): return 123456789",
        "def f(n): return 123456789.4",
    ),
    "whole_number_as_a_fraction": Form(
        {"fn_name": "f", "inputs": [[1]], "outputs": [5]}, "def f(n): return 5.0", "def f(n): return 5.000001"
    ),
    "fraction": Form(
        {"fn_name": "f", "inputs": [[1]], "outputs": [0.3]}, "def f(n): return .1 + .2", "def f(n): return .31"
    ),
    "whole_number_in_a_list": Form(
        {"fn_name": "f", "inputs": [[1]], "outputs": [[[10**9, 1]]]},
        "def f(n): return [10**9, 1]",
        "def f(n): return [10**9 + 0.5, 1]",
    ),
    "nothing_as_result": Form(
        {"fn_name": "f", "inputs": [[1], [2]], "outputs": [None, 2]},
        "def f(n): return None if n == 1 else n",
        "def f(n): pass",
    ),
    "same_as_the_input": Form(
        {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [[1, 2]]}, "def f(xs): return sorted(xs)", "def f(xs): pass"
    ),
    "threads": Form(
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n"
        "    assert list(pool.map(double, range(20))) == [2 * n for n in range(20)]",
        DOUBLE,
        BAD_DOUBLE,
    ),
}
assert len(FORMS) >= 60


@pytest.mark.parametrize("name", FORMS)
def test_right_and_wrong_programs(verdict: Verdict, name: str) -> None:
    form = FORMS[name]
    right = verdict(form.right, form.tests, row=dict(form.row), wall=20.0, case_timeout=15.0)
    assert right.pass_rate == 1.0, right
    wrong = verdict(form.wrong, form.tests, row=dict(form.row), wall=20.0, case_timeout=15.0)
    assert wrong.pass_rate < 1.0, wrong
    if not (isinstance(form.tests, dict) and len(form.tests["inputs"]) > 1):
        assert wrong.passed == 0, wrong
    for nothing in ("pass", "def unrelated(): pass", "import os\nos._exit(0)"):
        assert verdict(nothing, form.tests, row=dict(form.row), wall=20.0, case_timeout=15.0).passed == 0


UNUSABLE = {
    "a_number": ("42", "test nothing"),
    "nothing": (" ", "test nothing"),
    "a_comment": ("# TODO", "test nothing"),
    "a_text": ("'assert add(1, 2) == 3'", "test nothing"),
    "an_assignment": ("x = 5\nassert x == 5", "test nothing"),
    "a_constant": ("assert True", "test nothing"),
    "imports": ("import math", "test nothing"),
    "a_print": ("print('all tests passed')", "test nothing"),
    "a_helper": ("def helper(n):\n    return n", "test nothing"),
    "a_class": ("class Helper:\n    def go(self):\n        return add(1, 2)", "test nothing"),
    "several_of_them": (["42", "# nothing", "import math"], "test nothing"),
    "an_empty_pytest_file": ({"pytest": "import pytest\nassert True"}, "has no tests"),
    "a_check_of_nobody_knows_what": ("def check(candidate):\n    assert candidate(1) == 1", "no entry_point"),
    "no_python": ("this is no test", "no Python"),
    "a_missing_package": ("import not_installed_here\nassert add(1, 2) == 3", "not installed"),
    "a_patched_function": (
        "from unittest.mock import patch\nwith patch('solution.helper', return_value=1):\n    assert add(1, 2) == 3",
        "replaces solution.helper",
    ),
    "a_patched_module": (
        "import random\nfrom unittest import mock\nwith mock.patch.object(random, 'randint', return_value=4):\n"
        "    assert roll() == 4",
        "replaces random.randint",
    ),
    "a_patched_environment": (
        "def test_a(monkeypatch):\n    monkeypatch.setenv('A', 'b')\n    assert read() == 'b'",
        "replaces",
    ),
    "files_of_pytest": ("def test_a(tmp_path):\n    assert read(str(tmp_path)) == []", "no files in common"),
    "a_file": ("open('x', 'w').write('1')\nassert read('x') == '1'", "no files in common"),
    "temporary_files": (
        "import tempfile\nwith tempfile.TemporaryDirectory() as d:\n    assert files(d) == []",
        "tempfile",
    ),
    "a_derived_class": ("class Cat(Animal):\n    pass\nassert Cat().speak() == 'meow'", "derives Cat"),
    "source_code": ("import inspect\nassert 'for' in inspect.getsource(add)", "inspect"),
    "another_process": (
        "import subprocess\nassert subprocess.run(['python', 'solution.py']).returncode == 0",
        "subprocess",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_tests_that_cannot_judge_are_errors(name: str) -> None:
    tests, message = UNUSABLE[name]
    with pytest.raises(CaseError, match=message):
        read_cases(tests, {})


IMPOSSIBLE = {
    "an_object_of_the_tests": (
        "class Clock:\n    def now(self):\n        return 3\nassert read(Clock()) == 3",
        "def read(clock): return clock.now()",
    ),
    "a_mock_with_attributes": (
        "from unittest.mock import Mock\nservice = Mock()\nservice.get.return_value = 3\nassert read(service) == 3",
        "def read(service): return service.get()",
    ),
    "in_a_class_of_unittest": (
        "import io, unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
        "        self.assertEqual(read(io.BytesIO(b'3')), 3)",
        "def read(file): return int(file.read())",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_handed_over_is_an_error(verdict: Verdict, name: str) -> None:
    tests, right = IMPOSSIBLE[name]
    with pytest.raises(CaseError, match="cannot be handed"):
        verdict(right, textwrap.dedent(tests))


def test_a_set_up_that_fails_by_itself_is_an_error(verdict: Verdict) -> None:
    row = {"test_list": ["assert add(1, 2) == three"], "test_setup_code": "three = {}['three']"}
    with pytest.raises(CaseError, match="the set-up fails by itself: KeyError"):
        verdict(ADD, None, row=row)
    row["test_setup_code"] = "three = add(1, 2)[0]"
    assert verdict(ADD, None, row=row).passed == 0, "what it makes of the response is the response's"


def test_each_test_of_a_text_is_a_case(verdict: Verdict) -> None:
    functions = "def test_a():\n    assert add(1, 2) == 3\ndef test_b():\n    assert add(1, 2) == 4"
    assert verdict(ADD, functions).pass_rate == 0.5
    methods = "import unittest\nclass T(unittest.TestCase):\n" + textwrap.indent(
        "def test_a(self): self.assertEqual(add(1, 2), 3)\ndef test_b(self): self.assertEqual(add(1, 2), 4)\n"
        "@unittest.skip('no pass')\ndef test_c(self): pass",
        "    ",
    )
    assert (verdict(ADD, methods).passed, verdict(ADD, methods).total) == (1, 3)
    assert verdict(ADD, ["import math", "assert add(1, 2) == 3", "assert add(1, 2) == 4"]).pass_rate == 0.5
