"""On-policy distillation: what is asked of teachers, what their answers become, and the loss of the student.

For a token a that the student pi sampled in state s, with d = log pi(a|s) - log pi_T(a|s),

    E[d] = KL(pi || pi_T) at s,    and    A = -d    is its score-function form (no gradient flows through d).

The gradient is unbiased where the tokens were sampled from pi itself; differentiating the estimate d instead would have
expected gradient 0. Both log-probs are the trainers' at the temperature of sampling, over the whole vocabulary, never
the engine's. ``opd_form: topk`` and ``full_vocabulary`` differentiate the divergence of the distributions at s, which
has no sampling noise and leaves out what a token does to later states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.distillation import comparison_metrics
from roll.algorithms.kl import KLOptions, kl_estimate
from roll.algorithms.policy_losses import LossInputs
from roll.config.losses import DivergenceConfig
from roll.config.model_files import model_number
from roll.config.policy import PolicyRunConfig
from roll.methods.base import POLICY_COLUMNS, Answer, Ask, RoleAsk, Totals
from roll.methods.distill import TEACHER, comparison, of_teacher
from roll.methods.losses import LOSS_COLUMNS, PolicyLoss
from roll.methods.opd_keys import coefficients, opd_divergence, teacher_role
from roll.methods.policy_plan import PolicyPlan, taught_by_advantage
from roll.models.layouts import TopTokens
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.protocol.vision import IMAGES
from roll.strategies.base import TOP_COLUMNS, Comparison, TensorBatch, target_columns

TEACHING = "teachers"
"""Phase of the teachers' answers."""
TEACHER_PROMPTS, PROMPT_LENGTHS = "teacher_prompt_ids", "prompt_lengths"
"""Columns: int64 (B, P), the prompt that teachers see, padded with -1; int64 (B,), tokens of the student's."""
TEACHER_INDEX, TEACHER_WEIGHTS = f"{TEACHER}/index", f"{TEACHER}/weights"
"""Columns: int64 (B,) the number of a row's teacher, -1 for none; float32 (B,) the weight of its divergence."""


@dataclass(frozen=True)
class TaughtPolicyLoss(PolicyLoss):
    """:class:`PolicyLoss` plus each row's weighted divergence from its teacher."""

    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    names: tuple[str, ...] = ()
    """Names of the teachers, by number."""
    columns = (*POLICY_COLUMNS, *LOSS_COLUMNS, *target_columns(TEACHER), TEACHER_INDEX, TEACHER_WEIGHTS)

    @property
    def comparisons(self) -> Sequence[Comparison]:
        return (comparison(self.divergence, self.temperature),)

    def inputs(self, outputs: TensorBatch, batch: TensorBatch) -> LossInputs:
        divergence = outputs[f"{TEACHER}/divergence"] * batch[TEACHER_WEIGHTS][:, None]
        return replace(super().inputs(outputs, batch), divergence_term=divergence)

    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        loss, metrics = super().__call__(outputs, batch, totals)
        return loss, metrics | self.teacher_metrics(outputs, batch)

    def teacher_metrics(self, outputs: TensorBatch, batch: TensorBatch) -> Metrics:
        """Divergence from each teacher over the response tokens of its rows, and how the distributions compare."""
        metrics: Metrics = {}
        compared = of_teacher(outputs)
        for number, name in enumerate(self.names):
            mask = batch["response_mask"] & (batch[TEACHER_INDEX] == number)[:, None]
            total: Any = (compared["divergence"] * mask).sum().detach()
            tokens: Any = mask.sum()
            metrics[f"opd/{name}/kl"] = Mean(total, tokens)
            metrics |= comparison_metrics(compared, mask, f"opd/{name}/")
        return metrics


