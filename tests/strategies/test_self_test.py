"""The self-test of a role whose ranks share rows: by those ranks, in the group that they train in."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from roll.models import attention
from tests.strategies import jobs


def messages(role: Any) -> list[str]:
    """Of the self-test at the start."""
    return jobs.started_with_messages(role, "roll.models.self_test")[1]


def refused_with_swapped_chunks(role: Any) -> str:
    """The ranks' chunks of the sequence are put together in the wrong order: right on one rank, wrong on two."""
    exchange = attention._heads_for_sequence

    def swapped(tensor: Tensor, group: Any) -> Tensor:
        whole = exchange(tensor, group)
        return whole.roll(whole.shape[2] // 2, dims=2)

    with mock.patch.object(attention, "_heads_for_sequence", swapped):
        return jobs.refused(role)


@pytest.mark.long
@pytest.mark.default_rows("fsdp2_infer-*")
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("fsdp2", {}), ("fsdp2_infer", {"use_sequence_packing": True}), ("fsdp", {"use_prefix_sharing": True})],
)
def test_ranks_that_share_rows_compute_the_copy_together(run: Any, strategy: str, options: dict[str, Any]) -> None:
    arguments = {"ulysses_size": 2}
    for found in run(messages, 2, strategy, "qwen2", model_args=arguments, batch=None, **options):
        assert len(found) == 1 and "passed in" in found[0]
    for text in run(refused_with_swapped_chunks, 2, strategy, "qwen2", model_args=arguments, batch=None, **options):
        assert "a small copy of this qwen2 model" in text and "off by up to" in text
