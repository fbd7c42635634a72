"""The trusted side of tests: runs test code in a process of its own, next to the response's process.

What the tests name and do not define (``add``, ``Stack``, ``solution.add``) is a proxy of the response's object.  Names
of Python's built-in functions and of its standard modules are always the real ones: a response cannot put its own
``abs`` or ``math.isclose`` under a test.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import importlib
import inspect
import io
import itertools
import json
import os
import sys
import types
import typing
import unittest
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.rewards.sandbox.candidate import CHANNEL, SOURCE, VERDICTS, open_streams, read_all, remove_names, usual_names
from roll.rewards.sandbox.proxies import AwaitableProxy, Proxy
from roll.rewards.sandbox.remote import Remote, ResponseGone
from roll.rewards.sandbox.snippets import DYNAMIC, MODULE_NAMES, bound_names, names_in
from roll.rewards.sandbox.values import Channel, equal_values

if TYPE_CHECKING:
    import pytest

USUAL_ALIASES = {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot"}
"""Names under which tests use modules that they leave to the response to import."""
PYTEST_FILE = "test_solution.py"
MAX_NOTE = 400  # characters of the reason why a case failed


@dataclass(frozen=True)
class Verdicts:
    """Writes lines of JSON to a file that only this process and the reward worker hold."""

    descriptor: int

    def send(self, **message: object) -> None:
        os.write(self.descriptor, json.dumps(message).encode() + b"\n")

    def case(self, number: int, error: BaseException | None) -> None:
        note = None if error is None else f"{type(error).__name__}: {text_of(error)}"[:MAX_NOTE]
        self.send(case=number, passed=error is None, note=note)


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # formatting an assertion may call the response, which may be gone
        return ""


def run_tests(request: dict[str, Any]) -> None:
    """Run tests on the trusted side of the channel; verdicts leave through a file that the response's process lacks."""
    remove_names()
    job = read_all(SOURCE)
    open_streams()
    run(job, Channel(CHANNEL, request["max_message"]), Verdicts(VERDICTS))
    os._exit(0)


def run(job: bytes, channel: Channel, report: Verdicts) -> None:
    """Run the tests of a job with the response's process at ``channel``.

    The job is JSON with ``case_timeout``, ``object_operators``, the ``preparation``
    (:func:`~roll.rewards.sandbox.snippets.preparation`), and one of ``tests`` (sources, each a case), ``calls`` or
    ``pytest`` (the text of a file).
    """
    settings = json.loads(job)
    preparation = settings["preparation"]
    tests = sys.modules["tests"] = types.ModuleType("tests")
    namespace = tests.__dict__
    # File names by which lines of the tests are identified.
    numbered = [f"test {number}" for number in range(len(preparation["copies"]))]
    sources = ["setup", *([PYTEST_FILE] if "pytest" in settings else numbered)]
    copies = {name: frozenset(lines) for name, lines in zip(sources, preparation["copies"], strict=False)}
    ends, classes = preparation["expects_ends"], preparation["classes"]
    remote = Remote(channel, settings["object_operators"], ends, classes, namespace.get, copies)
    real = builtins.issubclass

    def is_subclass(kind: Any, base: Any) -> bool:
        # The response's classes are no classes here.
        return kind._roll_remote.ask("issubclass", kind, base) is True if type(kind) is Proxy else real(kind, base)

    builtins.issubclass = is_subclass
    remote.set_deadline(settings["case_timeout"])
    for name in [*preparation["imports"], *(["pytest"] if "pytest" in settings else [])]:
        try:
            importlib.import_module(name)
        except Exception as error:  # a package may fail in any way
            reason = f"the tests import {name}, which fails in the sandbox: {text_of(error)[:MAX_NOTE]}"
            return report.send(impossible=reason)
    try:
        state = remote.exchange(preparation)
        if "compile_error" in state or "raised" in state:
            details = state.get("raised")
            note = f"{details.get('name')}: {details.get('text')}" if isinstance(details, dict) else ""
            report.send(broken="compile_error" if "compile_error" in state else "raised", note=note[:MAX_NOTE])
        elif "calls" in settings:
            run_calls(settings, remote, report)
        elif "tests" in settings:
            run_snippets(settings, remote, report, namespace)
        else:
            run_pytest(settings, remote, report, namespace)
    except ResponseGone as gone:
        report.send(gone=text_of(gone), timed_out=gone.timed_out)
    if remote.impossible is not None:
        report.send(impossible=remote.impossible)
    return None


