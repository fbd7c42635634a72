"""Ranks of a Ulysses group share all rows of a micro-batch, or some, or none: the step is the plain model's."""

from __future__ import annotations

import pytest

from tests.strategies import jobs
from tests.strategies.comparison import assert_step_equals, plain_results
from tests.strategies.samples import DYNAMIC, PACKING, make_batch

SHARED = {"use_prefix_sharing": True}
ALWAYS, RARELY = 0.0, 1e3
"""Costs of an exchange: with the first no plan divides rows, with the second those do that can."""
CASES = {
    "packed": (2, 2, "fsdp2", PACKING),
    "shared-prompts": (2, 2, "fsdp2", DYNAMIC | SHARED),
    "padded": (2, 2, "fsdp2", DYNAMIC),
    "fixed-rows": (2, 2, "fsdp2", {"use_remove_padding": True}),
    "2x2": (4, 2, "fsdp2", PACKING | {"model_args": {"disable_gradient_checkpointing": False}}),
    "4-ranks": (4, 4, "fsdp2", PACKING),
    "fsdp": (2, 2, "fsdp", PACKING),
}
"""Ranks, ranks of a group, strategy, and options of the role by case."""


def facts(metrics):
    """Metrics that no plan changes: columns that only fill up a layout for the ranks that share it are left out."""
    tokens = metrics["tokens_per_micro_batch"] * (1 - metrics["padding_ratio"])
    return {name: metrics[name] for name in ("entropy", "rows", "grad_norm", "lr")} | {"tokens": tokens}


@pytest.mark.long
@pytest.mark.default_rows("packed")
@pytest.mark.parametrize("case", CASES)
def test_the_step_is_the_same_by_any_plan(run, family, case):
    world, size, strategy, options = CASES[case]
    model_args = options.get("model_args", {}) | {"ulysses_size": size}
    batch, results = make_batch(seed=7), {}
    for sharing in (ALWAYS, RARELY):
        results[sharing] = run(
            jobs.train_divided, world, strategy, "tied", sharing, batch=batch, **options | {"model_args": model_args}
        )
        assert_step_equals(results[sharing], plain_results(family("tied"), batch))
        for result in results[sharing]:
            group = results[sharing][result["rank_info"].dp_rank * size]
            assert result["plans"] == group["plans"]
    for shared, divided in zip(results[ALWAYS], results[RARELY], strict=True):
        assert all(len({*map(tuple, plan)}) == 1 for plan in shared["plans"])
        assert any(len({*map(tuple, plan)}) > 1 for plan in divided["plans"])
        assert facts(divided["metrics"]) == pytest.approx(facts(shared["metrics"]), rel=1e-5)
    if case == "4-ranks":
        degrees = {plan.count(rows) for plan in results[RARELY][0]["plans"] for rows in plan}
        assert {1, 2} <= degrees
