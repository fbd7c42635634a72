"""Weights leave a partitioned model whole, bucket by bucket; forward-only roles compute what a trainer does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from roll.strategies.factory import create_strategy
from tests.strategies.deepspeed import cases
from tests.strategies.deepspeed.test_numbers import zero
from tests.strategies.samples import make_batch, make_role, plain_model, plain_outputs, split_rows

RunRanks = Callable[..., list[Any]]
LIMIT = 8192


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_buckets_hold_the_whole_model_once(run_ranks: RunRanks, tied_model: Path, dtype: str) -> None:
    roles = {
        f"{strategy}-{stage}": make_role(tied_model, strategy, dtype=dtype, config=zero(stage))
        for strategy in ("deepspeed_train", "deepspeed_infer")
        for stage in (0, 2, 3)
    }
    first, other = run_ranks(2, cases.buckets_each, roles, LIMIT)
    wanted = dict(plain_model(tied_model).named_parameters())
    for name, (buckets, gathers) in first.items():
        sent = {key: tensor for bucket in buckets for key, tensor in bucket.items()}
        assert sum(len(bucket) for bucket in buckets) == len(sent)
        assert sent.keys() == wanted.keys(), "tied weights are sent once, under the embedding's name"
        for key, parameter in wanted.items():
            assert torch.equal(sent[key], parameter.detach().to(torch.bfloat16 if dtype == "bf16" else torch.float32))
        sizes = [sum(tensor.nbytes for tensor in bucket.values()) for bucket in buckets]
        assert all(size <= LIMIT or len(bucket) == 1 for size, bucket in zip(sizes, buckets, strict=True))
        assert len(buckets) < len(sent)
        assert gathers == (len(buckets) if name.endswith("3") else 0)
        assert len(other[name][0]) == len(buckets) and not any(other[name][0])


def test_weights_that_were_read_do_not_stay_next_to_deepspeeds(run_ranks: RunRanks, tied_model: Path) -> None:
    role = make_role(tied_model, "deepspeed_train", config=zero(1))
    for read, left in run_ranks(2, cases.loaded_and_left, role):
        assert read > 0 and left == 0


def test_a_layer_is_gathered_at_once(run_ranks: RunRanks, tied_model: Path) -> None:
    """Forward passes under ZeRO-3: embeddings (the output matrix is tied to them), two layers and a norm, gathered once
    each; module by module it would be nine gathers a layer."""
    section = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    sections = {"layers": section, "modules": {**section, "leaf_module": {"classes": []}}}
    roles = {
        name: make_role(tied_model, "deepspeed_infer", infer_batch_size=12, config={"zero_optimization": section})
        for name, section in sections.items()
    }
    for counts in run_ranks(2, cases.count_gathers_each, roles, make_batch()):
        assert counts == {"layers": 4, "modules": 20}


@pytest.mark.parametrize("model", ["tied_model", "untied_model"])
def test_export_is_a_hugging_face_folder(
    run_ranks: RunRanks, request: pytest.FixtureRequest, tmp_path: Path, model: str
) -> None:
    source = request.getfixturevalue(model)
    run_ranks(2, cases.export, make_role(source, "deepspeed_train", config=zero(3)), tmp_path / "export")
    wanted, exported = plain_model(source), plain_model(tmp_path / "export")
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {
        file.name for file in (tmp_path / "export").iterdir()
    }
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor)


def test_forward_only_roles(run_ranks: RunRanks, tied_model: Path) -> None:
    batch = make_batch()
    roles = {
        f"{strategy}-{stage}-{sharing}": make_role(tied_model, strategy, config=zero(stage), use_prefix_sharing=sharing)
        for strategy in ("deepspeed_infer", "deepspeed_train")
        for stage in (0, 1, 3)
        for sharing in (False, True)
    } | {"offloaded": make_role(tied_model, "deepspeed_infer", config=zero(3, offload="cpu"))}
    by_rank = run_ranks(2, cases.forward_each, roles, split_rows(batch, (7, 5)))
    with torch.no_grad():
        wanted = plain_outputs(plain_model(tied_model), batch)
    for name in roles:
        for key, values in wanted.items():
            actual = torch.cat([results[name][key] for results in by_rank])
            torch.testing.assert_close(actual, values, rtol=0, atol=1e-5)


def test_bf16_reference_equals_the_trainer_exactly(run_ranks: RunRanks, tied_model: Path) -> None:
    """The KL to the initial policy is exactly 0 before the first update, whatever the stages."""
    parts = split_rows(make_batch(), (7, 5))
    role = make_role(tied_model, "deepspeed_train", dtype="bf16", config=zero(2))
    reference = {
        str(stage): make_role(tied_model, "deepspeed_infer", dtype="bf16", config=zero(stage)) for stage in (0, 3)
    }
    trained = run_ranks(2, cases.train, role, parts)
    for rank, results in enumerate(run_ranks(2, cases.forward_each, reference, parts)):
        for outputs in results.values():
            assert torch.equal(outputs["log_probs"], trained[rank]["outputs"]["log_probs"])


def test_a_forward_only_strategy_does_not_train(tied_model: Path) -> None:
    with pytest.raises(ValueError, match="deepspeed_infer cannot train; use deepspeed_train"):
        create_strategy(make_role(tied_model, "deepspeed_infer")).initialize(num_training_steps=3)
