"""Findings that need no trial: versions, backends, devices, memory, limits, disk, clock, network."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import roll
from roll.config.strategies.registry import BACKENDS
from roll.distributed.nodes import NodeEnvironment, auth_problem, interface_of, own_address
from roll.doctor.findings import Finding, Severity, judge
from roll.platforms import current_platform
from roll.preflight import is_installed

GIBIBYTE = 1 << 30
DISTRIBUTION = "roll-rl"
SHOWN_PACKAGES = ("torch", "transformers", "ray", "numpy", "safetensors")
LEAST_SHM = 256 << 20
LEAST_FILES = 1024
LEAST_DISK, COMFORTABLE_DISK = 100 << 20, 5 * GIBIBYTE


def versions() -> Iterator[Finding]:
    """Python, this package, and every requirement of the base install."""
    python = platform.python_version()
    yield judge(
        "python",
        python,
        "3.11 or later",
        sys.version_info >= (3, 11),
        "make the environment with Python 3.11 or later",
        severity=Severity.ERROR,
    )
    yield Finding("roll", roll.__version__, f"at {Path(roll.__file__).parent}")
    try:
        listed = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield Finding(
            "requirements",
            "unknown",
            "the package is installed, so that what it needs is written down",
            Severity.WARNING,
            "pip install -e . in the clone",
        )
        return
    requirements = [Requirement(text) for text in listed]
    base = [each for each in requirements if each.marker is None]
    broken = 0
    for requirement in base:
        found = installed_version(requirement.name)
        holds = found is not None and requirement.specifier.contains(found, prereleases=True)
        broken += not holds
        if not holds or requirement.name in SHOWN_PACKAGES:
            yield judge(
                requirement.name,
                found or "not installed",
                str(requirement.specifier) or "any version",
                holds,
                f"pip install '{requirement}'",
                severity=Severity.ERROR,
            )
    yield Finding("requirements", f"{len(base) - broken} of {len(base)} met", "all of them")


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def backends(broken_imports: Mapping[str, str]) -> Iterator[Finding]:
    """Every strategy and engine: whether it can run here, else why not.

    Args:
        broken_imports: by backend, the error of a trial import; empty where none was made.
    """
    for backend in BACKENDS.rows:
        package, names = backend.package, ", ".join(backend.strategies)
        rule = "comes with the base install" if package is None else f"needs the package {package.module}"
        remedy = (
            "reinstall this package" if package is None else f"{package.install}; or leave it, if no recipe uses it"
        )
        version = None if package is None else version_of_module(package.module)
        value = f"{names}: " + ("ready" if version is None else f"ready, {version}")
        severity = Severity.OK
        if package is not None and not is_installed(package.module):
            value, severity = f"{names}: not installed", Severity.NOTE
        elif backend.name in broken_imports:
            value, rule = f"{names}: cannot be imported: {broken_imports[backend.name]}", "its modules can be imported"
            # An engine that is not made for this host keeps nothing else from running.
            severity = Severity.ERROR if package is None else Severity.WARNING
        elif package is not None and version is not None and package.title and not _is_tested(version, package.tested):
            rule = f"{package.tested[0]} up to, not including, {package.tested[1]}: the versions that were tried"
            severity = Severity.NOTE
        yield Finding(backend.name, value, rule, severity, remedy if severity else "")


def _is_tested(version: str, tested: tuple[str, str]) -> bool:
    from packaging.version import Version

    return Version(tested[0]) <= Version(version) < Version(tested[1])


def version_of_module(module: str) -> str | None:
    """The version of the distribution that brings a module."""
    names = _distributions().get(module.partition(".")[0], [])
    return next(iter(filter(None, map(installed_version, names))), None)


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Distributions by the modules that they bring; collecting them reads the list of files of each."""
    return metadata.packages_distributions()


