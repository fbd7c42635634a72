"""Settings of every test: one thread a process, nothing from the network, GPU tests only where there is a GPU; and the
Ray that runs of whole pipelines share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Set before torch, ray or transformers are imported, and inherited by every process that a test starts.
# One thread: the test machines are small, and two processes whose threads spin against each other are slower than one.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 starves a run's workers beside another test process
    "MPLBACKEND": "Agg",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# The same examples in every run: a change is judged by what it changed. `HYPOTHESIS_PROFILE=explore` draws new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


# Checks that tests of several folders share.
pytest.register_assert_rewrite("tests.strategies.engine_checks")

# A shell starts its background jobs with interrupts ignored, and what they start inherits that: tests that interrupt a
# run would wait for its end in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).parents[1]
_LONG = [
    *(ROOT / "tests" / folder for folder in ("strategies", "distributed", "pipelines", "examples", "faults")),
    *(ROOT / "tests" / file for file in ("test_python_api.py", "test_starter.py")),
]
"""Files that take long. They come first, so that test processes end at about the same time; whole pipelines come after
all that is quicker."""


_UNTIL = float(os.environ.get("TESTS_UNTIL", "inf"))
"""Seconds since the epoch after which no test begins: a host that is too slow for a tier runs what it can of it."""
_LATE = "the time of its tier was up"


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > _UNTIL:
        pytest.skip(_LATE)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    late = [report for report in terminalreporter.stats.get("skipped", ()) if _LATE in str(report.longrepr)]
    if late:
        terminalreporter.write_line(f"{len(late)} tests were not run: {_LATE} (TESTS_UNTIL)")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test that was not run for want of time is a failure."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", ()) if reporter is not None else ()
    if any(_LATE in str(report.longrepr) for report in skipped):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(tryfirst=True)  # before ``-m "not long"`` is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_rows(items, is_whole=not any("::" in argument for argument in config.args))
    items.sort(key=_place)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


def _mark_rows(items: list[pytest.Item], is_whole: bool) -> None:
    """Mark as ``matrix`` what ``default_rows`` does not name, and as ``long`` what ``long_rows`` names; of whole files,
    a name without a row is a mistake."""
    unused: dict[str, set[str]] = {}
    for item in items:
        for mark, tier, is_of_named in (("default_rows", "matrix", False), ("long_rows", "long", True)):
            patterns = {pattern for marker in item.iter_markers(mark) for pattern in marker.args}
            if not patterns:
                continue
            assert isinstance(item, pytest.Function)
            named = {pattern for pattern in patterns if fnmatchcase(item.callspec.id, pattern)}
            unused.setdefault(f"{mark} of {item.nodeid.partition('[')[0]}", set(patterns)).difference_update(named)
            if bool(named) == is_of_named:
                item.add_marker(tier)
    if is_whole and (wrong := {test: sorted(rows) for test, rows in unused.items() if rows}):
        raise pytest.UsageError(f"rows that a test does not have: {wrong}")


def _place(item: pytest.Item) -> tuple[bool, bool]:
    return item.get_closest_marker("e2e") is not None, not any(item.path.is_relative_to(path) for path in _LONG)


@pytest.fixture(autouse=True)
def gradients_stay_on() -> Iterator[None]:
    """A generation worker turns them off for the whole of its process, which here has other tests to run."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_grad_enabled(True)


@pytest.fixture(scope="session")
def shared_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray that runs join, so that not every one of them has to start its own."""
    file = tmp_path_factory.mktemp("ray") / "address"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.serve_ray", str(file)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
    )
    give_up = time.monotonic() + 60
    while not file.exists():
        assert server.poll() is None, "Ray did not start"
        assert time.monotonic() < give_up, "Ray did not start in time"
        time.sleep(0.05)
    yield file.read_text()
    server.communicate(timeout=60)
