"""Statements of tests whose arguments a response may see only as copies.

``assert f(x) == x[::-1]`` computes what is expected from the argument itself: a function that empties it would decide
on its own verdict.  Where a test sets a result of the response against something that it computes from an argument
after the response has seen it, the response gets a copy of that argument, and what it does to the copy stays with it.
Elsewhere changes come back, as in ``sort(x)`` followed by ``assert x == [1, 2]``, where the argument is the result.

Decided by the test code alone.  In doubt the argument is copied: a wrong guess costs a right program its test, never
gives a wrong one a pass.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterable, Iterator, Sequence, Set

Place = tuple[int, int, int]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.comprehension)
_ELEMENT = "#"
"""Separates an object's name from the position of one of its elements."""


def lines_with_copies(trees: Sequence[ast.Module], own: Set[str]) -> list[list[int]]:
    """Lines on which the response must get copies of its arguments.

    Args:
        trees: the test code of a row, in the order in which it runs.
        own: names that the tests bind or import themselves, the response's aside.

    Returns:
        For each source the lines on which the response gets copies of its arguments.
    """
    callables = Callables(own | set(dir(builtins)), trees)
    module_level = Scope(callables, list(enumerate(trees)))
    functions = [(number, node) for number, tree in enumerate(trees) for node in outermost_functions(tree)]
    scopes = [Scope(callables, [each], [module_level]) for each in functions]
    # Methods share what is kept in ``self``.
    scopes = [Scope(callables, [each], [module_level], scopes) for each in functions]
    lines: list[set[int]] = [set() for _ in trees]
    for scope in (module_level, *scopes):
        for number, line in scope.lines():
            lines[number].add(line)
    return [sorted(found) for found in lines]


def has_own_names(node: ast.AST) -> bool:
    """True for a function that binds no name of the module."""
    return isinstance(node, _FUNCTIONS) and not any(isinstance(each, ast.Global) for each in ast.walk(node))


