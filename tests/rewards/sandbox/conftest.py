"""Sandboxes that the tests of this folder share: one with all that the host gives, and those of poorer hosts."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from roll.rewards.code_sandbox import CodeSandbox
from roll.rewards.sandbox.client import Sandbox, Settings
from roll.rewards.sandbox.judging import Outcome, judge, read_cases

NOBODY = 65534
EVERYTHING = {"limits", "network", "files", "private", "signals", "syscalls", "ends", "scratch", "user"}
DISK = {"scratch"}
NO_LANDLOCK = {"files", "private"}
_PUBLIC_PYTHON = "/usr/bin/python3"


@dataclass(frozen=True)
class Host:
    """Means that the launched zygote may use, and protections that it then does not give."""

    lacks: frozenset[str]
    settings: Settings = field(default_factory=Settings)
    launched: tuple[tuple[str, object], ...] = ()
    """Arguments of :mod:`tests.rewards.sandbox.poorer_host`; needs the superuser."""

    def start(self) -> Sandbox:
        if not sys.platform.startswith("linux"):
            pytest.skip("the sandbox needs Linux")
        if not self.launched:
            return Sandbox(self.settings)
        asked = dict(self.launched)
        if os.geteuid() != 0:
            pytest.skip("only the superuser can give up what this host gives")
        if asked.get("python"):
            if not Path(_PUBLIC_PYTHON).exists():
                pytest.skip(f"needs {_PUBLIC_PYTHON}")
            asked["path"] = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        script = str(Path(__file__).with_name("poorer_host.py"))
        return Sandbox(replace(self.settings, launcher=(sys.executable, script, json.dumps(asked))))


def host(*lacks: str, settings: Settings | None = None, **launched: object) -> Host:
    return Host(frozenset(lacks), settings or Settings(), tuple(launched.items()))


SAME_USER = ("unshare", "--user", "--map-user=1000", "--")
DOCKER = {"no_namespaces": True, "docker_capabilities": True}
PUBLIC = {"python": _PUBLIC_PYTHON}
HOSTS = {
    "root": host(),
    "user": host("user", **PUBLIC, user=NOBODY),
    "container_root": host(*DISK, **DOCKER, **PUBLIC),
    "container_root_without_landlock": host(*DISK, *NO_LANDLOCK, **DOCKER, **PUBLIC, no_landlock=True),
    "container_root_private_python": host(*DISK, "user", settings=Settings(without=("namespaces", "mounts", "uid"))),
    "container_user": host(*DISK, "user", **DOCKER, **PUBLIC, user=NOBODY),
    "container_user_landlock_4": host(
        *DISK, "user", settings=Settings(landlock_abi=4), **DOCKER, **PUBLIC, user=NOBODY
    ),
    "container_user_landlock_1": host(
        *DISK, "user", settings=Settings(landlock_abi=1), **DOCKER, **PUBLIC, user=NOBODY
    ),
    "container_user_without_landlock": host(
        *DISK, "user", *NO_LANDLOCK, **DOCKER, **PUBLIC, user=NOBODY, no_landlock=True
    ),
    "container_same_user": host(
        *DISK, "user", settings=Settings(launcher=SAME_USER, without=("namespaces", "mounts"), landlock_abi=4)
    ),
    "container_same_user_without_landlock": host(
        *DISK, "user", *NO_LANDLOCK, settings=Settings(launcher=SAME_USER, without=("namespaces", "mounts", "landlock"))
    ),
}
"""Name to host: the superuser or a user, alone or in a container that forbids namespaces, on kernels with the newest
Landlock, an older one or none. ``same_user``: the user of the reward worker itself, which is this process."""
MARKS = {
    **dict.fromkeys(HOSTS, (pytest.mark.matrix,)),
    **dict.fromkeys(("root", "container_user", "container_root_without_landlock"), ()),
    **dict.fromkeys(
        ("user", "container_root", "container_user_landlock_1", "container_same_user_without_landlock"),
        (pytest.mark.long,),
    ),
}
"""In ``make test``: everything, no namespaces, and neither they nor Landlock."""

QUICK = CodeSandbox(timeout=10.0, case_timeout=5.0)


def cases_of(name: str) -> dict[str, dict[str, Any]]:
    """The cases of ``NAME.txt``: ``=== name``, and parts behind ``--- key``; of ``tests`` there may be several, and a
    part ``KEY.json`` is read as JSON."""
    found: dict[str, dict[str, Any]] = {}
    for block in Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8").split("\n=== ")[1:]:
        title, _, rest = block.rstrip("\n").partition("\n")
        case: dict[str, Any] = {}
        for part in f"\n{rest}".split("\n--- ")[1:]:
            key, _, text = part.partition("\n")
            if key == "tests":
                case.setdefault(key, []).append(text)
            else:
                case[key.removesuffix(".json")] = json.loads(text) if key.endswith(".json") else text
        found[title] = case
    return found


def truth_of(case: dict[str, Any]) -> Any:
    """The ground truth of a case; None: its row has the tests."""
    return {"pytest": case["pytest"]} if "pytest" in case else case.get("tests")


Verdict = Callable[..., Outcome]


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    os.environ["ROLL_TEST_SECRET"] = "a-key-that-no-program-may-see"
    sandbox = HOSTS["root"].start()
    yield sandbox
    sandbox.close()
    del os.environ["ROLL_TEST_SECRET"]


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=MARKS[name]) for name in HOSTS],
)
def any_host(request: pytest.FixtureRequest) -> str:
    """Every kind of host, one after the other."""
    return str(request.param)


@pytest.fixture(scope="session")
def any_sandbox(any_host: str, sandbox: Sandbox) -> Iterator[Sandbox]:
    if any_host == "root":
        yield sandbox
        return
    poorer = HOSTS[any_host].start()
    yield poorer
    poorer.close()


@pytest.fixture(scope="session")
def verdict(sandbox: Sandbox) -> Verdict:
    """``verdict(source, ground_truth, columns, limits and other settings)``."""

    def run(source: str, ground_truth: object = None, sandbox: Sandbox = sandbox, **changes: object) -> Outcome:
        columns = changes.pop("row", {})
        limits = {name: changes.pop(name) for name in list(changes) if hasattr(QUICK.limits, name)}
        options = replace(QUICK, **changes)
        options.limits = replace(options.limits, **limits)
        return judge(sandbox, source, read_cases(ground_truth, columns), options)

    return run
