"""``use_liger_kernel`` and ``compile``: where they cannot work they are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll import preflight
from roll.config.reading.errors import ConfigError
from tests.config.good import changed, load, mistakes

TRAINER, REFERENCE = "actor_train.model_args", "reference.model_args"
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}


@pytest.mark.parametrize("key", ["use_liger_kernel", "compile"])
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp", "deepspeed"])
def test_accepted_for_every_role_that_computes(tmp_path: Path, key: str, strategy: str) -> None:
    changes = KL | {
        f"{TRAINER}.{key}": True,
        f"{REFERENCE}.{key}": True,
        "actor_train.strategy_args": {"strategy_name": f"{strategy}_train"},
        "reference.strategy_args": {"strategy_name": f"{strategy}_infer"},
    }
    assert mistakes(tmp_path, changed(changes)) == ()


@pytest.mark.parametrize("key", ["use_liger_kernel", "compile"])
@pytest.mark.parametrize("strategy", ["hf_infer", "vllm"])
def test_an_engine_has_no_use_for_them(tmp_path: Path, key: str, strategy: str) -> None:
    changes = {f"actor_infer.model_args.{key}": True, "actor_infer.strategy_args": {"strategy_name": strategy}}
    notices = load(tmp_path, changed(changes)).warnings
    assert any(one.key == f"actor_infer.model_args.{key}" and "has no effect" in one.text for one in notices)


def refusal(tmp_path: Path, changes: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight.require_packages(load(tmp_path, changed(changes)))
    return str(caught.value)


def test_what_the_host_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLL_PLATFORM", "cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    changes = KL | {f"{REFERENCE}.use_liger_kernel": True}
    text = refusal(tmp_path, changes)
    assert f"{REFERENCE}.use_liger_kernel" in text and "needs a GPU" in text and "Triton" in text
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(preflight, "is_installed", lambda module: module != "liger_kernel")
    assert "[liger]" in refusal(tmp_path, changes)
    monkeypatch.setattr(preflight, "is_installed", lambda module: True)
    preflight.require_packages(load(tmp_path, changed(changes)))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert f"{TRAINER}.compile" in (text := refusal(tmp_path, {f"{TRAINER}.compile": True})) and "CXX" in text
    engine = {"actor_infer.model_args.compile": True, "actor_infer.model_args.use_liger_kernel": True}
    preflight.require_packages(load(tmp_path, changed(engine)))
