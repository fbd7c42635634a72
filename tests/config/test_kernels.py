"""``use_liger_kernel`` and ``compile``: where they cannot work they are refused before anything starts."""

from __future__ import annotations

import json
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
def test_megatron_has_its_own(tmp_path: Path, key: str) -> None:
    megatron = {"actor_train.strategy_args": {"strategy_name": "megatron_train"}}
    (problem,) = mistakes(tmp_path, changed({f"{TRAINER}.{key}": True} | megatron))
    assert problem.key == f"{TRAINER}.{key}" and "Megatron" in problem.rule and problem.example is False
    assert mistakes(tmp_path, changed({f"{TRAINER}.{key}": False} | megatron)) == ()


@pytest.mark.parametrize("key", ["use_liger_kernel", "compile"])
@pytest.mark.parametrize("strategy", ["hf_infer", "vllm"])
def test_an_engine_has_no_use_for_them(tmp_path: Path, key: str, strategy: str) -> None:
    changes = {f"actor_infer.model_args.{key}": True, "actor_infer.strategy_args": {"strategy_name": strategy}}
    notices = load(tmp_path, changed(changes)).warnings
    assert any(one.key == f"actor_infer.model_args.{key}" and "has no effect" in one.text for one in notices)


def test_one_of_them(tmp_path: Path) -> None:
    (problem,) = mistakes(tmp_path, changed({f"{TRAINER}.use_liger_kernel": True, f"{TRAINER}.compile": True}))
    assert problem.key == f"{TRAINER}.compile" and "use_liger_kernel" in problem.rule and problem.example is False


@pytest.mark.parametrize("key", ["use_liger_kernel", "compile"])
def test_strict_on_policy_has_one_kind_of_kernels(tmp_path: Path, key: str) -> None:
    (problem,) = mistakes(tmp_path, changed({"strict_on_policy": True, f"{TRAINER}.{key}": True}))
    assert problem.key == f"{TRAINER}.{key}" and "strict_on_policy" in problem.rule and problem.example is False


def test_compiled_models_are_dense(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = {"hidden_size": 64, "num_attention_heads": 4, "model_type": "qwen3_moe", "num_experts": 8}
    (folder / "config.json").write_text(json.dumps(model))
    sections = {"pretrain": str(folder), f"{TRAINER}.compile": True}
    found = mistakes(tmp_path, changed(sections), check_files=True)
    problem = next(one for one in found if "compile" in one.rule)
    assert problem.key == "pretrain" and "mixture-of-experts" in problem.rule and "false" in problem.rule
    found = mistakes(tmp_path, changed(sections | {f"{TRAINER}.compile": False}), check_files=True)
    assert not any("compile" in one.rule for one in found)


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
