"""Nothing in a checkpoint folder can run code, whoever has rewritten it, its manifest included."""

from __future__ import annotations

import io
import pickle
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.checkpoint import CheckpointManager
from roll.checkpoint.folders import write_manifest
from roll.checkpoint.state import load_state, save_state
from roll.config.roles import WorkerConfig
from tests.strategies.jobs import POLICY, started
from tests.strategies.samples import TensorBatch, policy_loss

STRATEGIES = ("fsdp2", "fsdp", "zero1", "megatron")


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def payloads(mark: Path) -> dict[str, bytes]:
    """A bomb in every container that something may take for one of its own."""
    packed = {"pickle": pickle.dumps(Bomb(mark))}
    for name, is_zip in (("zip", True), ("legacy", False)):
        stream = io.BytesIO()
        torch.save({"bomb": Bomb(mark)}, stream, _use_new_zipfile_serialization=is_zip)
        packed[name] = stream.getvalue()
    return packed


def attack(role: WorkerConfig, batch: TensorBatch, root: Path) -> list[str]:
    """Load every rewritten checkpoint as a run does; the names of those that ran code."""
    strategy = started(role, 10)
    strategy.train_step(batch, policy_loss, POLICY)
    manager = CheckpointManager(root)
    with manager.writing(1) as folder:
        strategy.save(folder / "actor_train")
        strategy.saved()
        save_state(folder / "pipeline", {"order": torch.arange(3), "step": 1})
    whole, mark = root / "checkpoint-1", root / "ran"
    tried, ran = 0, []
    files = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    for file, (kind, payload) in product(files, payloads(mark).items()):
        if file.name == "manifest.json":
            continue
        name, copy = f"{file} is a {kind}", root / "attacked" / "checkpoint-1"
        shutil.copytree(whole, copy)
        (copy / file).write_bytes(payload)
        write_manifest(copy, 1)
        found = manager.resolve(str(copy))
        assert found is not None, "its manifest is right"
        for read, role_name in ((strategy.load, "actor_train"), (load_state, "pipeline")):
            try:
                read(found.role(role_name))
            except Exception as error:
                assert str(error), name
        tried += 1
        if mark.exists():
            ran.append(name)
            mark.unlink()
        shutil.rmtree(copy.parent)
    strategy.load(whole / "actor_train")
    assert tried > 12 and strategy.progress.step == 1, "and the right one is loaded still"
    return ran


def test_a_bomb_goes_off_where_it_is_unpickled(tmp_path):
    mark = tmp_path / "ran"
    for name, payload in payloads(mark).items():
        if name == "pickle":
            pickle.loads(payload)
        else:
            torch.load(io.BytesIO(payload), weights_only=False)
        assert mark.exists(), name
        mark.unlink()


@pytest.mark.long
@pytest.mark.default_rows("fsdp2", "zero1")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_file_of_a_checkpoint_runs_code(run, tmp_path, strategy):
    assert run(attack, 1, strategy, "untied", tmp_path) == [[]]
