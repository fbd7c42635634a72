"""On-policy distillation: the teachers' passes, what becomes of their columns, and the loss of the student.

For a token a that the student pi sampled in state s, with d = log pi(a|s) - log pi_T(a|s),

    E[d] = KL(pi || pi_T) at s,    and    A = -d    is its score-function form (no gradient flows through d).

The gradient is unbiased where the tokens were sampled from pi itself; differentiating the estimate d instead would have
expected gradient 0. Both log-probs are the trainers' at the temperature of sampling, over the whole vocabulary, never
the engine's. ``opd_form: topk`` and ``full_vocabulary`` differentiate the divergence of the distributions at s, which
has no sampling noise and leaves out what a token does to later states.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.distillation import comparison_metrics
from roll.algorithms.kl import KLOptions, kl_estimate
from roll.algorithms.policy_losses import LossInputs
from roll.config.losses import DivergenceConfig
from roll.config.model_files import model_number
from roll.config.reading.errors import count
from roll.config.roles import DataArguments
from roll.datasets.columns import Columns
from roll.datasets.reading import SourceRow
from roll.datasets.sft import read_demonstration
from roll.datasets.templates import Conversation, Renderer, TemplateChoice
from roll.datasets.types import DataError, PromptRow
from roll.methods.base import LOSS_COLUMNS, POLICY_COLUMNS, Answer, Ask, PolicyLoss, RoleAsk, Totals
from roll.methods.distill import comparison, of_teacher
from roll.methods.opd_keys import (
    TaughtConfig,
    coefficients,
    is_taught,
    opd_divergence,
    taught_by_advantage,
    teacher_role,
    unrouted,
)
from roll.methods.policy_plan import PolicyPlan
from roll.methods.teachers import TEACHER
from roll.models.layouts import TopTokens
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.protocol.vision import IMAGES
from roll.rollout.groups import Group, Sample, SampleGroup
from roll.rollout.loops import RolloutContext, SingleTurn
from roll.strategies.base import TOP_COLUMNS, Comparison, TensorBatch, target_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Phase of the teachers' answers.
TEACHING = "teachers"
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
        compared = of_teacher(outputs)
        for number, name in enumerate(self.names):
            mask = batch["response_mask"] & (batch[TEACHER_INDEX] == number)[:, None]
            total: Any = (compared["divergence"] * mask).sum().detach()
            tokens: Any = mask.sum()
            metrics = metrics | {f"opd/{name}/kl": Mean(total, tokens)}
            metrics |= comparison_metrics(compared, mask, f"opd/{name}/")
        return loss, metrics


class OPD:
    """The teachers of a run. Each sees the samples of its tags, and acts on advantages or the loss (``opd_form``)."""

    def __init__(self, config: TaughtConfig) -> None:
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
            # A row may have several teachers, whose terms add up.
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


def clamped_kl(own: torch.Tensor, of_teacher: torch.Tensor, config: TaughtConfig) -> torch.Tensor:
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


def is_off_policy(order: int, lmbda: float) -> bool:
    """True if the prompt that was drawn as number ``order`` is answered by its row: a share of 1 - ``lmbda`` of all,
    evenly spread."""
    share = 1.0 - lmbda
    # 1e-9: rounding leaves products such as 10 * (1 - 0.9) = 0.9999999999999998 just below a whole number.
    return int((order + 1) * share + 1e-9) > int(order * share + 1e-9)


class DatasetResponses:
    """A rollout loop: a share of the prompts is answered by the policy, the others by their rows (GKD, arXiv
    2306.13649, algorithm 1).

    Args:
        max_new_tokens: longer responses of rows are cut there.
    """

    def __init__(self, config: Any, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> None:
        self._data_args, self._lmbda = config.actor_train.data_args, config.lmbda
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._sampled = SingleTurn()

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        """Sample, or take the row's response, whose log-probs are 0: nobody sampled it.

        Raises:
            DataError: a row without one.
        """
        if not is_off_policy(context.order, self._lmbda):
            return await self._sampled.answer(prompt, context)
        source = SourceRow(Path(f"prompt {prompt.prompt_id}"), 0, prompt.row)
        _, text = read_demonstration(Columns.of(self._data_args, source), source)
        tokenizer = self._tokenizer
        # With the end token: a student that never sees one would learn not to stop.
        ids: Any = tokenizer(f"{text}{tokenizer.eos_token}", add_special_tokens=False)["input_ids"]
        kept = np.array(ids[: self._max_new_tokens], dtype=np.int32)
        sample = Sample(
            prompt,
            prompt.token_ids,
            kept,
            np.zeros(len(kept), dtype=np.float32),
            [(context.version, 0, len(kept))],  # as new as a sampled one
            "stop" if len(kept) == len(ids) else "length",
            str(tokenizer.decode(kept, skip_special_tokens=True)),
        )
        return await context.compute_rewards(Group(context.order, prompt, [sample]))


class TeacherPrompts:
    """Prompts that teachers see in place of the student's: the row's conversation, whose last user message is
    ``opd_teacher_prompt`` filled in with the row's columns."""

    def __init__(
        self, template: str, data_args: DataArguments, templates: TemplateChoice, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._data_args = data_args
        self._template = template
        self._render = Renderer(tokenizer, templates)

    def token_ids(self, prompts: Sequence[PromptRow]) -> list[list[int]]:
        """The token ids that a teacher has in front of the responses to each prompt.

        Raises:
            DataError: a row lacks a column, has no user message, or has images.
        """
        found = []
        for rendered in self._render([self._conversation(prompt) for prompt in prompts]):
            if isinstance(rendered, DataError):
                raise rendered
            found.append(rendered.token_ids)
        return found

    def _conversation(self, prompt: PromptRow) -> Conversation:
        source = SourceRow(Path(f"prompt {prompt.prompt_id}"), 0, prompt.row)
        messages = [dict(one) for one in Columns.of(self._data_args, source).read_messages(source)]
        last = max((place for place, one in enumerate(messages) if one["role"] == "user"), default=None)
        if last is None or prompt.vision is not None:
            rule = "has no user message to fill in" if last is None else "has images, which it does not take"
            raise DataError(f"{source.path}: opd_teacher_prompt: the row {rule}")
        values: Mapping[str, Any] = {**prompt.row, "ground_truth": prompt.ground_truth}
        try:
            text = self._template.format_map({**values, "prompt": messages[last]["content"]})
        except (KeyError, IndexError, AttributeError) as error:
            listed = ", ".join(sorted({*values, "prompt"}))
            raise DataError(f"{source.path}: opd_teacher_prompt: no column {error}; there are {listed}") from error
        messages[last] = {**messages[last], "content": text}
        return Conversation(source, prompt.tag, self._render.templates.with_system(messages))


class PromptRows:
    """Parts of the prompts' rows besides the prompts: responses, and prompts that teachers see."""

    def __init__(self, config: Any, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> None:
        data_args = config.actor_train.data_args
        self._lmbda = config.lmbda
        self.loop: DatasetResponses | None = None
        """Answers some of the prompts by their rows."""
        if is_taught(config) and config.lmbda < 1.0:
            self.loop = DatasetResponses(config, tokenizer, max_new_tokens)
        self._prompts = None
        if is_taught(config) and config.opd_teacher_prompt is not None:
            templates = TemplateChoice.of_settings(data_args, config.global_template, config.tag_to_template)
            self._prompts = TeacherPrompts(config.opd_teacher_prompt, data_args, templates, tokenizer)

    def add_columns(self, batch: DataProto, groups: Sequence[SampleGroup]) -> Metrics:
        """Add the columns of teachers' prompts (:data:`TEACHER_PROMPTS`, :data:`PROMPT_LENGTHS`) to the batch that was
        built of ``groups``."""
        if self._prompts is not None:
            sizes = torch.tensor([len(group.members) for group in groups])
            prompts = [torch.tensor(ids) for ids in self._prompts.token_ids([group.item for group in groups])]
            padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=-1)
            lengths = torch.tensor([len(group.item.token_ids) for group in groups])
            batch.batch[TEACHER_PROMPTS] = padded.repeat_interleave(sizes, 0)
            batch.batch[PROMPT_LENGTHS] = lengths.repeat_interleave(sizes)
        if self.loop is None:
            return {}
        sampled = [not is_off_policy(group.order, self._lmbda) for group in groups]
        return {"opd/on_policy_share": Mean(sum(sampled), len(sampled))}


def check_rows(config: TaughtConfig, tags: Mapping[str, int], file: str) -> None:
    """Compare the teachers' tags with the number of training rows by tag; log rows that no teacher sees.

    Raises:
        DataError: a teacher sees no row at all.
    """
    idle, untaught = unrouted(config, list(tags)) if is_taught(config) else ([], [])
    for role in idle:
        shown = ", ".join(map(repr, list(tags)[:10]))
        raise DataError(f"{role}.tag_included: no row of {file} has one of these tags, but {shown}")
    if untaught and config.is_pure_opd:
        number, shown = sum(tags[tag] for tag in untaught), ", ".join(map(repr, untaught[:10]))
        text = "%s: no teacher sees %s (%s): nothing is learnt from them"
        logger.warning(text, file, count(number, "row"), shown)
