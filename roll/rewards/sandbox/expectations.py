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
import functools
from collections.abc import Iterable, Iterator, Sequence, Set

from roll.rewards.sandbox.names import (
    FUNCTIONS,
    LOOPS,
    Callables,
    Place,
    arguments_of,
    bindings,
    called,
    flat,
    free_names,
    has_own_names,
    is_reference,
    lines_of,
    names_of,
    outermost_functions,
    place,
    root,
)

_ELEMENT, _ELEMENTS, _HOLDER = "#", "*", "!"
"""After an object's name: one of its elements, with its place where that is known; another object that has all of its
elements; an object that holds it."""
_DEEPEST = 3  # elements of elements that are told apart
_MANY = 40  # names from which on elements are not told apart: the search must end soon for any test
_WITHOUT_OBJECTS = ("len", "sum", "str", "repr", "int", "float", "bool", "hash", "all", "any", "range", "deepcopy")
_COPIES = ("sorted", "list", "tuple", "set", "frozenset", "dict", "copy", "Counter", "deque")
"""Functions and methods whose results hold no given object, or none but the elements of those given."""
_NAMESPACES = frozenset(("globals", "locals", "vars"))


def lines_with_copies(trees: Sequence[ast.Module], own: Set[str]) -> list[list[int]]:
    """For each source (``trees``: in the order in which they run) the lines on which the response must get copies of
    its arguments; ``own``: names that the tests bind or import themselves, the response's aside."""
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
        self.aliases: dict[str, set[str]] = {}  # name to the objects that it may be, hold, or read when it is used
        for other in around:
            self.results |= other.results
            self.instances |= other.instances
            self.aliases |= {name: set(found) for name, found in other.aliases.items()}
        for other in beside:
            self.results |= {name for name in other.results if "." in name}
            self.instances |= {name for name in other.instances if "." in name}
        self._passed: dict[str, list[tuple[Place, int, ast.AST]]] = {}
        binding = [
            node
            for _, node in self._nodes()
            if bindings(node) or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
        ]
        while sum(self._learn_results(node) for node in binding):
            pass
        for _, part in parts:
            for function in outermost_functions(part) if isinstance(part, ast.Module) else ():
                self.aliases.setdefault(function.name, set()).update(free_names(function))
        for _, node in self._nodes():
            self._learn_aliases(node)
        for number, node in self._nodes():
            if isinstance(node, ast.Call) and (self._is_response_call(node) or self._has_result(node.func)):
                for name in self._all_names(self._handed_over(node)):
                    self._passed.setdefault(name, []).append((place(number, node), number, node))
        for number, node in self._nodes():
            self._learn_derived(number, node)

    def lines(self) -> Iterator[tuple[int, int]]:
        """Number of the source, and line, where an argument of which something is expected is handed over."""
        for number, node in self._nodes():
            # Arguments from which one side is computed, where another one is a result.
            sides = self._sides(node)
            with_result = [place for place, side in enumerate(sides) if self._has_result(side)]
            others = [side for place, side in enumerate(sides) if with_result and with_result != [place]]
            suspects = self._seen_in(self._names_in(others))
            if isinstance(node, ast.If | ast.While) and any(map(self._judges, [*node.body, *node.orelse])):
                # What is expected depends on it.
                suspects |= self._seen_in(names_of(node.test) - self.results)
            hides = False
            if isinstance(node, ast.Call):
                # Code in a string hides what it compares, and so does a helper that is given the same object twice.
                objects = [root(argument) for argument in arguments_of(node) if is_reference(argument)]
                hides = root(node.func) in ("exec", "eval")
                if self._is_response_call(node):
                    named = names_of(*arguments_of(node))
                    hides = hides or len(set(objects)) < len(objects) or bool(named & _NAMESPACES)
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

    def _judges(self, node: ast.AST) -> bool:
        """True if a statement asserts something about a result."""
        asserts = (
            each
            for each in ast.walk(node)
            if isinstance(each, ast.Assert | ast.Compare)
            or (isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr[:6] == "assert")
        )
        return any(map(self._has_result, asserts))

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

    def _learn_aliases(self, node: ast.AST) -> None:
        for target, value in bindings(node):
            for name, aliased in self._pairs_of_aliases(target, value, isinstance(node, LOOPS)):
                self.aliases.setdefault(name, set()).add(aliased)
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            self.aliases.setdefault(node.name, set()).update(free_names(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # ``xs.append(x)``
            holder = root(node.func.value)
            if holder and not self._is_response_call(node):
                self.aliases.setdefault(holder, set()).update(*map(self._held, arguments_of(node)))

    def _learn_derived(self, number: int, node: ast.AST) -> None:
        """Names for what is computed from an argument after the response has seen it."""
        for target, value in bindings(node):
            used = self._names_in([value])
            late = {
                name
                for name, passes in (self._passed.items() if used else ())
                if any(may_show(each, name) for each in used)
                and any(where < place(number, value) for where, _, _ in passes)
            }
            for each in flat(target):
                if late and root(each):
                    self.aliases.setdefault(root(each), set()).update(late)

    def _names_in(self, nodes: Iterable[ast.AST]) -> set[str]:
        """Objects that the nodes name, other than as arguments of the response."""
        found: set[str] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Call) and self._is_response_call(node):
                waiting.append(node.func)
                continue
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and root(node):
                found |= self._held(node)
                continue
            name = root(node) if isinstance(node, ast.Name | ast.Attribute) else ""
            if name:
                found.add(name)
            waiting += ast.iter_child_nodes(node)
        return self._all_names(found)

    def _all_names(self, found: set[str]) -> set[str]:
        """The objects of these names, and those that they may be, hold or read."""
        found = set(found)
        waiting = list(found)
        while waiting:
            name = waiting.pop()
            base, *steps = name.rstrip(_ELEMENTS).split(_ELEMENT)
            more = {name.removesuffix(_HOLDER)}
            for other in self.aliases.get(base, ()):
                for step in steps:
                    other = marked(other, _ELEMENT + step)
                more.add(marked(other, _ELEMENTS) if name.endswith(_ELEMENTS) else other)
            if len(found) > _MANY:
                bases = {each.rstrip(_ELEMENTS + _HOLDER).partition(_ELEMENT)[0] for each in more}
                more = bases | {base + _ELEMENTS for base in bases}
            waiting += more - found
            found |= more
        return found

    def _handed_over(self, call: ast.Call) -> set[str]:
        """Objects that a call gives to the response; a helper of the tests gives what it can reach as well."""
        found = set().union(*map(self._held, arguments_of(call)))
        owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        name = call.func.attr if isinstance(call.func, ast.Attribute) else root(call.func)
        return found | ({root(owner)} - {""} if name in self._callables.helpers else set())

    def _held(self, value: ast.AST) -> set[str]:
        """Objects that a value may be, hold, or read later."""
        if isinstance(value, ast.Constant | ast.Compare | ast.JoinedStr | ast.UnaryOp):
            return set()
        if isinstance(value, ast.Subscript):
            place = str(value.slice.value) if isinstance(value.slice, ast.Constant) else ""
            mark = _ELEMENTS if isinstance(value.slice, ast.Slice) else f"{_ELEMENT}{place}"
            return {marked(name, mark) for name in self._held(value.value)}
        if isinstance(value, ast.Attribute) and not (isinstance(value.value, ast.Name) and value.value.id == "self"):
            return {marked(name, _ELEMENT) for name in self._held(value.value)}
        if is_reference(value):
            return {root(value)} - {""}
        if isinstance(value, ast.Call):
            name = value.func.attr if isinstance(value.func, ast.Attribute) else root(value.func)
            if self._is_response_call(value) or name in _WITHOUT_OBJECTS:
                return set()
            if name in _COPIES:
                given = [*arguments_of(value), *([value.func.value] if isinstance(value.func, ast.Attribute) else [])]
                return {marked(each, _ELEMENTS) for each in set().union(*map(self._held, given))}
        elif isinstance(value, ast.BinOp):
            return {marked(name, _ELEMENTS) for name in self._held(value.left) | self._held(value.right)}
        elif isinstance(value, ast.ListComp | ast.SetComp):
            return {marked(name, _HOLDER) for name in self._held(value.elt)}
        elif isinstance(value, ast.Starred | ast.IfExp | ast.BoolOp):
            return set().union(*map(self._held, ast.iter_child_nodes(value)))
        elif isinstance(value, ast.List | ast.Tuple | ast.Set | ast.Dict):
            held = set().union(*map(self._held, ast.iter_child_nodes(value)))
            return {marked(name, _HOLDER) for name in held}
        # Whatever it does: it may be each of them, hold it, or be one of its elements.
        return {each for name in names_of(value) for each in (name, marked(name, _HOLDER), marked(name, _ELEMENT))}

    def _pairs_of_aliases(self, target: ast.expr, value: ast.expr, is_loop: bool) -> Iterator[tuple[str, str]]:
        """Each name of a target with the objects that it may be, hold or read."""
        name = called(value)
        if is_loop and name in ("enumerate", "zip") and isinstance(value, ast.Call) and isinstance(target, ast.Tuple):
            sources = value.args if name == "zip" else [ast.Constant(0), *value.args]
            for each, source in zip(target.elts, sources, strict=False):
                yield from self._pairs_of_aliases(each, source, is_loop)
        else:
            held = self._held(value)
            if is_loop:
                held = {marked(one, _ELEMENT) for one in held}
            if not isinstance(target, ast.Tuple | ast.List):
                yield from ((root(target), one) for one in held if root(target))
                return
            # What a call gives, and what follows a star, has no known place.
            is_known = not isinstance(value, ast.Call) and not any(isinstance(e, ast.Starred) for e in target.elts)
            for number, part in enumerate(target.elts):
                place = f"{_ELEMENT}{number if is_known else ''}"
                yield from ((root(each), marked(one, place)) for each in flat(part) for one in held if root(each))

    def _seen_in(self, names: set[str]) -> set[str]:
        """Arguments of the response that these names may show."""
        used = self._all_names(names) if self._passed else ()
        return {name for name in self._passed if any(may_show(each, name) for each in used)}

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


def marked(name: str, mark: str) -> str:
    """An element of an object (its place after the mark), what has its elements, or what holds it."""
    if name.endswith(_HOLDER):
        return name.removesuffix(_HOLDER) if mark.startswith(_ELEMENT) else name
    if mark == _HOLDER:
        return name + mark
    name = name.rstrip(_ELEMENTS)
    return name if mark.startswith(_ELEMENT) and name.count(_ELEMENT) >= _DEEPEST else name + mark


@functools.lru_cache(maxsize=1 << 16)
def may_show(used: str, passed: str) -> bool:
    """True if what is computed from ``used`` may change with the object ``passed``: it is that, a part of it, or holds
    it; a copy that was made before does not."""
    used, passed = used.removesuffix(_HOLDER), passed.removesuffix(_HOLDER)
    ours, theirs = (name.rstrip(_ELEMENTS).split(_ELEMENT) for name in (used, passed))
    if any(one and other and one != other for one, other in zip(ours, theirs, strict=False)):
        return False
    return not used.endswith(_ELEMENTS) or passed.endswith(_ELEMENTS) or len(theirs) > len(ours)
