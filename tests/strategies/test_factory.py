from __future__ import annotations

from typing import Any

import pytest
import torch

from roll.config.roles import StrategyArguments, WorkerConfig
from roll.strategies.base import ModelHead, create_generation_strategy, create_strategy
from roll.strategies.fsdp.fsdp2 import Fsdp2Strategy
from tests.strategies import jobs, own_backend
from tests.strategies.samples import PACKING, make_batch, make_role, split_rows


def role(name: str, **config: Any) -> WorkerConfig:
    return WorkerConfig(name="actor_train", strategy_args=StrategyArguments(name, config))


def test_names_give_strategies(tied_model):
    trainer = create_strategy(role("fsdp2_train"), ModelHead.VALUE, max_grad_norm=0.5)
    assert type(trainer) is Fsdp2Strategy and trainer.trains
    assert (trainer.head, trainer.max_grad_norm) == (ModelHead.VALUE, 0.5)
    reference = create_strategy(role("fsdp2_infer"), max_grad_norm=1.0)
    assert type(reference) is Fsdp2Strategy and not reference.trains
    own = make_role(tied_model, training={"max_grad_norm": 0.25})
    assert create_strategy(own, max_grad_norm=1.0).max_grad_norm == 0.25, "the role's own goes first"


@pytest.mark.parametrize("name", ["fsdp2", "deepspeed", "replicated"])
def test_a_forward_only_strategy_does_not_train(run_ranks, tied_model, name):
    pytest.importorskip("deepspeed" if name == "deepspeed" else "torch")
    (message,) = run_ranks(1, own_backend.forward_only, make_role(tied_model, f"{name}_infer"))
    assert message.endswith(f"{name}_infer cannot train; use {name}_train")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "fsdp3_train",
            "'fsdp3_train' is not a strategy that can compute batches; use one of fsdp2_train, fsdp2_infer, ",
        ),
        ("vllm", "not a strategy that can compute batches"),
    ],
)
def test_other_names_are_refused(name, reason):
    with pytest.raises(ValueError, match=f"actor_train.strategy_args.strategy_name: .*{reason}"):
        create_strategy(role(name))


def test_generation_names_are_apart():
    with pytest.raises(ValueError, match="not a strategy that can generate; use one of hf_infer, vllm, sglang"):
        create_generation_strategy(role("fsdp2_train"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"wrap_policy": {"transformer_layer_cls_to_wrap": ["Block"]}}}, "no module of class Block"),
        ({"config": {"wrap_policy": {"wrap_lm_output": True}}}, "ties its output matrix to its embeddings"),
    ],
)
def test_options_that_cannot_work_are_refused(run_ranks, tied_model, options, message):
    assert message in run_ranks(2, jobs.refused, make_role(tied_model, **options))[0]


def test_a_backend_is_one_class_and_one_descriptor(run_ranks, tied_model):
    """Micro-batches, packing, metrics, exports come with it: its steps are those of FSDP2."""
    rows = split_rows(make_batch(), (5, 7))
    options = PACKING | {"use_prefix_sharing": True}
    for own, fsdp2 in zip(
        run_ranks(2, own_backend.train, make_role(tied_model, "replicated_train", **options), rows, 3),
        run_ranks(2, own_backend.train, make_role(tied_model, "fsdp2_train", **options), rows, 3),
        strict=True,
    ):
        assert own["metrics"] == [pytest.approx(metrics, rel=1e-5) for metrics in fsdp2["metrics"]]
        for kind in ("outputs", "weights"):
            assert own[kind].keys() == fsdp2[kind].keys()
            for name, expected in fsdp2[kind].items():
                torch.testing.assert_close(own[kind][name], expected, rtol=1e-4, atol=1e-5, msg=name)
