"""Evidence about a worker that does not answer: the end of its log, and the stacks of its threads."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.distributed import actor
from roll.distributed.actor import STACK_SIGNAL, WorkerAddress, tail
from roll.distributed.guard import command_of, kill_tree

_REMOTE_SECONDS = 10.0
_STACK_SECONDS = 2.0
_STACK_LINES, _TAIL_LINES = 25, 15

_EXIT_DETAIL = re.compile(r"Worker exit detail: (?P<detail>.*)")
_NODE_LOST = re.compile(r"node has died|node was terminated|node is (dead|removed)|health check fail", re.IGNORECASE)
_PAYLOAD = 1 << 20
_RAY_LINES = (":job_id:", ":actor_name:", ":task_name:")


def lines_of_ray() -> list[str]:
    """The last errors of Ray's daemon on this node, where the processes of workers write until they are workers."""
    node = ray._private.worker.global_worker.node
    return tail(Path(node.get_logs_dir_path(), "raylet.err"), _TAIL_LINES) if node is not None else []


@dataclass(frozen=True)
class Link:
    """The network from here to a node."""

    node_id: str
    answers: bool
    text: str
    is_slow: bool  # takes less than a mebibyte a second, if anything


def links(addresses: Iterable[WorkerAddress]) -> list[Link]:
    """Test each other node: does it answer, and how fast does it take a mebibyte?"""
    own = ray.get_runtime_context().get_node_id()
    nodes = {address.node_id: address for address in addresses if address.node_id != own}
    if not nodes:
        return []
    alive, payload = {node["NodeID"] for node in ray.nodes() if node["Alive"]}, ray.put(bytes(_PAYLOAD))
    tasks = {
        node_id: ray.remote(_fetch)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        # In a list, so that the task itself fetches it: Ray would resolve a plain argument before the clock starts.
        .remote([payload])
        for node_id in nodes
        if node_id in alive
    }
    if tasks:
        ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=_REMOTE_SECONDS)
    found = []
    for node_id, address in nodes.items():
        text, answers, is_slow = "lost: it has not answered Ray's health checks", False, True
        if node_id in tasks:
            try:
                seconds = ray.get(tasks[node_id], timeout=0)
                text, answers, is_slow = f"{_PAYLOAD / seconds / 1e6:.2f} MB/s", True, seconds > 1.0
            except (ray.exceptions.RayError, TimeoutError):
                text = f"has not taken {_PAYLOAD >> 20} MiB within {_REMOTE_SECONDS:g} s"
        found.append(Link(node_id, answers, f"{address.hostname} ({address.node_ip}): {text}", is_slow))
    return found


def _fetch(refs: list[ray.ObjectRef[bytes]]) -> float:
    began = time.perf_counter()
    ray.get(refs[0])
    return time.perf_counter() - began


def death_cause(error: Exception) -> str:
    """One line out of Ray's account of how an actor ended."""
    text = " ".join(str(error).split())
    if isinstance(error, ray.exceptions.OutOfMemoryError) or "memory usage threshold" in text:
        return "ended by Ray because the node ran out of memory"
    if _NODE_LOST.search(text):
        return "its node is lost: the host was cut off, stopped, or too busy to answer Ray's health checks"
    if "connection error code 2" in text:
        return "its process ended without a word (kill -9, the kernel's out-of-memory killer, or a native crash)"
    found = _EXIT_DETAIL.search(text)
    return (found["detail"] if found else text)[:300]


def on_node(address: WorkerAddress, look: Callable[[WorkerAddress], list[str]]) -> list[str]:
    """The lines that ``look`` finds about a worker on the worker's own node, or one that says why there are none."""
    if address.node_id == ray.get_runtime_context().get_node_id():
        return look(address)
    strategy = NodeAffinitySchedulingStrategy(address.node_id, soft=False)
    task = ray.remote(look).options(num_cpus=0, scheduling_strategy=strategy)
    try:
        found: list[str] = ray.get(task.remote(address), timeout=_REMOTE_SECONDS)
        return found
    except (ray.exceptions.RayError, TimeoutError) as error:
        return [f"(could not be read on node {address.node_ip}: {type(error).__name__})"]


def kill_process(address: WorkerAddress) -> list[str]:
    """Kill a worker and all processes that it has started; Ray's own way needs the worker's help."""
    if command_of(address.pid).startswith("ray::"):  # not a later process with the same id
        kill_tree(address.pid)
    return []


def log_tail(address: WorkerAddress) -> list[str]:
    """The last lines of a worker's log."""
    lines = tail(Path(address.log_file), _TAIL_LINES + len(_RAY_LINES)) if address.log_file else []
    return [line for line in lines if not line.startswith(_RAY_LINES)][-_TAIL_LINES:]


def stacks(address: WorkerAddress) -> list[str]:
    """The Python stacks of a live worker's threads, innermost frame first; empty when the process is gone."""
    if not address.log_file:
        return []
    log = Path(address.log_file)
    try:
        before = log.stat().st_size
        os.kill(address.pid, STACK_SIGNAL)
    except (FileNotFoundError, ProcessLookupError):
        return []
    size, give_up = before, time.monotonic() + _STACK_SECONDS
    while time.monotonic() < give_up:
        time.sleep(0.05)
        grown = log.stat().st_size
        # The worker writes while this is read: two equal sizes in a row mean that the dump is complete.
        if grown > before and grown == size:
            break
        size = grown
    return _working_thread(tail(log, 400, begin=before))[:_STACK_LINES]


def _working_thread(dump: list[str]) -> list[str]:
    """The frames, innermost first, of a faulthandler dump's thread that runs a method of the worker, down to where the
    call came in; of the main thread (the last) when none does."""
    threads: list[list[str]] = [[]]
    for line in dump:
        if line.startswith(("Thread 0x", "Current thread 0x")):
            threads.append([])
        else:
            threads[-1].append(line.strip())
    call_line = f'"{actor.__file__}"'
    for frames in threads:
        entry = next((i for i, frame in enumerate(frames) if call_line in frame), None)
        if entry:
            return frames[:entry]
    return threads[-1]