def outermost_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if has_own_names(node):
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
    """Names by which tests call the response: its own, those of helpers that call it, and those that may hold one of
    its functions (arguments that are called, ``for f in (add, plus)``)."""

    def __init__(self, known: Set[str], trees: Sequence[ast.Module]) -> None:
        self._known = known
        self.names: set[str] = set()
        self._helpers: set[str] = set()
        nodes = [node for tree in trees for node in ast.walk(tree)]
        functions = [node.func for node in nodes if isinstance(node, ast.Call)]
        self._called = {root(node) for node in functions if isinstance(node, ast.Name | ast.Subscript)}
        imports = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
        self.modules = sys.stdlib_module_names | {(each.asname or each.name).partition(".")[0] for each in imports}
        for node in nodes:
            if isinstance(node, ast.arguments):
                self.names |= {each.arg for each in (*node.posonlyargs, *node.args, *node.kwonlyargs)} & self._called
        candidates = [node for node in nodes if isinstance(node, _FUNCTIONS) or bindings(node)]
        # Not any(): each round goes through all of them.
        while sum(self._learn(node) for node in candidates):
            pass

    def _learn(self, node: ast.AST) -> bool:
        before = len(self.names)
        if isinstance(node, _FUNCTIONS):
            if any(isinstance(each, ast.Call) and self.calls(each) for each in ast.walk(node)):
                self.names.add(node.name)
                self._helpers.add(node.name)
        else:
            for target, value in bindings(node):
                held = {root(each) for each in flat(target)} & self._called
                if held - self.names and any(self.has(each) for each in ast.walk(value) if is_reference(each)):
                    self.names |= held
        return len(self.names) > before

    def has(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and node.attr in self._helpers:
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


class Scope:
    """A test function, or the code outside of all, with the response's results and arguments in it."""

    def __init__(
        self,
        callables: Callables,
        parts: Sequence[tuple[int, ast.AST]],
        around: Iterable[Scope] = (),
        beside: Iterable[Scope] = (),
    ) -> None:
        self._callables = callables
        self._parts = parts
        self.results: set[str] = set()
        self.instances: set[str] = set()
        for other in around:
            self.results |= other.results
            self.instances |= other.instances
        for other in beside:
            self.results |= {name for name in other.results if "." in name}
            self.instances |= {name for name in other.instances if "." in name}
        self._aliases: dict[str, set[str]] = {}
        self._passed: dict[str, list[tuple[Place, int, ast.AST]]] = {}
        binding = [
            node
            for _, node in self._nodes()
            if bindings(node) or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
        ]
        while sum(self._learn_results(node) for node in binding):
            pass
        for number, node in self._nodes():
            # Names for the same object, or for an element of one.
            for target, value in bindings(node):
                for name, aliased in pairs_of_aliases(target, value, isinstance(node, _LOOPS)):
                    self._aliases.setdefault(name, set()).add(aliased)
            if isinstance(node, ast.Call) and (self._is_response_call(node) or self._has_result(node.func)):
                for name in self._names_in(arguments_of(node)):
                    self._passed.setdefault(name, []).append((place(number, node), number, node))
        for number, node in self._nodes():
            self._learn_derived(number, node)

    def lines(self) -> Iterator[tuple[int, int]]:
        """Number of the source, and line, where an argument of which something is expected is handed over."""
        for number, node in self._nodes():
            suspects = self._set_against_results(self._sides(node))
            hides = False
            if isinstance(node, ast.Call):
                # Code in a string hides what it compares, and so does a helper that is given the same object twice.
                objects = [root(argument) for argument in arguments_of(node) if is_reference(argument)]
                hides = root(node.func) in ("exec", "eval")
                hides = hides or (self._is_response_call(node) and len(set(objects)) < len(objects))
            if suspects or hides:
                # An iterator over calls performs them where its items are read.
                yield from lines_of(number, node)
            for name in suspects:
                for _, where, call in self._passed[name]:
                    yield from lines_of(where, call)

    def _nodes(self) -> Iterator[tuple[int, ast.AST]]:
        """All nodes; of a module those outside of functions with names of their own."""
        for number, part in self._parts:
            is_whole, waiting = not isinstance(part, ast.Module), [part]
            while waiting:
                node = waiting.pop()
                yield number, node
                waiting += [each for each in ast.iter_child_nodes(node) if is_whole or not has_own_names(each)]

    def _is_response_call(self, call: ast.Call) -> bool:
        """True if arguments of the call go to the response only; methods of plain results are the tests' own."""
        function = call.func
        if self._callables.calls(call) or (isinstance(function, ast.Name) and function.id in self.results):
            return True
        return isinstance(function, ast.Attribute) and self._is_instance(function.value)

    def _is_instance(self, node: ast.AST) -> bool:
        """True for an object of a class of the response's, which begins with a capital, and its attributes."""
        while isinstance(node, ast.Attribute) and root(node) not in self.instances:
            node = node.value
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else root(node.func)
            return name[:1].isupper() and self._callables.calls(node)
        return root(node) in self.instances

    def _has_result(self, node: ast.AST) -> bool:
        """True if the value of an expression is the response's; an index into something else does not make it so."""
        waiting = [node]
        while waiting:
            each = waiting.pop()
            if isinstance(each, ast.Call) and self._is_response_call(each):
                return True
            if is_reference(each) and root(each) in self.results:
                return True
            waiting += [each.value] if isinstance(each, ast.Subscript) else ast.iter_child_nodes(each)
        return False

    def _learn_results(self, node: ast.AST) -> bool:
        before = len(self.results)
        for target, value in bindings(node):
            # The numbers of a range are the tests' own, even if the response chooses its length.
            if called(value) != "range" and self._has_result(value):
                self.results |= {root(each) for each in flat(target)} - {""}
            if self._is_instance(value):
                self.instances.add(root(target))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # ``found.append(f(x))``; a module keeps nothing.
            holder = root(node.func.value)
            if holder not in ("", "self", *self._callables.modules) and any(map(self._has_result, arguments_of(node))):
                self.results.add(holder)
        return len(self.results) > before

    def _learn_derived(self, number: int, node: ast.AST) -> None:
        """Names for what is computed from an argument after the response has seen it."""
        for target, value in bindings(node):
            used = self._names_in([value], outside=True)
            late = {
                name
                for name, passes in (self._passed.items() if used else ())
                if any(same_object(name, each) for each in used)
                and any(where < place(number, value) for where, _, _ in passes)
            }
            for each in flat(target):
                if late and root(each):
                    self._aliases.setdefault(root(each), set()).update(late)

    def _names_in(self, nodes: Iterable[ast.AST], outside: bool = False) -> set[str]:
        """Objects that the nodes name; ``outside``: other than as arguments of the response."""
        found: set[str] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if outside and isinstance(node, ast.Call) and self._is_response_call(node):
                waiting.append(node.func)
                continue
            name = root(node) if isinstance(node, ast.Name | ast.Attribute) else ""
            if name:
                found.add(name)
            waiting += ast.iter_child_nodes(node)
        while more := {other for name in found for other in self._aliases.get(name, ())} - found:
            found |= more
        return found

    def _set_against_results(self, sides: Sequence[ast.expr]) -> set[str]:
        """Arguments from which one side is computed, where another one is a result."""
        with_result = [number for number, side in enumerate(sides) if self._has_result(side)]
        found: set[str] = set()
        for number, side in enumerate(sides):
            if with_result and with_result != [number]:
                used = self._names_in([side], outside=True)
                found |= {name for name in self._passed if any(same_object(name, each) for each in used)}
        return found

    def _sides(self, node: ast.AST) -> list[ast.expr]:
        """Expressions that are compared, combined, or handed to the same function."""
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.BinOp):
            sides = [node.left, node.right]
        elif isinstance(node, ast.Return | ast.Yield) and isinstance(node.value, ast.Tuple | ast.List):
            # The caller may compare them.
            sides = node.value.elts
        elif isinstance(node, ast.Subscript) and not any(isinstance(each, ast.Slice) for each in ast.walk(node.slice)):
            # The response chooses the position.
            sides = [node.value, node.slice]
        elif isinstance(node, ast.Call) and root(node.func) != "print" and not self._is_response_call(node):
            sides = arguments_of(node)
            if isinstance(node.func, ast.Attribute):
                sides.append(node.func.value)
        return sides


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
    if isinstance(node, _LOOPS):
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


