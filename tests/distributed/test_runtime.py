"""Starting Ray, joining it, and leaving nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roll.config.reading.errors import ConfigError
from roll.distributed import RayRuntime
from roll.distributed.failures import NodeError
from roll.distributed.guard import PREFIX, command_of, is_alive, remove_abandoned, run_processes, session_dir
from roll.distributed.nodes import NodeEnvironment, interface_of, require_token
from roll.distributed.roll_call import NodeCard, check_all_present, check_same_versions
from roll.distributed.signals import SAME_SECONDS

ROOT = Path(__file__).parents[2]


def _environment(**extra: str) -> dict[str, str]:
    """This process's environment without what the session's own Ray put there."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "ROLL_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def _start_driver(how: str, result_file: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.run_in_ray", how, str(result_file)],
        env=_environment(),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _wait_for_file(path: Path, seconds: float = 180) -> dict:
    give_up = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < give_up, f"{path} was not written"
        time.sleep(0.05)
    return json.loads(path.read_text())


@pytest.mark.long
@pytest.mark.default_rows("kill-9")
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("how", "sent", "status"),
    [
        ("success", [], 0),
        ("failure", [], 1),
        ("wait", [signal.SIGINT], 128 + signal.SIGINT),
        ("wait", [signal.SIGTERM], 128 + signal.SIGTERM),
        ("hold", [signal.SIGHUP, signal.SIGHUP], 128 + signal.SIGHUP),
        ("wait", [signal.SIGKILL], -signal.SIGKILL),
    ],
    ids=["success", "exception", "ctrl-c", "sigterm", "sighup-twice", "kill-9"],
)
def test_nothing_is_left_running(tmp_path, how, sent, status):
    """The whole process group gets the signal, as from a terminal. Twice: where the first one is not obeyed at once."""
    driver = _start_driver(how, tmp_path / "started.json")
    started = _wait_for_file(tmp_path / "started.json")
    folder = Path(started["folder"])
    if sent:
        assert len(run_processes(started["mark"])) >= 6, "gcs, raylet, two workers and their two children at least"
        assert folder.parent.stat().st_mode & 0o777 == 0o700, "Ray opens its own folder to everyone"
        niceness = {os.getpriority(os.PRIO_PROCESS, pid) for pid in started["children"]}  # that of their workers
        assert niceness == {os.getpriority(os.PRIO_PROCESS, 0)}, "a run would starve beside other work"
    for number in sent:
        driver.send_signal(number) if number == signal.SIGKILL else os.killpg(driver.pid, number)
        time.sleep(2 * SAME_SECONDS if len(sent) > 1 else 0)
    _, errors = driver.communicate(timeout=60)
    assert driver.returncode == status
    give_up = time.monotonic() + (10 if status in (-signal.SIGKILL, 128 + signal.SIGHUP) else 0)
    while left := run_processes(started["mark"], folder):
        assert time.monotonic() < give_up, f"still there: {[command_of(pid) for pid in left]}"
        time.sleep(0.1)
    assert not any(is_alive(pid) for pid in started["children"])
    assert not folder.parent.exists()
    assert ("the run failed on purpose" in errors) == (how == "failure")
    assert ("SIGHUP again: ended at once" in errors) == (how == "hold")
    assert ("ended without a word" in errors) == (sent == [signal.SIGKILL])


@pytest.mark.matrix
@pytest.mark.e2e
def test_daemons_that_are_late_are_started_once_more(tmp_path):
    """Ray gives its daemon thirty seconds, which a host may need for other things."""
    driver = _start_driver("success", tmp_path / "started.json")
    give_up = time.monotonic() + 60
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children")
    while not (late := [int(pid) for pid in children.read_text().split() if "/raylet " in command_of(int(pid))]):
        assert time.monotonic() < give_up and driver.poll() is None
        time.sleep(0.01)
    os.kill(late[0], signal.SIGSTOP)
    _, errors = driver.communicate(timeout=150)
    assert driver.returncode == 0 and "They are started once more" in errors, errors
    assert not is_alive(late[0])


