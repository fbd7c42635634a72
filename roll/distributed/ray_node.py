"""One Ray node (head or joining) started in this process: its daemons, and the watch over them.

``ray.init()`` also starts an autoscaler, a dashboard server and a log forwarder, which cost about 1.5 CPU-seconds at
start on top of what is needed and bind to the host's outward address. The daemons are watched because without them
calls hang or fail in ways that do not name the cause.

Private parts of Ray are used here and in no other module; ``setup.py`` bounds its version for their sake. Ray has no
public way to any of this:

- ``Node``, ``RayParams``: start a node without those three processes, and learn the daemons' process ids. They are
  by ``ray start``, which starts the processes too.
- ``Config``, ``AuthenticationTokenLoader``: read the access token again, which Ray does when it is imported.
- ``GcsClient``: exchange messages with the head before a node joins it.
- ``worker.print_to_stdstream``: keep notices of dead workers off the driver's standard output.
- ``ray_constants.ENABLE_RAY_CLUSTER``: join a cluster at a loopback address.
- the arguments ``_system_config`` and ``_node_ip_address``.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray._private.ray_constants
import ray._private.worker
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]

from roll.distributed.actor import tail
from roll.distributed.failures import NodeError, RayLost
from roll.platforms import Platform

logger = logging.getLogger(__name__)


_POLL_SECONDS = 0.25
_REGISTRATION_SECONDS = 5.0
_REGISTRATION_POLL = 0.01
_LOG_LINES = 8
DAEMONS = {"gcs_server": "the cluster's control service", "raylet": "the node's daemon"}


class RayWatch:
    """Looks after the daemons that ``node`` has started. ``on_loss``: called once, in the watching thread."""

    def __init__(self, node: Node, folder: Path, on_loss: Callable[[RayLost], None]) -> None:
        self._node = node
        self._folder = folder
        self._on_loss = on_loss
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._lost: RayLost | None = None
        threading.Thread(target=self._watch, name="ray watch", daemon=True).start()

    def look(self) -> RayLost | None:
        """The loss of a daemon; None: all run."""
        with self._lock:
            # Under the lock that stop() takes: an orderly end of the daemons must not be taken for a loss.
            if self._lost is None and not self._stopped.is_set():
                dead = [(name, process) for name, process in self._node.dead_processes() if name in DAEMONS]
                if dead:
                    self._lost = self._describe(*dead[0])
            return self._lost

    def stop(self) -> None:
        """Stop watching: the daemons are about to be ended."""
        with self._lock:
            self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            with self._lock:
                all_run = self._stopped.is_set() or not self._node.dead_processes()
            if not all_run and (lost := self.look()) is not None:
                self._on_loss(lost)
                return

    def _describe(self, name: str, process: object) -> RayLost:
        status = int(getattr(process, "returncode", 0) or 0)
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        files = [*self._folder.glob(f"session_2*/logs/{name}.out"), *self._folder.glob(f"session_2*/logs/{name}.err")]
        lines = [line for file in files for line in tail(file, _LOG_LINES)]
        what = f"Ray's {name} ({DAEMONS[name]}, pid {getattr(process, 'pid', '?')}) {how}"
        return RayLost(what, lines[-_LOG_LINES:])


_current: RayWatch | None = None


def set_current(watch: RayWatch | None) -> None:
    """Set the watch that :func:`ray_lost` reads: a process has one connection to Ray at a time."""
    global _current
    _current = watch


def ray_lost() -> RayLost | None:
    """The loss of a daemon of the Ray that this process has started; None: they run. Where one is gone,
    Ray must not be called any more: it would look for them for a minute."""
    return None if _current is None else _current.look()


LOOPBACK = "127.0.0.1"

SLOT_RESOURCE = "roll_slot"  # the Ray resource of logical CPU slots on nodes without accelerators

NODE_RANK_LABEL = "roll-node-rank"  # Ray node label: the place of a node in the order of device ids

_MEBIBYTE = 1 << 20
_SMALL_SHM = 256 * _MEBIBYTE

SYSTEM_CONFIG: Mapping[str, Any] = {
    # Workers start when an actor needs one, not by the number of CPUs; metrics and event statistics have no reader.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    "enable_metrics_collection": False,
    "event_stats": False,
    "task_events_report_interval_ms": 0,
    # The daemon tries to reach its own object store while that starts; it would wait a second before it tries again.
    "raylet_client_connect_timeout_milliseconds": 20,
    "raylet_client_num_connect_attempts": 500,
}


class _LateNode(NodeError):
    """The daemons run, but did not report in time."""


class _LeanNode(Node):
    """A node without the dashboard server, unless a port is configured. Nothing of it is left where it fails."""

    def __init__(self, *args: Any, **options: Any) -> None:
        try:
            super().__init__(*args, **options)
        except Exception as error:
            is_late = bool(DAEMONS.keys() & self.all_processes.keys()) and not self.dead_processes()
            self.kill_all_processes(check_alive=False, allow_graceful=False)
            if is_late:
                raise _LateNode(f"Ray's daemons run, but do not report: is the host overloaded? {error}") from error
            raise

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        if include_dashboard:
            super().start_api_server(include_dashboard=include_dashboard, raise_on_failure=raise_on_failure)

    def start_raylet(self, *args: Any, **options: Any) -> None:
        super().start_raylet(*args, **options)
        # Ray looks at once, when the daemon is not ready yet, and then once a second.
        client, node = self.get_gcs_client(), ray.NodeID.from_hex(self.node_id)
        give_up = time.monotonic() + _REGISTRATION_SECONDS
        with contextlib.suppress(ray.exceptions.RayError):  # Ray itself waits for longer
            while not client.check_alive([node], _REGISTRATION_SECONDS)[0] and time.monotonic() < give_up:
                time.sleep(_REGISTRATION_POLL)


@dataclass(frozen=True)
class NodeOptions:
    """Parameters of a node."""

    address: str  # the IP address that the node's servers bind to and announce
    num_devices: int  # logical device slots, on a host without accelerators
    platform: Platform
    rank: int = 0
    gcs_port: int = 0  # Head: the port to serve the cluster's control service on; 0 takes a free one
    gcs_address: str | None = None  # ``host:port`` of the head to join; None starts a head
    dashboard_port: int | None = None
    object_store_bytes: int | None = None


WORKER_SCRIPT = str(Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py")
"""Ray's own script, which starts a worker in the environment that its actor requires."""


