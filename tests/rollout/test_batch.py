import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.rewards.base import RewardResult
from roll.rollout.groups import build_batch, greedy_baseline, reward_components
from tests.support.sample_groups import give, make_group

tokens = st.lists(st.integers(0, 1000), min_size=1, max_size=6)
group_shapes = st.lists(st.tuples(tokens, st.lists(tokens, min_size=1, max_size=3)), min_size=1, max_size=4)


@given(group_shapes)
def test_rows_hold_prompt_response_and_padding(shapes):
    groups = [
        make_group(i, prompt, responses, [float(j) for j in range(len(responses))])
        for i, (prompt, responses) in enumerate(shapes)
    ]
    batch = build_batch(groups, pad_token_id=7777)

    width = max(len(prompt) + len(r) for prompt, responses in shapes for r in responses)
    row = 0
    for index, group in enumerate(groups):
        prompt = list(group.item.token_ids)
        for sample, one in enumerate(group.members):
            response, log_probs = one.response_ids, iter(one.log_probs.tolist())
            ids = prompt + response.tolist()
            padding = width - len(ids)
            assert batch.batch["input_ids"][row].tolist() == ids + [7777] * padding
            assert batch.batch["attention_mask"][row].tolist() == [True] * len(ids) + [False] * padding
            expected_mask = [False] * len(prompt) + [True] * len(response) + [False] * padding
            assert batch.batch["response_mask"][row].tolist() == expected_mask
            expected = [0.0] * len(prompt) + [next(log_probs) for _ in response] + [0.0] * padding
            assert batch.batch["rollout_log_probs"][row].tolist() == expected
            assert batch.batch["scores"][row].item() == float(sample)
            assert batch.batch["group_ids"][row].item() == index
            assert batch.non_tensor_batch["sample_id"][row] == f"{group.order}-{sample}"
            assert batch.non_tensor_batch["prompt_id"][row] == group.item.prompt_id
            row += 1
    assert len(batch) == row


def test_a_sample_without_reward_has_score_nan():
    batch = build_batch([make_group(0, [1], [[2], [3]], [None, 1.0])], pad_token_id=0)
    assert math.isnan(batch.batch["scores"][0])
    assert batch.batch["scores"].dtype == torch.float32


def test_the_numbers_of_a_reward_as_columns():
    group = make_group(0, [1], [[2], [3], [4]])
    rewards = [
        RewardResult(1.5, {"correct": 1.0, "format": 0.5}),
        RewardResult(0.25, {}, "failed, and on_error says value"),
        RewardResult(None, {}, "failed, and on_error says mask"),
    ]
    give(group, rewards)
    components = reward_components([group], ["format", "score"])
    assert components.dtype == torch.float32
    assert components.tolist() == [[0.5, 1.5], [0.25, 0.25], [0.0, 0.0]]
    with pytest.raises(ValueError, match=r"estimator.weights names 'formt'.*rewards\.domain.*correct, format, score"):
        reward_components([group], ["correct", "formt"])


def test_routes_of_samples():
    """A sample without a record has the mark of missing ones."""
    group = make_group(0, [1], [[2], [3, 4], [5]])
    for first, one in enumerate(group.members[:2]):
        one.routes = np.full((len(one.response_ids) + 1, 2, 1), first, np.uint8)
    batch = build_batch([group], pad_token_id=0).batch
    assert batch["routed_experts"][:, :, 0, 0].tolist() == [[0, 0, 255], [1, 1, 1], [255, 255, 255]]


def test_the_greedy_response_stands_beside_every_sample_of_its_prompt():
    groups = [make_group(0, [1], [[2], [3]], [0.0, 1.0]), make_group(4, [1], [[2, 2]], [1.0])]
    baselines = [make_group(0, [1], [[5, 6, 7]], [0.5]), make_group(1, [1], [[8]], [None])]
    columns = greedy_baseline(groups, baselines)
    assert columns["baseline_lengths"].tolist() == [3, 3, 1]
    assert columns["baseline_scores"][:2].tolist() == [0.5, 0.5]
    assert math.isnan(columns["baseline_scores"][2])
