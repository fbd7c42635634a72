"""Nothing in a checkpoint folder can run code, whoever has rewritten it, its manifest included."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from roll.checkpoint import CheckpointManager
from roll.checkpoint.contents import STATE_NAME, read_trainer_state
from roll.checkpoint.folders import write_manifest
from roll.checkpoint.state import load_state, save_state
from roll.checkpoint.tensors import FOLDER, MOMENTS, WEIGHT, stored_tensors
from roll.config.roles import WorkerConfig
from roll.strategies.factory import create_strategy
from tests.strategies.samples import TensorBatch, make_batch, make_role, policy_loss
from tests.strategies.sharded_cases import POLICY

RunRanks = Callable[..., list[Any]]
STRATEGIES = ("fsdp2_train", "fsdp_train", "deepspeed_train", "megatron_train")


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


def rewritten(whole: Path, mark: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Every file of the checkpoint ``whole`` replaced by every payload, and an index that leads to one."""
    for file in sorted(path for path in whole.rglob("*") if path.is_file() and path.name != "manifest.json"):
        place = file.relative_to(whole)
        for name, payload in payloads(mark).items():
            yield f"{place} is a {name}", lambda folder, p=place, b=payload: (folder / p).write_bytes(b)  # type: ignore[misc]
        if file.name == ".metadata":
            yield f"{place} with a bomb", lambda folder, p=place: poison_index(folder / p, mark)  # type: ignore[misc]
            for name, payload in payloads(mark).items():
                for as_bytes in (False, True):
                    yield (
                        f"{place} leads to a {name} (as bytes: {as_bytes})",
                        lambda folder, p=place, b=payload, a=as_bytes: mislead_index(folder / p, b, a),  # type: ignore[misc]
                    )


def poison_index(path: Path, mark: Path) -> None:
    """An index that is right in all, with a bomb where nobody looks."""
    index = pickle.loads(path.read_bytes())
    index.planner_data = {"model.x": ("model", Bomb(mark))}
    path.write_bytes(pickle.dumps(index))


def mislead_index(path: Path, payload: bytes, as_bytes: bool) -> None:
    """An index of known classes that gives every tensor another file, or says that they are no tensors."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    index = pickle.loads(path.read_bytes())
    (path.parent / "other.distcp").write_bytes(payload)
    place = {"relative_path": "other.distcp", "offset": 0, "length": len(payload)}
    index.storage_data = {key: replace(info, **place) for key, info in index.storage_data.items()}
    if as_bytes:
        index.state_dict_metadata = {name: BytesStorageMetadata() for name in index.state_dict_metadata}
    path.write_bytes(pickle.dumps(index))


def as_format_2(folder: Path) -> None:
    """Rewrite a role's folder as the version before wrote it under FSDP: PyTorch's distributed checkpoint."""
    path, state = folder / STATE_NAME, read_trainer_state(folder)
    tensors: dict[str, Any] = {}
    with stored_tensors(folder) as stored:
        for name, shape in state["model"]["trained"].items():
            size = torch.Size(shape).numel()
            tensors[f"model.{name}"] = stored.read(WEIGHT, name, 0, size).view(shape)
            for kind in MOMENTS:
                tensors[f"optimizer.{name}.{kind}"] = stored.read(kind, name, 0, size).view(shape)
            tensors[f"optimizer.{name}.step"] = torch.tensor(float(stored.updates(name)))
    shutil.rmtree(folder / FOLDER)
    save(tensors, checkpoint_id=folder / FOLDER, no_dist=True)
    path.write_text(json.dumps(state | {"format": 2}))


def attack(role: WorkerConfig, batch: TensorBatch, root: Path, is_old: bool) -> list[str]:
    """Load every rewritten checkpoint as a run does; the names of those that ran code."""
    strategy = create_strategy(role)
    strategy.initialize(num_training_steps=10)
    strategy.train_step(batch, policy_loss, POLICY)
    manager = CheckpointManager(root)
    with manager.writing(1) as folder:
        strategy.save(folder / "actor_train")
        strategy.saved()
        if is_old:
            as_format_2(folder / "actor_train")
        save_state(folder / "pipeline", {"order": torch.arange(3), "step": 1})
    whole, mark = root / "checkpoint-1", root / "ran"
    tried, ran = 0, []
    for name, rewrite in rewritten(whole, mark):
        copy = root / "attacked" / "checkpoint-1"
        shutil.copytree(whole, copy)
        rewrite(copy)
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


def test_a_bomb_goes_off_where_it_is_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for name, payload in payloads(mark).items():
        if name == "pickle":
            pickle.loads(payload)
        else:
            torch.load(io.BytesIO(payload), weights_only=False)
        assert mark.exists(), name
        mark.unlink()


@pytest.mark.parametrize(
    ("strategy", "is_old"), [*((name, False) for name in STRATEGIES), ("fsdp2_train", True), ("deepspeed_train", True)]
)
def test_no_file_of_a_checkpoint_runs_code(
    run_ranks: RunRanks, untied_model: Path, tmp_path: Path, strategy: str, is_old: bool
) -> None:
    pytest.importorskip({"deepspeed_train": "deepspeed", "megatron_train": "megatron.core"}.get(strategy, "torch"))
    role = make_role(untied_model, strategy)
    assert run_ranks(1, attack, role, make_batch(), tmp_path, is_old) == [[]]