def pairs_of_aliases(target: ast.expr, value: ast.expr, is_loop: bool) -> Iterator[tuple[str, str]]:
    """Each name of a target with the object that it names; an element's place is part of its name."""
    name = called(value)
    if is_loop and name in ("enumerate", "zip") and isinstance(value, ast.Call) and isinstance(target, ast.Tuple):
        sources = value.args if name == "zip" else [ast.Constant(0), *value.args]
        for each, source in zip(target.elts, sources, strict=False):
            yield from pairs_of_aliases(each, source, is_loop)
    elif is_loop and isinstance(value, ast.Call):
        # What a call gives may hold what it was given: ``sorted(xs)``, ``cases.items()``.
        given = [*arguments_of(value), *([value.func.value] if isinstance(value.func, ast.Attribute) else [])]
        yield from ((root(each), f"{root(one)}{_ELEMENT}") for each in flat(target) for one in given if root(one))
    elif isinstance(target, ast.Tuple | ast.List):
        if isinstance(value, ast.Tuple | ast.List) and not is_loop:
            for each, source in zip(target.elts, value.elts, strict=False):
                yield from pairs_of_aliases(each, source, is_loop)
        elif root(value):
            yield from ((root(each), f"{root(value)}{_ELEMENT}{n}") for n, each in enumerate(target.elts) if root(each))
    elif root(target) and root(value):
        is_same = isinstance(value, ast.Name | ast.Attribute) and not is_loop
        yield root(target), root(value) if is_same else f"{root(value)}{_ELEMENT}"
    elif root(target) and isinstance(value, ast.Tuple | ast.List | ast.Dict):
        # A display holds the objects themselves.
        held = value.values if isinstance(value, ast.Dict) else value.elts
        yield from ((root(target), root(each)) for each in held if root(each))


def called(node: ast.expr) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def same_object(one: str, other: str) -> bool:
    """True for the same object, or an object and an element of it."""
    return one == other or one.startswith(f"{other}{_ELEMENT}") or other.startswith(f"{one}{_ELEMENT}")