def run_calls(settings: dict[str, Any], remote: Remote, report: Verdicts) -> None:
    """Call a function (or method of ``Solution``) for each case and compare its result: its first argument, changed in
    place, where it returns nothing."""
    right_unchanged: list[int] = []
    works_in_place = False
    for number, case in enumerate(settings["calls"]):
        remote.set_deadline(settings["case_timeout"])
        is_changed = True
        try:
            before = json.dumps(case["arguments"][:1])
            # A function of that name, else a method of a fresh ``Solution()``.
            name, names = settings["fn_name"], remote.ask("names")
            if name in names:
                function = remote.ask("get", name)
            elif "Solution" in names:
                function = getattr(remote.ask("get", "Solution")(), name)
            else:
                raise NameError(f"the response defines no {name}")
            returned = function(*case["arguments"])
            if isinstance(returned, AwaitableProxy):
                returned = remote.ask("await", returned)
            if returned is None and None not in case["accepted"] and case["arguments"]:
                returned = case["arguments"][0]
                is_changed = json.dumps(case["arguments"][:1]) != before
                works_in_place = works_in_place or is_changed
            if isinstance(returned, Proxy):
                # Items of an iterator, where a list is wanted; no more than tell that there are too many.
                lengths = [len(wanted) for wanted in case["accepted"] if isinstance(wanted, list)]
                returned = list(itertools.islice(returned, max(lengths) + 1)) if lengths else returned
            elif hasattr(returned, "tolist"):
                returned = returned.tolist()
            if not any(equal_values(returned, value, settings["tolerance"]) for value in case["accepted"]):
                report.case(number, AssertionError("another result was expected"))
            elif is_changed:
                report.case(number, None)
            else:
                right_unchanged.append(number)
        except Exception as error:  # whatever the response raises, it has not returned the result
            report.case(number, error)
    for number in right_unchanged:
        # An argument that is right already needs no change, if the function changes others.
        report.case(number, None if works_in_place else AssertionError("the function returned nothing"))


def run_snippets(settings: dict[str, Any], remote: Remote, report: Verdicts, namespace: dict[str, Any]) -> None:
    """Execute each test in one namespace after the set-up; a test passes if it raises nothing."""
    offer_response(remote, "\n".join([settings.get("setup", ""), *settings["tests"]]))
    entry_point = settings["entry_point"].partition(".")[0].partition("(")[0]
    if settings.get("setup"):
        remote.set_deadline(settings["case_timeout"])
        try:
            bind_names(settings["setup"], namespace, remote)
            exec(compile(settings["setup"], "setup", "exec"), namespace)  # noqa: S102  the data set's own code
        except (Exception, SystemExit) as error:
            # A set-up that uses nothing of the response has failed for another reason.
            tree = ast.parse(settings["setup"])
            used, own = names_in(tree), bound_names(tree) | set(dir(builtins)) | sys.stdlib_module_names
            imports = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
            imports |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
            if used <= own | set(USUAL_ALIASES) and not imports & set(MODULE_NAMES) and not used & DYNAMIC:
                remote.impossible = f"the set-up fails by itself: {type(error).__name__}: {text_of(error)}"[:MAX_NOTE]
            return report.case(0, error)
    for number, (test, method) in enumerate(zip(settings["tests"], settings["methods"], strict=True)):
        remote.set_deadline(settings["case_timeout"])
        failed: BaseException | None = None
        try:
            code = compile(test, f"test {number}", "exec")
            bind_names(test, namespace, remote, entry_point)
            exec(code, namespace)  # noqa: S102  the data set's own code
            if method is not None:
                # One method of a class of unittest's; one that was skipped or not run has not passed.
                result = unittest.TestResult()
                unittest.TestSuite([namespace[method[0]](method[1])]).run(result)
                bad = [*result.errors, *result.failures]
                if bad or result.skipped or not result.testsRun:
                    raise AssertionError(bad[0][1].strip().splitlines()[-1] if bad else f"{method[1]} was not run")
        except (Exception, SystemExit) as error:
            failed = error
        remote.require_answers()
        report.case(number, failed)
    return None


