"""RLVR with soft caps in attention and at the head (Gemma 2): trainer and engine agree before and after an update."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config

from tests.pipelines.conftest import Run
from tests.support.tiny_runs import TinyWorld, training_args

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.mark.default_rows("fsdp2_train-use_prefix_sharing")
@pytest.mark.parametrize(
    ("strategy", "key"),
    [("fsdp2_train", "use_sequence_packing"), ("fsdp2_train", "use_prefix_sharing"), ("deepspeed_train", None)],
)
def test_trainer_and_engine_agree(run: Run, world: TinyWorld, tmp_path: Path, strategy: str, key: str | None) -> None:
    folder = tmp_path / "model"
    shutil.copytree(world.model, folder)
    own = AutoConfig.from_pretrained(world.model)
    ids = {name: getattr(own, name) for name in ("vocab_size", "eos_token_id", "pad_token_id")}
    config = Gemma2Config(
        **ids,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=8,
        max_position_embeddings=256,
        initializer_range=0.2,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    finished = run(
        {
            "max_steps": 2,
            "pretrain": str(folder),
            "reward_pretrain": str(folder),
            "actor_train.strategy_args": {"strategy_name": strategy},
            "actor_train.training_args": training_args(8, 2, 1e-2),
            "actor_train.model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
            **({} if key is None else {f"actor_train.{key}": True}),
        },
        output=tmp_path / "output",
    )
    assert max(finished.values("actor/train_infer_log_diff_abs_max")) < 1e-4
    assert finished.values("actor/grad_norm")[0] > 0