def test_servers_listen_on_loopback_only(runtime):
    """No socket of the run is reachable from outside."""
    inodes = set()
    for pid in [*run_processes(runtime.mark), os.getpid()]:
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(entry)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    assert inodes
    outward = []
    for table, loopback in (("tcp", "0100007F"), ("tcp6", "0" * 24 + "01000000")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, state, inode = fields[1].split(":")[0], fields[3], fields[9]
            mapped = address == "0000000000000000FFFF00000100007F"
            if state == "0A" and inode in inodes and address != loopback and not mapped:
                outward.append(fields[1])
    assert outward == []


NODE_SCRIPT = """
import json, os, sys
from roll.config.roles import WorkerConfig
from roll.distributed import Cluster, ResourceManager, ray_runtime
from tests.distributed.light_workers import BasicWorker
from tests.distributed.workers import CollectiveWorker
with ray_runtime(2, num_nodes=2, join_timeout=90, system_envs={"ROLL_TEST_GLOBAL": "both"}) as runtime:
    assert os.environ["RANK"] == "0", "only node 0 runs the block"
    resources = ResourceManager(2, num_nodes=2)
    role = WorkerConfig(device_mapping=[3, 0])
    cluster = Cluster("role", "tests.distributed.workers.CollectiveWorker", resources, role)
    light = Cluster("light", "tests.distributed.light_workers.BasicWorker", resources, WorkerConfig(world_size=2))
    cluster.call_all(CollectiveWorker.initialize).result()
    print(json.dumps({
        "sum": cluster.call_all(CollectiveWorker.rank_sum).result(),
        "nodes": [len({a.node_id for a in c.addresses}) for c in (cluster, light)],
        "global": [d["environment"]["ROLL_TEST_GLOBAL"] for d in light.call_all(BasicWorker.describe).result()],
        "node_of_device_0": cluster.addresses[1].node_id == light.addresses[0].node_id,
    }))
    try:
        Cluster("wide", "tests.distributed.light_workers.BasicWorker", resources,
                WorkerConfig(device_mapping=[1, 2], num_gpus_per_worker=2))
    except ValueError as error:
        print(error)
    cluster.shutdown()
"""


LEAVING_SCRIPT = """
import logging
import os
import sys
import time
from roll.distributed import ray_runtime
from roll.distributed.ray_node import connection_error
from roll.distributed.roll_call import NodeCard

read, cards = NodeCard.of_this_node, []

def read_late(rank, address):
    if cards and rank:  # the second card goes with the signal
        print("passing on", flush=True)
        while connection_error(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])) is None:
            time.sleep(0.05)
    cards.append(rank)
    return read(rank, address)

NodeCard.of_this_node = read_late
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
with ray_runtime(2):
    print("up", flush=True)
    input()
"""


def _two_nodes(script: str) -> list[subprocess.Popen[str]]:
    """Nodes 0 and 1 of a run, on this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RAY_AUTH_TOKEN": "1f" * 32}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", script]
    return [
        subprocess.Popen(command, env=_environment(RANK=rank, **shared), cwd=ROOT, text=True, **pipes)
        for rank in ("0", "1")
    ]


@pytest.mark.long
@pytest.mark.e2e
def test_a_signal_reaches_a_node_whose_head_ends():
    """A scheduler sends it to all nodes, and the head may be done before a further node can pass it on."""
    head, follower = _two_nodes(LEAVING_SCRIPT)
    assert "up\n" in head.stdout, "it is read as far as that line"
    assert any("serves the run" in line for line in follower.stdout)
    follower.send_signal(signal.SIGTERM)
    assert "passing on\n" in follower.stdout
    _, errors = head.communicate("end\n", timeout=60)
    assert head.returncode == 0, errors
    _, errors = follower.communicate(timeout=30)
    assert follower.returncode == 128 + signal.SIGTERM, errors


@pytest.mark.long
@pytest.mark.e2e
def test_two_nodes_join_and_leave():
    head, follower = _two_nodes(NODE_SCRIPT)
    output, errors = head.communicate(timeout=180)
    assert head.returncode == 0, errors
    seen, refused = output.splitlines()
    assert json.loads(seen) == {"sum": [3.0, 3.0], "nodes": [2, 2], "global": ["both"] * 2, "node_of_device_0": True}
    assert "wide.device_mapping: [1, 2] must name" in refused and "on one node of num_gpus_per_node=2" in refused
    follower_output, follower_errors = follower.communicate(timeout=60)
    assert follower.returncode == 0, follower_errors
    assert follower_output == ""


def _guest(runtime: RayRuntime, script: str, *arguments: str) -> subprocess.Popen:
    """A second driver on the session's Ray."""
    auth = {k: v for k, v in os.environ.items() if k.startswith("RAY_AUTH")}
    env = _environment(RAY_ADDRESS=runtime.address, **auth)
    command = [sys.executable, "-c", script, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


SIDE_BY_SIDE_SCRIPT = """
import json, pathlib, sys, time
from roll.config.roles import WorkerConfig
from roll.distributed import Cluster, ResourceManager, ray_runtime
from tests.distributed.workers import CollectiveWorker
own, other = map(pathlib.Path, sys.argv[1:])
with ray_runtime(2):
    resources = ResourceManager(2)
    cluster = Cluster("role", CollectiveWorker, resources, WorkerConfig(device_mapping=[0, 1]))
    cluster.call_all(CollectiveWorker.initialize).result()
    own.touch()
    while not other.exists():
        time.sleep(0.05)
    pids = [address.pid for address in cluster.addresses]
    print(json.dumps({"sum": cluster.call_all(CollectiveWorker.rank_sum).result(), "pids": pids}))
    try:
        ResourceManager(2, timeout=1)
    except ValueError as error:
        print(error)
    own.with_suffix(".done").touch()
    while not other.with_suffix(".done").exists():
        time.sleep(0.05)
    cluster.shutdown()
    resources.close()
"""


@pytest.mark.long
@pytest.mark.e2e
def test_two_runs_on_one_cluster_do_not_meet(runtime, tmp_path):
    """Four devices, two runs of two each, with the same role and device ids; a third would have nothing. Their workers
    end with them, the cluster goes on."""
    files = [str(tmp_path / "one"), str(tmp_path / "two")]
    runs = [_guest(runtime, SIDE_BY_SIDE_SCRIPT, *pair) for pair in (files, files[::-1])]
    seen = []
    for run in runs:
        output, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors
        told, refused = output.splitlines()
        seen.append(json.loads(told))
        assert "Another run may hold them" in refused
    assert [one["sum"] for one in seen] == [[3.0, 3.0]] * 2
    pids = {pid for one in seen for pid in one["pids"]}
    assert len(pids) == 4 and not any(map(is_alive, pids))
    host, _, port = runtime.address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=2).close()


def test_environment_of_nodes():
    assert NodeEnvironment.from_environ({}) == NodeEnvironment()
    several = NodeEnvironment.from_environ(
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "7000", "DASHBOARD_PORT": "8265"}
    )
    assert (several.rank, several.world_size, several.master_addr) == (1, 2, "10.0.0.4")
    assert (several.master_port, several.dashboard_port) == (7000, 8265)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0'.* from 1 "),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK = '2'.* from 0 to 1"),
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR: is not set"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT = '70000'"),
    ],
)
def test_environment_that_makes_no_sense(environ, message):
    with pytest.raises(ConfigError, match=message):
        NodeEnvironment.from_environ(environ)


