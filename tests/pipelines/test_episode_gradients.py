"""The update by episodes: its loss and gradient equal a plain float64 loop over turns, however rows are formed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from roll.agents.episode import Task
from roll.algorithms.losses import actor_loss_options
from roll.methods.base import PolicyLoss
from roll.methods.episodes import EpisodeMethod
from roll.pipelines.agentic.config import AgenticConfig
from roll.pipelines.model_calls import even_mini_batches, num_samples, shuffled_rows
from roll.protocol import DataProto
from roll.rollout.episodes import EpisodeGroup, SampleRule, build_episode_batch
from roll.strategies.base import Output
from tests.support.episodes import make_episode, random_groups, said
from tests.support.keys import config_of

VOCABULARY = 50


class TinyPolicy(torch.nn.Module):
    """Recurrent, so that every prediction depends on all tokens before it and their order; float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(VOCABULARY, 6, dtype=torch.float64)
        self.body = torch.nn.GRU(6, 6, batch_first=True, dtype=torch.float64)
        self.head = torch.nn.Linear(6, VOCABULARY, dtype=torch.float64)

    def log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        """float64 (B, L) of every token, 0 for the first."""
        logits = self.head(self.body(self.embedding(ids))[0][:, :-1])
        chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(chosen, (1, 0))

    def gradients(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(self.parameters()))])


def settings(**keys: Any) -> AgenticConfig:
    return config_of(AgenticConfig, **{"estimator": "grpo", "gamma": 1.0, "loss_norm_length": 16} | keys)


def learned(groups: list[EpisodeGroup], rule: SampleRule, config: AgenticConfig) -> DataProto:
    batch = build_episode_batch(groups, rule, 0)
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    EpisodeMethod(config, ("auto", "auto"), 100).credit(batch)
    return batch


def update(batch: DataProto, config: AgenticConfig, parts: list[list[int]] | None = None) -> tuple[float, torch.Tensor]:
    """Loss and gradient of an optimizer step whose rows are computed in ``parts``, micro-batches of any ranks."""
    policy, options = TinyPolicy(), actor_loss_options(config)
    shares = [batch[part] for part in parts or [list(range(len(batch)))]]
    columns = [
        {name: column.double() if column.is_floating_point() else column for name, column in share.batch.items()}
        for share in shares
    ]
    groups = int(batch.batch["group_ids"].max()) + 1
    loss = PolicyLoss(num_groups=groups, norm_length=16.0, options=options)
    counts = [loss.counts(share) for share in columns]
    totals = {name: torch.stack([own[name] for own in counts]).sum(0) for name in counts[0]}
    total = torch.zeros((), dtype=torch.float64)
    for share in columns:
        log_probs = torch.where(share["response_mask"], policy.log_probs(share["input_ids"]), 0.0)
        total = total + loss({Output.LOG_PROBS: log_probs}, share, totals)[0]
    return float(total.detach()), policy.gradients(total)


def reference(groups: list[EpisodeGroup], config: AgenticConfig) -> tuple[float, torch.Tensor]:
    """PPO on GRPO's advantages, call by call behind the very prompt that the engine was given."""
    policy = TinyPolicy()
    episodes = [episode for group in groups for episode in group.members]
    all_tokens = sum(len(call.response_ids) for episode in episodes for call in episode.calls)
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        rewards = [sum(call.reward for call in episode.calls) for episode in group.members]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
        group_tokens = sum(len(call.response_ids) for episode in group.members for call in episode.calls)
        for episode, reward in zip(group.members, rewards, strict=True):
            advantage = (reward - mean) / (std + 1e-6)
            own_tokens = sum(len(call.response_ids) for call in episode.calls)
            weight = {
                "token-mean": 1 / all_tokens,
                "seq-mean-token-mean": 1 / (len(episodes) * own_tokens),
                "seq-mean-token-sum": 1 / len(episodes),
                "seq-mean-token-sum-norm": 1 / (len(episodes) * 16),
                "prompt-mean": 1 / (len(groups) * group_tokens),
            }[config.loss_agg_mode]
            for call in episode.calls:
                prompt = episode.conversations.prompt_ids(call)
                log_probs = policy.log_probs(torch.tensor([prompt + call.response_ids]))[0, len(prompt) :]
                difference = log_probs - torch.tensor(call.log_probs, dtype=torch.float32).double()
                if config.loss.get("importance_sampling") == "segment":
                    difference = difference.mean().expand(len(difference))
                for ratio in difference.exp():
                    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                    total = total - weight * surrogate
    return float(total.detach()), policy.gradients(total)


MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean")


def near_policy(groups: list[EpisodeGroup]) -> list[EpisodeGroup]:
    """The engine's log-probs are the policy's and a little noise, so that some ratios are clipped and some are not."""
    policy, noise = TinyPolicy(), np.random.default_rng(1)
    for episode in (episode for group in groups for episode in group.members):
        for call in episode.calls:
            prompt = episode.conversations.prompt_ids(call)
            with torch.no_grad():
                found = policy.log_probs(torch.tensor([prompt + call.response_ids]))[0, len(prompt) :]
            call.log_probs = (found.numpy() + noise.normal(0, 0.25, len(found))).tolist()
    return groups


@pytest.fixture(scope="module")
def trees() -> list[EpisodeGroup]:
    return near_policy(random_groups(np.random.default_rng(4), groups=2, episodes=3, vocabulary=VOCABULARY))


def close(found: tuple[float, torch.Tensor], expected: tuple[float, torch.Tensor]) -> bool:
    """To float32, the precision of advantages and of the engine's log-probs."""
    scale = float(expected[1].abs().max())
    return abs(found[0] - expected[0]) < 2e-6 and float((found[1] - expected[1]).abs().max()) < 2e-6 * max(scale, 1.0)


@pytest.mark.parametrize(("mode", "ratio_type"), [*((mode, "token") for mode in MODES), (MODES[1], "segment")])
def test_trees_and_steps_have_the_gradient_of_their_calls(
    trees: list[EpisodeGroup], mode: str, ratio_type: Any
) -> None:
    """Also where a trajectory has several rows, in any micro-batches: each token once, each trajectory counted once."""
    config = settings(loss_agg_mode=mode, ratio_type=ratio_type)
    expected = reference(trees, config)
    for rule in ("trajectory", "step"):
        batch = learned(trees, rule, config)
        assert len(batch) > num_samples(batch) == 6
        rows = np.random.default_rng(0).permutation(len(batch)).tolist()
        for parts in (None, [[row] for row in rows], [rows[:3], rows[3:4], rows[4:]]):
            assert close(update(batch, config, parts), expected), (rule, parts)


def test_turns_that_follow_one_another_directly_have_ratios_of_their_own() -> None:
    """An agent that lets the policy go on without a token between: one run of sampled tokens, two turns."""
    episodes = [make_episode(said([3], [4, 5]), said([], [6, 7, 8], parent=0, reward=reward)) for reward in (1.0, 0.0)]
    groups = near_policy([EpisodeGroup(0, Task("env", 1), episodes)])
    config = settings(ratio_type="segment", loss_agg_mode="token-mean")
    assert close(update(learned(groups, "trajectory", config), config), reference(groups, config))


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("owned", [((0, 1), (2, 3), (4, 5)), ((0, 1), (2, 3), (4,), (5,)), ((0, 1, 2, 3, 4, 5),)])
def test_mini_batches_are_of_episodes(
    trees: list[EpisodeGroup], dp_size: int, owned: tuple[tuple[int, ...], ...]
) -> None:
    """Rows of an episode in one optimizer step; what is missing to even numbers of rows weighs nothing."""
    count = len(owned)
    config = settings(loss_agg_mode="seq-mean-token-mean")
    batch = learned(trees, "trajectory", config)
    even = even_mini_batches(batch, count, dp_size)
    assert len(even) % (count * dp_size) == 0
    parts = np.arange(len(even)).reshape(count, -1)
    used = even.batch["attention_mask"].sum(-1) > 1
    for mini, rows in enumerate(parts):
        owners = even.batch["episode_ids"][rows][used[rows]].tolist()
        assert set(owners) == set(owned[mini])
        whole = batch[np.flatnonzero(np.isin(batch.batch["episode_ids"].numpy(), owners))]
        shares = [rows[rank::dp_size].tolist() for rank in range(dp_size)]
        found = update(even[rows], config, [[row - rows[0] for row in share] for share in shares])
        assert close(found, update(whole, config))
    assert int(used.sum()) == len(batch)


def test_drawn_mini_batches_keep_episodes_whole(trees: list[EpisodeGroup]) -> None:
    batch = learned(trees, "step", settings())
    drawn = batch[shuffled_rows(batch, (1, 2), by_prompt=False)].batch["episode_ids"].tolist()
    order = list(dict.fromkeys(drawn))
    assert sorted(order) == list(range(6)) != order
    assert drawn == [episode for episode in order for _ in range(drawn.count(episode))]
