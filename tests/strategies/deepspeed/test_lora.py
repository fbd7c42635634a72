"""LoRA under DeepSpeed computes what a plain peft model computes in one process, at every stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")
pytest.importorskip("peft")

from tests.strategies import lora_cases
from tests.strategies.deepspeed.cases import trainer
from tests.strategies.deepspeed.test_numbers import CHECKPOINTED, zero
from tests.strategies.samples import make_batch, make_role, split_rows

RunRanks = Callable[..., list[Any]]
SPLIT = (7, 5)
STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"config": zero(stage)} for stage in range(4)},
    "zero3-persistent": {"config": {"zero_stage": 3}},
    "zero2-offload": {"config": zero(2, offload="cpu")},
    "zero3-offload": {"config": zero(3, offload="cpu", offload_param=True)},
    "zero3-checkpointed": {"config": zero(3), **CHECKPOINTED},
}
RESUMED = ("zero0", "zero2", "zero3")


@pytest.fixture(scope="module")
def adapter(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lora_cases.write_adapter(tied_model, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def expected(tied_model: Path, adapter: Path) -> dict[str, Any]:
    return lora_cases.plain_training(tied_model, adapter, make_batch(), STEPS)


def lora_role(model: Path, adapter: Path, **options: Any) -> Any:
    model_args = {"adapter_name_or_path": str(adapter)} | options.pop("model_args", {})
    return make_role(model, "deepspeed_train", model_args=model_args, training={"adam_epsilon": 1e-3}, **options)


@pytest.fixture(scope="module")
def whole_adapter(untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the output matrix trained in full."""
    return lora_cases.write_adapter(untied_model, tmp_path_factory.mktemp("whole"), whole=["lm_head"])


@pytest.fixture(scope="module")
def trained(
    run_ranks: RunRanks, tied_model: Path, untied_model: Path, adapter: Path, whole_adapter: Path
) -> list[dict[str, Any]]:
    """Every case on two ranks, all in one pair of processes."""
    roles = {name: lora_role(tied_model, adapter, **options) for name, options in CASES.items()}
    roles |= {f"whole-zero{stage}": lora_role(untied_model, whole_adapter, config=zero(stage)) for stage in (2, 3)}
    return run_ranks(2, lora_cases.train_each, trainer, roles, split_rows(make_batch(), SPLIT), STEPS)


@pytest.mark.default_rows("zero3")
@pytest.mark.parametrize("case", CASES)
def test_training_equals_plain_peft(trained: list[dict[str, Any]], expected: dict[str, Any], case: str) -> None:
    results = [rank[case] for rank in trained]
    lora_cases.assert_same_training(results, expected)
    elements = sum(gradient.numel() for gradient in expected["gradients"].values())
    held = sum(result["moments"] for result in results) / (2 if case == "zero0" else 1)
    # ZeRO rounds its partitions up.
    assert elements <= held < 1.5 * elements, "the frozen base has no optimizer state"


def test_output_matrix_trained_in_full_alongside_adapters(
    trained: list[dict[str, Any]], untied_model: Path, whole_adapter: Path
) -> None:
    wanted = lora_cases.plain_training(untied_model, whole_adapter, make_batch(), STEPS)
    for stage in (2, 3):
        lora_cases.assert_same_training([rank[f"whole-zero{stage}"] for rank in trained], wanted)


def test_resumed_is_uninterrupted_and_the_export_is_complete(
    run_ranks: RunRanks, tied_model: Path, adapter: Path, tmp_path: Path
) -> None:
    roles = {
        f"{name}-{dtype}": lora_role(tied_model, adapter, dtype=dtype, **CASES[name])
        for name in RESUMED
        for dtype in ("fp32", "bf16")
    }
    batch = make_batch()
    parts = split_rows(batch, SPLIT)
    whole = run_ranks(2, lora_cases.train_and_save_each, trainer, roles, parts, tmp_path)[0]
    resumed = run_ranks(2, lora_cases.load_and_train_each, trainer, roles, parts, tmp_path)[0]
    for name in roles:
        assert all(torch.equal(whole[name][key], resumed[name][key]) for key in whole[name]), name
        if name.endswith("fp32"):
            lora_cases.assert_export_is_complete(tied_model, tmp_path / name / "export", whole[name], batch)
