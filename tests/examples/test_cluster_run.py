"""examples/cluster/slurm.sh runs as written, over hosts that are network namespaces: stand-ins for Slurm's two commands
start its tasks there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.conftest import tiny  # noqa: F401  the modules of examples/tiny, as a fixture
from tests.distributed.hosts import ROOT, Host, clean_environment, hosts, missing
from tests.support.tiny_runs import (
    HERE,
    FinishedRun,
    TinyWorld,
    load_changed,
    make_world,
    rlvr_settings,
    training_args,
)

REASON = missing()
pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]

SCONTROL = """#!/usr/bin/env bash
[[ "$*" == "show hostnames $SLURM_JOB_NODELIST" ]] && printf '%s\\n' $NODES
"""
SRUN = """#!/usr/bin/env bash
# One task a node, in its namespace and under its name, with a file of the job's nodes in place of a resolver.
kill_on_bad_exit=
while [[ "$1" == --* ]]; do [[ "$1" == --kill-on-bad-exit=1 ]] && kill_on_bad_exit=yes; shift; done
number=0
tasks=()
for node in $NODES; do
    SLURM_NODEID=$number ip netns exec "$node" unshare --uts --mount sh -c \\
        'hostname "$0"; mount --bind "$HOSTS_FILE" /etc/hosts; exec "$@"' "$node" "$@" &
    tasks+=($!)
    echo $! >> "$TASKS_FILE"
    number=$((number + 1))
done
status=0
for _ in $NODES; do
    wait -n && continue
    status=$?
    [[ -z "$kill_on_bad_exit" ]] || (sleep 20; kill "${tasks[@]}") 2>/dev/null &
done
exit $status
"""


@pytest.fixture
def world(tiny: Any, tmp_path: Path) -> TinyWorld:  # noqa: F811
    return make_world(tiny, tmp_path / "world")


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


def wait_for(look: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 240) -> Any:
    give_up = time.monotonic() + seconds
    while not (found := look()):
        if process.poll() is not None:
            pytest.fail(f"it ended with {process.returncode}: {process.communicate()[0]}")
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.05)
    return found


class SlurmJob:
    """A job of two nodes: ``sbatch`` runs its script on the first of them."""

    def __init__(self, machines: list[Host], folder: Path) -> None:
        self.machines, self.folder = machines, folder
        programs = folder / "bin"
        programs.mkdir()
        roll = f'#!/bin/sh\nexec {sys.executable} -c "import sys; from roll.cli import main; sys.exit(main())" "$@"\n'
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "roll": roll}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        rows = [f"{host.address} {host.name}" for host in machines]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *rows]) + "\n")
        self.environ = {
            **clean_environment(),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "NODES": " ".join(host.name for host in machines),
            "HOSTS_FILE": str(folder / "hosts"),
            "TASKS_FILE": str(folder / "tasks"),
            "SLURM_JOB_NODELIST": f"{machines[0].name[:-1]}[0-1]",
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NUM_NODES": str(len(machines)),
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        (self.folder / "tasks").unlink(missing_ok=True)
        script = str(ROOT / "examples/cluster/slurm.sh")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen([script, *words], env=self.environ, cwd=self.folder, text=True, **pipes)

    def preempt(self) -> None:
        """SIGTERM to the process of each task, and no other, as ``--signal=TERM@300`` does."""
        for pid in (self.folder / "tasks").read_text().split():
            os.kill(int(pid), signal.SIGTERM)


def test_a_slurm_job_is_preempted_and_goes_on(two_hosts: list[Host], world: TinyWorld, tmp_path: Path) -> None:
    """A trainer on each node, so that both must live until the state is saved."""
    output = tmp_path / "out"
    changes = {
        "num_gpus_per_node": 1,
        "max_steps": 500,
        "actor_train.device_mapping": [0, 1],
        "actor_train.training_args": training_args(8, 1),
        "actor_infer.device_mapping": [0],
        "rewards.digits.worker_cls": f"{HERE}.rewards.slow_digit_share",
    }
    load_changed(rlvr_settings(world, output), changes)
    config, run = str(output / "input/config.yaml"), FinishedRun(output)
    job = SlurmJob(two_hosts, tmp_path)
    first = job.start(config)
    wait_for(lambda: (run.logs / "metrics.jsonl").exists() and len(run.steps) >= 2, first)
    job.preempt()
    text, _ = first.communicate(timeout=200)
    saved = re.search(r"(\d+) of 500 steps are done; newest checkpoint: (\S+)", text)
    assert first.returncode == 128 + signal.SIGTERM and saved, text
    assert Path(saved[2]).is_dir() and int(saved[1]) >= 2
    last = int(saved[1]) + 1
    again = job.start(config, f"max_steps={last + 1}")
    text, _ = again.communicate(timeout=240)
    assert again.returncode == 0, text
    assert run.values("system/global_step") == list(range(last + 1)), "no step is missing or stands there twice"
    assert f"node 1 ({two_hosts[1].name}" in text or "node 1 serves the run" in text, text
