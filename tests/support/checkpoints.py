"""Checkpoints without tensors, and a bucket to copy checkpoints into."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import fsspec
import pytest

from roll.checkpoint.contents import FORMAT, STATE_NAME, ModelContents
from roll.checkpoint.folders import write_manifest

BODY, HEAD = "model.layers.0.mlp.weight", "lm_head.weight"
PLAIN = ModelContents("fsdp2_train", {BODY: [8, 4], HEAD: [16, 4]})


def write_checkpoint(root: Path, roles: dict[str, ModelContents], step: int = 3, ahead: bool = False) -> Path:
    """A checkpoint as far as anything but tensors goes."""
    folder = root / f"checkpoint-{step}"
    for role, contents in roles.items():
        (folder / role).mkdir(parents=True)
        state = {"format": FORMAT, "world_size": 2, "step": step, "model": asdict(contents)}
        (folder / role / STATE_NAME).write_text(json.dumps(state))
    (folder / "pipeline").mkdir(parents=True)
    rollout = {"ahead": {"unfinished": [], "complete": [{"order": 1}]}} if ahead else {}
    (folder / "pipeline/state.json").write_text(json.dumps({"rollout": rollout}))
    write_manifest(folder, step)
    return folder


@pytest.fixture
def bucket(monkeypatch):
    """A bucket of a server that speaks S3, and the options to reach it."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "key", "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    options = {"endpoint_url": f"http://{host}:{port}"}
    fsspec.filesystem("s3", **options).mkdir("bucket")
    yield "s3://bucket/runs/one", options
    server.stop()
