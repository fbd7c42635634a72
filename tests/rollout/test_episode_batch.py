"""Columns of a batch of episodes: every sampled token in one row, rewards on their turns, episodes cut short."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from roll.agents.conversation import Call, Conversations
from roll.agents.episode import Episode, Outcome, Task
from roll.rollout.episode_batch import build_episode_batch, episode_score
from roll.rollout.episodes import EpisodeGroup
from tests.support.episodes import make_episode, random_groups, said

PAD = 999


def batch_of(*episodes: Episode, rule: Any = "trajectory", **options: Any) -> Any:
    return build_episode_batch([EpisodeGroup(0, Task("env", 1), list(episodes))], rule, PAD, **options)


def test_a_tree_is_one_row_a_branch_and_one_trajectory() -> None:
    """Calls 0 and 1 in one conversation, 2 goes on from 0 another way, 3 begins anew."""
    episode = make_episode(
        said([1, 2], [3, 4], reward=0.5),
        said([5], [6], parent=0, reward=1.0),
        said([7, 8], [9], parent=0),
        said([10], [11, 12], reward=2.0),
    )
    batch = batch_of(episode, make_episode(said([1], [2])))
    columns = batch.batch
    assert columns["input_ids"].tolist() == [
        [1, 2, 3, 4, 5, 6, PAD][:7],
        [1, 2, 3, 4, 7, 8, 9],
        [10, 11, 12, PAD, PAD, PAD, PAD],
        [1, 2, PAD, PAD, PAD, PAD, PAD],
    ]
    assert columns["response_mask"].int().tolist() == [
        [0, 0, 1, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
        [0, 1, 1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0],
    ]
    assert columns["turn_ids"].tolist()[:3] == [
        [-1, -1, 0, 0, -1, 1, -1],
        [-1, -1, -1, -1, -1, -1, 2],
        [-1, 3, 3, -1, -1, -1, -1],
    ]
    assert columns["turn_rewards"].tolist()[:3] == [[0, 0, 0, 0.5, 0, 1, 0], [0] * 7, [0, 0, 2, 0, 0, 0, 0]]
    assert columns["scores"].tolist() == [3.5, 3.5, 3.5, 0.0]
    assert columns["trajectory_ids"].tolist() == columns["episode_ids"].tolist() == [0, 0, 0, 1]
    assert columns["step_index"].tolist() == [0, 2, 3, 0]
    assert columns["group_ids"].tolist() == [0, 0, 0, 0]


def test_each_sampled_token_is_trained_once_under_both_rules() -> None:
    groups = random_groups(np.random.default_rng(0), groups=3, episodes=4)
    expected = sorted(
        (order, turn, token, log_prob)
        for order, episode in enumerate(episode for group in groups for episode in group.members)
        for turn, call in enumerate(episode.calls)
        for token, log_prob in zip(call.response_ids, np.float32(call.log_probs).tolist(), strict=True)
    )
    for rule in ("trajectory", "step"):
        columns = build_episode_batch(groups, rule, PAD).batch
        rows, places = columns["response_mask"].nonzero(as_tuple=True)
        per_token = (columns["turn_ids"], columns["input_ids"], columns["rollout_log_probs"])
        found = zip(columns["episode_ids"][rows].tolist(), *(c[rows, places].tolist() for c in per_token), strict=True)
        assert sorted(found) == expected
        total = sum(call.reward for group in groups for episode in group.members for call in episode.calls)
        assert float(columns["turn_rewards"].sum()) == pytest.approx(total, abs=1e-4)
        assert torch.equal(columns["turn_ids"] >= 0, columns["response_mask"])


def test_states_are_told_apart_by_task_and_a_missing_one_is_alone() -> None:
    def group(order: int, seed: int, *states: str) -> EpisodeGroup:
        return EpisodeGroup(
            order, Task("env", seed), [make_episode(said([1], [2], state=state), seed=seed) for state in states]
        )

    groups = [group(0, 1, "a", "a", "b"), group(1, 1, "a"), group(2, 2, "a"), group(3, 2, "", "")]
    states = build_episode_batch(groups, "step", PAD).batch["state_ids"][:, 1].tolist()
    assert states[0] == states[1] == states[3] and len({states[0], *states[2:3], *states[4:]}) == 5
    assert build_episode_batch(groups, "step", PAD).batch["task_ids"].tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_roles_are_trajectories_with_rewards_of_their_own() -> None:
    """Two speak in one conversation; a branch of both is a row of each, and only roles that learn have rows."""
    episode = make_episode(
        said([1], [2], role="proposer", reward=1.0),
        said([3], [4], parent=0, role="solver", reward=-1.0),
        said([5], [6], role="judge", reward=9.0),
    )
    batch = batch_of(episode)
    assert batch.non_tensor_batch["role"].tolist() == ["proposer", "solver", "judge"]
    assert batch.batch["scores"].tolist() == [1.0, -1.0, 9.0]
    assert batch.batch["trajectory_ids"].tolist() == [0, 1, 2] and batch.batch["episode_ids"].tolist() == [0, 0, 0]
    assert batch.batch["response_mask"].int().tolist()[:2] == [[0, 1, 0, 0], [0, 0, 0, 1]]
    assert batch_of(episode, roles=("solver",)).batch["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert batch_of(episode, roles=("critic",)).batch["scores"].isnan().tolist() == [True]


@pytest.mark.parametrize("outcome", ["environment_error", "agent_error"])
def test_a_failed_episode(outcome: Outcome) -> None:
    failed = make_episode(said([1], [2], reward=2.0), outcome=outcome)
    batch = batch_of(failed)
    assert batch.batch["scores"].isnan().tolist() == [True]
    assert batch.batch["turn_rewards"].sum() == 0
    assert not batch.batch["terminated"][0] and not batch.batch["truncated"][0]


def test_a_truncated_episode_may_get_a_token_behind_its_last_turn() -> None:
    ended, cut = (
        make_episode(said([1], [2]), said([3], [4], parent=0), outcome=o) for o in ("terminated", "turn_limit")
    )
    batch = batch_of(ended, cut, bootstrap=True)
    assert batch.batch["bootstrap_mask"].int().tolist() == [[0] * 5, [0, 0, 0, 0, 1]]
    assert batch.batch["attention_mask"].int().tolist() == [[1, 1, 1, 1, 0]] * 2
    assert batch.batch["truncated"].tolist() == [False, True] and batch.batch["terminated"].tolist() == [True, False]
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["stop", "length"]
    assert batch_of(ended, cut).batch["input_ids"].shape == (2, 4)


def test_the_reward_of_a_call_without_a_token_goes_to_the_turn_before() -> None:
    batch = batch_of(make_episode(said([1], [2]), said([3], [], parent=0, reward=3.0), said([4], [5], parent=1)))
    assert batch.batch["turn_rewards"].tolist() == [[0, 3, 0, 0, 0]]


def test_an_episode_that_never_began_is_a_row_without_a_score() -> None:
    """Its first prompt was too long: no call, no fault of the run."""
    nothing = make_episode(outcome="context_limit")
    batch = batch_of(nothing, make_episode(said([1], [2], reward=1.0)))
    assert batch.batch["scores"].isnan().tolist() == [True, False]
    assert (
        batch.batch["attention_mask"].int().tolist() == [[1, 0], [1, 1]] and not batch.batch["response_mask"][0].any()
    )
    assert batch.batch["episode_ids"].tolist() == [0, 1]
    assert np.isnan(episode_score(nothing))


def test_a_call_in_flight_is_in_no_row() -> None:
    episode = make_episode(said([1], [2]))
    episode.conversations.calls.append(Call(1, 0, [3], []))
    assert isinstance(episode.conversations, Conversations)
    assert batch_of(episode).batch["input_ids"].tolist() == [[1, 2]]
