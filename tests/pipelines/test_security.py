"""Promises of docs/security.md for a run: nothing listens beyond loopback, and planted secrets turn up nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roll.distributed.guard import run_processes
from tests.support.subprocess_runs import Start
from tests.support.tiny_runs import HERE, TinyWorld, load_changed, rlvr_settings, training_args

pytestmark = [pytest.mark.long, pytest.mark.e2e]

LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}
LISTENS = "0A"

OF_ENVIRONMENT = {
    "PLANTED_API_KEY": "environment-planted-1",
    "PLANTED_PAT": "environment-planted-2",
    "PLANTED_PGPASSWORD": "environment-planted-3",
    "PLANTED_URL": "https://user:url-planted-4@host/path",
}
OF_CONFIGURATION = {"RUN_TOKEN": "configuration-planted-5", "ROLE_TOKEN": "configuration-planted-6"}
SECRETS = [*OF_ENVIRONMENT.values(), *OF_CONFIGURATION.values(), "url-planted-4", "bearer-planted-4"]


def listening_beyond_loopback(pids: list[int]) -> list[str]:
    """``pid command address:port`` of every listening socket of these processes that other hosts may reach."""
    owners = {}
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(entry)
            except OSError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                owners[target[8:-1]] = pid
    assert owners
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in owners and fields[1].split(":")[0] not in LOOPBACK:
                pid = owners[fields[9]]
                found.append(f"{pid} {command(pid)[:60]!r} {fields[1]}")
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def holding(folder: Path, secrets: list[str]) -> list[str]:
    """Files under a folder that hold one of the secrets."""
    found = []
    for path in folder.rglob("*"):
        try:
            content = path.read_bytes() if path.is_file() else b""
        except OSError:  # gone meanwhile
            continue
        found += [f"{path}: {secret}" for secret in secrets if secret.encode() in content]
    return found


def test_a_run_listens_on_loopback_and_tells_no_secret(
    start: Start, world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trainers, two engines, weights by broadcast; a reward that quotes secrets in its errors; all that can be
    written is: checkpoints, samples, rollouts, TensorBoard."""
    for name, value in OF_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    changes = {
        "max_steps": 500,
        "save_steps": 2,
        "eval_steps": 2,
        "num_gpus_per_node": 4,
        "track_with": ["tensorboard", "jsonl"],
        "rollout_dump_dir": str(tmp_path / "rollouts"),
        "system_envs": {"RUN_TOKEN": OF_CONFIGURATION["RUN_TOKEN"]},
        "actor_train.device_mapping": [0, 1],
        "actor_train.training_args": training_args(8, 1),
        "actor_infer.device_mapping": [2, 3],
        "actor_infer.system_envs": {"ROLE_TOKEN": OF_CONFIGURATION["ROLE_TOKEN"]},
        "weight_sync.transport": "broadcast",
        "rewards.digits.worker_cls": f"{HERE}.rewards.leaks_for_some",
        "rewards.digits.on_error": "mask",
    }
    load_changed(rlvr_settings(world, tmp_path), changes)
    driver = start(tmp_path / "input" / "config.yaml", tmp_path)
    driver.wait_for(lambda: driver.steps_done() >= 3)
    mark = driver.mark("actor_train-0")
    _, folder = driver.daemon("raylet", mark)
    pids = [driver.process.pid, *run_processes(mark, folder)]
    assert len(pids) >= 10, "driver, guard, Ray's daemons and helpers, five workers"
    assert listening_beyond_loopback(pids) == []
    token = next(
        entry.partition(b"=")[2].decode()
        for pid in run_processes(mark)
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if entry.startswith(b"RAY_AUTH_TOKEN=")
    )
    told = [f"{command(pid)}: {secret}" for pid in pids for secret in [*SECRETS, token] if secret in command(pid)]
    assert told == [], "any user of the host can list commands"
    assert folder.parent.stat().st_mode & 0o077 == 0, "Ray's own logs are for this user only"
    driver.process.terminate()
    _, errors = driver.finish(120)
    assert [secret for secret in [*SECRETS, token] if secret in errors] == []
    (tmp_path / "input").rename(tmp_path.parent / f"{tmp_path.name}-input")  # the user's own file
    written = {path.suffix or path.name.split(".")[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert {".yaml", ".jsonl", ".log", ".safetensors"} <= written, written
    assert holding(tmp_path, [*SECRETS, token]) == []
    assert not folder.parent.exists()
