"""On-policy distillation: teachers' columns for the student's samples; and what it takes from the rows besides prompts:
their responses (``lmbda``), and prompts that only teachers see (``opd_teacher_prompt``).

For a token a that the student pi sampled in state s, with d = log pi(a|s) - log pi_T(a|s),

    E[d] = KL(pi || pi_T) at s,    and    A = -d    is its score-function form (no gradient flows through d).

The gradient is unbiased where the tokens were sampled from pi itself; differentiating the estimate d instead would have
expected gradient 0. Both log-probs are the trainers' at the temperature of sampling, over the whole vocabulary, never
the engine's. ``opd_form: topk`` and ``full_vocabulary`` differentiate the divergence of the distributions at s, which
has no sampling noise and leaves out what a token does to later states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll.algorithms.kl import KLOptions, kl_estimate
from roll.config.policy import PolicyRunConfig
from roll.datasets.columns import Columns
from roll.datasets.reading import SourceRow
from roll.datasets.sft import read_demonstration
from roll.datasets.templates import Conversation, Renderer, TemplateChoice
from roll.datasets.types import DataError, PromptRow
from roll.distributed import Cluster, WorkerDied
from roll.methods.base import Ask
from roll.methods.distill import TEACHER
from roll.methods.opd import TEACHER_INDEX, TEACHER_WEIGHTS
from roll.models.layouts import TopTokens
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.phases import start_computing, without_routes
from roll.pipelines.rlvr.teachers import coefficients
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.protocol.vision import IMAGES
from roll.rollout.groups import FinishedGroup, SampleGroup
from roll.rollout.loops import RolloutContext, SingleTurn
from roll.strategies.base import TEACHER_COLUMNS, teacher_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEACHER_PROMPTS, PROMPT_LENGTHS = "teacher_prompt_ids", "prompt_lengths"
"""Columns of a batch: int64 (B, P), the prompt that teachers see, padded with -1; int64 (B,), tokens of the student's.
"""


def rows_with_tags(batch: DataProto, tags: Sequence[str] | None) -> np.ndarray:
    """bool (B,): rows with one of ``tags``; all where there are none."""
    of_rows = batch.non_tensor_batch["tag"]
    return np.isin(of_rows.astype(str), list(tags)) if tags else np.ones(len(batch), dtype=bool)


Values = Mapping[str, torch.Tensor]
Replacing = Callable[[Cluster, Callable[[], Values]], Values]
Answer = tuple[str, torch.Tensor, DataProto, dict[str, torch.Tensor]]
"""A teacher's name, the rows that it was asked about (bool (B,)), those rows, and its columns for them."""


def ask_teachers(
    batch: DataProto,
    teachers: Mapping[str, Cluster],
    config: PolicyRunConfig,
    bring: Callable[[Cluster], None],
    replacing: Replacing,
    ask: Ask,
) -> Iterator[Answer]:
    """Each teacher's answer for its rows, in their order. Teachers without a device in common compute concurrently,
    others take turns.

    Args:
        bring: brings a teacher onto its devices, which several may share.
        replacing: runs the work of a teacher, once more where its workers have to be replaced.
    """
    pending: list[Callable[[], Answer]] = []
    busy: set[int] = set()
    for name, cluster in teachers.items():
        rows = rows_with_tags(batch, config.teacher[name].tag_included)
        if not rows.any():
            continue
        devices = set(config.teacher[name].device_mapping or ())
        if devices & busy:
            yield from (answer() for answer in pending)
            pending, busy = [], set()
        part = batch if rows.all() else batch[rows]
        seen = with_teacher_prompts(part)
        begin = partial(_begin, without_routes(seen), cluster, bring, ask)
        pending.append(partial(_answer, name, rows, part, seen, partial(replacing, cluster, _repeatable(begin))))
        busy |= devices
    yield from (answer() for answer in pending)


def _begin(seen: DataProto, cluster: Cluster, bring: Callable[[Cluster], None], ask: Ask) -> Callable[[], Values]:
    bring(cluster)
    return start_computing(seen, cluster, ask)


def _repeatable(begin: Callable[[], Callable[[], Values]]) -> Callable[[], Values]:
    """Work that begins now and is waited for when it is called; called again, it begins again."""
    begun: list[Callable[[], Values]] = []
    with suppress(WorkerDied):  # found again by the one who waits
        begun.append(begin())
    return lambda: (begun.pop() if begun else begin())()


