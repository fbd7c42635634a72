"""The quickstart's own recipe, run as its reader runs it: on one node, and on two of several nodes' kind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from roll.tracking import read_metrics
from tests.examples.pages import ROOT, named_files

pytestmark = pytest.mark.e2e
START = [sys.executable, str(ROOT / "examples/start_rlvr_pipeline.py"), "--config_path", ".", "--config_name", "sums"]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader who has copied the page's files and made the data."""
    for name, text in named_files(ROOT / "docs/quickstart.md").items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    # The package, but not the reader's own folder: the launcher must find my_rewards.py there by itself.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    subprocess.run([sys.executable, "make_data.py"], check=True)
    return tmp_path


def start(*overrides: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*START, *overrides],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.long
def test_own_data_and_reward(reader: Path, tiny_model: Path, shared_ray: str) -> None:
    """The untrained model scores ``wrong_score`` everywhere: that number comes from the reader's reward."""
    words = (f"pretrain={tiny_model}", "max_steps=1", "+rewards.sums.reward_kwargs.wrong_score=0.25")
    process = start(*words, RAY_ADDRESS=shared_ray)
    output, _ = process.communicate()
    assert process.returncode == 0, output[-3000:]
    rows = read_metrics(reader / "output/logs/sums/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows[:1]:
        assert row["critic/score/min"] == 0.25
        assert row["reward/sums/lines"] > 0
        assert row["system/samples"] == 128
    assert "val/sampled/accuracy" in output


@pytest.mark.matrix  # hosts of their own: tests/pipelines/test_hosts.py
def test_two_nodes_on_one_machine(reader: Path, tiny_model: Path) -> None:
    """Node 1 serves and exits; the files of the run are node 0's alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spread = [f"{role}.device_mapping=[0,1]" for role in ("actor_train", "actor_infer")]
    spread.append("actor_train.training_args.per_device_train_batch_size=64")
    nodes = [
        start(
            *(f"pretrain={tiny_model}", "max_steps=2", "eval_steps=0", *spread),
            WORLD_SIZE="2",
            RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        for rank in (1, 0)
    ]
    outputs = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert "node 1 serves the run" in outputs[0]
    logs = reader / "output/logs/sums"
    assert [row["step"] for row in read_metrics(logs / "metrics.jsonl")] == [0, 1]
    assert len(list((logs / "tensorboard").iterdir())) == 1
    assert not list(logs.glob("*.previous"))
    assert {file.name for file in (logs / "workers").glob("actor_*.log")} == {
        f"{role}-{rank}.log" for role in ("actor_train", "actor_infer") for rank in (0, 1)
    }
