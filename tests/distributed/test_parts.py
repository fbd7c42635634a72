"""Parts of the runtime that need no cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from roll.config.roles import WorkerConfig
from roll.distributed.actor import CallTimes, WorkerAddress, _show_devices
from roll.distributed.diagnosis import stacks
from roll.distributed.failures import DeadlineExceeded, RankReport, WorkerDied, WorkerFailed
from roll.distributed.nodes import HEAP_DEFAULTS, absent_here
from roll.distributed.ray_node import object_store
from roll.distributed.resources import SLOT_RESOURCE, _device_resource
from roll.distributed.worker import Dispatch, Registration, Worker, WorkerContext, register, registrations


class Base(Worker):
    @register(Dispatch.ONE_TO_ALL, deadline=5)
    def first(self) -> int:
        return 1

    @register(Dispatch.DP_MP_COMPUTE, columns=("a",), name="phase two")
    def second(self, batch: object) -> object:
        return batch


class Derived(Base):
    def first(self) -> int:
        return 2

    @register(Dispatch.RANK_ZERO)
    def second(self, batch: object) -> object:
        return batch


def test_registrations_are_inherited_and_overridden():
    assert registrations(Base)["second"] == Registration(Dispatch.DP_MP_COMPUTE, ("a",), None, "phase two")
    derived = registrations(Derived)
    assert derived["first"] == Registration(Dispatch.ONE_TO_ALL, None, 5, None)
    assert derived["second"] == Registration(Dispatch.RANK_ZERO)
    assert "shutdown" not in derived


def test_wrong_registrations():
    with pytest.raises(ValueError, match="columns go with a data-parallel dispatch, not with ONE_TO_ALL"):
        register(Dispatch.ONE_TO_ALL, columns=("a",))
    with pytest.raises(ValueError, match="positive seconds, got 0"):
        register(Dispatch.ONE_TO_ALL, deadline=0)


def test_light_worker_imports_no_torch():
    """Rewards start in a fraction of a second because the worker's base drags no tensors in."""
    code = "import sys; from roll.distributed import Dispatch, Worker, register; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_call_outlives_a_full_disk():
    """``/dev/full`` is the kernel's full disk."""
    times = CallTimes(Path("/dev/full"), WorkerContext("actor_train", WorkerConfig(), 0, 1))
    times.add("update", 1.0, 3.0)


def test_no_stacks_without_a_log(tmp_path):
    """Somebody may have removed it; a call that hangs is diagnosed all the same."""
    gone = WorkerAddress(0, "node", "127.0.0.1", "host", str(tmp_path / "removed.log"))
    assert stacks(gone) == []


def _node(**resources: float) -> dict:
    return {"Resources": resources}


def test_devices_of_a_cluster():
    assert _device_resource([_node(GPU=8, CPU=64), _node(GPU=8)], 8, 2) == "GPU"
    assert _device_resource([_node(CPU=4), _node(GPU=8)], 8, 1) == "GPU", "a head without GPUs is fine"
    assert _device_resource([_node(NPU=8)], 4, 1) == "NPU"
    assert _device_resource([_node(**{SLOT_RESOURCE: 2, "CPU": 2})], 2, 1) == SLOT_RESOURCE
    assert _device_resource([_node(CPU=2)], 8, 1) == "CPU"


@pytest.mark.parametrize(
    ("nodes", "per_node", "num_nodes", "message"),
    [
        ([_node(GPU=4)], 8, 1, r"num_gpus_per_node=8 .* set num_gpus_per_node to at most 4; .*ROLL_PLATFORM=cpu"),
        ([_node(GPU=8), _node(CPU=4)], 8, 2, "more than there is"),
        ([_node(CPU=4)], 2, 2, r"needs 2 node\(s\), the Ray cluster has 1"),
    ],
)
def test_too_few_devices(nodes, per_node, num_nodes, message):
    with pytest.raises(ValueError, match=message):
        _device_resource(nodes, per_node, num_nodes)


def test_visible_devices_are_those_of_the_node(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # not delenv: of a variable that is not there it restores nothing
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    _show_devices((3, 1))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert os.environ["HIP_VISIBLE_DEVICES"] == "7,5"
    with pytest.raises(ValueError, match=r"hides device 3"):
        _show_devices((3,))


def test_object_store_size(tmp_path):
    size, folder = object_store(None, tmp_path)
    assert size >= 1 << 26
    assert object_store(1 << 60, tmp_path) == (1 << 60, str(tmp_path)), "more than shared memory holds goes to files"
    assert object_store(size, tmp_path)[0] == size
    assert folder in (None, str(tmp_path))


def test_messages_put_the_cause_first():
    killed = RankReport(2, "pid 9 on h", "killed", log_file="x.log", log_tail=["last"])
    peer = RankReport(0, error="connection closed")
    died = str(WorkerDied("critic", "train_step", 1.5, [killed, peer], [1, 3]))
    assert died.splitlines() == [
        "critic rank 2 (pid 9 on h) died in 'train_step' after 1.5 s: killed",
        "  last lines of its log (x.log):",
        "    last",
        "  then also rank 0: connection closed",
        "  no answer from rank 1, 3",
    ]
    silent_cause = WorkerFailed("critic", "train_step", 1.5, [RankReport(0, error=""), RankReport(1, error="")], [])
    assert "rank 0" in str(silent_cause)
    late = DeadlineExceeded("actor", "step", 4.0, [RankReport(1, "pid 9 on h", "0 of 2", log_tail=["a", "b"])], [0, 1])
    assert str(late).splitlines()[:2] == [
        "actor: 'step' was not done after 4.0 s; 0 of 2",
        "  no answer from rank 0, 1",
    ]


EFFORT = """
import os, sys, time
from roll.distributed.worker import Effort
effort = Effort()
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[1] == "works":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    ends = time.process_time() + 0.2
    while time.process_time() < ends:
        pass
else:
    time.sleep(0.4)
print(effort.seconds() - time.process_time(), flush=True)
"""


def held_up(*kinds: str, stops: bool = False) -> float:
    """Seconds for which the first of some processes, all at the same time, was kept from working."""
    command = [sys.executable, "-c", EFFORT]
    pipe = subprocess.PIPE
    started = [subprocess.Popen([*command, kind], stdin=pipe, stdout=pipe, text=True) for kind in kinds]
    for one in started:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
    for one in started:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    if stops:
        time.sleep(0.05)
        started[0].send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        started[0].send_signal(signal.SIGCONT)
    answers = [one.communicate(timeout=60)[0] for one in started]
    return float(answers[0])


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts it")
def test_what_keeps_a_process_from_working_counts() -> None:
    """Being stopped, and waiting for the only processor; sleeping does not."""
    assert held_up("waits", stops=True) > 0.4
    assert held_up("works", "works") > 0.05


@pytest.mark.parametrize(("device", "expected"), [("cpu", HEAP_DEFAULTS), ("cuda", {})])
def test_workers_on_a_cpu_alone_keep_what_large_tensors_give_back(
    device: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in HEAP_DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("roll.distributed.nodes.current_platform", lambda: SimpleNamespace(device_type=device))
    variables = absent_here(1, "mark")
    assert {name: variables[name] for name in HEAP_DEFAULTS if name in variables} == expected


def test_what_a_user_has_set_for_the_heap_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "65536")
    assert "MALLOC_MMAP_MAX_" not in absent_here(1, "mark")
