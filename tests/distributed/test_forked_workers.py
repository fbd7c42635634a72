"""Workers of a run on a CPU host are forks where they could not tell the difference; else Ray starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from roll.config.roles import WorkerConfig
from roll.distributed import Cluster, ResourceManager, ray_runtime, worker_script
from roll.distributed.forked_workers import fork_server, forked
from roll.distributed.guard import MARK_ENV, is_alive
from roll.distributed.nodes import absent_here
from tests.distributed.light_workers import BasicWorker

pytestmark = pytest.mark.long


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_who_is_forked() -> None:
    # vLLM imports Ray, too: before the settings of this run are known, it would be a Ray without its token.
    with forked(2, ["ray"]), ray_runtime(2) as runtime:
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
        assert parent(parent(plain["pid"])) == server.pid
        assert plain["environment"]["ROLL_RUN_MARK"] == runtime.mark
        assert plain["has_torch"]

        own = start("own", HF_HOME="/nowhere")
        assert server.pid not in (parent(own["pid"]), parent(parent(own["pid"])))
        assert own["environment"]["HF_HOME"] == "/nowhere"
        assert not own["has_torch"]

        os.kill(server.pid, signal.SIGKILL)
        os.kill(parent(plain["pid"]), signal.SIGKILL)
        late = start("late")
        assert not late["has_torch"]
        assert is_alive(plain["pid"])  # forks do not end with the server
    assert not any(map(is_alive, (worker["pid"] for worker in (plain, own, late))))


SEEN = """
import json, os, sys
print(json.dumps({"has_ray": "ray" in sys.modules, "job": os.environ["RAY_JOB_ID"]}), flush=True)
"""


def test_ray_is_imported_for_those_with_the_settings_of_the_first(tmp_path: Path) -> None:
    """Ray keeps the settings of the process that imports it: a worker with others must import it by itself."""
    script = tmp_path / "seen.py"
    script.write_text(SEEN)
    with forked(2, []):
        server = fork_server()
        assert server is not None
        environment = {**os.environ, **absent_here(2, server.mark), MARK_ENV: server.mark}
        environment |= server.environment("never started")
        while not Path(environment[worker_script.SOCKET_ENV]).exists():
            time.sleep(0.01)

        def start(job: str) -> dict[str, Any]:
            command = [sys.executable, worker_script.__file__, str(script)]
            run = subprocess.run(command, env=environment | {"RAY_JOB_ID": job}, check=True, capture_output=True)
            return dict(json.loads(run.stdout))

        seen = [start(job) for job in ("01", "01", "02", "01")]
    assert [one["job"] for one in seen] == ["01", "01", "02", "01"]
    assert [one["has_ray"] for one in seen] == [True, True, False, True]
