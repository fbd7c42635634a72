"""Names in test code: what they bind, where expressions start, and by which names tests call the response."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence, Set

Place = tuple[int, int, int]  # number of a source, line and column
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.AsyncFor, ast.comprehension)


def has_own_names(node: ast.AST) -> bool:
    """True for a function that binds no name of the module."""
    return isinstance(node, FUNCTIONS) and not any(isinstance(each, ast.Global) for each in ast.walk(node))


def outermost_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS) and has_own_names(node):
            yield node
        else:
            yield from outermost_functions(node)


def root(node: ast.AST) -> str:
    """The object that an expression starts from: ``x`` of ``x[0].y``, and ``self.x`` of ``self.x.y``; '' for others."""
    attribute = ""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Await):
        attribute = node.attr if isinstance(node, ast.Attribute) else attribute if isinstance(node, ast.Await) else ""
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return f"self.{attribute}" if node.id == "self" and attribute else node.id


class Callables:
    """Names by which tests call the response: its own, its callers', and those that may hold one of its functions."""

    def __init__(self, known: Set[str], trees: Sequence[ast.Module]) -> None:
        self._known = known
        self.names: set[str] = set()
        self.helpers: set[str] = set()
        nodes = [node for tree in trees for node in ast.walk(tree)]
        functions = [node.func for node in nodes if isinstance(node, ast.Call)]
        self._called = {root(node) for node in functions if isinstance(node, ast.Name | ast.Subscript)}
        imports = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
        self.modules = sys.stdlib_module_names | {(each.asname or each.name).partition(".")[0] for each in imports}
        for node in nodes:
            if isinstance(node, ast.arguments):
                self.names |= {each.arg for each in (*node.posonlyargs, *node.args, *node.kwonlyargs)} & self._called
        candidates = [node for node in nodes if isinstance(node, FUNCTIONS) or bindings(node)]
        # Not any(): each round goes through all of them.
        while sum(self._learn(node) for node in candidates):
            pass

    def _learn(self, node: ast.AST) -> bool:
        before = len(self.names)
        if isinstance(node, FUNCTIONS):
            if any(isinstance(each, ast.Call) and self.calls(each) for each in ast.walk(node)):
                self.names.add(node.name)
                self.helpers.add(node.name)
        else:
            for target, value in bindings(node):
                held = {root(each) for each in flat(target)} & self._called
                if held - self.names and any(self.has(each) for each in ast.walk(value) if is_reference(each)):
                    self.names |= held
        return len(self.names) > before

    def has(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and node.attr in self.helpers:
            return True
        name = root(node)
        # Modules are not callable: where the name of one is called, it is the response's.
        known = name in self._known or (name in sys.stdlib_module_names and not isinstance(node, ast.Name))
        return name in self.names or (bool(name) and "." not in name and not known)

    def calls(self, call: ast.Call) -> bool:
        """True if it calls the response, or hands a function of the response to what will: ``map(f, xs)``."""
        handed = (each for each in arguments_of(call) if is_reference(each))
        return self.has(call.func) or any(self.has(each) for each in handed)


def is_reference(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute)


def arguments_of(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def place(number: int, node: ast.AST) -> Place:
    return number, getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def lines_of(number: int, node: ast.AST) -> Iterator[tuple[int, int]]:
    first = getattr(node, "lineno", 0)
    return ((number, line) for line in range(first, (getattr(node, "end_lineno", None) or first) + 1))


def bindings(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Targets and what is bound to them; of two tuples the elements."""
    if isinstance(node, ast.Assign):
        first = node.targets[0]
        shared = [(target, first) for target in node.targets[1:]]
        return [*(pair for target in node.targets for pair in element_pairs(target, node.value)), *shared]
    if isinstance(node, ast.AugAssign | ast.NamedExpr) or (isinstance(node, ast.AnnAssign) and node.value):
        return [(node.target, node.value)]  # type: ignore[list-item]
    if isinstance(node, LOOPS):
        return [(node.target, node.iter)]
    if isinstance(node, ast.withitem) and node.optional_vars:
        return [(node.optional_vars, node.context_expr)]
    if isinstance(node, ast.Match):
        patterns = [each for case in node.cases for each in ast.walk(case.pattern)]
        names = [each.name for each in patterns if isinstance(each, ast.MatchAs | ast.MatchStar) and each.name]
        return [(ast.copy_location(ast.Name(name, ast.Store()), node.subject), node.subject) for name in names]
    return []


def element_pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    sides = [each.elts for each in (target, value) if isinstance(each, ast.Tuple | ast.List)]
    if len(sides) < 2 or len(sides[0]) != len(sides[1]) or any(isinstance(e, ast.Starred) for e in sides[0] + sides[1]):
        return [(target, value)]
    return [pair for two in zip(*sides, strict=True) for pair in element_pairs(*two)]


def flat(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        return [each for element in target.elts for each in flat(element)]
    return [target]


def called(node: ast.expr) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def names_of(*nodes: ast.AST) -> set[str]:
    """Objects that the nodes name, anywhere in them."""
    return {root(each) for node in nodes for each in ast.walk(node) if is_reference(each)} - {""}


def free_names(node: ast.AST) -> set[str]:
    """Names in a function or class that it does not bind itself."""
    bound = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    bound |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    defaults = [default for each in ast.walk(node) if isinstance(each, ast.arguments) for default in each.defaults]
    return (names_of(node) - bound) | names_of(*defaults)
