"""This node of a run: which one it is, by which address the others reach it, the secret that they share, and the
variables of the processes that start here. Light to import: what starts before Ray needs it too.

``RANK`` and ``WORLD_SIZE`` in the environment of the command count nodes; in workers they have torch's meaning.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from roll.config.reading.errors import ConfigError, Problem
from roll.distributed.guard import MARK_ENV
from roll.platforms import current_platform, usable_cores

_SOURCE = "environment"


@dataclass(frozen=True)
class NodeEnvironment:
    """This node's place in a run."""

    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 6379
    dashboard_port: int | None = None
    ray_address: str | None = None
    """A Ray cluster that is already running (``RAY_ADDRESS``); it is used and left running."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> NodeEnvironment:
        """Read the variables. Raises ``ConfigError``: one that is not a number or out of range; the message names
        it."""
        world_size = _number(environ, "WORLD_SIZE", 1, 1, 1 << 16)
        rank = _number(environ, "RANK", 0, 0, world_size - 1)
        master_addr = environ.get("MASTER_ADDR") or ("127.0.0.1" if world_size == 1 else "")
        if not master_addr:
            rule = f"is not set, and WORLD_SIZE={world_size}: give every node the address of node 0"
            raise ConfigError([Problem("MASTER_ADDR", None, rule, "10.0.0.4", _SOURCE, has_value=False)])
        return cls(
            rank=rank,
            world_size=world_size,
            master_addr=master_addr,
            master_port=_number(environ, "MASTER_PORT", 6379, 1, 65535),
            dashboard_port=_number(environ, "DASHBOARD_PORT", 0, 0, 65535) or None,
            ray_address=environ.get("RAY_ADDRESS") or None,
        )


def _number(environ: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        rule = f"must be a whole number from {low} to {high}"
        raise ConfigError([Problem(name, text, rule, default, _SOURCE)])
    return value


def own_address(nodes: NodeEnvironment) -> str:
    """The address by which other nodes reach this one: the master's own on node 0, else the one that faces it. Raises
    ``OSError``: the master's name is not known here, or there is no route to it."""
    if nodes.rank == 0:
        return socket.gethostbyname(nodes.master_addr)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((nodes.master_addr, nodes.master_port))  # sends nothing; picks the outgoing interface
        return str(probe.getsockname()[0])


_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str | None:
    """The network interface of this host that has an IPv4 address; None: none has it, or it is no such address."""
    try:
        wanted = socket.inet_aton(address)
    except OSError:
        return None
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                # struct ifreq: 16 bytes of name, then struct sockaddr_in, whose address follows family and port.
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if found[20:24] == wanted:
                return name
    return None


def require_token(nodes: NodeEnvironment, environ: Mapping[str, str]) -> None:
    """Check that the nodes of a run know each other by a token, or do without by choice.

    Ray looks for it in ``RAY_AUTH_TOKEN``, in the file ``RAY_AUTH_TOKEN_PATH``, and in ``~/.ray/auth_token``. Raises
    ``ConfigError``: several nodes, and no secret between them.
    """
    mode, path = environ.get("RAY_AUTH_MODE", "token").lower(), environ.get("RAY_AUTH_TOKEN_PATH")
    alone = nodes.world_size == 1 or nodes.ray_address is not None
    if alone or mode != "token" or environ.get("RAY_AUTH_TOKEN"):
        return
    file = Path(path) if path else Path.home() / ".ray" / "auth_token"
    if file.is_file():
        return
    problem = (
        f"RAY_AUTH_TOKEN_PATH={path} is no file on this node"
        if path
        else "nodes of a run know each other by a secret, and this one has none: who reaches Ray's ports could run "
        "commands here. Set RAY_AUTH_TOKEN to the same value on all nodes (openssl rand -hex 32), or "
        "RAY_AUTH_TOKEN_PATH to a file with it; RAY_AUTH_MODE=disabled accepts the risk, on a network of your own"
    )
    raise ConfigError([Problem("RAY_AUTH_TOKEN", None, problem, source=_SOURCE, has_value=False)])


LOG_DIR_ENV = "ROLL_LOG_DIR"
"""The folder of worker logs; without it they are in Ray's session folder and are removed with it."""

WORKER_DEFAULTS = {
    # Several workers share the host's cores: threads that spin while they wait take them from one another.
    "OMP_WAIT_POLICY": "passive",
    # oneDNN and torch each keep what they prepared for the last 1,024 shapes, and batches rarely have a shape again:
    # 1,250 products of random numbers of rows left 2.3 GB instead of .4, and took longer.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "LRU_CACHE_CAPACITY": "32",
    "TOKENIZERS_PARALLELISM": "false",
}
HEAP_DEFAULTS = {
    # glibc gives a large tensor's pages back to the system at once, and the next one has every page cleared again: a
    # tenth of the CPU time of a step on SmolLM2. Here the heap keeps what was freed until `Platform.empty_cache`.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "67108864",
    # Tensors of 2 MiB and more in huge pages (torch). With the heap's, an 80th of the page faults.
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Of workers on a CPU host; read when a process starts. On others tensors are in device memory."""
_MOST_THREADS = 16
"""Most threads of a worker on a CPU host: matrices of models that a CPU can train are too small for more."""

RAY_SETTINGS = {
    # Actors request no devices from Ray (roles may share them), and Ray would hide all devices from such an actor.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def worker_threads(num_devices: int) -> int:
    """Threads of each worker: on a CPU host the cores of its device (roles on one device compute in turns); else 1."""
    if current_platform().device_type != "cpu":
        return 1
    return max(1, min(usable_cores() // num_devices, _MOST_THREADS))


def absent_here(num_devices: int, mark: str) -> dict[str, str]:
    """Variables of the workers that this process's environment does not set."""
    threads = {"OMP_NUM_THREADS": str(worker_threads(num_devices))}
    heap = HEAP_DEFAULTS if current_platform().device_type == "cpu" else {}
    wanted = {**WORKER_DEFAULTS, **heap, **threads, **RAY_SETTINGS, MARK_ENV: mark}
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for the length of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
