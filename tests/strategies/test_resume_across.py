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
    "fsdp2 on 1": (1, "fsdp2_train", {}),
    "hsdp": (4, "fsdp2_train", {"fsdp_size": 2}),
    "fsdp on 4": (4, "fsdp_train", {}),
    "zero3 on 4": (4, "deepspeed_train", {"zero_stage": 3}),
    "tp2 pp2": (4, "megatron_train", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}
"""Ranks, strategy, options."""


def role_of(name: str, model: Path, **options: Any) -> WorkerConfig:
    _, strategy, config = LAYOUTS[name]
    return make_role(model, strategy, config=config, training=TRAINING, **options)


def check(
    run_ranks: RunRanks, model: Path, folder: Path, writers: list[str], readers: list[str], **options: Any
) -> None:
    """Every writer's checkpoint under every reader; the writers have as many ranks."""
    (world,) = {LAYOUTS[name][0] for name in writers}
    batch = make_batch()
    roles = {name: role_of(name, model, **options) for name in writers}
    (wanted, *_) = run_ranks(world, cases.write, roles, batch, folder)
    states = {name: cases.contents_of(folder / name) for name in writers}
    for reader in readers:
        again = folder / f"again {reader}"
        role = role_of(reader, model, **options)
        (ends, *_) = run_ranks(LAYOUTS[reader][0], cases.go_on, role, batch, folder, tuple(writers), again)
        for writer in writers:
            taken_up = cases.contents_of(again / writer)
            assert taken_up.keys() == states[writer].keys()
            for key, tensor in states[writer].items():
                assert torch.equal(taken_up[key], tensor), (writer, reader, key)
            assert ends[writer].keys() == wanted[writer].keys()
            for name, tensor in wanted[writer].items():
                error = float((ends[writer][name] - tensor).abs().max())
                assert error <= BOUND * float(tensor.abs().max()), (writer, reader, name, error)


@pytest.mark.default_rows("tied")
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_two_backends_go_on_from_each_other(
    run_ranks: RunRanks, tied_model: Path, untied_model: Path, tmp_path: Path, model: str
) -> None:
    pytest.importorskip("megatron.core")
    pair = ["fsdp2", "tp2"] if model == "tied" else ["tp2", "fsdp2"]
    check(run_ranks, tied_model if model == "tied" else untied_model, tmp_path, pair[:1], pair[1:])


@pytest.mark.long
@pytest.mark.parametrize("reader", list(LAYOUTS))
def test_every_layout_goes_on_from_every_other(
    run_ranks: RunRanks, tied_model: Path, tmp_path: Path, reader: str
) -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("deepspeed")
    writers = [name for name, (world, *_) in LAYOUTS.items() if world == 2]
    check(run_ranks, tied_model, tmp_path, writers, [reader])


@pytest.mark.long
@pytest.mark.parametrize(("writer", "reader"), [("tp2 pp2", "zero1"), ("hsdp", "tp2"), ("fsdp on 4", "dp2")])
def test_from_four_ranks_to_two(
    run_ranks: RunRanks, untied_model: Path, tmp_path: Path, writer: str, reader: str
) -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("deepspeed")
    check(run_ranks, untied_model, tmp_path, [writer], [reader])


ADAPTERS = {"lora_target": ["q_proj", "v_proj", "o_proj", "down_proj"], "lora_rank": 4, "lora_alpha": 8}


@pytest.mark.long
@pytest.mark.parametrize(
    ("writer", "reader"), [("fsdp2", "tp2"), ("pp2", "zero3"), ("zero2", "fsdp"), ("tp2", "fsdp2")]
)
def test_adapters_go_on(run_ranks: RunRanks, untied_model: Path, tmp_path: Path, writer: str, reader: str) -> None:
    for package in ("peft", "megatron.core", "deepspeed"):
        pytest.importorskip(package)
    check(run_ranks, untied_model, tmp_path, [writer], [reader], model_args=ADAPTERS)


LAYOUTS["ep2"] = (2, "megatron_train", {"expert_model_parallel_size": 2})


@pytest.mark.long
@pytest.mark.parametrize(("writer", "reader"), [("fsdp2", "ep2"), ("ep2", "zero3"), ("tp2", "fsdp2"), ("zero2", "pp2")])
def test_experts_go_on(run_ranks: RunRanks, tmp_path: Path, writer: str, reader: str) -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("deepspeed")
    check(run_ranks, write_moe(tmp_path / "model"), tmp_path, [writer], [reader])
