"""Batches of judged responses: whole prompts on every rank, and KTO's mismatched pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roll.algorithms.reward_models import reward_model_loss, units_of
from roll.config.losses import RewardLossConfig
from roll.datasets.preferences import JudgedRow
from roll.methods.preferences import mismatched, pair_batch
from roll.methods.reward_model import judged_batch


def row(number: int, lengths: list[int], **more: Any) -> JudgedRow:
    prompt = [1, 10 + number]
    responses = [[20 + number] * length for length in lengths]
    scores = [float(len(lengths) - place) for place in range(len(lengths))]
    return JudgedRow(
        f"r{number}", "", prompt, responses, **({"scores": scores, "step_ends": [], "margin": None} | more)
    )


ROWS = [row(0, [3, 1]), row(1, [2, 2, 5, 1]), row(2, [1, 4, 2]), row(3, [6, 2])]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_has_whole_prompts_and_as_many_rows(ranks: int) -> None:
    batch = judged_batch(ROWS, ranks)
    size, rest = divmod(len(batch), ranks)
    assert rest == 0
    units, mask = batch.batch["unit_ids"], batch.batch["score_mask"]
    found = [set(units[rank * size : (rank + 1) * size].tolist()) - {-1} for rank in range(ranks)]
    assert sorted(unit for of_rank in found for unit in of_rank) == [0, 1, 2, 3], "no prompt on two ranks"
    assert int(mask.sum()) == 11 and not mask[units == -1].any()
    lengths = (mask.float().argmax(1))[units >= 0].tolist()
    assert sorted(lengths) == sorted(len(side) for one in ROWS for side in one.sides)

    values = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    # The value of a response by what it is, wherever it stands.
    values = values * 0 + (batch.batch["input_ids"] * batch.batch["attention_mask"]).sum(1, keepdim=True).sin()
    columns = dict(batch.batch.items())
    parts = [{k: v[rank * size : (rank + 1) * size] for k, v in columns.items()} for rank in range(ranks)]
    options = RewardLossConfig()
    total = sum(units_of(part, options) for part in parts)
    assert total == pytest.approx(4)
    loss = sum(
        float(reward_model_loss(values[rank * size : (rank + 1) * size], part, options, total, "")[0])
        for rank, part in enumerate(parts)
    )
    whole = judged_batch(ROWS, 1)
    alone = (whole.batch["input_ids"] * whole.batch["attention_mask"]).sum(1, keepdim=True).sin()
    alone = alone.expand(whole.batch["score_mask"].shape)
    assert loss == pytest.approx(float(reward_model_loss(alone, dict(whole.batch.items()), options, 4.0, "")[0]))


def test_steps_and_margins() -> None:
    steps = row(0, [6], scores=[1.0, 0.0, 1.0], step_ends=[2, 5, 6])
    batch = judged_batch([steps, row(1, [3], scores=[0.0, 1.0], step_ends=[1, 3])], 1).batch
    places = [torch.where(mask)[0].tolist() for mask in batch["score_mask"]]
    assert places == [[4, 7, 8], [3, 5]], "behind the tokens of each step"
    assert batch["targets"][0, places[0]].tolist() == [1, 0, 1] and "margins" not in batch.keys()  # noqa: SIM118
    pairs = judged_batch([row(0, [1, 2], margin=1.5), row(1, [1, 2])], 1).batch
    assert pairs["margins"].tolist() == [1.5, 1.5, 0, 0] and pairs["targets"].tolist() == [2, 1, 2, 1]


def test_a_mismatched_response_is_that_of_another_prompt() -> None:
    first, same, other = (row(number, [3], scores=[1.0]) for number in (0, 0, 5))
    found = mismatched([first, same, other], 4)
    assert [one.prompt_ids for one in found] == [first.prompt_ids, same.prompt_ids, other.prompt_ids]
    assert [one.responses[0] for one in found] == [
        other.responses[0][:2],
        other.responses[0][:2],
        first.responses[0][:2],
    ]
    (alone,) = mismatched([first], 9)
    assert alone.responses == first.responses, "nothing to exchange it with"


def test_labels_of_single_responses() -> None:
    rows = [row(0, [2, 3], scores=[1.0, 0.0]), row(1, [4], scores=[0.0])]
    batch = pair_batch(rows, 0).batch
    assert batch["desirable"].tolist() == [True, False, False] and batch["unit_ids"].tolist() == [0, 0, 1]
    assert batch["response_mask"].sum(1).tolist() == [2, 3, 4]
