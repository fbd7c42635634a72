"""Starting, joining and leaving Ray, so that nothing of a run is left running."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import ray

from roll.distributed import worker_script
from roll.distributed.failures import NodeError, RayLost
from roll.distributed.forked_workers import fork_server
from roll.distributed.guard import Guard, end_run, session_dir
from roll.distributed.nodes import LOG_DIR_ENV, NodeEnvironment, absent_here, environment, own_address, require_token
from roll.distributed.ray_node import (
    DAEMONS,
    LOOPBACK,
    WORKER_SCRIPT,
    Board,
    NodeOptions,
    RayWatch,
    connect,
    connection_error,
    ray_lost,
    reload_auth,
    set_current,
    start_node,
)
from roll.distributed.restarts import DONE, supervised
from roll.distributed.roll_call import NodeCard, answer_roll_call, compare_nodes, wait_for_nodes
from roll.distributed.signals import ENDING, ending
from roll.platforms import current_platform

if TYPE_CHECKING:
    from ray._private.node import Node


logger = logging.getLogger(__name__)

DRIVER_SETTINGS = {
    # A failure is reported once, by the call that met it, not again for each rank that failed with it.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1"
}

_NICENESS = {"RAY_worker_niceness": "0"}
"""Ray's own is 15: beside other work of the host, the workers of a run would starve. Of the nodes started here, not of
a cluster that is joined."""
_JOIN_SECONDS = 600.0
_HEAD_POLL_SECONDS = 1.0
_HEAD_MISSES = 3
_OVER = "over"
_SIGNAL = "signal"
"""Key of the note that a further node leaves about a signal: its number, a running count, and the node's name."""


@dataclass(frozen=True)
class RayRuntime:
    """The Ray cluster that this process drives."""

    address: str
    log_dir: Path | None
    mark: str  # the value of ``ROLL_RUN_MARK`` in the environment of every process of the run
    guard: Guard  # outlives this process where that ends hard
    actor_envs: Mapping[str, str] = field(default_factory=dict)
    """Variables that each actor must be given: those of the processes of a Ray that the caller had started."""


@contextlib.contextmanager
def ray_runtime(
    num_devices_per_node: int,
    num_nodes: int = 1,
    system_envs: Mapping[str, str] | None = None,
    log_dir: Path | None = None,
    object_store_bytes: int | None = None,
    join_timeout: float = _JOIN_SECONDS,
) -> Iterator[RayRuntime]:
    """Start or join Ray for the length of a ``with`` block.

    * this process is connected to a Ray already (``ray.init()``): that is used, and stays connected.
    * ``RAY_ADDRESS`` set: that cluster is used and left running.
    * ``WORLD_SIZE`` (nodes) above 1: the node of ``RANK`` 0 starts the head at ``MASTER_ADDR:MASTER_PORT`` and waits
      for the others. On every other node this call serves the run until the head is gone and then raises
      ``SystemExit(0)``: the block runs on node 0 only.
    * otherwise a private Ray is started on the loopback interface with ports and a folder of its own.

    Leaving the block (by success, exception or signal) ends every process of the run on this node, and so does the
    hard end of this process (kill -9, out of memory, a second Ctrl-C). SIGINT, SIGTERM, SIGHUP and SIGUSR1, to this
    node or to a further one, raise :class:`~roll.distributed.signals.Interrupted` in the block; Ray and the workers are
    not reached by them.

    Args:
        num_devices_per_node: Logical device slots of a node without accelerators.
        num_nodes: Nodes to wait for at least.
        system_envs: Variables for this process and all workers.
        log_dir: Folder for one log file a worker; None: ``ROLL_LOG_DIR``, else they go with Ray's own logs.
        object_store_bytes: Size of the object store; None: by the host's memory.
        join_timeout: Seconds that nodes wait for each other.

    Raises:
        ConfigError: environment variables that make no sense; several nodes without a secret between them.
        NodeError: the other nodes, or the head, did not come in time, or have other versions than this one; on a
            further node also: the network to the head is lost.
        RayLost: a daemon of the Ray started here has ended; whatever came of that in the block is its cause.
    """
    nodes = NodeEnvironment.from_environ(os.environ)
    require_token(nodes, os.environ)
    log_dir = log_dir or (Path(os.environ[LOG_DIR_ENV]) if os.environ.get(LOG_DIR_ENV) else None)
    exported = {**(system_envs or {}), **({LOG_DIR_ENV: str(log_dir.resolve())} if log_dir else {})}
    mark = uuid.uuid4().hex if (forks := fork_server()) is None else forks.mark  # /proc shows forks their server's
    inherited = absent_here(num_devices_per_node, mark) | exported
    has_ray = ray.is_initialized()
    auth = contextlib.nullcontext() if has_ray else _private_auth(nodes)
    with auth, environment({**DRIVER_SETTINGS, **exported}), ending.handled():
        if has_ray or nodes.ray_address is not None:
            connected = contextlib.nullcontext() if has_ray else _connected(str(nodes.ray_address), None, inherited)
            with _guarded(mark, None) as guard, connected:
                compare_nodes()
                address = ray.get_runtime_context().gcs_address if has_ray else str(nodes.ray_address)
                # Ray hands `inherited` to the actors of a connection made here; the caller's own knows nothing of it.
                yield RayRuntime(address, log_dir, mark, guard, actor_envs=inherited if has_ray else {})
            return
        options = _node_options(nodes, num_devices_per_node, object_store_bytes)
        if nodes.rank > 0:
            _serve(options, inherited, mark, join_timeout)
        # Workers on this node inherit the environment; those of other nodes get it from Ray.
        passed_on = inherited if nodes.world_size > 1 else None
        with session_dir() as folder, _guarded(mark, folder) as guard, _own_node(options, inherited, folder) as node:
            started = {name: infos for name, infos in node.all_processes.items() if name in DAEMONS and infos}
            guard.tell({"daemons": {name: infos[0].process.pid for name, infos in started.items()}})
            with _watched(node, folder, guard), _connected(node.address, options.address, passed_on):
                wait_for_nodes(node.address, options.address, nodes.world_size, num_nodes, join_timeout)
                with (
                    _signals_of_nodes(node.address, nodes.world_size),
                    _dismissing_nodes(node.address, nodes.world_size > 1 and supervised.is_attached),
                ):
                    yield RayRuntime(node.address, log_dir=log_dir, mark=mark, guard=guard)


