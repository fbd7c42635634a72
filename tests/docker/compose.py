"""The part of the compose specification that compose.yaml uses: read strictly, and run with namespaces for containers.

A service is a process tree with a network address, a name, mounts, process ids and limits of its own, as a container
has; its file system is a copy of what the Dockerfile copies, at the same relative paths. https://compose-spec.io
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.distributed.hosts import ROOT, clean_environment, hosts

WORKDIR = "/home/roll/roll"
"""As in the Dockerfile."""
SERVICE = {
    "image": str, "build": dict, "command": list, "environment": dict, "shm_size": str, "ulimits": dict, "init": bool,
    "security_opt": list, "cap_drop": list, "networks": list, "volumes": list, "depends_on": dict,
}  # fmt: skip
TOP = {"services": dict, "networks": dict, "volumes": dict}
CONDITIONS = ("service_started", "service_healthy", "service_completed_successfully")
VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?:(:[-?])([^}]*(?:\([^)]*\))?[^}]*))?\}|(\w+))")
UNITS = {"b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30}


class ComposeError(ValueError):
    """The file, or the environment, is not what the specification asks for."""


def interpolated(value: Any, environ: Mapping[str, str]) -> Any:
    """``${NAME}``, ``${NAME:-default}``, ``${NAME:?error}`` and ``$$`` in all texts."""

    def put(match: re.Match[str]) -> str:
        dollar, name, how, word, plain = match.groups()
        word = (word or "").replace("$$", "$")
        if dollar:
            return "$"
        found = environ.get(name or plain, "")
        if not found and how == ":?":
            raise ComposeError(f"required variable {name} is missing a value: {word}")
        return found or word

    if isinstance(value, dict):
        return {key: interpolated(each, environ) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolated(each, environ) for each in value]
    return VARIABLE.sub(put, value) if isinstance(value, str) else value


def typed(where: str, mapping: Any, known: Mapping[str, type]) -> None:
    if not isinstance(mapping, dict):
        raise ComposeError(f"{where} is not a mapping")
    for key, value in mapping.items():
        if key.startswith("x-"):
            continue
        if key not in known:
            raise ComposeError(f"{where}: additional property {key!r}")
        if not isinstance(value, known[key]):
            raise ComposeError(f"{where}.{key}: {type(value).__name__} instead of {known[key].__name__}")


def read(text: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The file with variables put in.

    Raises:
        ComposeError: a key, type, name or value that the specification does not have.
    """
    project: dict[str, Any] = interpolated(yaml.safe_load(text), environ)
    typed("file", project, TOP)
    for name, service in project["services"].items():
        where = f"services.{name}"
        typed(where, service, SERVICE)
        texts = [*service.get("command", ()), *service.get("environment", {}).values()]
        if not all(isinstance(each, str) for each in texts):
            raise ComposeError(f"{where}: words of a command and values of variables are texts")
        for key in ("networks", "volumes"):
            used = {each.partition(":")[0] for each in service.get(key, ())}
            if not used <= project.get(key, {}).keys():
                raise ComposeError(f"{where}.{key}: {used - project.get(key, {}).keys()} is not declared")
        for other, how in service.get("depends_on", {}).items():
            if other not in project["services"] or how.get("condition") not in CONDITIONS:
                raise ComposeError(f"{where}.depends_on: {other} {how}")
        if not all(isinstance(limit, int) for limit in service.get("ulimits", {}).values()):
            raise ComposeError(f"{where}.ulimits: a limit is a number")
        size_of(service.get("shm_size", "64m"))
    return project


def size_of(text: str) -> int:
    match = re.fullmatch(r"(\d+)([a-z]+)", text)
    if match is None or match[2] not in UNITS:
        raise ComposeError(f"{text!r} is not a size")
    return int(match[1]) * UNITS[match[2]]


@dataclass
class Container:
    """A service that runs."""

    name: str
    process: subprocess.Popen[str]

    def wait(self, seconds: float) -> tuple[int, str]:
        text, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, text


CONTAINER = """
hostname "$1"; mount --bind "$2" /etc/hosts; mount -t tmpfs -o size="$3" tmpfs /dev/shm; ulimit -n "$4"; shift 4
"$@"
"""


class Project:
    """``docker compose up``: services by the order in which they depend on each other."""

    def __init__(self, project: Mapping[str, Any], folder: Path) -> None:
        self.services, self.folder = project["services"], folder
        for volume in project["volumes"]:
            (folder / "volumes" / volume).mkdir(parents=True)
        self._running: dict[str, Container] = {}

    def volume(self, name: str) -> Path:
        return self.folder / "volumes" / name

    @contextmanager
    def up(self, seconds: float) -> Iterator[dict[str, Container]]:
        """All services, started; those that others wait for have ended well by then."""
        with hosts(len(self.services)) as made:
            self._hosts = dict(zip(self.services, made, strict=True))
            resolver = "".join(f"{host.address} {name}\n" for name, host in self._hosts.items())
            (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + resolver)
            try:
                for name in self.services:
                    self._start(name, time.monotonic() + seconds)
                yield self._running
            finally:
                for host in made:
                    host.kill()
                for container in self._running.values():
                    container.process.wait(30)

    def _start(self, name: str, give_up: float) -> None:
        if name in self._running:
            return
        service = self.services[name]
        for other, how in service.get("depends_on", {}).items():
            self._start(other, give_up)
            assert how["condition"] == "service_completed_successfully"
            status, text = self._running[other].wait(give_up - time.monotonic())
            assert status == 0, f"{other} has not completed successfully: {text}"
        code = self._file_system(name)
        # Root without capabilities may still read what is root's, as the image's user may read the image.
        words = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if service.get("cap_drop") == ["ALL"] else []
        words += ["--no-new-privs"] if "no-new-privileges:true" in service.get("security_opt", ()) else []
        made = [name, str(self.folder / "hosts"), str(size_of(service.get("shm_size", "64m")))]
        inside = ["sh", "-c", CONTAINER, "sh", *made, str(service["ulimits"]["nofile"]), *words, *service["command"]]
        bin_folder = Path(sys.executable).parent  # the image's ``python`` is the one of this environment
        own = ["unshare", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._hosts[name].name, *own, *inside],
            env={
                **clean_environment(),
                "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
                **service["environment"],
            },
            cwd=code,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._running[name] = Container(name, process)

    def _file_system(self, name: str) -> Path:
        code = self.folder / name
        for part in ("examples", "configs"):
            shutil.copytree(ROOT / part, code / part, ignore=shutil.ignore_patterns("artifacts", "__pycache__"))
        for each in self.services[name]["volumes"]:
            volume, _, place = each.partition(":")
            target = code / os.path.relpath(place, WORKDIR)
            target.symlink_to(self.volume(volume))
        return code
