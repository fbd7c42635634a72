"""The nodes of a run: which one this is, by which address the others reach it, the secret that they share, and the roll
call at which each announces its versions.

``RANK`` and ``WORLD_SIZE`` in the environment of the command count nodes; in workers they have torch's meaning.
"""

from __future__ import annotations

import fcntl
import json
import platform
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path

from roll.config.reading.errors import ConfigError, Problem
from roll.distributed.failures import NodeError

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
        """Read the variables.

        Raises:
            ConfigError: one that is not a number or out of range; the message names it.
        """
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
    """The address by which other nodes reach this one: the master's own on node 0, else the one that faces it.

    Raises:
        OSError: the master's name is not known here, or there is no route to it.
    """
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

    Ray looks for it in ``RAY_AUTH_TOKEN``, in the file ``RAY_AUTH_TOKEN_PATH``, and in ``~/.ray/auth_token``.

    Raises:
        ConfigError: several nodes, and no secret between them.
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


EQUAL_PACKAGES = ("torch", "ray", "transformers")
"""Their versions, Python's and this package's must be the same on all nodes: objects travel as pickles, and ranks
compute one model together."""


@dataclass(frozen=True)
class NodeCard:
    """A node's answer to the roll call."""

    rank: int
    hostname: str
    address: str
    versions: dict[str, str]

    @classmethod
    def of_this_node(cls, rank: int, address: str) -> NodeCard:
        return cls(rank, socket.gethostname(), address, version_reader()())

    @classmethod
    def from_bytes(cls, text: bytes) -> NodeCard:
        return cls(**json.loads(text))

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        return f"node {self.rank} ({self.hostname}, {self.address})"


def version_reader() -> Callable[[], dict[str, str]]:
    """A function that reads the versions of the node where it runs.

    By name: Python, this package, and :data:`EQUAL_PACKAGES`, without the build (``+cpu``): a head node without
    accelerators may have another one. A nested function is pickled by value, and another node may have no ``roll``.
    """
    names = EQUAL_PACKAGES

    def versions() -> dict[str, str]:
        found = {"python": platform.python_version(), "roll": "not installed"}
        with suppress(ImportError):
            found["roll"] = import_module("roll").__version__
        for name in names:
            # Metadata instead of an import: torch alone would take seconds on each node.
            found[name] = "not installed"
            with suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(name).partition("+")[0]
        return found

    return versions


def check_same_versions(head: NodeCard, others: list[NodeCard], head_name: str | None = None) -> None:
    """
    Args:
        head_name: in place of its number.

    Raises:
        NodeError: nodes whose versions differ from the head's, each with what it has and what the head has.
    """
    lines, head_name = [], head_name or f"node {head.rank}"
    for card in others:
        different = [
            f"{name} {card.versions.get(name, 'unknown')} ({head_name}: {version})"
            for name, version in head.versions.items()
            if card.versions.get(name) != version
        ]
        if different:
            lines.append(f"{card} has {', '.join(different)}")
    if lines:
        rule = "All nodes must have the same versions: give them one environment or one image"
        raise NodeError("\n".join([*lines, rule]))


def check_all_present(world_size: int, present: set[int], cards: Mapping[int, NodeCard], seconds: float) -> None:
    """
    Raises:
        NodeError: nodes that are missing, by number, and by name where they have been heard of.
    """
    missing = [rank for rank in range(world_size) if rank not in present]
    if not missing:
        return
    silent = [str(rank) for rank in missing if rank not in cards]
    started = [str(cards[rank]) for rank in missing if rank in cards]
    lines = [f"{len(present)} of WORLD_SIZE={world_size} nodes joined within {seconds:g} s"]
    if silent:
        lines.append(
            f"never heard of: node {', '.join(silent)}. Is the command running there, with that RANK and the same "
            "MASTER_ADDR and MASTER_PORT, and do they reach this node?"
        )
    if started:
        lines.append(f"heard of, but its Ray did not join: {', '.join(started)}. Its own output says why")
    raise NodeError("\n".join(lines))
