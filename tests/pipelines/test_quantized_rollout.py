"""``weight_sync.quantization``: what a format's values are, which matrices have them, and that engines compute with
them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll.config.roles import ModelArguments
from roll.pipelines.batches import RecordedBatch
from roll.weight_sync.quantization import quantized_names, rounded
from tests.pipelines.conftest import Run
from tests.strategies.moe_models import moe_config
from tests.support.tiny_runs import TinyWorld

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3() -> Tensor:
    """All finite values, ascending."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return every[every.isfinite()].unique()


def nearest(value: float, grid: Tensor) -> float:
    """The nearest of the grid; of two, the one whose last bit is 0, which is the one at an even place."""
    distance = (grid - value).abs()
    places = (distance == distance.min()).nonzero().flatten().tolist()
    zero = int((grid == 0).nonzero())
    return float(grid[min(places, key=lambda place: (place - zero) % 2)])


def by_hand(weight: Tensor, form: str) -> Tensor:
    """Block by block and value by value."""
    height, width = {"fp8": (128, 128), "int8": (1, weight.shape[1]), "nvfp4": (1, 16)}[form]
    grid = {
        "fp8": e4m3(),
        "int8": torch.arange(-127, 128).double(),
        "nvfp4": torch.tensor(sorted({sign * value for value in E2M1 for sign in (-1, 1)})).double(),
    }[form]
    found = torch.empty(weight.shape)
    rows, columns = weight.shape
    for top, left in itertools.product(range(0, rows, height), range(0, columns, width)):
        here = slice(top, top + height), slice(left, left + width)
        block = weight[here].float()
        scale = block.abs().max() / grid.max().float()
        if form == "nvfp4":
            whole = weight.float().abs().max() / (448 * 6)
            scale = torch.tensor(nearest(float(scale / whole), e4m3())).float() * whole
        values = [[nearest(float(value / scale), grid) if scale else 0.0 for value in row] for row in block]
        found[here] = torch.tensor(values).float() * scale
    return found


@pytest.mark.parametrize("form", ["fp8", "int8", "nvfp4"])
@pytest.mark.parametrize("shape", [(3, 40), (130, 17)], ids=str)
def test_each_value_is_the_nearest_of_the_format(form: Any, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[0, :16] *= 1e-5  # a block whose scale in E4M3 is 0
    weight[1] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 8)[: shape[1]] / 100  # ties
    weight[2] = 0.0
    assert torch.equal(rounded(weight, form), by_hand(weight, form))
    once = rounded(weight.bfloat16(), form)
    assert once.dtype == torch.bfloat16
    assert torch.allclose(once.float(), by_hand(weight.bfloat16(), form), rtol=2**-8, atol=0)


def test_the_matrices_of_layers_are_rounded_and_no_others(world: TinyWorld) -> None:
    names = quantized_names(ModelArguments(model_name_or_path=str(world.model)))
    model = AutoModelForCausalLM.from_pretrained(world.model)
    layers = {name for name, tensor in model.named_parameters() if ".layers." in name and tensor.dim() == 2}
    assert names == layers
    assert not any("embed" in name or "lm_head" in name for name in names)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_experts_are_rounded_and_their_gates_are_not(tmp_path: Path, family: str) -> None:
    moe_config(family).save_pretrained(tmp_path)
    names = quantized_names(ModelArguments(model_name_or_path=str(tmp_path)))
    assert "model.layers.0.mlp.experts.0.down_proj.weight" in names
    assert ("model.layers.0.mlp.shared_expert.down_proj.weight" in names) == (family == "qwen2_moe")
    assert not any(name.endswith("gate.weight") for name in names)


@pytest.mark.long
@pytest.mark.e2e
def test_engines_generate_with_the_rounded_weights(run: Run, world: TinyWorld, tmp_path: Path) -> None:
    changes = {"max_steps": 1, "weight_sync": {"quantization": "fp8"}, "dump_batches": 1}
    finished = run(changes, output=tmp_path / "output")
    assert min(finished.values("actor/train_infer_log_diff_abs_mean")) > 1e-4, "the trainer's weights are not rounded"
    file = sorted((tmp_path / "output").rglob("batches/*"))[0]
    batch = RecordedBatch.load(file).batch.batch
    model = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)
    names = quantized_names(ModelArguments(model_name_or_path=str(world.model)))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name in names:
                tensor.copy_(rounded(tensor, "fp8"))
        ids, mask = batch["input_ids"], batch["attention_mask"]
        logits = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    log_probs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    sampled = batch["response_mask"].bool()[:, 1:]
    difference = (log_probs - batch["rollout_log_probs"][:, 1:])[sampled]
    assert difference.abs().max() < 1e-4


@pytest.mark.long
@pytest.mark.e2e
def test_updates_of_what_changed_bring_the_same_values(run: Run) -> None:
    changes = {"max_steps": 3, "weight_sync.quantization": "int8"}
    whole, changed = (run(changes | {"weight_sync.mode": mode}) for mode in ("full", "delta"))
    for metric in ("actor/train_infer_log_diff_abs_mean", "critic/score/mean", "actor/total_loss"):
        assert changed.values(metric) == whole.values(metric)
        assert len(whole.values(metric)) == 3
