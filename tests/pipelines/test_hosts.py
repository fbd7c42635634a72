"""Runs over several hosts (network namespaces), through the start script and the variables of docs/multi-node.md: they
compute what one host computes, and a host that is cut off, slow or dead is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.hosts import TOKEN, Host, hosts, missing
from tests.pipelines.conftest import Run
from tests.support.subprocess_runs import ROOT
from tests.support.tiny_runs import HERE, FinishedRun, TinyWorld, load_changed, rlvr_settings, training_args, untimed

LOOPBACK = ("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]")
REASON = missing()
pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.skipif(REASON is not None, reason=REASON or "")]

QUICK_HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
"""Ray's own take half a minute and more to give a node up."""
SLOW_REWARD = {"rewards.digits.worker_cls": f"{HERE}.rewards.slow_digit_share"}
ON_BOTH = {
    "actor_train.device_mapping": [0, 1],
    "actor_train.training_args": training_args(8, 1),
    "actor_infer.device_mapping": [0, 1],
}
SECONDS = 60
"""To notice: Ray's health checks, the two seconds for other ranks, tidying up; all on a busy machine."""


class HostsRun:
    """The start script on every host, node 0 first."""

    def __init__(self, machines: list[Host], config: Path, output: Path, **environ: str) -> None:
        shared = {
            **QUICK_HEALTH_CHECKS,
            "WORLD_SIZE": str(len(machines)),
            "MASTER_ADDR": machines[0].address,
            "RAY_AUTH_TOKEN": TOKEN,
            **environ,
        }
        command = [str(ROOT / "examples" / "launch.sh"), str(config.parent), config.stem]
        self.machines, self.finished = machines, FinishedRun(output)
        self.processes = [host.start(command, {**shared, "RANK": str(i)}) for i, host in enumerate(machines)]

    def wait_for(self, look: Callable[[], Any], seconds: float = 120) -> Any:
        give_up = time.monotonic() + seconds
        while not (found := look()):
            assert self.processes[0].poll() is None, self.processes[0].communicate()[1]
            assert time.monotonic() < give_up, "it did not happen in time"
            time.sleep(0.05)
        return found

    def steps_done(self) -> int:
        try:
            return len(self.finished.steps)
        except (FileNotFoundError, ValueError):  # not there yet, or half a line
            return 0

    def finish(self, node: int = 0, seconds: float = SECONDS) -> tuple[int, str]:
        try:
            _, errors = self.processes[node].communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.machines[node].kill()
            raise AssertionError(f"no end: {self.processes[node].communicate()[1]}") from None
        return self.processes[node].returncode, errors


@pytest.fixture
def three_hosts() -> Iterator[list[Host]]:
    with hosts(3) as made:
        yield made


def spread(world: TinyWorld, output: Path, changes: Mapping[str, Any]) -> Path:
    """A configuration with one device a host."""
    load_changed(rlvr_settings(world, output), {"num_gpus_per_node": 1, **ON_BOTH, **changes})
    return output / "input" / "config.yaml"


@pytest.mark.matrix
def test_two_hosts_compute_what_one_does(three_hosts: list[Host], run: Run, world: TinyWorld, tmp_path: Path) -> None:
    """Trainers and engines on both; gloo over the hosts' own cable, the hosts' names being in no resolver."""
    config = spread(world, tmp_path, {})
    there = HostsRun(three_hosts[:2], config, tmp_path)
    there.wait_for(lambda: there.steps_done() >= 1)
    beyond = {at for host in three_hosts[:2] for at in host.listens() if at not in (host.address, *LOOPBACK)}
    status, errors = there.finish(seconds=180)
    assert status == 0, errors
    assert there.finish(1)[0] == 0, "the further node leaves in good order"
    assert beyond <= {"*"}, "Ray's servers listen on every interface where nodes are several; nothing else does"
    assert "process group of 2 ranks on gloo" in (tmp_path / "logs/workers/actor_train-1.log").read_text()
    assert three_hosts[1].sent() > 1 << 20, "gradients and responses have crossed the cable"
    here = run(ON_BOTH)
    assert [*map(untimed, there.finished.steps)] == [*map(untimed, here.steps)]


def test_a_dead_engine_host_is_survived_and_a_cut_off_trainer_is_named(
    three_hosts: list[Host], world: TinyWorld, tmp_path: Path
) -> None:
    changes = {"max_steps": 500, "actor_infer.device_mapping": [0, 2], **SLOW_REWARD}
    there = HostsRun(three_hosts, spread(world, tmp_path, changes), tmp_path)
    there.wait_for(lambda: there.steps_done() >= 1)
    three_hosts[2].kill()
    there.wait_for(lambda: there.finished.steps[-1].get("scheduler/engines") == 1)
    steps = there.steps_done()
    there.wait_for(lambda: there.steps_done() > steps)
    log = (tmp_path / "logs" / "run.log").read_text()
    assert re.search(rf"actor_infer rank 1 \(pid \d+ on {three_hosts[2].name}, {three_hosts[2].address}\)", log), log
    three_hosts[1].cut_off()
    status, errors = there.finish()
    assert status == 1
    name = rf"actor_train rank 1 \(pid \d+ on {three_hosts[1].name}, {three_hosts[1].address}\) died"
    assert re.search(rf"{name} .* its node is lost", errors), errors
    status, errors = there.finish(1)
    assert status == 1 and f"has lost the network to the head at {three_hosts[0].address}" in errors, errors