def _answer(name: str, rows: np.ndarray, part: DataProto, seen: DataProto, columns: Callable[[], Values]) -> Answer:
    aligned = {column: aligned_with(part, seen, values) for column, values in columns().items()}
    return name, torch.from_numpy(rows), part, aligned


def clamped_kl(own: torch.Tensor, of_teacher: torch.Tensor, config: PolicyRunConfig) -> torch.Tensor:
    """``kl_penalty`` of each sampled token's log-probs, (B, L), within +- ``opd_clamp``."""
    estimate = kl_estimate(own, of_teacher, KLOptions(estimator=config.kl_penalty))
    return estimate if config.opd_clamp is None else estimate.clamp(-config.opd_clamp, config.opd_clamp)


def add_teacher_divergence(
    batch: DataProto,
    teachers: Mapping[str, Cluster],
    config: PolicyRunConfig,
    temperature: float,
    bring: Callable[[Cluster], None],
    replacing: Replacing,
) -> Metrics:
    """``teacher_kl`` float32 (B, L): the weighted sum over teachers of each sampled token's divergence, 0 outside the
    response mask; from ``old_log_probs``.

    Returns:
        The metrics of each teacher.
    """
    tensors, weights = batch.batch, coefficients(config)
    total, metrics = torch.zeros_like(tensors["old_log_probs"]), Metrics()
    ask = Ask(temperature=temperature)
    for name, rows, part, columns in ask_teachers(batch, teachers, config, bring, replacing, ask):
        of_teacher = columns["log_probs"]
        mask, own = part.batch["response_mask"], part.batch["old_log_probs"]
        total[rows] += weights[name] * (clamped_kl(own, of_teacher, config) * mask)
        tokens = float(mask.sum())
        metrics[f"opd/{name}/kl"] = Mean(float(((own - of_teacher) * mask).sum()), tokens)
        metrics[f"opd/{name}/teacher_log_prob"] = Mean(float((of_teacher * mask).sum()), tokens)
    tensors["teacher_kl"] = total
    mask = tensors["response_mask"]
    return metrics | {"opd/kl": Mean(float(total.sum()), float(mask.sum()))}


def add_teacher_targets(
    batch: DataProto,
    teachers: Mapping[str, Cluster],
    config: PolicyRunConfig,
    temperature: float,
    top: TopTokens,
    bring: Callable[[Cluster], None],
    replacing: Replacing,
) -> None:
    """The columns of the teacher of each row (:func:`~roll.strategies.base.teacher_columns`), its number
    ``TEACHER_INDEX`` int64 (B,), -1 for none, and its weight ``TEACHER_WEIGHTS`` float32 (B,)."""
    tensors, weights = batch.batch, coefficients(config)
    tensors[TEACHER_INDEX] = torch.full((len(batch),), -1, dtype=torch.int64)
    tensors[TEACHER_WEIGHTS] = torch.zeros(len(batch))
    numbers = {name: number for number, name in enumerate(teachers)}
    ask = Ask(temperature=temperature, top=top)
    for name, rows, _, columns in ask_teachers(batch, teachers, config, bring, replacing, ask):
        for column, source in zip(teacher_columns(TEACHER), TEACHER_COLUMNS, strict=True):
            values = columns[source]
            if column not in tensors:
                tensors[column] = values.new_zeros(len(batch), *values.shape[1:])
            tensors[column][rows] = values
        tensors[TEACHER_INDEX][rows] = numbers[name]
        tensors[TEACHER_WEIGHTS][rows] = weights[name]


def is_off_policy(order: int, lmbda: float) -> bool:
    """True where the prompt that was drawn as number ``order`` is answered by its row: a share of 1 - ``lmbda`` of all,
    evenly spread."""
    share = 1.0 - lmbda
    return int((order + 1) * share + 1e-9) > int(order * share + 1e-9)


