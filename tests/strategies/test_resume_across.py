"""A checkpoint goes on under another strategy: weights and moments to the last bit, and then the same steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config.roles import WorkerConfig
from tests.strategies import resume_cases as cases
from tests.strategies.moe_models import write_moe
from tests.strategies.samples import make_batch, make_role

RunRanks = Callable[..., list[Any]]
# Epsilon keeps AdamW from turning a gradient that is rounding noise into a whole step.
TRAINING = {"lr_scheduler_type": "cosine", "warmup_steps": 1, "adam_epsilon": 1e-3}
BOUND = 1e-5
"""Of docs/backends.md for float32."""

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fsdp2": (2, "fsdp2_train", {}),
    "fsdp": (2, "fsdp_train", {}),
    "zero0": (2, "deepspeed_train", {"zero_stage": 0}),
    "zero1": (2, "deepspeed_train", {"zero_stage": 1}),
    "zero2": (2, "deepspeed_train", {"zero_stage": 2}),
    "zero3": (2, "deepspeed_train", {"zero_stage": 3}),
    "tp2": (2, "megatron_train", {"tensor_model_parallel_size": 2}),
    "pp2": (2, "megatron_train", {"pipeline_model_parallel_size": 2}),
    "dp2": (2, "megatron_train", {"use_distributed_optimizer": True}),
    "ep2": (2, "megatron_train", {"expert_model_parallel_size": 2}),
    "tp2 sp": (2, "megatron_train", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "fsdp2 on 1": (1, "fsdp2_train", {}),
    "hsdp": (4, "fsdp2_train", {"fsdp_size": 2}),
    "fsdp on 4": (4, "fsdp_train", {}),
    "zero3 on 4": (4, "deepspeed_train", {"zero_stage": 3}),
    "tp2 pp2": (4, "megatron_train", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}
"""Ranks, strategy, options."""
DENSE = [name for name in LAYOUTS if name not in ("ep2", "tp2 sp")]


def role_of(name: str, model: Path, **options: Any) -> WorkerConfig:
    _, strategy, config = LAYOUTS[name]
    return make_role(model, strategy, config=config, training=TRAINING, **options)


def write(
    run_ranks: RunRanks, model: Path, folder: Path, names: list[str], **options: Any
) -> dict[str, dict[str, torch.Tensor]]:
    (world,) = {LAYOUTS[name][0] for name in names}
    roles = {name: role_of(name, model, **options) for name in names}
    ends: dict[str, dict[str, torch.Tensor]] = run_ranks(world, cases.write, roles, make_batch(), folder)[0]
    return ends


def check(
    run_ranks: RunRanks,
    model: Path,
    folder: Path,
    wanted: dict[str, dict[str, torch.Tensor]],
    reader: str,
    again: Path,
    **options: Any,
) -> None:
    """Every writer's checkpoint in ``folder`` under one reader, against what the writers ended with."""
    role = role_of(reader, model, **options)
    ends = run_ranks(LAYOUTS[reader][0], cases.go_on, role, make_batch(), folder, tuple(wanted), again)[0]
    for writer in wanted:
        state, taken_up = cases.contents_of(folder / writer), cases.contents_of(again / writer)
        assert taken_up.keys() == state.keys()
        for key, tensor in state.items():
            assert torch.equal(taken_up[key], tensor), (writer, reader, key)
        assert ends[writer].keys() == wanted[writer].keys()
        for name, tensor in wanted[writer].items():
            error = float((ends[writer][name] - tensor).abs().max())
            assert error <= BOUND * float(tensor.abs().max()), (writer, reader, name, error)


def check_pair(run_ranks: RunRanks, model: Path, folder: Path, writer: str, reader: str, **options: Any) -> None:
    wanted = write(run_ranks, model, folder, [writer], **options)
    check(run_ranks, model, folder, wanted, reader, folder / "again", **options)


@pytest.mark.default_rows("tied")
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_two_backends_go_on_from_each_other(
    run_ranks: RunRanks, tied_model: Path, untied_model: Path, tmp_path: Path, model: str
) -> None:
    pytest.importorskip("megatron.core")
    if model == "tied":
        check_pair(run_ranks, tied_model, tmp_path, "fsdp2", "tp2")
    else:
        check_pair(run_ranks, untied_model, tmp_path, "tp2", "fsdp2")


@pytest.fixture(scope="module")
def written(
    run_ranks: RunRanks, tied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """The folder of a checkpoint under every layout of two ranks, and the weights that each ended with."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("written")
    return folder, write(run_ranks, tied_model, folder, [name for name in DENSE if LAYOUTS[name][0] == 2])


@pytest.mark.long
@pytest.mark.parametrize("reader", DENSE)
def test_every_layout_goes_on_from_every_other(
    run_ranks: RunRanks,
    tied_model: Path,
    tmp_path: Path,
    written: tuple[Path, dict[str, dict[str, torch.Tensor]]],
    reader: str,
) -> None:
    check(run_ranks, tied_model, written[0], written[1], reader, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("writer", "reader"), [("tp2 pp2", "zero1"), ("hsdp", "tp2"), ("fsdp on 4", "dp2")])
def test_from_four_ranks_to_two(
    run_ranks: RunRanks, untied_model: Path, tmp_path: Path, writer: str, reader: str
) -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("deepspeed")
    check_pair(run_ranks, untied_model, tmp_path, writer, reader)


ADAPTERS = {"lora_target": ["q_proj", "v_proj", "o_proj", "down_proj"], "lora_rank": 4, "lora_alpha": 8}


@pytest.mark.long
@pytest.mark.parametrize(
    ("writer", "reader"), [("fsdp2", "tp2"), ("pp2", "zero3"), ("zero2", "fsdp"), ("tp2", "fsdp2")]
)
def test_adapters_go_on(run_ranks: RunRanks, untied_model: Path, tmp_path: Path, writer: str, reader: str) -> None:
    for package in ("peft", "megatron.core", "deepspeed"):
        pytest.importorskip(package)
    check_pair(run_ranks, untied_model, tmp_path, writer, reader, model_args=ADAPTERS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("writer", "reader"), [("fsdp2", "ep2"), ("ep2", "zero3"), ("tp2 sp", "fsdp2"), ("zero2", "pp2")]
)
def test_experts_go_on(run_ranks: RunRanks, tmp_path: Path, writer: str, reader: str) -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("deepspeed")
    check_pair(run_ranks, write_moe(tmp_path / "model"), tmp_path, writer, reader)
