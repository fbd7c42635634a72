"""``model_args.compile``: layers are compiled once, whatever the number of tokens. Numbers: ``test_numbers.py``."""

from __future__ import annotations

import pytest

from tests.strategies import jobs
from tests.strategies.samples import make_batch

MODEL = {"compile": True}
CASES = {
    "fsdp": (2, "fsdp", {}),
    "zero3": (2, "zero3", {}),
    "packed": (1, "fsdp2", {"use_remove_padding": True}),
    "shared": (1, "fsdp2", {"use_prefix_sharing": True}),
    "checkpointed": (2, "fsdp2", {"model_args": MODEL | {"disable_gradient_checkpointing": False}}),
}


@pytest.mark.long
@pytest.mark.default_rows("shared")
@pytest.mark.parametrize("case", CASES)
def test_lengths_do_not_compile_again(run, case):
    world, strategy, options = CASES[case]
    batches = [make_batch(groups=groups, seed=groups, extra_padding=groups) for groups in (2, 4, 3)]
    options = {"model_args": MODEL, "micro_batch": 99, "batch": None} | options
    counted = run(jobs.graphs, world, strategy, "tied", batches, **options)
    for of_rank in counted:
        assert of_rank[1] > 0
        assert len(set(of_rank[1:])) == 1, of_rank
