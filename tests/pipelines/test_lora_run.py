"""RLVR with adapters: the actor is its own reference, engines compute with merged weights, the strategies agree."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")
pytest.importorskip("peft")

from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.pipelines.conftest import Run
from tests.support.tiny_runs import FinishedRun, TinyWorld, training_args

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MODEL_ARGS = {
    "dtype": "fp32",
    "disable_gradient_checkpointing": True,
    "lora_target": "all-linear",
    "lora_rank": 4,
}
LORA = {
    "max_steps": 2,
    "use_kl_loss": True,
    "kl_loss_coef": 0.05,
    "actor_train.device_mapping": [0, 1],
    "actor_train.training_args": training_args(8, 1, 1e-2) | {"save_hf_model": True},
    "actor_train.model_args": MODEL_ARGS,
    "weight_sync": {"lora": "adapter"},
}


@pytest.fixture(scope="module")
def finished(run: Run) -> FinishedRun:
    return run(LORA)


def test_the_actor_is_its_own_reference(finished: FinishedRun) -> None:
    started = {path.stem.rpartition("-")[0] for path in (finished.logs / "workers").iterdir()}
    assert started == {"actor_train", "actor_infer", "rewards.digits"}
    first, second = finished.values("actor/kl_loss")
    assert first == pytest.approx(0, abs=1e-10)
    assert second > 1e-6, "the adapters have moved, the base has not"
    assert finished.values("actor/ratio_max") == finished.values("actor/ratio_min") == [1.0, 1.0]


def test_engines_merge_the_adapters_that_they_are_sent(finished: FinishedRun) -> None:
    assert max(finished.values("actor/train_infer_log_diff_abs_max")) < 1e-4
    first, *later = finished.values("model_update/bytes")
    assert max(later) < 0.5 * first, "A and B alone"


def test_export_has_the_merged_model_and_the_adapter(finished: FinishedRun, world: TinyWorld) -> None:
    merged = AutoModelForCausalLM.from_pretrained(finished.output / "model")
    base = AutoModelForCausalLM.from_pretrained(world.model)
    name = "model.layers.0.self_attn.q_proj.weight"
    moved = merged.get_parameter(name) - base.get_parameter(name)
    assert moved.abs().max() > 1e-4
    adapted = PeftModel.from_pretrained(base, finished.output / "model/adapter").merge_and_unload()
    assert (merged.get_parameter(name) - adapted.get_parameter(name)).abs().max() < 1e-6


@pytest.mark.matrix
def test_an_adapter_alone_makes_a_reference_of_it(run: Run, world: TinyWorld, tmp_path: Path) -> None:
    """DPO that goes on with an adapter, against the same adapter: ln 2 at the first step."""
    import peft

    model = AutoModelForCausalLM.from_pretrained(world.model)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    adapter = {"adapter_name_or_path": str(tmp_path / "adapter"), "dtype": "fp32"}
    sections = {"actor_train.model_args": adapter, "reference.model_args": adapter, "max_steps": 1}
    finished = run(sections, pipeline="dpo", output=tmp_path / "run")
    assert finished.values("actor/loss") == pytest.approx([math.log(2)], abs=1e-6)
    base = {"actor_train.model_args": adapter, "reference.model_args": {"dtype": "fp32"}, "max_steps": 1}
    other = run(base, pipeline="dpo", output=tmp_path / "base")
    assert abs(other.values("actor/loss")[0] - math.log(2)) > 1e-3, "the base is another reference"