def test_several_nodes_share_a_secret(tmp_path, monkeypatch):
    """Without one nothing starts, unless the user says so."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    nodes = NodeEnvironment(world_size=2)
    with pytest.raises(ConfigError, match=r"RAY_AUTH_TOKEN: .*openssl rand -hex 32"):
        require_token(nodes, {})
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN_PATH=/no/file is no file"):
        require_token(nodes, {"RAY_AUTH_TOKEN_PATH": "/no/file"})
    for environ in ({"RAY_AUTH_TOKEN": "x"}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN_PATH": __file__}):
        require_token(nodes, environ)
    require_token(NodeEnvironment(), {})
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    require_token(nodes, {})


def test_other_versions_and_missing_nodes_are_named():
    head = NodeCard(0, "a", "10.0.0.4", {"python": "3.11.7", "torch": "2.13.0"})
    same, other = NodeCard(1, "b", "10.0.0.5", head.versions), NodeCard(2, "c", "10.0.0.6", {"python": "3.11.7"})
    check_same_versions(head, [same])
    with pytest.raises(NodeError, match=re.escape("node 2 (c, 10.0.0.6) has torch unknown (node 0: 2.13.0)\nAll")):
        check_same_versions(head, [same, other])
    check_all_present(2, {0, 1}, {}, 5)
    with pytest.raises(NodeError) as caught:
        check_all_present(5, {0, 1}, {1: same, 2: other}, 5)
    text = str(caught.value)
    assert "2 of WORLD_SIZE=5 nodes joined within 5 s" in text
    assert "never heard of: node 3, 4." in text and "did not join: node 2 (c, 10.0.0.6)." in text


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.250") is None
    assert interface_of("no address") is None


def test_session_folders(tmp_path, monkeypatch):
    """A folder in use stays; one whose driver is gone is removed; ours goes at the end."""
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    abandoned = tmp_path / f"{PREFIX}abandoned"
    abandoned.mkdir()
    (abandoned / "driver.lock").touch()
    remove_abandoned(tmp_path)
    assert not abandoned.exists()
    with session_dir() as folder:
        remove_abandoned(folder.parent.parent)
        assert folder.exists()
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        assert len(str(folder)) < 30
    assert not folder.parent.exists()
