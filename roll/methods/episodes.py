"""Learning from episodes: rewards of turns, statistics over trajectories, and advantages of the rows that are trained.

The rows of a batch (:mod:`roll.rollout.episodes`) are laid out as trajectories, each with all its sampled tokens in
order of time (:class:`~roll.algorithms.returns.TrajectoryLayout`). Everything between scores and update then works as
it does for single responses: normalisation, estimators, masks, weights, controllers, metrics.
"""

from __future__ import annotations

import numpy as np
import torch

from roll.algorithms.metrics import BatchWatch, MetricBuilder
from roll.algorithms.returns import TrajectoryLayout, Turns
from roll.algorithms.samples import resolve_norm_types, token_level_rewards
from roll.config.choices import traits
from roll.methods.policy import PolicyMethod
from roll.methods.policy_plan import PolicyConfig
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics, merge_metrics

TOKEN_COLUMNS = (
    "turn_rewards",
    "rollout_log_probs",
    "old_log_probs",
    "old_entropy",
    "old_sum_of_squares",
    "ref_log_probs",
    "values",
    "teacher_kl",
)
PER_TOKEN = ("loss_mask", "policy_mask", "token_level_rewards", "advantages", "returns")
PER_TRAJECTORY = ("response_level_rewards", "sample_weights")
LENGTHS_OF_ROWS = ("token/prompt_length", "token/total_length")