def bind_names(source: str, namespace: dict[str, Any], remote: Remote, entry_point: str = "") -> None:
    """Bind what the source names but does not define: standard modules, and proxies of the response's objects;
    ``entry_point`` is the response's, whatever else has that name."""
    tree = ast.parse(source)
    offered = remote.ask("names")
    own = set(offered) if isinstance(offered, list) else set()
    # Names that are used as modules are: `name.attribute`.
    parts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    holders = {part.id for part in parts if isinstance(part, ast.Name)}
    if entry_point in own:
        namespace[entry_point] = remote.ask("get", entry_point)
    for name in sorted(names_in(tree) - set(namespace)):
        if hasattr(builtins, name):
            continue
        if name in sys.stdlib_module_names and name not in own:
            namespace[name] = importlib.import_module(name)
        elif name in USUAL_ALIASES or (name in sys.stdlib_module_names and name in holders):
            with contextlib.suppress(ImportError):
                namespace[name] = importlib.import_module(USUAL_ALIASES.get(name, name))
        elif name in own:
            namespace[name] = remote.ask("get", name)
        elif isinstance(usual := usual_names().get(name), type) or hasattr(typing, name):
            # Tests were published with the same imports in front. Functions may be what the response lacks.
            namespace[name] = usual


def offer_response(remote: Remote, tests: str) -> None:
    """Let tests import the response. ``import *`` brings no name that the tests bind themselves or that is Python's."""
    tree = ast.parse(tests)
    hidden = bound_names(tree) | {*USUAL_ALIASES, *MODULE_NAMES} | sys.stdlib_module_names | set(dir(builtins))
    used = names_in(tree)
    wanted = None if used & DYNAMIC else used - hidden
    sys.modules.update({name: response_module(name, remote, hidden, wanted) for name in MODULE_NAMES})


def response_module(name: str, remote: Remote, hidden: Set[str], wanted: Set[str] | None) -> types.ModuleType:
    """A module of the response's names; ``import *`` brings those ``wanted`` (None: unknown) and not ``hidden``."""
    module = types.ModuleType(name)

    def look_up(attribute: str) -> Any:
        if attribute == "__all__":
            # Names that the importing module already has are kept.
            taken = hidden | sys._getframe(1).f_globals.keys()
            offered = {each for each in remote.ask("names") if each.isidentifier() and not each.startswith("_")}
            return sorted((offered if wanted is None else offered & wanted) - taken)
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        try:
            return remote.ask("get", attribute)
        except KeyError as error:
            raise AttributeError(f"the response defines no {attribute}") from error

    module.__getattr__ = look_up  # type: ignore[method-assign]
    return module


def run_pytest(settings: dict[str, Any], remote: Remote, report: Verdicts, namespace: dict[str, Any]) -> None:
    """Run the text as a file of pytest's; each collected test is a case, and only a passed one counts."""
    # Plugins installed here are not for the tests, and take seconds to load.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    offer_response(remote, settings["pytest"])
    with open(PYTEST_FILE, "w", encoding="utf-8") as file:
        file.write(settings["pytest"])

    class Plugin:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            for module in {id(item.module): item.module for item in session.items if hasattr(item, "module")}.values():
                bind_names(settings["pytest"], module.__dict__, remote)
                namespace.update({name: each for name, each in vars(module).items() if isinstance(each, type)})
            self.numbers = {item.nodeid: number for number, item in enumerate(session.items)}
            self.names = dict.fromkeys(self.numbers.values(), False)
            report.send(total=len(self.numbers))

        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_protocol(self, item: object) -> Iterator[None]:
            remote.set_deadline(settings["case_timeout"])
            yield

        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
            if not inspect.iscoroutinefunction(pyfuncitem.obj):
                return None
            names = pyfuncitem._fixtureinfo.argnames
            asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
            return True

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call":
                self.names[self.numbers[report.nodeid]] = report.passed and remote.gone is None
            elif report.failed:
                self.names[self.numbers[report.nodeid]] = False

    plugin = Plugin()
    options = f"-q -p no:cacheprovider -p no:faulthandler --rootdir=. --confcutdir=. -c {os.devnull}"
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*options.split(), PYTEST_FILE], plugins=[plugin])
    for number, passed in getattr(plugin, "names", {}).items():
        report.case(number, None if passed else AssertionError("the test did not pass"))
    remote.require_answers()