def start_node(options: NodeOptions, temp_dir: Path, worker_script: str | None = None) -> Node:
    """Start the daemons; they end with this process, however it ends.

    Args:
        worker_script: in place of Ray's own, :data:`WORKER_SCRIPT`.

    Raises:
        NodeError: they do not report within Ray's limit of 30 seconds, and not at a second attempt either.
        RuntimeError: Ray did not come up; its logs are under ``temp_dir``.
    """
    store_bytes, store_dir = object_store(options.object_store_bytes, temp_dir)
    is_head = options.gcs_address is None
    # Ray annotates dashboard_port as a bool and include_log_monitor as a str; it uses a number and a bool.
    parameters = RayParams(
        node_ip_address=options.address,
        gcs_address=options.gcs_address,
        gcs_server_port=options.gcs_port if is_head and options.gcs_port else None,
        num_cpus=os.cpu_count(),
        # 0, since None makes Ray count the accelerators of a host that is to compute on its CPU (ROLL_PLATFORM=cpu).
        num_gpus=0 if options.platform.ray_resource is None else None,
        resources={SLOT_RESOURCE: options.num_devices} if options.platform.ray_resource is None else None,
        labels={NODE_RANK_LABEL: str(options.rank)},
        include_dashboard=options.dashboard_port is not None,
        dashboard_host=options.address,
        dashboard_port=options.dashboard_port,  # type: ignore[arg-type]
        temp_dir=str(temp_dir),
        setup_worker_path=worker_script,
        # No actor asks for any. Left to Ray, it refuses to start where the store's limit exceeds what is free.
        memory=_MEBIBYTE,
        object_store_memory=store_bytes,
        plasma_directory=store_dir,
        no_monitor=True,
        include_log_monitor=False,  # type: ignore[arg-type]
        _system_config=dict(SYSTEM_CONFIG) if is_head else None,
    )
    # The reaper process kills the daemons when this process dies, however it dies; a hook at exit would do so only
    # after a normal end, where the caller does it already.
    options_of_ray: dict[str, Any] = {"head": is_head, "shutdown_at_exit": False, "spawn_reaper": True}
    try:
        return _LeanNode(copy.deepcopy(parameters), **options_of_ray)
    except _LateNode as error:
        logger.warning("%s. They are started once more", error)
        return _LeanNode(parameters, **options_of_ray)


