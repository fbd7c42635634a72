"""LoRA under FSDP1 computes what a plain peft model computes in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from tests.strategies import lora_cases as cases
from tests.strategies.samples import make_batch, make_role, split_rows
from tests.strategies.sharded_cases import refused, trainer
from tests.strategies.test_fsdp2_lora import adapter, expected  # noqa: F401  the same adapter and plain computation

RunRanks = Callable[..., list[Any]]
STEPS = 3


def lora_role(model: Path, adapter: Path, strategy: str = "fsdp_train", **options: Any) -> Any:  # noqa: F811
    model_args = {"adapter_name_or_path": str(adapter)} | options.pop("model_args", {})
    return make_role(model, strategy, model_args=model_args, training={"adam_epsilon": 1e-3}, **options)


@pytest.mark.default_rows("2-ranks")
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param((7, 5), {}, id="2-ranks"),
        pytest.param((7, 5), {"model_args": {"disable_gradient_checkpointing": False}}, id="checkpointed"),
        pytest.param((5, 4, 3, 0), {"micro_batch": 2, "config": {"fsdp_size": 2}}, id="hsdp-one-without-rows"),
    ],
)
def test_training_equals_plain_peft(
    run_ranks: RunRanks,
    tied_model: Path,
    adapter: Path,  # noqa: F811
    expected: dict[str, Any],  # noqa: F811
    sizes: tuple[int, ...],
    options: dict[str, Any],
) -> None:
    parts = split_rows(make_batch(), sizes)
    results = run_ranks(len(sizes), cases.train, trainer, lora_role(tied_model, adapter, **options), parts, STEPS)
    cases.assert_same_training(results, expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_resumed_is_uninterrupted(
    run_ranks: RunRanks,
    tied_model: Path,
    adapter: Path,  # noqa: F811
    tmp_path: Path,
    dtype: str,
) -> None:
    """Also under FSDP2, whose checkpoints do not hold the base."""
    parts = split_rows(make_batch(), (6, 6))
    role = lora_role(tied_model, adapter, dtype=dtype)
    whole = run_ranks(2, cases.train_and_save, trainer, role, parts, tmp_path)[0]
    resumed = run_ranks(2, cases.load_and_train, trainer, role, parts, tmp_path)[0]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    other = lora_role(tied_model, adapter, "fsdp2_train", dtype=dtype)
    continued = run_ranks(2, cases.load_and_train, trainer, other, parts, tmp_path)[0]
    for name, weight in whole.items():
        # The order of sums differs; in bf16 the last digit of a merged weight with it.
        limit = 2e-6 if dtype == "fp32" else float(weight.abs().max()) * 2**-7
        torch.testing.assert_close(continued[name], weight, rtol=0, atol=limit)
    if dtype == "fp32":
        cases.assert_export_is_complete(tied_model, tmp_path / "export", whole, make_batch())


def test_an_output_matrix_of_its_own_unit_is_not_trained_in_full(
    run_ranks: RunRanks, untied_model: Path, tmp_path: Path
) -> None:
    adapter = cases.write_adapter(untied_model, tmp_path, whole=["lm_head"])  # noqa: F811
    role = lora_role(untied_model, adapter, config={"wrap_policy": {"wrap_lm_output": True}})
    for message in run_ranks(2, refused, role):
        assert "wrap_lm_output: does not go with additional_target" in message
