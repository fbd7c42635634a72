"""RLVR with a model that is published with a vision tower: it is trained on text, and written whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.pipelines.conftest import Run
from tests.strategies.published_models import is_apart, write_published
from tests.support.tiny_runs import TinyWorld, training_args

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.mark.default_rows("qwen3_5")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_run_and_another_from_what_it_wrote(run: Run, world: TinyWorld, tmp_path: Path, family: str) -> None:
    """Trainer and engine agree before and after an update, also in a run that begins with the export of the first."""
    folder = tmp_path / "model"
    shutil.copytree(world.model, folder)
    own = AutoConfig.from_pretrained(world.model)
    ids = {name: getattr(own, name) for name in ("vocab_size", "eos_token_id", "pad_token_id")}
    write_published(folder, family, **ids, max_position_embeddings=256)
    before = folder
    for turn in range(2):
        finished = run(
            {
                "max_steps": 2,
                "pretrain": str(before),
                "reward_pretrain": str(before),
                "actor_train.training_args": training_args(8, 2, 1e-2) | {"save_hf_model": True},
                "actor_train.model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
            },
            output=tmp_path / f"output{turn}",
        )
        # Linear attention amplifies rounding at single tokens; see tests/strategies/hf_infer/test_families.py.
        assert max(finished.values("actor/train_infer_log_diff_abs_max")) < 1e-3
        assert finished.values("actor/grad_norm")[0] > 0
        written = finished.output / "model"
        old, new = load_file(before / "model.safetensors"), load_file(written / "model.safetensors")
        assert new.keys() == old.keys()
        assert all(torch.equal(new[name], tensor) for name, tensor in old.items() if is_apart(name))
        moved = "model.language_model.layers.3.self_attn.q_proj.weight"
        assert not torch.equal(new[moved], old[moved])
        before = written
    tokens = torch.arange(2, 40)[None]
    with torch.no_grad():
        part = AutoModelForCausalLM.from_pretrained(before)(tokens).logits
        whole = AutoModelForImageTextToText.from_pretrained(before)(tokens).logits
    assert float((part - whole).abs().max()) < 1e-5