def devices() -> Iterator[Finding]:
    """The kind and number of devices, and processors and memory of the host."""
    here = current_platform()
    files = [path for pattern in ("nvidia[0-9]*", "davinci[0-9]*") for path in Path("/dev").glob(pattern)]
    chosen = os.environ.get("ROLL_PLATFORM")
    unused = here.name == "cpu" and bool(files) and chosen is None
    count = here.device_count()
    yield judge(
        "platform",
        here.name if here.name == "cpu" else f"{count} x {here.name}",
        "devices of the host are used" if chosen is None else f"ROLL_PLATFORM={chosen}",
        not unused and count > 0,
        f"{len(files)} device files are there and torch uses none of them: install torch with support for them, see "
        "that the driver and the visible-devices variable are right, or set ROLL_PLATFORM=cpu",
    )
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield judge(
        "processors",
        f"{usable} of {os.cpu_count()} usable",
        "two or more",
        usable > 1,
        "trainer, engine and Ray share one processor: expect a run to be slow",
    )
    total, free = memory()
    yield judge(
        "memory",
        f"{free / GIBIBYTE:.1f} of {total / GIBIBYTE:.1f} GiB free",
        "4 GiB free, which a run on a tiny model takes",
        free >= 4 * GIBIBYTE,
        "end what else runs here, or give the container more memory",
        data={"total": total, "free": free},
    )


def memory() -> tuple[int, int]:
    """Bytes in total and available: of the host, or of the container where that has less."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    total, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            bound, taken = int(Path(limit).read_text()), int(Path(used).read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
        if bound < total:
            total, free = bound, min(free, bound - taken)
    return total, free


def limits(output: Path) -> Iterator[Finding]:
    """Shared memory, open files, disk of the output folder, folder for temporary files."""
    from roll.distributed.ray_node import object_store

    shm = Path("/dev/shm")
    usage = shutil.disk_usage(shm) if shm.exists() else None
    store, elsewhere = object_store(None, Path(tempfile.gettempdir()))
    where = f"files under {elsewhere}" if elsewhere else str(shm)
    yield judge(
        "shared memory",
        "no /dev/shm"
        if usage is None
        else f"{usage.free / GIBIBYTE:.2f} of {usage.total / GIBIBYTE:.2f} GiB free; "
        f"Ray's object store: {store / GIBIBYTE:.2f} GiB in {where}",
        f"{LEAST_SHM >> 20} MiB free in /dev/shm, for the batches between processes",
        usage is not None and usage.free >= LEAST_SHM,
        "batches go through files, which is slower: --shm-size=1g for docker run, shm_size: 1gb in a compose file, an "
        "emptyDir with medium: Memory at /dev/shm under Kubernetes",
        data={"object_store": store},
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield judge(
        "open files",
        f"{soft} (at most {hard})",
        f"{LEAST_FILES} or more; 65536 with hundreds of workers",
        soft >= LEAST_FILES,
        "ulimit -n 65536 before the start; --ulimit nofile=65536 for docker run",
    )
    yield _disk(output)
    yield _temporary()


def _disk(output: Path) -> Finding:
    folder = output.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    rule = (
        f"can be written, with {COMFORTABLE_DISK // GIBIBYTE} GiB free: a checkpoint takes 12 to 16 bytes a parameter"
    )
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".roll-doctor-") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Finding(
            "output folder",
            f"{folder}: {error.strerror}",
            rule,
            Severity.ERROR,
            "give the user of the run the right to write there, or name another folder by --output and output_dir",
        )
    return judge(
        "output folder",
        f"{folder}: {free / GIBIBYTE:.1f} GiB free",
        rule,
        free >= COMFORTABLE_DISK,
        "free some of it, keep fewer checkpoints (max_ckpt_to_keep), or name another disk by --output and output_dir",
        severity=Severity.WARNING if free >= LEAST_DISK else Severity.ERROR,
        data={"free": free},
    )


def _temporary() -> Finding:
    folder = Path(tempfile.gettempdir())
    free, writable = shutil.disk_usage(folder).free, os.access(folder, os.W_OK)
    return judge(
        "temporary files",
        f"{folder}: {free / GIBIBYTE:.1f} GiB free{'' if writable else ', not writable'}",
        "can be written, with 1 GiB free: Ray keeps its session and spilled objects there",
        writable and free >= GIBIBYTE,
        "free some of it, or set TMPDIR to another disk",
        severity=Severity.WARNING if writable else Severity.ERROR,
    )


_TIME_ERROR = 5
"""State of the kernel's clock while it is not synchronised, adjtimex(2)."""


