"""Advantages, losses and gradients of episodes against plain float64 loops over their turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from roll.agents.episode import Task
from roll.methods.episodes import EpisodeMethod
from roll.pipelines.agentic.config import AgenticConfig
from roll.protocol import DataProto
from roll.protocol.metrics import to_floats
from roll.rollout.episodes import EpisodeGroup, SampleRule, build_episode_batch
from tests.support.episodes import make_episode, random_groups, said
from tests.support.keys import config_of

GAMMA, LAMBD, STEP_GAMMA = 0.9, 0.8, 0.7
Key = tuple[int, int, int]
"""Episode, turn, token of the turn."""


@dataclass
class Turn:
    group: int
    episode: int
    index: int
    size: int
    reward: float
    state: str

    def tokens(self) -> list[Key]:
        return [(self.episode, self.index, place) for place in range(self.size)]


def value_of(key: Key) -> float:
    return float(np.float32(math.sin(7.0 * key[0] + 3.0 * key[1] + key[2])))


def turns_of(groups: list[EpisodeGroup]) -> list[list[Turn]]:
    """The turns of each episode, in order of time."""
    found: list[list[Turn]] = []
    for number, group in enumerate(groups):
        for episode in group.members:
            number_of = len(found)
            calls = episode.calls
            found.append([Turn(number, number_of, c.index, len(c.response_ids), c.reward, c.state) for c in calls])
    return found


def keys_of(batch: DataProto) -> Iterator[tuple[Key, tuple[int, int]]]:
    """Every trained token of the batch, and where it stands."""
    columns = batch.batch
    for row, episode in enumerate(columns["episode_ids"].tolist()):
        count: dict[int, int] = {}
        for column in columns["response_mask"][row].nonzero()[:, 0].tolist():
            turn = int(columns["turn_ids"][row, column])
            yield (episode, turn, count.get(turn, 0)), (row, column)
            count[turn] = count.get(turn, 0) + 1


def by_key(batch: DataProto, name: str) -> dict[Key, float]:
    return {key: batch.batch[name][place].item() for key, place in keys_of(batch)}


def learn(
    groups: list[EpisodeGroup], rule: SampleRule, norm: tuple[Any, Any] = ("auto", "auto"), **keys: Any
) -> tuple[DataProto, dict[str, float]]:
    config = config_of(AgenticConfig, **{"gamma": GAMMA, "lambd": LAMBD, "step_reward_gamma": STEP_GAMMA} | keys)
    batch = build_episode_batch(groups, rule, 0, bootstrap=True)
    batch.batch["values"] = torch.zeros(batch.batch["response_mask"].shape)
    for key, place in keys_of(batch):
        batch.batch["values"][place] = value_of(key)
    for row, column in batch.batch["bootstrap_mask"].nonzero().tolist():
        batch.batch["values"][row, column] = value_of((int(batch.batch["episode_ids"][row]), -1, 0))
    metrics = EpisodeMethod(config, norm, 100).credit(batch)
    return batch, to_floats(metrics)


def moments(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))


def divided(value: float, std: float) -> float:
    return value / (std + 1e-6) if std > 1e-6 else value


def totals(episodes: list[list[Turn]]) -> list[float]:
    return [sum(turn.reward for turn in turns) for turns in episodes]


def in_group(episodes: list[list[Turn]], index: int) -> list[int]:
    return [other for other, turns in enumerate(episodes) if turns[0].group == episodes[index][0].group]


def outcome(advantage: Callable[[list[list[Turn]], int], float]) -> Callable[[list[list[Turn]]], dict[Key, float]]:
    """An estimator that gives every token of a trajectory the same."""

    def reference(episodes: list[list[Turn]]) -> dict[Key, float]:
        return {
            key: advantage(episodes, index)
            for index, turns in enumerate(episodes)
            for turn in turns
            for key in turn.tokens()
        }

    return reference


@outcome
def grpo(episodes: list[list[Turn]], index: int) -> float:
    rewards = totals(episodes)
    mean, std = moments([rewards[other] for other in in_group(episodes, index)])
    return divided(rewards[index] - mean, std)


@outcome
def loop(episodes: list[list[Turn]], index: int) -> float:
    rewards = totals(episodes)
    others = [rewards[other] for other in in_group(episodes, index) if other != index]
    return rewards[index] - sum(others) / len(others)


@outcome
def opo(episodes: list[list[Turn]], index: int) -> float:
    rewards, members = totals(episodes), in_group(episodes, index)
    sizes = [sum(turn.size for turn in turns) for turns in episodes]
    return rewards[index] - sum(sizes[m] * rewards[m] for m in members) / sum(sizes[m] for m in members)


def rewards_on_turns(episodes: list[list[Turn]], index: int) -> dict[Key, float]:
    """Each turn's on its last token, divided by the batch's spread; the batch's mean comes off at the end."""
    mean, std = moments(totals(episodes))
    placed = {turn.tokens()[-1]: divided(turn.reward, std) for turn in episodes[index]}
    placed[episodes[index][-1].tokens()[-1]] -= divided(mean, std)
    return placed


