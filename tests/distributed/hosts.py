"""Several hosts out of one: network namespaces with an address, a name and a cable of their own, joined by a switch.

Needs root and iproute2 (``apt-get install iproute2``). Everything lies in namespaces whose names begin with ``roll-``;
the interfaces of the machine itself are left alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NETWORK = "10.77.0"
TOKEN = "5ec2e7" * 10


def missing() -> str | None:
    """Why there can be no namespaces here; None: there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "ss", "tc", "unshare") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install iproute2"
    name = f"roll-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"no network namespaces: {tried.stderr.strip()}" if tried.returncode else None


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def clean_environment() -> dict[str, str]:
    """That of a host on which nothing of a run is set, with this interpreter and this tree."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "ROLL_", "GLOO_"))}
    return {**kept, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Host:
    """A namespace that passes for a host."""

    name: str
    address: str
    switch: str
    port: str
    """The switch's end of its cable."""

    def start(self, words: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
        """A command on this host, under the host's name."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh", *words]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *named],
            env={**clean_environment(), **environ},
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def pids(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Everything on it ends at once, as with a loss of power, but its kernel still refuses connections."""
        for pid in self.pids():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue

    def cut_off(self) -> None:
        """Unplug its cable."""
        ip("-n", self.switch, "link", "set", self.port, "down")

    def slow_down(self, kilobits: int) -> None:
        """Both directions of its cable get this rate. Not every kernel has netem; a token bucket is everywhere."""
        for namespace, device in ((self.switch, self.port), (self.name, "eth0")):
            bucket = ["tbf", "rate", f"{kilobits}kbit", "burst", "4kb", "latency", "400ms"]
            subprocess.run(
                ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket],
                check=True,
                capture_output=True,
            )

    def listens(self) -> set[str]:
        """The addresses at which something on it listens; ``*`` and ``0.0.0.0`` are all that it has."""
        sockets = subprocess.check_output(["ip", "netns", "exec", self.name, "ss", "-Hltn"], text=True)
        return {line.split()[3].rpartition(":")[0] for line in sockets.splitlines()}

    def sent(self) -> int:
        """Bytes that it has sent over its cable."""
        file = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(subprocess.check_output(["ip", "netns", "exec", self.name, "cat", file], text=True))


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts on one switch; what runs on them ends with the block."""
    switch, made = f"roll-{os.getpid()}-sw", []
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for number in range(count):
            host = Host(f"roll-{os.getpid()}-{number}", f"{NETWORK}.{number + 1}", switch, f"port{number}")
            made.append(host)
            ip("netns", "add", host.name)
            cable = ["type", "veth", "peer", "name", "eth0", "netns", host.name]
            ip("-n", switch, "link", "add", host.port, *cable)
            ip("-n", switch, "link", "set", host.port, "master", "br0", "up")
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host.name, "link", "set", device, "up")
        yield made
    finally:
        for host in made:
            host.kill()
        for name in [host.name for host in made] + [switch]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
