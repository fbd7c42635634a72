"""Test code of data sets: definitions that nothing calls are called, and what tests nothing is refused.

All of it is decided by the test code alone, before a response is looked at: no response can make its row an error.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import importlib.util
import sys
import textwrap
from collections.abc import Iterable, Set
from typing import Any

from roll.rewards.sandbox.expectations import lines_with_copies

MODULE_NAMES = ("solution", "main", "candidate", "answer", "submission")  # names under which tests import the response
FORWARDED = ("builtins.input", "sys.stdin", "sys.stdout", "sys.stderr")
"""Replaceable by tests for the response: its input is read in the tests' process, its output is handed to it."""
_FIXTURES_WITH_FILES = {"tmp_path", "tmpdir", "tmp_path_factory", "tmpdir_factory"}
_BLIND_MODULES = ("tempfile", "subprocess", "runpy", "pickle", "inspect", "multiprocessing")
_PLAIN_MODULES = ("typing", "dataclasses", "__future__", "collections", "enum")
DYNAMIC = {"eval", "exec", "globals", "__import__", "importlib"}
_STARRED = {"pytest", "numpy", "pandas", "sympy"}
_RUNNERS = {("unittest", "main"), ("pytest", "main")}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class CaseError(ValueError):
    """A row whose cases cannot be read."""


Method = tuple[str, str]  # a class and one of its methods


@functools.lru_cache(maxsize=512)
def prepared(texts: tuple[str, ...], setup: str, entry_point: str) -> str | tuple[tuple[str, Method | None], ...]:
    """The sources that judge a response: one per case, with the method of a unittest class that runs after it; or the
    text of a pytest file. Raises ``CaseError``: the tests are no Python, test nothing, or need what the sandbox does
    not have.

    Args:
        texts: the tests, executed one after the other in one namespace.
        setup: executed before them.
        entry_point: what a ``check(candidate)`` is called with; empty: none named.
    """
    pieces = [Piece(f"test {number}", text, entry_point) for number, text in enumerate(texts)]
    whole = [Piece("the set-up", setup, entry_point), *pieces]
    bound = set(dir(builtins)).union(*(bound_names(piece.tree) | star_names(piece.tree) for piece in whole))
    for piece in whole:
        piece.check_supported(bound)
    if not any(piece.names_the_response() or not piece.names <= bound for piece in whole):
        raise CaseError(f"the tests test nothing: {texts[0][:80]!r}")
    cases: list[tuple[str, Method | None]] = []
    waiting: list[str] = []
    if any(piece.needs_pytest for piece in pieces):
        return as_pytest_file(setup, pieces)
    for piece in pieces:
        calls = piece.calls()
        if not calls and not piece.executes_a_test:
            waiting.append(piece.source)
            continue
        first, method = calls[0] if calls else ("", None)
        cases += [("\n".join([*waiting, piece.source, first]), method), *calls[1:]]
        waiting = []
    if not cases:
        raise CaseError(f"the tests test nothing: {texts[0][:80]!r}")
    return tuple(cases)


