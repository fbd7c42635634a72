"""The registry of backends: every descriptor names classes that are there, and is all that the configuration asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config.strategies import registry
from roll.config.strategies.base import Backend
from roll.config.strategies.registry import BACKENDS, checkpoint_readers, trains

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("backend", BACKENDS.rows, ids=lambda backend: backend.name)
def test_every_class_is_there(backend: Backend) -> None:
    """Read as text: the packages of most backends are optional."""
    paths = [path for path in (backend.computes, backend.generates, backend.scores) if path]
    assert paths and (not backend.trains or (backend.computes and backend.checkpoints))
    for path in paths:
        module, _, name = path.rpartition(".")
        file = ROOT / (module.replace(".", "/") + ".py")
        text = (file if file.is_file() else file.with_suffix("") / "__init__.py").read_text(encoding="utf-8")
        assert f"class {name}(" in text or f'"{name}"' in text, path


def test_names_of_every_task() -> None:
    assert registry.train_strategies() == ("fsdp2_train", "fsdp_train", "deepspeed_train", "megatron_train")
    assert (
        registry.infer_strategies()[:2] == ("fsdp2_infer", "fsdp2_train") and "vllm" not in registry.infer_strategies()
    )
    assert registry.generation_strategies() == ("hf_infer", "vllm", "sglang")
    assert registry.scoring_strategies() == ("vllm", "remote")
    assert registry.all_scoring_strategies() == (*registry.infer_strategies(), "vllm", "remote")
    assert [name for name in BACKENDS if trains(name)] == list(registry.train_strategies())


def test_backends_of_one_format_read_each_others_checkpoints() -> None:
    for name in registry.train_strategies():
        assert checkpoint_readers(name) == registry.train_strategies()
    assert checkpoint_readers("of_another_version") == ("of_another_version",)
