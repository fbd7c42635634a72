"""Workers of a run on a CPU host are forks where they could not tell the difference; else Ray starts them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from roll.config.roles import WorkerConfig
from roll.distributed import Cluster, ResourceManager, ray_runtime
from roll.distributed.forked_workers import fork_server, forked
from roll.distributed.guard import is_alive
from tests.distributed.light_workers import BasicWorker

pytestmark = pytest.mark.long


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_who_is_forked() -> None:
    with forked(2, []), ray_runtime(2) as runtime:
        server = fork_server()
        assert server is not None
        assert runtime.mark == server.mark
        resources = ResourceManager(2)
        clusters: list[Cluster] = []  # their actors end with them

        def start(name: str, **system_envs: str) -> dict[str, Any]:
            role = WorkerConfig(name=name, device_mapping=[0], system_envs=system_envs)
            clusters.append(Cluster(name, BasicWorker, resources, role))
            return clusters[-1].call_all(BasicWorker.describe).result()[0]

        plain = start("plain")
        assert parent(plain["pid"]) == server.pid
        assert plain["environment"]["ROLL_RUN_MARK"] == runtime.mark
        assert plain["has_torch"]

        own = start("own", HF_HOME="/nowhere")
        assert parent(own["pid"]) != server.pid
        assert own["environment"]["HF_HOME"] == "/nowhere"
        assert not own["has_torch"]

        os.kill(server.pid, signal.SIGKILL)
        late = start("late")
        assert not late["has_torch"]
        assert is_alive(plain["pid"])  # forks do not end with the server
    assert not any(is_alive(worker["pid"]) for worker in (plain, own, late))
