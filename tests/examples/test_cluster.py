"""examples/cluster: scripts run with stand-ins for schedulers' commands, and manifests agree with this repository."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.config.loader import load_config
from tests.datasets.conftest import tiny  # noqa: F401  the modules of examples/tiny, as a fixture
from tests.support.tiny_runs import FinishedRun, load_changed, make_world, sft_settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
TWO_NODES = "examples/qwen2.5-7B-rlvr_fsdp2/rlvr_config_2nodes.yaml"

RECORDER = """#!PYTHON -IS
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RAY_AUTH_TOKEN", "RAY_ADDRESS")
    file.write(json.dumps({"argv": sys.argv, "environ": {k: os.environ[k] for k in names if k in os.environ}}) + "\\n")
if sys.argv[1:2] == ["doctor"]:
    sys.exit(int(os.environ.get("DOCTOR", "0")))
"""
SRUN = """#!/usr/bin/env bash
echo "$@" >> "$RECORD.srun"
while [[ "$1" == --* ]]; do shift; done
status=0
for node in 0 1; do SLURM_NODEID=$node "$@" || status=$?; done
exit $status
"""
SCONTROL = '#!/usr/bin/env bash\n[[ "$*" == "show hostnames gpu[07-08]" ]] && printf "gpu07\\ngpu08\\n"\n'


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """The environment in which the commands of schedulers are stand-ins that write down what they were given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"roll": RECORDER, "ray": RECORDER, "srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text.replace("PYTHON", sys.executable))
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record")}


