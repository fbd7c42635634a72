"""RLVR with the mixture of experts of ``examples/tiny_moe``: trainer and engine agree, and metrics show the load."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.pipelines.conftest import Run
from tests.pipelines.test_strict_run import BF16, LORA, PACKED, SHARED, STRICT, TWO_RANKS, check_equal, trained_by
from tests.support.tiny_runs import FinishedRun, TinyWorld, training_args

pytestmark = [pytest.mark.e2e, pytest.mark.long]

EXAMPLE = Path(__file__).parents[2] / "examples/tiny_moe/prepare.py"
MODEL_ARGS = {"dtype": "fp32", "disable_gradient_checkpointing": True, "moe_aux_loss_coef": 0.01}
WEIGHTS = 357_760


@pytest.fixture(scope="module")
def model(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's model, untrained, for the tokenizer of the small runs."""
    spec = importlib.util.spec_from_file_location("prepare_moe", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    folder = tmp_path_factory.mktemp("moe")
    shutil.copytree(world.model, folder, dirs_exist_ok=True)
    made = example.make_model(AutoTokenizer.from_pretrained(world.model), seed=0)
    assert abs(made.num_parameters() - WEIGHTS) < 64 * 448, "but for the vocabulary"
    made.save_pretrained(folder)
    return folder


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gathered": ({}, {}),
    "ep2": ({"ep_size": 2}, {}),
    "adapters": ({}, {"lora_target": "all-linear,experts", "lora_rank": 4}),
}


@pytest.fixture(
    scope="module",
    params=["ep2", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("gathered", "adapters"))],
)
def finished(run: Run, model: Path, request: pytest.FixtureRequest) -> FinishedRun:
    strategy_config, adapters = CASES[request.param]
    return run(
        {
            "actor_train.strategy_args.strategy_config": strategy_config,
            "max_steps": 2,
            "pretrain": str(model),
            "reward_pretrain": str(model),
            "actor_train.device_mapping": [0, 1],
            "actor_train.training_args": training_args(4, 2, 1e-2) | {"save_hf_model": True},
            "actor_train.model_args": MODEL_ARGS | adapters,
            "actor_train.use_prefix_sharing": True,
        }
    )


def test_trainer_and_engine_agree_before_and_after_an_update(finished: FinishedRun) -> None:
    assert max(finished.values("actor/train_infer_log_diff_abs_max")) < 1e-4
    assert finished.values("actor/ratio_max") == finished.values("actor/ratio_min") == [1.0, 1.0]


REPLAYED = {"actor_train.router_replay.mode": "R3", "actor_infer.router_replay.mode": "R3"}
STRICT_RUNS: dict[str, dict[str, Any]] = {
    "packed, replayed, bf16": TWO_RANKS | PACKED | REPLAYED | BF16,
    "experts over ranks, shared prompts": TWO_RANKS | SHARED | trained_by("fsdp2_train", ep_size=2),
    "fsdp, bf16": TWO_RANKS | BF16 | trained_by("fsdp_train"),
    "ZeRO-3, replayed": TWO_RANKS | REPLAYED | trained_by("deepspeed_train", zero_stage=3),
    "LoRA, checkpointing": LORA | {"actor_train.model_args.disable_gradient_checkpointing": False},
}


@pytest.mark.default_rows("packed, replayed, bf16")
@pytest.mark.parametrize("name", STRICT_RUNS)
def test_strictly_on_policy(run: Run, model: Path, name: str) -> None:
    """Routers choose the same experts, whether their choices are replayed or not."""
    finished = run({"pretrain": str(model), "reward_pretrain": str(model)} | STRICT | STRICT_RUNS[name])
    check_equal(finished, 2)
    assert set(finished.values("actor/moe_replay_changed") if "replayed" in name else [0.0]) == {0.0}


def test_the_load_is_in_the_metrics(finished: FinishedRun) -> None:
    first, second = finished.values("actor/moe_aux_loss")
    assert 2.0 <= second != first
    shares = [finished.values(f"actor/moe_share/expert_{index:02d}") for index in range(8)]
    for step in zip(*shares, strict=True):
        assert sum(step) == pytest.approx(1.0)
    assert all(load > 1 for load in finished.values("actor/moe_load_max_over_mean"))


def test_the_export_has_the_layout_that_it_came_in(finished: FinishedRun, model: Path) -> None:
    before = load_file(model / "model.safetensors")
    after = load_file(finished.output / "model/model.safetensors")
    assert after.keys() == before.keys()
    moved = "model.layers.0.mlp.experts.3.down_proj.weight"
    assert not torch.equal(after[moved], before[moved])


@pytest.mark.matrix
def test_dpo_10_pairs_train_the_balance_loss_as_well(run: Run, model: Path) -> None:
    """Also behind shared prompts; without its coefficient the gradient is another."""
    changes: dict[str, Any] = {"pretrain": str(model), "max_steps": 1, "actor_train.use_prefix_sharing": True}
    with_it, without = (
        run(
            changes | {"actor_train.model_args": MODEL_ARGS | {"moe_aux_loss_coef": weight}},
            pipeline="dpo",
        ).steps[0]
        for weight in (1.0, 0.0)
    )
    assert with_it["actor/moe_aux_loss"] >= 1 - 1e-6, "evenly spread it is 1"
    assert with_it["actor/loss"] == pytest.approx(without["actor/loss"], rel=1e-6), "the loss of the pairs alone"
    assert with_it["actor/grad_norm"] != pytest.approx(without["actor/grad_norm"], rel=1e-3)
