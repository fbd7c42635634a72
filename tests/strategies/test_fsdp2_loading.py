"""Each rank of FSDP2 reads the rows that it holds, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.strategies import fsdp2_cases as cases
from tests.strategies.samples import make_role

RunRanks = Callable[..., list[Any]]


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
def test_shards_equal_those_of_a_model_loaded_whole(
    run_ranks: RunRanks, request: pytest.FixtureRequest, model: str, world_size: int, options: dict[str, Any]
) -> None:
    role = make_role(request.getfixturevalue(model), **options)
    for result in run_ranks(world_size, cases.compare_loading, role):
        assert result["different"] == []
        shards = 2 if "fsdp_size" in options.get("config", {}) else world_size
        # Rows are whole: a rank may hold one more of each tensor than its share.
        assert 0 < result["rows_read"] <= result["rows"] / shards + result["tensors"]
        assert result["meta"] == []
