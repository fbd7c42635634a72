"""LoRA under FSDP2 computes what a plain peft model computes in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("peft")

from tests.strategies import lora_cases as cases
from tests.strategies.samples import make_batch, make_role, plain_model, split_rows
from tests.strategies.sharded_cases import buckets, trainer

RunRanks = Callable[..., list[Any]]
SPLITS = {1: (12,), 2: (7, 5), 4: (5, 4, 3, 0)}
STEPS = 3
# Epsilon keeps AdamW's first steps smooth where a gradient is rounding noise.
SMOOTH = {"adam_epsilon": 1e-3}
CHECKPOINTED = {"disable_gradient_checkpointing": False}


@pytest.fixture(scope="module")
def adapter(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_adapter(tied_model, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def expected(tied_model: Path, adapter: Path) -> dict[str, Any]:
    return cases.plain_training(tied_model, adapter, make_batch(), STEPS)


def lora_role(model: Path, adapter: Path, **options: Any) -> Any:
    model_args = {"adapter_name_or_path": str(adapter)} | options.pop("model_args", {})
    return make_role(model, model_args=model_args, training=SMOOTH, **options)


@pytest.mark.default_rows("1-rank", "2-ranks", "packed", "offload")
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        pytest.param(1, {}, id="1-rank"),
        pytest.param(2, {}, id="2-ranks"),
        pytest.param(2, {"use_prefix_sharing": True}, id="shared-prompts"),
        pytest.param(2, {"use_sequence_packing": True}, id="packed"),
        pytest.param(2, {"config": {"offload_policy": True}}, id="offload"),
        pytest.param(2, {"config": {"reshard_after_forward": False}}, id="no-reshard"),
        pytest.param(2, {"config": {"wrap_policy": {"transformer_layer_cls_to_wrap": []}}}, id="one-unit"),
        pytest.param(2, {"model_args": CHECKPOINTED}, id="gradient-checkpointing"),
        pytest.param(
            2,
            {"model_args": CHECKPOINTED | {"gradient_checkpointing_use_reentrant": True}},
            id="reentrant-gradient-checkpointing",
        ),
        pytest.param(4, {"micro_batch": 2, "config": {"fsdp_size": 2}}, id="hsdp-2x2-one-rank-without-rows"),
    ],
)
def test_training_equals_plain_peft(
    run_ranks: RunRanks, tied_model: Path, adapter: Path, expected: dict[str, Any], world_size: int, options: Any
) -> None:
    role = lora_role(tied_model, adapter, **options)
    parts = split_rows(make_batch(), SPLITS[world_size])
    results = run_ranks(world_size, cases.train, trainer, role, parts, STEPS)
    cases.assert_same_training(results, expected)
    elements = sum(gradient.numel() for gradient in expected["gradients"].values())
    assert results[0]["moments"] == elements, "the frozen base has no optimizer state"


def test_ranks_that_share_each_sequence(
    run_ranks: RunRanks, tied_model: Path, adapter: Path, expected: dict[str, Any]
) -> None:
    role = lora_role(tied_model, adapter, model_args={"ulysses_size": 2})
    first, second = run_ranks(2, cases.train, trainer, role, [make_batch()] * 2, STEPS)
    cases.assert_same_training([first], expected)
    for name, values in first["outputs"].items():
        assert torch.equal(second["outputs"][name], values)


@pytest.mark.parametrize("wrap", [False, True])
def test_output_matrix_trained_in_full_alongside_adapters(
    run_ranks: RunRanks, untied_model: Path, tmp_path: Path, wrap: bool
) -> None:
    adapter = cases.write_adapter(untied_model, tmp_path / "adapter", whole=["embed_tokens", "lm_head"])
    batch = make_batch()
    wanted = cases.plain_training(untied_model, adapter, batch, STEPS)
    assert "lm_head.modules_to_save.default.weight" in wanted["gradients"]
    config = {"wrap_policy": {"wrap_embeddings": wrap, "wrap_lm_output": wrap}}
    parts = split_rows(batch, SPLITS[2])
    role = lora_role(untied_model, adapter, config=config)
    cases.assert_same_training(run_ranks(2, cases.train, trainer, role, parts, STEPS), wanted)
    weights = run_ranks(2, cases.train_and_save, trainer, role, parts, tmp_path)[0]
    cases.assert_export_is_complete(untied_model, tmp_path / "export", weights, batch)


@pytest.mark.parametrize("world_size", [1, 2])
def test_resumed_is_uninterrupted_and_the_export_is_complete(
    run_ranks: RunRanks, tied_model: Path, adapter: Path, tmp_path: Path, world_size: int
) -> None:
    role, batch = lora_role(tied_model, adapter), make_batch()
    parts = split_rows(batch, SPLITS[world_size])
    whole = run_ranks(world_size, cases.train_and_save, trainer, role, parts, tmp_path)[0]
    resumed = run_ranks(world_size, cases.load_and_train, trainer, role, parts, tmp_path)[0]
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    cases.assert_export_is_complete(tied_model, tmp_path / "export", whole, batch)
    with safe_open(tmp_path / "checkpoint/model_and_optimizer/rank00000.safetensors", "pt") as file:
        held = [name for name in file.keys() if not name.startswith("buffer/")]  # noqa: SIM118
    assert held and all("lora_" in name for name in held), "the base is not written"


def test_bf16_base_is_held_in_bf16_and_adapters_in_float32(
    run_ranks: RunRanks, tied_model: Path, adapter: Path, expected: dict[str, Any]
) -> None:
    parts = split_rows(make_batch(), SPLITS[2])
    role = lora_role(tied_model, adapter, dtype="bf16")
    results = run_ranks(2, cases.train, trainer, role, parts, STEPS)
    trained = {name for name, dtype in results[0]["dtypes"].items() if dtype is torch.float32}
    assert trained == expected["gradients"].keys()
    assert set(results[0]["dtypes"].values()) == {torch.float32, torch.bfloat16}
    (weights,) = run_ranks(2, buckets, role, 2**30)[0]
    plain = dict(plain_model(tied_model).named_parameters())
    adapters = dict(cases.plain_peft_model(tied_model, adapter).named_parameters())
    name = "model.layers.1.mlp.down_proj"
    a, b = (adapters[f"base_model.model.{name}.lora_{x}.default.weight"].bfloat16().float() for x in "AB")
    merged = plain[f"{name}.weight"].bfloat16().float() + cases.ALPHA / cases.RANK * (b @ a)
    assert torch.equal(weights[f"{name}.weight"], merged.bfloat16())


def test_new_adapters_are_the_same_on_any_number_of_ranks(run_ranks: RunRanks, tied_model: Path) -> None:
    role = make_role(tied_model, model_args={"lora_target": "all-linear", "lora_rank": 2})
    one = run_ranks(1, cases.initial_weights, role)[0]
    for world_size, config in ((2, {}), (4, {"fsdp_size": 2})):
        many = make_role(tied_model, config=config, model_args={"lora_target": "all-linear", "lora_rank": 2})
        for weights in run_ranks(world_size, cases.initial_weights, many):
            assert weights.keys() == one.keys()
            assert all(torch.equal(weights[name], one[name]) for name in one)
    assert all(tensor.any() == ("lora_A" in name) for name, tensor in one.items())


def test_a_critic_trains_its_head_in_full(run_ranks: RunRanks, tied_model: Path) -> None:
    role = make_role(tied_model, model_args={"lora_target": "q_proj,v_proj"})
    trained = run_ranks(2, cases.initial_weights, role, True)[0]
    assert {name for name in trained if "lora_" not in name} == {
        "score.modules_to_save.default.weight",
        "score.modules_to_save.default.bias",
    }
