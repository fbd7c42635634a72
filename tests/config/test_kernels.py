"""Kernels that cannot work here, or for this model, are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from roll import preflight
from roll.config.reading.errors import ConfigError
from roll.models.invariant import check_processor
from roll.pipelines.policy_preflight import check_policy_host
from tests.config.good import changed, load

TRAINER, REFERENCE = "actor_train.model_args", "reference.model_args"
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_batches_of_all_sizes(dtype: torch.dtype) -> None:
    """With matrices as wide as SmolLM2's: by the matrix instructions of an Intel processor other kernels take narrow
    ones than wide ones."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            check_processor(model, dtype)
    finally:
        torch.set_num_threads(threads)


def test_a_family_whose_attention_cannot_be_replaced(tmp_path: Path) -> None:
    from transformers import GPTNeoConfig

    folder = tmp_path / "model"
    GPTNeoConfig(hidden_size=32, num_layers=2, attention_types=[[["global"], 2]], num_heads=4).save_pretrained(folder)
    loaded = load(tmp_path, changed({"strict_on_policy": True, "pretrain": str(folder)}))
    with pytest.raises(ConfigError, match="strict_on_policy = true: does not work here"):
        check_policy_host(loaded)
