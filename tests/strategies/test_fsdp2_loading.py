"""Each rank of FSDP2 reads the rows that it holds, and no others; no rank of another backend holds the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from roll.config.roles import WorkerConfig
from roll.models.build import build_model
from roll.models.loading import TensorFiles
from roll.strategies.base import create_strategy
from roll.strategies.fsdp.fsdp2 import Fsdp2Strategy
from roll.strategies.training.optimizer import local_tensor
from tests.strategies.jobs import weights_of
from tests.strategies.samples import make_role, plain_model


def compare_loading(role: WorkerConfig) -> dict[str, Any]:
    """Load shard by shard and whole; the names of local tensors that differ, and how much was read."""
    sizes = []

    class Counting(TensorFiles):
        def read_region(self, name: str, rows: slice, columns: slice = slice(None)) -> torch.Tensor:
            tensor = super().read_region(name, rows, columns)
            sizes.append(len(tensor))
            return tensor

    class Whole(Fsdp2Strategy):
        def _build_language_model(self, storage_dtype: torch.dtype) -> Any:
            self._meta = None
            return build_model(self.role.model_args, self.head.value, storage_dtype)

    with mock.patch("roll.models.loading.TensorFiles", Counting):
        ours = Fsdp2Strategy(role)
        ours.initialize(num_training_steps=1)
    whole = Whole(role)
    whole.initialize(num_training_steps=1)
    tensors = dict(ours.model.named_parameters()) | dict(ours.model.named_buffers())
    wanted = dict(whole.model.named_parameters()) | dict(whole.model.named_buffers())
    assert tensors.keys() == wanted.keys()
    same = {name: torch.equal(local_tensor(tensors[name]), local_tensor(wanted[name])) for name in wanted}
    return {
        "different": [name for name, equal in same.items() if not equal],
        "meta": [name for name, tensor in tensors.items() if tensor.is_meta],
        "rows_read": sum(sizes),
        "rows": sum(len(parameter) for parameter in ours.model.parameters()),
        "tensors": len(sizes),
    }


@pytest.mark.default_rows("tied_model-2x2", "untied_model-2-ranks")
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        pytest.param(1, {}, id="plain"),
        pytest.param(1, {"dtype": "bf16"}, id="1-rank"),
        pytest.param(2, {}, id="2-ranks"),
        pytest.param(2, {"config": {"offload_policy": True}}, id="offload"),
        pytest.param(4, {"config": {"fsdp_size": 2}}, id="2x2"),
    ],
)
@pytest.mark.parametrize("model", ["tied_model", "untied_model"])
def test_shards_equal_those_of_a_model_loaded_whole(run_ranks, request, model, world_size, options):
    role = make_role(request.getfixturevalue(model), **options)
    for result in run_ranks(world_size, compare_loading, role):
        assert result["different"] == []
        shards = 2 if "fsdp_size" in options.get("config", {}) else world_size
        # Rows are whole: a rank may hold one more of each tensor than its share.
        assert 0 < result["rows_read"] <= result["rows"] / shards + result["tensors"]
        assert result["meta"] == []


def load_by_parts(role: WorkerConfig) -> dict[str, Any]:
    """The weights of a model that is never loaded whole, and the share of the files' elements that was read."""
    read = []

    class Counting(TensorFiles):
        def read_region(self, name: str, rows: slice, columns: slice = slice(None)) -> torch.Tensor:
            tensor = super().read_region(name, rows, columns)
            if self.folder == Path(str(role.model_args.model_name_or_path)):  # not the self-test's small copy
                read.append(tensor.numel())
            return tensor

    refused = mock.patch("roll.strategies.training.data_parallel.build_model", side_effect=AssertionError("whole"))
    names = [f"roll.{module}.TensorFiles" for module in ("models.loading", "strategies.megatron.parts")]
    with refused, mock.patch(names[0], Counting), mock.patch(names[1], Counting):
        strategy = create_strategy(role)
        strategy.initialize(num_training_steps=1)
    shapes = TensorFiles(str(role.model_args.model_name_or_path)).shapes()
    elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    return {"weights": weights_of(strategy), "share": sum(read) / elements}


@pytest.mark.default_rows("zero3-*")
@pytest.mark.parametrize(
    ("strategy", "config", "dtype", "share"),
    [
        pytest.param("fsdp_train", {}, "bf16", 1.0, id="fsdp-bf16"),
        pytest.param("deepspeed_train", {"zero_stage": 3}, "bf16", 1.6, id="zero3-bf16"),  # and this rank's float32
        pytest.param("deepspeed_train", {"zero_stage": 1}, "bf16", 1.6, id="zero1-bf16"),
        pytest.param("megatron_train", {"tensor_model_parallel_size": 2}, "fp32", 0.52, id="tp2-fp32"),
        pytest.param("megatron_train", {"pipeline_model_parallel_size": 2}, "fp32", 0.52, id="pp2-fp32"),
    ],
)
def test_no_rank_loads_a_whole_model(run_ranks, untied_model, strategy, config, dtype, share):
    pytest.importorskip({"deepspeed_train": "deepspeed", "megatron_train": "megatron.core"}.get(strategy, "torch"))
    results = run_ranks(2, load_by_parts, make_role(untied_model, strategy, config=config, dtype=dtype))
    wanted = plain_model(untied_model).state_dict()
    assert results[0]["weights"].keys() == wanted.keys()
    for name, tensor in results[0]["weights"].items():
        assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name
    assert max(result["share"] for result in results) <= share