class Piece:
    """One source: what it executes, what it defines, and what of that would never be called."""

    def __init__(self, title: str, source: str, entry_point: str) -> None:
        self._title = title
        self._entry_point = entry_point
        try:
            self.tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise CaseError(f"{title} is no Python: {error}") from error
        lines = source.split("\n")
        for node in filter(is_runner, self.tree.body):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = ""
        self.source = "\n".join(lines)
        body = [node for node in self.tree.body if not is_runner(node)]
        self._executed = [
            node
            for node in body
            if not isinstance(node, _DEFINITIONS)
            and not (isinstance(node, ast.If) and "__name__" in names_in(node.test))
        ]
        self._used = names_in(*self._executed)
        self._used_by_functions = names_in(*(each for each in body if isinstance(each, _DEFINITIONS)))
        # A helper is called, or has another name; what is left are tests that nothing calls.
        unused = [node for node in body if isinstance(node, _FUNCTIONS) and node.name not in self._used]
        self._functions = [
            node
            for node in unused
            if takes_candidate(node)
            or (node.name.startswith("test") and not (required(node) and node.name in self._used_by_functions))
        ]
        self._classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name not in self._used]
        self.mocks = "mock" in source
        self.names = names_in(self.tree)
        inside = [node for each in self._executed for node in ast.walk(each)]
        self.executes_a_test = any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in inside)

    @property
    def needs_pytest(self) -> bool:
        """Fixtures, parameters and classes that only pytest knows."""
        if any(not takes_candidate(node) and (required(node) or node.decorator_list) for node in self._functions):
            return True
        return any(
            node.name.startswith("Test")
            and any(isinstance(each, _FUNCTIONS) and each.name.startswith("test") for each in node.body)
            and not is_unittest_class(node)
            for node in self._classes
        )

    def calls(self, only_checks: bool = False) -> list[tuple[str, Method | None]]:
        """A source or a method for each test that nothing calls; ``only_checks``: of ``check(candidate)`` alone. Raises
        ``CaseError``: a ``check(candidate)`` without an entry point."""
        calls: list[tuple[str, Method | None]] = []
        for node in self._functions:
            takes = takes_candidate(node)
            if takes and not self._entry_point:
                raise CaseError(f"{self._title} defines {node.name}(candidate), but the row has no entry_point")
            call = f"{node.name}({self._entry_point if takes else ''})"
            if takes or not only_checks:
                is_async = isinstance(node, ast.AsyncFunctionDef)
                calls.append((f"import asyncio\nasyncio.run({call})" if is_async else call, None))
        for each in self._classes:
            if is_unittest_class(each) and not only_checks:
                own = [node.name for node in each.body if isinstance(node, _FUNCTIONS) and node.name.startswith("test")]
                calls += [("", (each.name, name)) for name in own]
        return calls

    def names_the_response(self) -> bool:
        """True if it imports the response, or looks names up at run time."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import) and any(alias.name in MODULE_NAMES for alias in node.names):
                return True
            if isinstance(node, ast.ImportFrom) and node.module in MODULE_NAMES and node.names[0].name != "*":
                return True
            if isinstance(node, ast.Name) and node.id in DYNAMIC:
                return True
        return any(takes_candidate(node) for node in self._functions)

    def check_supported(self, bound: Set[str]) -> None:
        """Raise ``CaseError`` for tests that fail for any response; ``bound``: names that are not the response's."""
        for node in ast.walk(self.tree):
            reason = unsupported(node, self.mocks)
            if isinstance(node, ast.ClassDef) and any(
                dotted(base)[:1] and dotted(base)[0] not in bound for base in node.bases
            ):
                reason = f"derives {node.name} from a class of the response, which lives in another process"
            if reason:
                raise CaseError(f"{self._title} {reason}")


def names_in(*nodes: ast.AST) -> set[str]:
    return {node.id for each in nodes for node in ast.walk(each) if isinstance(node, ast.Name)}


def bound_names(tree: ast.AST) -> set[str]:
    """Names that a source imports (the response aside), defines, assigns or takes as arguments, anywhere in it."""
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias for alias in node.names if alias.name not in MODULE_NAMES]
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in modules}
        elif isinstance(node, ast.ImportFrom) and node.module not in MODULE_NAMES:
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, _DEFINITIONS):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return bound


@functools.lru_cache(maxsize=64)
def public_names(module: str) -> frozenset[str]:
    """Names that ``from module import *`` brings, of Python's own modules and those that tests use most."""
    if module.partition(".")[0] not in sys.stdlib_module_names - {"antigravity"} | _STARRED:
        return frozenset()
    try:
        found = importlib.import_module(module)
    except ImportError:
        return frozenset()
    return frozenset(getattr(found, "__all__", None) or (name for name in vars(found) if not name.startswith("_")))


def star_names(tree: ast.AST) -> set[str]:
    """Names that a source imports with a star, the response's aside."""
    modules = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.names[0].name == "*" and not node.level
    }
    return set().union(*(public_names(module) for module in modules - set(MODULE_NAMES)))


def as_pytest_file(setup: str, pieces: Iterable[Piece]) -> str:
    """One file; what a piece executes at its top becomes a test of its own. Raises ``CaseError``: this Python has no
    pytest."""
    if importlib.util.find_spec("pytest") is None:
        raise CaseError("the tests have fixtures or parameters of pytest, which is not installed here")
    parts = [setup]
    for number, piece in enumerate(pieces):
        if piece.executes_a_test and not piece.needs_pytest:
            parts.append(f"def test_roll_{number}():\n{textwrap.indent(piece.source, '    ')}")
        else:
            parts.append(piece.source)
            parts += [
                f"def test_roll_{number}_{index}():\n{textwrap.indent(call[0], '    ')}"
                for index, call in enumerate(piece.calls(only_checks=True))
            ]
    return "\n\n".join(parts)


@functools.lru_cache(maxsize=512)
def check_pytest_file(text: str) -> None:
    """Raise ``CaseError`` where the row's own file has no tests, or needs what the sandbox does not have."""
    piece = Piece("the pytest file", text, "")
    piece.check_supported(set(dir(builtins)) | bound_names(piece.tree))
    defined = [node.name for node in ast.walk(piece.tree) if isinstance(node, _DEFINITIONS)]
    if not any(name.lower().startswith("test") for name in defined) and not any(
        is_unittest_class(node) for node in piece.tree.body
    ):
        raise CaseError(f"the pytest file has no tests: {text[:80]!r}")