class OPD:
    """The teachers of a run. Each sees the samples of its tags, and acts on advantages or the loss (``opd_form``)."""

    def __init__(self, config: PolicyRunConfig) -> None:
        self._config = config
        self._weights = coefficients(config)

    def asks(self, plan: PolicyPlan, temperature: float) -> list[RoleAsk]:
        """Log-probs of the sampled tokens, or of the most probable ones."""
        config = self._config
        started = [name for name in config.teacher if teacher_role(name) in plan.roles]
        ask = Ask(temperature=temperature)
        if not taught_by_advantage(config):
            paths = [plan.roles[role].model_path for role in ("actor_train", *map(teacher_role, started))]
            # Output matrices are padded differently: only ids that all models have can be compared, as int32.
            limit = min(model_number(path, "vocab_size") or 2**31 - 1 for path in paths)
            ask = replace(ask, top=TopTokens(opd_divergence(config).logits_topk, limit))
        return [
            RoleAsk(
                teacher_role(name), ask, TEACHING, tags=config.teacher[name].tag_included, view=with_teacher_prompts
            )
            for name in started
        ]

    def receive(self, batch: DataProto, answers: Iterable[Answer]) -> Metrics:
        """Add the teachers' columns to the batch; return the metrics of each teacher."""
        if taught_by_advantage(self._config):
            return self._add_divergence(batch, answers)
        self._add_targets(batch, answers)
        return {}

    def loss(self, policy: PolicyLoss) -> PolicyLoss:
        """The policy's loss, with the divergence from the teachers in it where that is differentiated."""
        if taught_by_advantage(self._config):
            return policy
        shared = {item.name: getattr(policy, item.name) for item in fields(policy)}
        return TaughtPolicyLoss(**shared, divergence=opd_divergence(self._config), names=tuple(self._config.teacher))

    def _add_divergence(self, batch: DataProto, answers: Iterable[Answer]) -> Metrics:
        """``teacher_kl`` float32 (B, L): the weighted sum over teachers of each sampled token's divergence, 0 outside
        the response mask; from ``old_log_probs``."""
        tensors = batch.batch
        total, metrics = torch.zeros_like(tensors["old_log_probs"]), Metrics()
        for answer in answers:
            name, part = self._name(answer), answer.part
            theirs = aligned_with(part, answer.seen, answer.columns["log_probs"])
            mask, own = part.batch["response_mask"], part.batch["old_log_probs"]
            total[answer.rows] += self._weights[name] * (clamped_kl(own, theirs, self._config) * mask)
            tokens = float(mask.sum())
            # Without the clamp, so that the metric remains an estimate of the divergence.
            metrics[f"opd/{name}/kl"] = Mean(float(((own - theirs) * mask).sum()), tokens)
            metrics[f"opd/{name}/teacher_log_prob"] = Mean(float((theirs * mask).sum()), tokens)
        tensors["teacher_kl"] = total
        return metrics | {"opd/kl": Mean(float(total.sum()), float(tensors["response_mask"].sum()))}

    def _add_targets(self, batch: DataProto, answers: Iterable[Answer]) -> None:
        """The columns of the teacher of each row (:func:`~roll.strategies.base.target_columns`), its number
        ``TEACHER_INDEX`` int64 (B,), -1 for none, and its weight ``TEACHER_WEIGHTS`` float32 (B,)."""
        tensors = batch.batch
        tensors[TEACHER_INDEX] = torch.full((len(batch),), -1, dtype=torch.int64)
        tensors[TEACHER_WEIGHTS] = torch.zeros(len(batch))
        numbers = {name: number for number, name in enumerate(self._config.teacher)}
        for answer in answers:
            name, rows = self._name(answer), answer.rows
            for column, source in zip(target_columns(TEACHER), TOP_COLUMNS, strict=True):
                values = aligned_with(answer.part, answer.seen, answer.columns[source])
                if column not in tensors:
                    tensors[column] = values.new_zeros(len(batch), *values.shape[1:])
                tensors[column][rows] = values
            tensors[TEACHER_INDEX][rows] = numbers[name]
            tensors[TEACHER_WEIGHTS][rows] = self._weights[name]

    def _name(self, answer: Answer) -> str:
        return next(name for name in self._config.teacher if teacher_role(name) == answer.asked.role)


def clamped_kl(own: torch.Tensor, of_teacher: torch.Tensor, config: PolicyRunConfig) -> torch.Tensor:
    """``kl_penalty`` of each sampled token's log-probs, (B, L), within +- ``opd_clamp``."""
    estimate = kl_estimate(own, of_teacher, KLOptions(estimator=config.kl_penalty))
    return estimate if config.opd_clamp is None else estimate.clamp(-config.opd_clamp, config.opd_clamp)


def with_teacher_prompts(batch: DataProto) -> DataProto:
    """The rows with the teachers' prompts in front of the same responses; ``batch`` itself where there are none.

    The tokens that count are the same, in the same order, so what is computed of them is put back by the masks.
    """
    tensors = batch.batch
    if TEACHER_PROMPTS not in tensors:
        return batch
    rows, masks = [], []
    for ids, attended, counted, prompt, length in zip(
        tensors["input_ids"],
        tensors["attention_mask"],
        tensors["response_mask"],
        tensors[TEACHER_PROMPTS],
        tensors[PROMPT_LENGTHS].tolist(),
        strict=True,
    ):
        own, end = prompt[prompt >= 0], int(attended.sum())
        rows.append(torch.cat([own, ids[length:end]]))
        masks.append(torch.cat([torch.zeros(len(own), dtype=torch.bool), counted[length:end]]))

    def padded(parts: list[torch.Tensor], value: float) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)

    names = [name for name in batch.non_tensor_batch if name != IMAGES]
    seen = batch.select([name for name in tensors.keys() if tensors[name].dim() == 1], names)  # noqa: SIM118
    seen.batch["input_ids"] = padded(rows, 0)
    seen.batch["attention_mask"] = padded([torch.ones(len(row), dtype=torch.bool) for row in rows], False)
    seen.batch["response_mask"] = padded(masks, False)
    return seen


def aligned_with(batch: DataProto, seen: DataProto, values: torch.Tensor) -> torch.Tensor:
    """Move values of the response tokens of ``seen`` (B, L', ...) to those of ``batch`` (B, L, ...)."""
    if seen is batch:
        return values
    mask = batch.batch["response_mask"]
    column = values.new_zeros(*mask.shape, *values.shape[2:])
    column[mask] = values[seen.batch["response_mask"]]
    return column