def clock(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The time of day against the files of the installation, and whether the kernel's clock is synchronised."""
    newest = max(path.stat().st_mtime for path in Path(roll.__file__).parent.glob("*.py"))
    now = time.time()
    text = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    yield judge(
        "time of day",
        text,
        "not before the files of this installation",
        now >= newest - 60,
        "set the clock: certificates and the order of checkpoints depend on it",
        severity=Severity.ERROR,
    )
    several = environ.get("WORLD_SIZE", "1") not in ("", "1")
    state = _clock_state()
    yield judge(
        "synchronised",
        {None: "unknown", True: "yes", False: "no"}[state],
        "by NTP or the host, so that the logs of several hosts can be read together",
        bool(state),
        "start chrony or systemd-timesyncd (in a container: on its host)",
        severity=Severity.WARNING if several and state is False else Severity.NOTE,
    )


def _clock_state() -> bool | None:
    """True where the kernel's clock is synchronised; None: it does not say."""
    buffer = ctypes.create_string_buffer(512)  # struct timex, read only with modes = 0
    call = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)
    state = -1 if call is None else int(call(buffer))
    return None if state < 0 else state != _TIME_ERROR


def network(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The place of this host among the nodes of a run, as the environment gives it."""
    try:
        nodes = NodeEnvironment.from_environ(environ)
    except ValueError as error:
        yield Finding("nodes", str(error), "variables that make sense", Severity.ERROR, "see docs/multi-node.md")
        return
    if nodes.ray_address is not None:
        yield Finding("nodes", f"RAY_ADDRESS={nodes.ray_address}", "a cluster that is there is used")
    elif nodes.world_size == 1:
        yield Finding("nodes", "this one alone, on loopback", "WORLD_SIZE above 1: several nodes")
    else:
        yield from _several(nodes, environ)


def _several(nodes: NodeEnvironment, environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        address = own_address(nodes)
    except OSError as error:
        yield Finding(
            "address",
            f"MASTER_ADDR={nodes.master_addr}: {error}",
            "node 0 has a name or address that this host knows, and a route to it",
            Severity.ERROR,
            "give the address itself, and see that `ip route get ADDRESS` finds an interface",
        )
        return
    name = interface_of(address)
    chosen = environ.get("GLOO_SOCKET_IFNAME")
    yield judge(
        "address",
        f"node {nodes.rank} of {nodes.world_size}: {address} on {name or 'no interface'}{_speed(name)}",
        "an interface of this host; gloo uses it, unless GLOO_SOCKET_IFNAME names another",
        name is not None and chosen in (None, name),
        f"GLOO_SOCKET_IFNAME={chosen} sends collectives over another network than Ray: unset it, unless that is meant"
        if name is not None
        else f"MASTER_ADDR={nodes.master_addr} must be an address of node 0's own",
        severity=Severity.WARNING if name is not None else Severity.ERROR,
    )
    problem = auth_problem(environ)
    yield judge(
        "access token",
        "set" if problem is None else "none",
        "nodes of a run know each other by a secret",
        problem is None,
        problem or "",
        severity=Severity.ERROR,
    )


def _speed(interface: str | None) -> str:
    try:
        megabits = int(Path(f"/sys/class/net/{interface}/speed").read_text())
    except (OSError, ValueError):
        return ""
    return f", {megabits / 1000:g} Gbit/s" if megabits > 0 else ""
