"""The roll call of a run's nodes: each announces its versions, and all must be there and have the same."""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module, metadata

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.config.reading.errors import ConfigError, Problem
from roll.distributed.failures import NodeError
from roll.distributed.ray_node import NODE_RANK_LABEL, Board, NodeOptions

_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 120.0  # time limit for a node of an existing cluster to start a process and report its versions

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


def answer_roll_call(options: NodeOptions, give_up: float) -> Board:
    """Announce this node's versions and compare them with the head's; returns the head's board. Raises ``NodeError``:
    they differ, or the head does not announce any."""
    assert options.gcs_address is not None
    board = Board(options.gcs_address, patience=give_up - time.monotonic())
    card = NodeCard.of_this_node(options.rank, options.address)
    # Put before waiting for the head's card: both sides compare, so that each prints the difference in its own log.
    board.put(f"node/{options.rank}", json.dumps(asdict(card)).encode())
    while (head := board.get("node/0")) is None:
        if time.monotonic() > give_up:
            raise NodeError(f"the head at {options.gcs_address} does not say what it is: does it run this package?")
        time.sleep(_POLL_SECONDS)
    check_same_versions(NodeCard(**json.loads(head)), [card])
    return board


def wait_for_nodes(gcs_address: str, address: str, world_size: int, num_nodes: int, join_timeout: float) -> None:
    """Wait until every node has joined, on node 0. Raises ``ConfigError``: the run needs more nodes than there will be;
    ``NodeError``: some did not come in time, came twice, or have other versions than this one."""
    # Before any waiting: this can be known at once, and waiting for the others may take ten minutes.
    if num_nodes > world_size:
        rule = (
            f"the device ids need {num_nodes} nodes: start the command on {num_nodes} nodes with "
            f"WORLD_SIZE={num_nodes}, or use fewer devices"
        )
        raise ConfigError([Problem("WORLD_SIZE", world_size, rule, source="environment")])
    if world_size == 1:
        return
    board, head = Board(gcs_address), NodeCard.of_this_node(0, address)
    board.put("node/0", json.dumps(asdict(head)).encode())
    cards: dict[int, NodeCard] = {}
    give_up = time.monotonic() + join_timeout
    while True:
        for rank in range(1, world_size):
            if rank not in cards and (text := board.get(f"node/{rank}")) is not None:
                cards[rank] = NodeCard(**json.loads(text))
        check_same_versions(head, list(cards.values()))
        ranks = [int(node["Labels"].get(NODE_RANK_LABEL, -1)) for node in ray.nodes() if node["Alive"]]
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        if twice:
            raise NodeError(f"two nodes have joined as RANK={twice[0]}: every node needs a RANK of its own")
        if len(set(ranks)) == world_size:
            return
        if time.monotonic() > give_up:
            check_all_present(world_size, set(ranks), cards, join_timeout)
        time.sleep(_POLL_SECONDS)


def compare_nodes() -> None:
    """Compare the versions of the other nodes of an existing cluster with those of this one. Raises ``NodeError``: some
    differ, or do not answer."""
    own = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
    # No CPU is requested, so that nodes whose CPUs are all taken by others still answer.
    read = ray.remote(num_cpus=0, max_retries=0)(version_reader())
    answers = [
        read.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in others
    ]
    done, _ = ray.wait(answers, num_returns=len(answers), timeout=_ANSWER_SECONDS) if answers else ([], [])
    silent = [node["NodeManagerHostname"] for node, one in zip(others, answers, strict=True) if one not in done]
    if silent:
        raise NodeError(
            f"node {', '.join(silent)} of the cluster did not say within {_ANSWER_SECONDS:g} s which versions it has"
        )
    cards = []
    for number, (node, one) in enumerate(zip(others, answers, strict=True), start=1):
        try:
            cards.append(NodeCard(number, node["NodeManagerHostname"], node["NodeManagerAddress"], ray.get(one)))
        except ray.exceptions.RayError as error:
            raise NodeError(
                f"node {node['NodeManagerHostname']} of the cluster cannot start a worker: {error}"
            ) from error
    check_same_versions(NodeCard.of_this_node(0, ""), cards, "this one")