def reinforce(episodes: list[list[Turn]]) -> dict[Key, float]:
    found = {}
    for index, turns in enumerate(episodes):
        placed, running = rewards_on_turns(episodes, index), 0.0
        for key in [key for turn in turns for key in turn.tokens()][::-1]:
            running = placed.get(key, 0.0) + GAMMA * running
            found[key] = running
    return found


def agentic_reinforce(episodes: list[list[Turn]]) -> dict[Key, float]:
    found = {}
    for index, turns in enumerate(episodes):
        placed, running = rewards_on_turns(episodes, index), 0.0
        for turn in turns[::-1]:
            running = placed[turn.tokens()[-1]] + GAMMA * running
            found |= dict.fromkeys(turn.tokens(), running)
    return found


def gae(episodes: list[list[Turn]]) -> dict[Key, float]:
    found = {}
    for index, turns in enumerate(episodes):
        placed, running = rewards_on_turns(episodes, index), 0.0
        following = value_of((index, -1, 0)) if index % 2 else 0.0
        for key in [key for turn in turns for key in turn.tokens()][::-1]:
            delta = placed.get(key, 0.0) + GAMMA * following - value_of(key)
            running = delta + GAMMA * LAMBD * running
            found[key], following = running, value_of(key)
    return found


def turn_gae(episodes: list[list[Turn]]) -> dict[Key, float]:
    found = {}
    for index, turns in enumerate(episodes):
        placed, running = rewards_on_turns(episodes, index), 0.0
        following = value_of((index, -1, 0)) if index % 2 else 0.0
        for turn in turns[::-1]:
            state = value_of(turn.tokens()[0])
            running = placed[turn.tokens()[-1]] + GAMMA * following - state + GAMMA * LAMBD * running
            found |= dict.fromkeys(turn.tokens(), running)
            following = state
    return found


def step_returns(episodes: list[list[Turn]]) -> dict[tuple[int, int], float]:
    found = {}
    for index, turns in enumerate(episodes):
        running = 0.0
        for turn in turns[::-1]:
            running = turn.reward + STEP_GAMMA * running
            found[index, turn.index] = running
    return found


def step_reinforce(episodes: list[list[Turn]]) -> dict[Key, float]:
    """Normalised over all turns of the batch."""
    returns = step_returns(episodes)
    mean, std = moments(list(returns.values()))
    turns = [turn for turns in episodes for turn in turns]
    return {key: divided(returns[turn.episode, turn.index] - mean, std) for turn in turns for key in turn.tokens()}


def gigpo(episodes: list[list[Turn]]) -> dict[Key, float]:
    """A group is a task: what another group did in a state of the same name is no comparison."""
    returns, of_episode = step_returns(episodes), grpo(episodes)
    turns = [turn for turns in episodes for turn in turns]
    found = {}
    for turn in turns:
        equal = [o for o in turns if (o.group, o.state) == (turn.group, turn.state)]
        mean, std = moments([returns[o.episode, o.index] for o in equal])
        step = divided(returns[turn.episode, turn.index] - mean, std)
        found |= {key: of_episode[key] + 0.5 * step for key in turn.tokens()}
    return found