@contextlib.contextmanager
def _signals_of_nodes(address: str, world_size: int) -> Iterator[None]:
    """Treat a signal to a further node as a signal to this process: a scheduler sends it to all nodes of a job, a cloud
    to the machine that it reclaims."""
    if world_size == 1:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        board, last = Board(address), b""
        while not over.wait(_HEAD_POLL_SECONDS):
            text = board.get(_SIGNAL) or b""
            if text != last:
                last = text
                number, name = text.decode().split(" ", 1)
                logger.warning("%s has got %s", name, signal.Signals(int(number)).name)
                ending.take_over(int(number))

    threading.Thread(target=watch, name="signals of nodes", daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextlib.contextmanager
def _dismissing_nodes(address: str, do: bool) -> Iterator[None]:
    """At the end of the block, unless that fails, tell further nodes that the run is over: they would wait for the next
    head of a run that is started again."""
    try:
        yield
    except Exception:
        do = False
        raise
    finally:
        if do and ray_lost() is None:
            with ending.holding(then_raise=False):
                Board(address).put(_OVER, b"1")
                # The board ends with the head: each node, which looks once per poll, must have seen the note before
                # that.
                time.sleep(2 * _HEAD_POLL_SECONDS)


def _node_options(nodes: NodeEnvironment, num_devices: int, object_store_bytes: int | None) -> NodeOptions:
    alone = nodes.world_size == 1
    return NodeOptions(
        address=LOOPBACK if alone else own_address(nodes),
        num_devices=num_devices,
        platform=current_platform(),
        rank=nodes.rank,
        gcs_port=0 if alone else nodes.master_port,
        gcs_address=f"{nodes.master_addr}:{nodes.master_port}" if nodes.rank > 0 else None,
        dashboard_port=nodes.dashboard_port if nodes.rank == 0 else None,
        object_store_bytes=object_store_bytes,
    )


@contextlib.contextmanager
def _guarded(mark: str, folder: Path | None) -> Iterator[Guard]:
    """A guard for the length of the block, at whose end no process of the run is left."""
    guard = Guard(mark, folder)
    ending.on_second = lambda words: guard.tell({"cause": words})
    try:
        yield guard
    finally:
        with ending.holding(then_raise=False):
            # The guard is dismissed last: should this process be killed during the cleanup, the guard finishes it.
            end_run(mark, folder)
            ending.on_first = ending.on_second = None
            guard.dismiss()


@contextlib.contextmanager
def _own_node(options: NodeOptions, inherited: Mapping[str, str], folder: Path) -> Iterator[Node]:
    forks = fork_server()
    niceness = {name: value for name, value in _NICENESS.items() if name not in os.environ}
    forked = forks.environment(WORKER_SCRIPT) if forks is not None else {}
    with environment({**inherited, **niceness, **forked}):
        # Blocked in processes that start here: a signal to the whole process group, or to all processes of a job, is
        # the driver's, which needs the others to save a checkpoint.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            node = start_node(options, folder, None if forks is None else worker_script.__file__)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield node
    finally:
        with ending.holding(then_raise=False):
            if forks is not None:
                forks.close()
            node.kill_all_processes(check_alive=False, allow_graceful=False)


@contextlib.contextmanager
def _watched(node: Node, folder: Path, guard: Guard) -> Iterator[None]:
    """End the block soon after one of Ray's daemons has died."""

    def lose(lost: RayLost) -> None:
        guard.tell({"cause": str(lost)})  # Ray may end this process before it can speak
        ending.raise_in_main(lost)

    watch = RayWatch(node, folder, lose)
    set_current(watch)
    try:
        yield
    except BaseException as error:
        # A call fails within milliseconds of a daemon's death, the watch polls four times a second: look before the
        # symptom is reported as the cause.
        lost = watch.look()
        if lost is not None and error is not lost:
            raise lost from error
        raise
    finally:
        watch.stop()
        ending.forget_pending()
        set_current(None)


@contextlib.contextmanager
def _connected(address: str, node_ip: str | None, passed_on: Mapping[str, str] | None) -> Iterator[None]:
    excepthook = sys.excepthook
    try:
        connect(address, node_ip, {"env_vars": dict(passed_on)} if passed_on else None)
        sys.excepthook = excepthook  # Ray's calls the cluster first
        ending.install()  # ray.init() installs a handler of its own
        yield
    except BaseException as error:
        meant = ending.meant(error)
        if meant is not error:
            raise meant from None
        raise
    finally:
        with ending.holding(then_raise=False):
            if ray_lost() is None:
                ray.shutdown()
            else:
                atexit.unregister(ray.shutdown)  # as this process ends; both would look for Ray for a minute


def _serve(options: NodeOptions, inherited: Mapping[str, str], mark: str, join_timeout: float) -> NoReturn:
    """Serve a run as a further node until its head is gone. Started again (``max_restarts``), this node waits for as
    long as the head may take to come back; when it does not, the run was done.

    A first signal is passed on to node 0, which ends the run in good order; the ranks on this node are needed for that.
    """
    assert options.gcs_address is not None
    rejoin = supervised.rejoin_seconds
    join_timeout = rejoin or join_timeout
    host, _, text = options.gcs_address.rpartition(":")
    port = int(text)
    give_up = time.monotonic() + join_timeout
    while (error := connection_error(host, port)) is not None:
        if time.monotonic() > give_up:
            if rejoin:
                supervised.tell(end=DONE)
                raise SystemExit(0)
            raise NodeError(
                f"no Ray head at {options.gcs_address} after {join_timeout:g} s ({error}): is the command running with "
                "RANK=0 on that host, with the same MASTER_ADDR and MASTER_PORT?"
            )
        time.sleep(_HEAD_POLL_SECONDS)
    board = answer_roll_call(options, give_up)
    with (
        session_dir() as folder,
        _guarded(mark, folder),
        _own_node(options, inherited, folder) as node,
        ending.holding(),
    ):
        logger.info("node %d serves the run of %s", options.rank, options.gcs_address)
        # Misses in a row, reset by an answer: a single refused or lost connection must not end a node's share of the
        # run.
        misses = 0
        passed_on = False
        while misses < _HEAD_MISSES:
            time.sleep(_HEAD_POLL_SECONDS)
            error = connection_error(host, port)
            misses = 0 if error is None else misses + 1
            if error is None and ending.received is not None and not passed_on:
                passed_on = _pass_on(board, options, ending.received)
            if error is None and supervised.is_attached and board.get(_OVER) is not None:
                ending.check()
                supervised.tell(end=DONE)
                raise SystemExit(0)
            # Daemons end with their head: a loss only where the head is still there afterwards.
            if node.dead_processes() and connection_error(host, port) is None:
                raise NodeError(
                    f"Ray's processes on node {options.rank} ended while the head still runs: node 0 may have given "
                    "this node up after it could not reach it for a while"
                )
    if not isinstance(error, ConnectionRefusedError):  # the head's host would refuse, if it could be reached
        raise NodeError(f"node {options.rank} has lost the network to the head at {options.gcs_address}: {error}")
    raise SystemExit(0)


def _pass_on(board: Board, options: NodeOptions, number: signal.Signals) -> bool:
    """Returns whether node 0 has the signal; False: it may have ended meanwhile, by a signal of its own."""
    logger.warning(
        "%s: node 0 saves what is done and ends the run, and this node serves it until then; once more ends it "
        "at once, and what is not saved is lost",
        number.name,
    )
    card = NodeCard.of_this_node(options.rank, options.address)
    return board.put(_SIGNAL, f"{int(number)} {card}".encode(), _HEAD_POLL_SECONDS)


@contextlib.contextmanager
def _private_auth(nodes: NodeEnvironment) -> Iterator[None]:
    """A private Ray answers to this run only, whoever else is on the host, by a token that only its processes know.

    Several nodes have the token that they were given (:func:`~roll.distributed.nodes.require_token`). Where the user
    has chosen otherwise, or an existing cluster is concerned, Ray's own variables hold.
    """
    chosen = any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    several = nodes.world_size > 1
    if nodes.ray_address is not None or "RAY_AUTH_MODE" in os.environ or (chosen and not several):
        yield
        return
    own = {} if several else {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        with environment({"RAY_AUTH_MODE": "token", **own}):
            reload_auth()
            yield
    finally:
        reload_auth()