def call(words: list[str], environ: dict[str, str]) -> tuple[int, list[dict[str, Any]]]:
    """Exit status, and the calls of ``roll`` and ``ray``."""
    done = subprocess.run(words, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    record = Path(environ["RECORD"])
    return done.returncode, [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


SLURM = {"SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2"}


def test_slurm(stand_ins: dict[str, str]) -> None:
    status, calls = call([str(FOLDER / "slurm.sh"), TWO_NODES, "exp_name=a b"], {**stand_ins, **SLURM})
    assert status == 0
    runs = [one for one in calls if one["argv"][1] == "run"]
    assert [one["argv"][2:] for one in runs] == [[TWO_NODES, "resume_from_checkpoint=true", "exp_name=a b"]] * 2
    assert [one["environ"]["RANK"] for one in runs] == ["0", "1"]
    (token,) = {one["environ"].pop("RAY_AUTH_TOKEN") for one in runs}
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert token not in Path(stand_ins["RECORD"] + ".srun").read_text(), "any user of the cluster can list commands"
    for one in runs:
        del one["environ"]["RANK"]
        assert one["environ"] == {"WORLD_SIZE": "2", "MASTER_ADDR": "gpu07", "MASTER_PORT": "24711"}
    assert [one["argv"][1] for one in calls] == ["doctor", "run"] * 2


def test_slurm_runs_with_warnings_and_not_with_errors(stand_ins: dict[str, str]) -> None:
    for doctor, runs in (("2", 0), ("1", 2)):
        status, calls = call([str(FOLDER / "slurm.sh"), TWO_NODES], {**stand_ins, **SLURM, "DOCTOR": doctor})
        assert (status == 0) == (runs > 0)
        assert sum(one["argv"][1] == "run" for one in calls) == runs


def test_ray_job(stand_ins: dict[str, str]) -> None:
    assert call([str(FOLDER / "ray_job.sh"), "http://head:8265"], stand_ins)[0] == 2
    status, (sent,) = call([str(FOLDER / "ray_job.sh"), "http://head:8265", "c.yaml", "max_steps=1"], stand_ins)
    assert status == 0
    words = "job submit --address http://head:8265 -- roll run c.yaml max_steps=1"
    assert sent["argv"][1:] == words.split()


RAY = [sys.executable, "-m", "ray.scripts.scripts"]
HAS_DASHBOARD = find_spec("aiohttp_cors") is not None


@pytest.fixture
def ray_cluster() -> Iterator[tuple[dict[str, str], int, int]]:
    """A head, with a dashboard where it is installed: the environment of processes, its port and the dashboard's."""
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ROLL_"))}
    with tempfile.TemporaryDirectory(prefix="rc") as folder:  # sockets have short names
        programs = Path(folder) / "bin"
        programs.mkdir()
        for name, module in {"ray": "ray.scripts.scripts", "roll": "roll.cli"}.items():  # of this environment
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            (programs / name).chmod(0o755)
        # Of a home of its own: a token in the host's would be asked for.
        environ = kept | {"PATH": f"{programs}:{kept['PATH']}", "PYTHONPATH": str(ROOT), "HOME": folder}
        environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        words = ["--head", f"--port={ports[0]}", f"--dashboard-port={ports[1]}", "--node-ip-address=127.0.0.1"]
        words += [f"--include-dashboard={HAS_DASHBOARD}", "--num-cpus=4", f"--temp-dir={folder}"]
        with ray_node(words, environ):
            yield environ, ports[0], ports[1]


@contextmanager
def ray_node(words: list[str], environ: dict[str, str]) -> Iterator[None]:
    """``ray start``, and the end of what it has started."""
    command = [*RAY, "start", *words, "--block"]
    node = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        node.terminate()
        node.wait(30)


def alive(port: int, environ: dict[str, str], wanted: int) -> None:
    """Wait until the cluster has so many nodes."""
    look, give_up = [*RAY, "status", f"--address=127.0.0.1:{port}"], time.monotonic() + 90
    while time.monotonic() < give_up:
        seen = subprocess.run(look, env=environ, capture_output=True, text=True, check=False).stdout
        if seen.partition("Pending")[0].count("node_") == wanted:
            return
        time.sleep(0.2)
    pytest.fail(f"{wanted} nodes did not come")


JOIN = "from roll.distributed import ray_runtime\nwith ray_runtime(1): print('joined')"
OTHER = "Metadata-Version: 2.1\nName: transformers\nVersion: 0.1\n"


@pytest.mark.matrix
@pytest.mark.e2e
def test_a_cluster_whose_nodes_differ_is_refused_by_name(
    ray_cluster: tuple[dict[str, str], int, int], tmp_path: Path
) -> None:
    environ, port, _ = ray_cluster
    join = environ | {"RAY_ADDRESS": f"127.0.0.1:{port}"}

    def joined() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", JOIN], env=join, capture_output=True, text=True, check=False)

    alive(port, environ, 1)
    one = joined()
    assert one.stdout == "joined\n", one.stderr
    stub = tmp_path / "stub" / "transformers-0.1.dist-info"
    stub.mkdir(parents=True)
    (stub / "METADATA").write_text(OTHER)
    words = [f"--address=127.0.0.1:{port}", "--node-ip-address=127.0.0.1", "--num-cpus=1"]
    with ray_node(words, environ | {"PYTHONPATH": f"{stub.parent}:{ROOT}"}):
        alive(port, environ, 2)
        two = joined()
    assert two.returncode != 0 and two.stdout == ""
    assert "has transformers 0.1 (this one: " in two.stderr
    assert "All nodes must have the same versions" in two.stderr


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.skipif(not HAS_DASHBOARD, reason="jobs need the dashboard: ray[default], the extra cluster")
def test_a_job_runs_on_a_real_cluster(
    ray_cluster: tuple[dict[str, str], int, int],
    tiny: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    """``ray_job.sh`` has a run done to its end."""
    environ, port, dashboard = ray_cluster
    output = tmp_path / "out"
    load_changed(sft_settings(make_world(tiny, tmp_path / "world"), output), {"max_steps": 2, "num_gpus_per_node": 1})
    alive(port, environ, 1)
    submit = [str(FOLDER / "ray_job.sh"), f"http://127.0.0.1:{dashboard}", str(output / "input/config.yaml")]
    give_up = time.monotonic() + 120
    while True:
        done = subprocess.run(submit, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
        text = done.stdout + done.stderr
        not_yet = "connect to" in text.lower() or "try again later" in text  # the dashboard, then its agent
        if not not_yet or time.monotonic() > give_up:
            break
        time.sleep(0.5)
    assert done.returncode == 0, text
    assert FinishedRun(output).values("system/global_step") == [0.0, 1.0]


def test_skypilot(stand_ins: dict[str, str], tmp_path: Path) -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    known = {"name", "num_nodes", "resources", "workdir", "envs", "secrets", "file_mounts", "setup", "run"}
    assert set(task) <= known and set(task["resources"]) <= {"accelerators", "disk_size"}
    plan = load_config(None, str(ROOT / task["envs"]["CONFIG"]), check_files=False).plan
    assert task["num_nodes"] == plan.num_nodes
    assert task["resources"]["accelerators"] == f"H100:{plan.num_devices_per_node}"
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    given = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}
    environ = {**stand_ins, **given, **task["envs"], "RAY_AUTH_TOKEN": "t"}
    done = subprocess.run(["bash", "-e", "-c", task["run"]], env=environ, cwd=tmp_path, check=False)
    assert done.returncode == 0
    run = [json.loads(line) for line in Path(stand_ins["RECORD"]).read_text().splitlines()][-1]
    assert run["argv"][1:3] == ["run", TWO_NODES]
    assert run["environ"] == {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.4", "RAY_AUTH_TOKEN": "t"}
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)


def test_kuberay() -> None:
    """``test_cluster_programs.py`` holds its pods against Kubernetes's schema."""
    manifest = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    cluster = manifest["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert f"ray[default]>={cluster['rayVersion'].rpartition('.')[0]}" in (ROOT / "setup.py").read_text()
    user = re.search(r"useradd .*--uid (\d+)", (ROOT / "Dockerfile").read_text())
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in groups):
        assert user is not None and pod["securityContext"]["runAsUser"] == int(user[1])
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]} == volumes
    assert manifest["spec"]["entrypoint"].startswith("roll run /runs/")