BATCH = ("batch", "batch")
AUTO = ("auto", "auto")
Reference = Callable[[list[list[Turn]]], dict[Key, float]]
ESTIMATORS: list[tuple[str, Reference, Any, dict[str, Any]]] = [
    ("grpo", grpo, AUTO, {"gamma": 1.0}),
    ("loop", loop, AUTO, {}),
    ("opo", opo, AUTO, {}),
    ("reinforce", reinforce, BATCH, {}),
    ("agentic_reinforce", agentic_reinforce, BATCH, {}),
    ("gae", gae, BATCH, {}),
    ("turn_gae", turn_gae, BATCH, {}),
    ("step_reinforce", step_reinforce, BATCH, {}),
    ("gigpo", gigpo, AUTO, {"step_reward_weight": 0.5}),
]


@pytest.mark.parametrize("rule", ["trajectory", "step"])
@pytest.mark.parametrize(("name", "reference", "norm", "keys"), ESTIMATORS, ids=[row[0] for row in ESTIMATORS])
def test_estimators_equal_the_loop(
    name: str, reference: Reference, norm: Any, keys: dict[str, Any], rule: SampleRule
) -> None:
    """Trees, conversations that begin anew, one row a call: all the same trajectories. Every second is truncated."""
    for seed in range(2):
        groups = random_groups(np.random.default_rng(seed), groups=3, episodes=4)
        for index, episode in enumerate(episode for group in groups for episode in group.members):
            episode.outcome = "turn_limit" if index % 2 else "terminated"
        batch, _ = learn(groups, rule, norm, adv_estimator=name, **keys)
        expected = reference(turns_of(groups))
        found = by_key(batch, "advantages")
        assert not batch.batch["advantages"][~batch.batch["response_mask"]].any()
        assert found.keys() == expected.keys()
        np.testing.assert_allclose([found[k] for k in expected], list(expected.values()), rtol=2e-4, atol=2e-5)


def test_values_learn_the_return_and_turns_share_one() -> None:
    groups = random_groups(np.random.default_rng(5), groups=2, episodes=3)
    for name in ("gae", "turn_gae"):
        batch, _ = learn(groups, "trajectory", BATCH, adv_estimator=name)
        advantages, returns = by_key(batch, "advantages"), by_key(batch, "returns")
        for key, advantage in advantages.items():
            state = key if name == "gae" else (key[0], key[1], 0)
            assert returns[key] == pytest.approx(advantage + value_of(state), abs=1e-4)


def test_roles_are_compared_with_their_own() -> None:
    """Self-play for a sum of zero: each side against the same side of the other episodes."""

    def game(first: float) -> Any:
        return make_episode(said([1], [2, 3], role="first", reward=first), said([4], [5], role="second", reward=-first))

    groups = [EpisodeGroup(0, Task("env", 1), [game(1.0), game(0.0)])]
    batch, metrics = learn(
        groups, "trajectory", adv_estimator="grpo", gamma=1.0, norm_std_type=None, norm=("group", None)
    )
    assert batch.batch["advantages"].tolist() == [[0, 0.5, 0.5], [0, -0.5, 0], [0, -0.5, -0.5], [0, 0.5, 0]]
    batch, _ = learn(groups, "trajectory", adv_estimator="loop")
    assert batch.batch["advantages"].tolist() == [[0, 1, 1], [0, -1, 0], [0, -1, -1], [0, 1, 0]]
    running, _ = learn(groups, "trajectory", norm=("running", None), adv_estimator="reinforce", gamma=1.0)
    assert running.batch["response_level_rewards"].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert metrics["trajectory/rows/mean"] == 1.0
    assert (metrics["role/first/score/mean"], metrics["role/second/score/min"]) == (0.5, -1.0)


def test_tags_may_be_normalised_apart() -> None:
    episodes = [(0.0, "a"), (1.0, "a"), (10.0, "b"), (30.0, "b")]
    groups = [
        EpisodeGroup(order, Task(tag, 1), [make_episode(said([1], [2], reward=reward), tag=tag)])
        for order, (reward, tag) in enumerate(episodes)
    ]
    config = config_of(AgenticConfig, adv_estimator="reinforce")
    for by_tag, expected in ((True, [-0.5, 0.5, -10.0, 10.0]), (False, [-10.25, -9.25, -0.25, 19.75])):
        batch = build_episode_batch(groups, "step", 0)
        EpisodeMethod(config, ("batch", None), 100, by_tag).credit(batch)
        assert batch.batch["advantages"][:, 1].tolist() == expected