class EpisodeMethod(PolicyMethod):
    """Everything between the rewards of episodes and the update.

    Each role has its own baselines. ``running`` moments are kept by tag and role.

    Args:
        max_tokens: most sampled tokens of a trajectory, at which the over-long penalty reaches its maximum.
        by_tag: normalise rewards within their tag (``reward_normalization.grouping: tags``).
    """

    def __init__(
        self,
        config: PolicyConfig,
        norm_types: tuple[str | None, str | None],
        max_tokens: int,
        by_tag: bool = False,
    ) -> None:
        super().__init__(config, norm_types, max_tokens)
        self._by_tag = by_tag or "running" in resolve_norm_types(config.estimator, *norm_types)
        self._traits, self._step_gamma = traits(self._estimator), self._estimator.get("step_gamma")
        ended = "were ended by a limit, not by their task"
        remedy = "raise custom_envs.<tag>.max_steps or sequence_length"
        self._watch = BatchWatch(ended, remedy, not self._ignores_rewards)

    def credit(self, batch: DataProto) -> Metrics:
        """Add the columns of :class:`PolicyMethod`, and ``sequence_tokens`` int64 (B,): the number of tokens in
        the loss over all rows of a row's trajectory."""
        tensors = batch.batch
        layout = TrajectoryLayout.of(tensors["response_mask"], tensors["trajectory_ids"], tensors["turn_ids"])
        trajectories = as_trajectories(batch, layout)
        metrics = super().credit(trajectories)
        columns, index = trajectories.batch, layout.trajectories.index
        for name in PER_TOKEN:
            if name in columns:
                tensors[name] = layout.unpack(columns[name])
        for name in PER_TRAJECTORY:
            if name in columns:
                tensors[name] = columns[name][index]
        # A sample of the loss is a trajectory: its rows share one denominator.
        tensors["sequence_tokens"] = columns["loss_mask"].sum(-1)[index]
        # A packed trajectory has no prompt: lengths are those of the rows that the model processes.
        of_trajectories = {name: metric for name, metric in metrics.items() if not name.startswith(LENGTHS_OF_ROWS)}
        return of_trajectories | layout_metrics(batch, trajectories, layout)

    def normalised(self, batch: DataProto, shaped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """Rewards (T,), normalised by moments of each role (and tag).

        Where the estimator works with turns, they are due on the tokens of their turns: those of the environment scaled
        as their sum was, and what mean, clip and length subtract on the last token.
        """
        tensors, rewards = batch.batch, shaped
        metrics: Metrics = {}
        divisors = torch.ones_like(shaped, dtype=torch.float64)
        # Such an estimator normalises the returns of turns below; twice would divide by the spread of a spread.
        if not self._traits.normalises_steps:
            rows = torch.arange(len(shaped))
            rewards, metrics = self._by_part(batch, shaped, tensors["group_ids"], rows, divisors)
        if not self._traits.rewards_turns:
            return rewards, rewards, metrics
        mask = tensors["response_mask"]
        earned = torch.where(mask, tensors["turn_rewards"].double() / divisors[:, None], 0.0)
        return rewards, (earned + token_level_rewards(rewards - earned.sum(-1), mask)).float(), metrics

    def more_inputs(self, batch: DataProto, rewards: torch.Tensor) -> dict[str, torch.Tensor]:
        tensors = batch.batch
        more = {"turn_ids": tensors["turn_ids"]}
        if "bootstrap_values" in tensors:
            more["bootstrap_values"] = tensors["bootstrap_values"]
        if self._step_gamma is None:
            return more
        # Discounted returns from the turn of each token on, normalised where the estimator demands it; penalties for
        # divergence and length are those in `rewards`.
        mask = tensors["response_mask"]
        turns = Turns.of(mask, tensors["turn_ids"])
        cost = token_level_rewards(self._penalised(tensors["scores"], mask.sum(-1)) - tensors["scores"], mask)
        if rewards.dim() == 2:
            cost = cost + rewards - token_level_rewards(tensors["response_level_rewards"], mask)
        returns = turns.returns((tensors["turn_rewards"] + cost).double(), self._step_gamma)
        if self._traits.normalises_steps:
            rows = turns.exists.nonzero()[:, 0]
            flat, _ = self._by_part(batch, returns[turns.exists], tensors["group_ids"][rows], rows)
            returns = torch.zeros_like(returns, dtype=flat.dtype).masked_scatter(turns.exists, flat)
        return more | {"state_ids": tensors["state_ids"], "step_returns": turns.spread(returns).float()}

    def _by_part(
        self,
        batch: DataProto,
        values: torch.Tensor,
        group_ids: torch.Tensor,
        rows: torch.Tensor,
        divisors: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Metrics]:
        """``values`` (N,) of the trajectories ``rows``, normalised within each role (and tag)."""
        tags = batch.non_tensor_batch["domain"] if self._by_tag else np.full(len(batch), "", dtype=object)
        names = np.array([f"{tag}/{role}" for tag, role in zip(tags, batch.non_tensor_batch["role"], strict=True)])
        of_value = names[rows.numpy()]
        normalised = torch.empty(len(values))
        metrics: list[Metrics] = []
        for name in sorted(set(of_value)):
            part = torch.from_numpy(of_value == name)
            raw = values[part].double()
            mean, divisor = self._normalise.moments(raw, group_ids[part], name)
            normalised[part], measured = self._normalise.applied(raw, mean, divisor)
            metrics.append(measured)
            if divisors is not None:
                divisors[part] = divisor.expand(len(raw))
        return normalised, merge_metrics(metrics)


def as_trajectories(batch: DataProto, layout: TrajectoryLayout) -> DataProto:
    """One row per trajectory: the columns (T, W) that advantages are computed from, and those of its first row (T,).

    Groups are split by role: rewards of other roles are no baseline.
    """
    tensors, first = batch.batch, torch.empty_like(layout.lengths)
    first.scatter_reduce_(0, layout.trajectories.index, torch.arange(len(batch)), "amin", include_self=False)
    objects = {name: batch.non_tensor_batch[name][first.numpy()] for name in ("domain", "finish_reason", "role")}
    roles, role = np.unique(objects["role"].astype(str), return_inverse=True)
    columns = {name: layout.pack(tensors[name]) for name in TOKEN_COLUMNS if name in tensors}
    columns |= {
        "response_mask": layout.mask,
        "attention_mask": layout.mask,
        "turn_ids": layout.pack(tensors["turn_ids"], -1),
        "state_ids": layout.pack(tensors["state_ids"], -1),
        "scores": tensors["scores"][first],
        # One number for each pair of group and role.
        "group_ids": tensors["group_ids"][first] * max(len(roles), 1) + torch.from_numpy(role),
    }
    if "bootstrap_mask" in tensors and "values" in tensors:
        left = torch.where(tensors["bootstrap_mask"], tensors["values"], 0.0).sum(-1)
        columns["bootstrap_values"] = layout.trajectories.sum(left)
    return DataProto.from_dict(columns, non_tensors=objects)


def layout_metrics(batch: DataProto, trajectories: DataProto, layout: TrajectoryLayout) -> Metrics:
    """Lengths of the rows that the model processes, numbers of rows and turns of trajectories, and, where agents have
    roles, raw rewards by role."""
    tensors, metrics = batch.batch, MetricBuilder()
    mask, total = tensors["response_mask"], tensors["attention_mask"].sum(-1)
    # argmax is the first sampled token; a row without one is prompt to its end.
    first = torch.where(mask.any(-1), mask.int().argmax(-1), total)
    for name, lengths in zip(LENGTHS_OF_ROWS, (first, total), strict=True):
        metrics.summary(name, lengths)
        metrics.mean(f"{name}/diff", (lengths.max() - lengths.min()).float(), 1.0)
    turns = Turns.of(layout.mask, layout.pack(tensors["turn_ids"], -1)).exists.sum(-1)
    metrics.summary("trajectory/rows", layout.trajectories.counts)
    metrics.summary("trajectory/turns", turns)
    roles, scores = trajectories.non_tensor_batch["role"], trajectories.batch["scores"]
    scored = ~scores.isnan()
    for role in sorted({role for role in roles if role}):
        metrics.summary(f"role/{role}/score", scores.nan_to_num(), torch.from_numpy(roles == role) & scored)
    return metrics.build()