def reload_auth() -> None:
    """Make Ray read the authentication variables again; it does so by itself only when it is imported."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


class Board:
    """Short messages between the nodes of a run, kept by the head; a node can use it before it joins.

    Args:
        address: ``host:port`` of the head.
        patience: Seconds in which a head that is busy may begin to answer, beyond the 40 of Ray's own.

    Raises:
        NodeError: the head does not know the token of this node, or does not answer.
    """

    _NAMESPACE = b"roll"

    def __init__(self, address: str, patience: float = 0.0) -> None:
        give_up = time.monotonic() + patience
        while True:
            try:
                with _token_accepted():
                    self._client = GcsClient(address=address)
                return
            except ray.exceptions.RpcError as error:
                if time.monotonic() > give_up:
                    raise NodeError(f"the head at {address} takes connections and does not answer: {error}") from error

    def put(self, key: str, text: bytes, seconds: float | None = None) -> bool:
        """Returns whether the head took the text; False: it did not within ``seconds``.

        Without a limit, Ray ends this process where the head is gone for a minute. Raises ``NodeError``: the head does
        not know the token of this node.
        """
        try:
            with _token_accepted():
                self._client.internal_kv_put(key.encode(), text, True, self._NAMESPACE, timeout=seconds)
        except ray.exceptions.RayError:
            if seconds is None:
                raise
            return False
        return True

    def get(self, key: str) -> bytes | None:
        """The text under a key; None: there is none, or the head does not answer within a second. Raises ``NodeError``:
        the head does not know the token of this node."""
        try:
            with _token_accepted():
                found: bytes | None = self._client.internal_kv_get(key.encode(), self._NAMESPACE, timeout=1)
        except ray.exceptions.RayError:
            return None
        return found


@contextlib.contextmanager
def _token_accepted() -> Iterator[None]:
    try:
        yield
    except ray.exceptions.AuthenticationError as error:
        raise NodeError(
            "the head refuses this node's token: RAY_AUTH_TOKEN (or the file RAY_AUTH_TOKEN_PATH) and RAY_AUTH_MODE "
            "must be the same on all nodes"
        ) from error


def connect(address: str, node_ip: str | None, runtime_env: Mapping[str, Any] | None = None) -> None:
    """Make this process the driver of the cluster at ``address``."""
    # Ray prints its notices of dead workers to the driver's standard output, through a progress bar and ahead of the
    # diagnosis that the failed call gives; the log keeps them.
    ray._private.worker.print_to_stdstream = _log_notice
    if threading.current_thread() is not threading.main_thread():  # of which Ray warns: it has no handler of SIGTERM
        logging.getLogger(ray._private.worker.__name__).setLevel(logging.ERROR)
    host, _, port = address.rpartition(":")
    if host in (LOOPBACK, "localhost"):
        # Keep Ray from exchanging a loopback address for the host's outward one if the cluster is not there.
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = True
        outward = ray.util.get_node_ip_address()
        is_there = outward != LOOPBACK and connection_error(outward, int(port)) is None
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = is_there
    ray.init(
        address=address,
        _node_ip_address=node_ip,
        log_to_driver=False,
        logging_level=logging.WARNING,
        runtime_env=dict(runtime_env) if runtime_env else None,
    )


def connection_error(host: str, port: int) -> OSError | None:
    """Why nothing at this address answers; None: something listens there."""
    try:
        with socket.create_connection((host, port), timeout=2.0):
            return None
    except OSError as error:
        return error


def _log_notice(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    for line in data["lines"]:
        logger.debug("ray (%s): %s", data["pid"], line)


def object_store(wanted: int | None, temp_dir: Path) -> tuple[int, str | None]:
    """Size of the object store in bytes, and its folder where shared memory will not do.

    A third of the memory, at most 80% of ``/dev/shm``; where that is tiny (a container's default is 64 MiB), files in
    the temporary folder serve instead.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shm = Path("/dev/shm")
    free = shutil.disk_usage(shm).free if shm.exists() else 0
    size = wanted or min(memory // 3, int(0.8 * free) if free >= _SMALL_SHM else memory // 3)
    return size, None if size <= free else str(temp_dir)