def test_one_setting_normalises_both_parts_of_gigpo() -> None:
    groups = random_groups(np.random.default_rng(2), groups=2, episodes=4)
    batch, _ = learn(groups, "step", ("group", None), adv_estimator="gigpo")
    episodes = turns_of(groups)
    returns, rewards = step_returns(episodes), totals(episodes)
    turns = [turn for turns in episodes for turn in turns]
    found = by_key(batch, "advantages")
    for turn in turns:
        equal = [returns[o.episode, o.index] for o in turns if (o.group, o.state) == (turn.group, turn.state)]
        episode = rewards[turn.episode] - moments([rewards[m] for m in in_group(episodes, turn.episode)])[0]
        step = returns[turn.episode, turn.index] - moments(equal)[0]
        assert found[turn.tokens()[0]] == pytest.approx(episode + step, abs=1e-4)


def test_truncated_trajectories_may_be_left_out_and_failed_ones_are() -> None:
    calls = said([1], [2], reward=1.0), said([3], [4, 5], reward=1.0)
    outcomes: tuple[Any, ...] = ("terminated", "turn_limit", "environment_error", "terminated")
    episodes = [make_episode(*calls, outcome=outcome) for outcome in outcomes]
    episodes[3] = make_episode(said([1], [2], reward=5.0))
    groups = [EpisodeGroup(0, Task("env", 1), episodes)]
    batch, metrics = learn(groups, "step", adv_estimator="loop", max_len_mask=True)
    columns = batch.batch
    assert columns["loss_mask"].sum(-1).tolist() == [1, 2, 0, 0, 0, 0, 1], "not the cut one, not the failed one"
    assert columns["sequence_tokens"].tolist() == [3, 3, 0, 0, 0, 0, 1]
    assert columns["advantages"].sum(-1).tolist() == [-1.5, -3.0, -1.5, -3.0, 0, 0, 3.0], "but the cut one compares"
    assert metrics["critic/unscored_ratio"] == 0.25
    assert columns["rollout_log_probs"].shape == columns["advantages"].shape


def test_limits_that_end_most_episodes_are_named(caplog: pytest.LogCaptureFixture) -> None:
    episodes = [make_episode(said([1], [2], reward=r), outcome="turn_limit") for r in (0.0, 1.0)]
    computer = EpisodeMethod(config_of(AgenticConfig), ("auto", "auto"), 100)
    for _ in range(3):
        batch = build_episode_batch([EpisodeGroup(0, Task("env", 1), episodes)], "step", 0)
        batch.batch["values"] = torch.zeros(2, 2)
        computer.credit(batch)
    assert "ended by a limit" in caplog.text and "max_steps" in caplog.text


def test_the_divergence_costs_its_tokens_what_it_costs() -> None:
    """Under estimators that take rewards by turn, by trajectory and by step."""
    groups = random_groups(np.random.default_rng(3), groups=1, episodes=2)
    for name, norm in (("reinforce", (None, None)), ("step_reinforce", (None, None))):
        config = config_of(
            AgenticConfig,
            adv_estimator=name,
            add_token_level_kl=True,
            init_kl_coef=0.5,
            kl_penalty="k1",
            step_reward_gamma=1.0,
        )
        batch = build_episode_batch(groups, "trajectory", 0)
        mask = batch.batch["response_mask"]
        batch.batch["old_log_probs"] = torch.where(mask, -1.0, 0.0)
        batch.batch["ref_log_probs"] = torch.where(mask, -3.0, 0.0)
        EpisodeMethod(config, norm, 100).credit(batch)
        found = by_key(batch, "advantages")
        for turns in turns_of(groups):
            keys = [key for turn in turns for key in turn.tokens()]
            first = sum(turn.reward for turn in turns) - 0.5 * 2.0 * len(keys)
            assert found[keys[0]] == pytest.approx(first, abs=1e-4), name


def test_a_batch_without_any_score_learns_nothing() -> None:
    groups = [EpisodeGroup(0, Task("env", 1), [make_episode(said([1], [2]), outcome="agent_error")] * 2)]
    for name in ("grpo", "gae", "gigpo"):
        batch, metrics = learn(groups, "trajectory", adv_estimator=name)
        assert not batch.batch["loss_mask"].any() and not batch.batch["advantages"].any()
        assert metrics["critic/unscored_ratio"] == 1.0