class DatasetResponses:
    """A rollout loop: a share of the prompts is answered by the policy, the others by their rows (GKD, arXiv
    2306.13649, algorithm 1).

    Args:
        max_new_tokens: longer responses of rows are cut there.
    """

    def __init__(self, config: RLVRConfig, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> None:
        self._data_args = config.actor_train.data_args
        self._tokenizer = tokenizer
        self._lmbda = config.lmbda
        self._max_new_tokens = max_new_tokens
        self._sampled = SingleTurn()
        self.version = 0
        """Of the weights of the step; a row's response counts as new as a sampled one."""

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        if not is_off_policy(context.order, self._lmbda):
            return await self._sampled.answer(prompt, context)
        group = SampleGroup(context.order, prompt, self.response_of(context.order, prompt))
        return await context.compute_rewards(group)

    def response_of(self, order: int, prompt: PromptRow) -> FinishedGroup:
        """The row's response as a group of one sample, whose log-probs are 0: nobody sampled it.

        Raises:
            DataError: a row without one.
        """
        source = SourceRow(Path(f"prompt {prompt.prompt_id}"), 0, prompt.row)
        _, text = read_demonstration(Columns.of(self._data_args, source), source)
        tokenizer = self._tokenizer
        ids: Any = tokenizer(f"{text}{tokenizer.eos_token}", add_special_tokens=False)["input_ids"]
        kept = np.array(ids[: self._max_new_tokens], dtype=np.int32)
        return FinishedGroup(
            request_id=str(order),
            token_ids=kept,
            log_probs=np.zeros(len(kept), dtype=np.float32),
            lengths=np.array([len(kept)], dtype=np.int64),
            finish_reasons=["stop" if len(kept) == len(ids) else "length"],
            texts=[str(tokenizer.decode(kept, skip_special_tokens=True))],
            weight_versions=[[(self.version, 0, len(kept))]],
        )


class TeacherPrompts:
    """Prompts that teachers see in place of the student's: the row's conversation, whose last user message is
    ``opd_teacher_prompt`` filled in with the row's columns."""

    def __init__(self, config: RLVRConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        assert config.opd_teacher_prompt is not None
        self._data_args = config.actor_train.data_args
        templates = TemplateChoice.of_settings(self._data_args, config.global_template, config.tag_to_template)
        self._template = config.opd_teacher_prompt
        self._render = Renderer(tokenizer, templates)

    def token_ids(self, prompts: Sequence[PromptRow]) -> list[list[int]]:
        """The token ids that a teacher has in front of the responses to each prompt.

        Raises:
            DataError: a row lacks a column, has no user message, or has images.
        """
        found = self._render([self._conversation(prompt) for prompt in prompts])
        for rendered in found:
            if isinstance(rendered, DataError):
                raise rendered
        return [rendered.token_ids for rendered in found if not isinstance(rendered, DataError)]

    def _conversation(self, prompt: PromptRow) -> Conversation:
        source = SourceRow(Path(f"prompt {prompt.prompt_id}"), 0, prompt.row)
        messages = [dict(one) for one in Columns.of(self._data_args, source).read_messages(source)]
        last = max((place for place, one in enumerate(messages) if one["role"] == "user"), default=None)
        if last is None or prompt.vision is not None:
            rule = "has no user's message to make anew" if last is None else "has images, which it does not take"
            raise DataError(f"{source.path}: opd_teacher_prompt: the row {rule}")
        values: Mapping[str, Any] = {**prompt.row, "ground_truth": prompt.ground_truth}
        try:
            text = self._template.format_map({**values, "prompt": messages[last]["content"]})
        except (KeyError, IndexError, AttributeError) as error:
            listed = ", ".join(sorted({*values, "prompt"}))
            raise DataError(f"{source.path}: opd_teacher_prompt: no column {error}; there are {listed}") from error
        messages[last] = {**messages[last], "content": text}
        return Conversation(source, prompt.tag, self._render.templates.with_system(messages, prompt.tag))

    def add_columns(self, batch: DataProto, groups: Sequence[SampleGroup]) -> None:
        """Add :data:`TEACHER_PROMPTS` and :data:`PROMPT_LENGTHS` to the batch that was built of ``groups``."""
        sizes = torch.tensor([group.num_samples for group in groups])
        prompts = [torch.tensor(ids) for ids in self.token_ids([group.prompt for group in groups])]
        padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=-1)
        lengths = torch.tensor([len(group.prompt.token_ids) for group in groups])
        batch.batch[TEACHER_PROMPTS] = padded.repeat_interleave(sizes, 0)
        batch.batch[PROMPT_LENGTHS] = lengths.repeat_interleave(sizes)


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