@pytest.mark.matrix
def test_a_preempted_run_saves_and_goes_on(three_hosts: list[Host], world: TinyWorld, tmp_path: Path) -> None:
    """SIGTERM to the process of each node, as Slurm sends it: both live until the trainers' state is saved."""
    changes = {"max_steps": 500, "actor_infer.device_mapping": [0], **SLOW_REWARD}
    there = HostsRun(three_hosts[:2], spread(world, tmp_path, changes), tmp_path)
    there.wait_for(lambda: there.steps_done() >= 2)
    for process in there.processes:
        process.terminate()
    status, errors = there.finish(seconds=200)
    saved = re.search(r"(\d+) of 500 steps are done; newest checkpoint: (\S+)", errors)
    assert status == 128 + signal.SIGTERM and saved and Path(saved[2]).is_dir(), errors
    there.finish(1)
    goes_on = {"max_steps": int(saved[1]) + 2, "resume_from_checkpoint": True}
    again = HostsRun(three_hosts[:2], spread(world, tmp_path, changes | goes_on), tmp_path)
    status, errors = again.finish(seconds=200)
    assert status == 0, errors
    steps = again.finished.values("system/global_step")
    assert steps == list(range(int(saved[1]) + 2)), "no step is missing or stands there twice"


@pytest.mark.matrix
def test_a_failed_run_is_started_again_with_its_nodes(
    three_hosts: list[Host], world: TinyWorld, tmp_path: Path
) -> None:
    """A trainer on the further host is killed: the further node stays for the next head, and leaves at the end."""
    changes = {
        "max_steps": 6,
        "save_steps": 2,
        "max_restarts": 1,
        "restart_backoff": 1,
        "actor_infer.device_mapping": [0],
        **SLOW_REWARD,
    }
    there = HostsRun(three_hosts[:2], spread(world, tmp_path, changes), tmp_path)
    there.wait_for(lambda: (tmp_path / "checkpoints" / "checkpoint-2").is_dir())
    log = (tmp_path / "logs" / "workers" / "actor_train-1.log").resolve()
    (rank_1,) = [pid for pid in three_hosts[1].pids() if reads(f"/proc/{pid}/fd/1") == str(log)]
    os.kill(rank_1, signal.SIGKILL)
    status, errors = there.finish(seconds=200)
    assert status == 0, errors
    assert re.search(r"restart 1 of 1 .*actor_train rank 1", errors), errors
    assert [row["system/global_step"] for row in there.finished.steps][-1] == 5
    assert there.finish(1)[0] == 0


def reads(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


@pytest.mark.matrix
def test_a_slow_host_is_named(three_hosts: list[Host], world: TinyWorld, tmp_path: Path) -> None:
    """Collectives over its cable take longer than the deadline; the rate to it is in the message."""
    changes = {"max_steps": 500, "rpc_timeout": 30, "actor_infer.device_mapping": [0]}
    there = HostsRun(three_hosts[:2], spread(world, tmp_path, changes), tmp_path)
    there.wait_for(lambda: there.steps_done() >= 1)
    three_hosts[1].slow_down(kilobits=64)
    status, errors = there.finish(seconds=120)
    assert status == 1
    assert "was not done after 30" in errors, errors
    slow = rf"{three_hosts[1].name} \({three_hosts[1].address}\): (0\.\d+ MB/s|has not taken 1 MiB)"
    assert re.search(slow, errors), errors


@pytest.mark.matrix
def test_nodes_that_differ_or_are_missing_are_named(three_hosts: list[Host], world: TinyWorld, tmp_path: Path) -> None:
    """Another torch on one host, another token on the second, and a third that never comes."""
    older = tmp_path / "older"
    (older / "torch-2.12.0.dist-info").mkdir(parents=True)
    (older / "torch-2.12.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n")
    config = spread(world, tmp_path, {})
    there = HostsRun(three_hosts[:1], config, tmp_path, WORLD_SIZE="3")
    shared = {"WORLD_SIZE": "3", "MASTER_ADDR": three_hosts[0].address}
    command = [str(ROOT / "examples" / "launch.sh"), str(config.parent), config.stem]
    stranger = three_hosts[1].start(command, {**shared, "RANK": "1", "RAY_AUTH_TOKEN": "0" * 64})
    _, errors = stranger.communicate(timeout=SECONDS)
    assert stranger.returncode == 1 and "the head refuses this node's token" in errors, errors
    environ = {**shared, "RANK": "2", "RAY_AUTH_TOKEN": TOKEN, "PYTHONPATH": f"{older}:{ROOT}"}
    other = three_hosts[2].start(command, environ)
    said = f"node 2 ({three_hosts[2].name}, {three_hosts[2].address}) has torch 2.12.0 (node 0: "
    _, errors = other.communicate(timeout=SECONDS)
    assert other.returncode == 1 and said in errors, errors
    status, errors = there.finish()
    assert status == 1 and said in errors, errors
    secretless = three_hosts[1].start(command, {**shared, "RANK": "1", "HOME": str(tmp_path)})
    _, errors = secretless.communicate(timeout=SECONDS)
    assert secretless.returncode == 2 and "RAY_AUTH_TOKEN: nodes of a run know each other by a secret" in errors, errors