def takes_candidate(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """``check(candidate)``, under whatever name."""
    names = required(node)
    return names == ["candidate"] or (node.name == "check" and len(names) == 1)


def required(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Arguments without a default value."""
    positional = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    named = [
        argument.arg
        for argument, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if value is None
    ]
    return positional[: len(positional) - len(node.args.defaults)] + named


def is_unittest_class(node: ast.AST) -> bool:
    bases = [dotted(base)[-1:] for base in node.bases] if isinstance(node, ast.ClassDef) else []
    return ["TestCase"] in bases or ["IsolatedAsyncioTestCase"] in bases


def is_runner(node: ast.AST) -> bool:
    """``unittest.main()``: the tests are run without it, and it would end the process."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    return tuple(dotted(node.value.func)) in _RUNNERS


def dotted(node: ast.AST) -> list[str]:
    """``a.b.c`` as its parts; of other expressions only the attributes that follow them."""
    if isinstance(node, ast.Attribute):
        return [*dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else []


def unsupported(node: ast.AST, mocks: bool) -> str | None:
    """Why a test with this node cannot work between two processes; None: it can."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or "."]
        for top in {name.partition(".")[0] for name in names} - set(MODULE_NAMES):
            if not top or (top not in sys.stdlib_module_names and importlib.util.find_spec(top) is None):
                return f"imports {top or 'a relative module'}, which is not installed here"
        return None
    if isinstance(node, ast.arg) and node.arg in _FIXTURES_WITH_FILES:
        return f"uses {node.arg}: tests and programs have no files in common"
    if isinstance(node, ast.Call):
        parts = dotted(node.func)
        if parts == ["open"]:
            return "opens a file: tests and programs have no files in common"
        patches = (mocks and "patch" in parts[-2:]) or parts[:1] in (["monkeypatch"], ["mocker"])
        if not patches or parts[-1:] == ["undo"]:
            return None
        # The target of a replacement is written ``"a.b"``, or ``a, "b"``.
        first, second, *_ = [
            *(str(each.value) if isinstance(each, ast.Constant) else ".".join(dotted(each)) for each in node.args[:2]),
            *("", ""),
        ]
        target = first if node.args and isinstance(node.args[0], ast.Constant) else f"{first}.{second}"
        if parts[-1] in ("patch", "setattr", "object") and target in FORWARDED:
            return None
        seen = f"which the program's does not see; it sees {', '.join(FORWARDED)}"
        return f"replaces {target or 'something'} in the tests' process, {seen}"
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        blind = node.value.id in _BLIND_MODULES or node.attr == "iscoroutinefunction"
        return f"uses {node.value.id}.{node.attr}, which sees nothing of another process" if blind else None
    return None


@functools.lru_cache(maxsize=512)
def preparation(sources: tuple[str, ...]) -> dict[str, Any]:
    """Information on the tests that both processes get before any of them runs: ``classes`` that only hold data, and
    the ``prelude`` that defines them; ``expects_ends``: whether ``StopIteration`` may reach the tests; ``copies``: for
    each source the lines on which the response gets copies of its arguments; ``imports`` without which no test can
    pass."""
    trees = [ast.parse(source) for source in sources]
    own = set().union(*(bound_names(tree) | star_names(tree) for tree in trees))
    # Classes of the tests that only hold data, such as ``ListNode``. Nothing that a class can do is handed to the
    # response's process: one with methods of its own may know answers.
    names: list[str] = []
    parts: list[str] = []
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, ast.ClassDef) and holds_data(node):
            names.append(node.name)
            parts.append(ast.unparse(node))
        elif isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module in _PLAIN_MODULES):
            parts.append(ast.unparse(node))
    packages = {
        alias.name for tree in trees for node in tree.body if isinstance(node, ast.Import) for alias in node.names
    }
    packages |= {node.module or "" for tree in trees for node in tree.body if isinstance(node, ast.ImportFrom)}
    # Python's own modules and the response are there.
    present = {"", *sys.stdlib_module_names, *MODULE_NAMES}
    return {
        "classes": names,
        "prelude": "\n".join(parts) if names else "",
        "expects_ends": any("StopIteration" in source or "StopAsyncIteration" in source for source in sources),
        "copies": lines_with_copies(trees, own),
        "imports": sorted(name for name in packages if name.partition(".")[0] not in present),
    }


def holds_data(node: ast.ClassDef) -> bool:
    functions = [each.name for each in node.body if isinstance(each, _FUNCTIONS)]
    only_special = all(name.startswith("__") and name.endswith("__") for name in functions)
    decorators = [dotted(each.func if isinstance(each, ast.Call) else each)[-1:] for each in node.decorator_list]
    plain = all(dotted(base) == ["object"] for base in node.bases) and not node.keywords
    return only_special and plain and all(name == ["dataclass"] for name in decorators)
