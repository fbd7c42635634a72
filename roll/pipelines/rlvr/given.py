"""Inputs of on-policy distillation from the rows, besides prompts: responses that somebody else gave (``lmbda``), and
prompts that only teachers see (``opd_teacher_prompt``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll.config.roles import DataArguments
from roll.datasets.columns import Columns
from roll.datasets.reading import SourceRow
from roll.datasets.sft import read_demonstration
from roll.datasets.templates import Conversation, Renderer, TemplateChoice
from roll.datasets.types import DataError, PromptRow
from roll.pipelines.rlvr.config import RLVRConfig
from roll.protocol import DataProto
from roll.protocol.vision import IMAGES
from roll.rollout.groups import FinishedGroup, SampleGroup
from roll.rollout.loops import RolloutContext, SingleTurn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEACHER_PROMPTS, PROMPT_LENGTHS = "teacher_prompt_ids", "prompt_lengths"
"""Columns of a batch: int64 (B, P), the prompt that teachers see, padded with -1; int64 (B,), tokens of the student's.
"""


def is_given(order: int, lmbda: float) -> bool:
    """True where the prompt that was drawn as number ``order`` comes with its own response: a share of 1 - ``lmbda`` of
    all, evenly spread."""
    share = 1.0 - lmbda
    return int((order + 1) * share + 1e-9) > int(order * share + 1e-9)


class GivenResponses:
    """A rollout loop: a share of the prompts is answered by the policy, the others by their rows (GKD, arXiv
    2306.13649, algorithm 1).

    Args:
        max_new_tokens: longer responses of rows are cut there.
    """

    def __init__(
        self, data_args: DataArguments, tokenizer: PreTrainedTokenizerBase, lmbda: float, max_new_tokens: int
    ) -> None:
        self._data_args = data_args
        self._tokenizer = tokenizer
        self._lmbda = lmbda
        self._max_new_tokens = max_new_tokens
        self._sampled = SingleTurn()
        self.version = 0
        """Of the weights of the step; a given response counts as new as a sampled one."""

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        if not is_given(context.order, self._lmbda):
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


def as_teachers_see(batch: DataProto, pad_token_id: int = 0) -> DataProto:
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
    seen.batch["input_ids"] = padded(rows, pad_token_id)
    seen.batch["attention_mask"] = padded([torch.ones(len(row), dtype=torch.bool) for row in rows], False)
    seen.batch["response_mask"] = padded(masks, False)
    return seen


def back_in_place(values: torch.Tensor, seen: DataProto, batch: DataProto) -> torch.Tensor:
    """Move values of the response tokens of ``seen`` (B, L', ...) to those of ``batch`` (B, L, ...)."""
    if seen is batch:
        return values
    mask = batch.batch["response_mask"]
    column = values.new_zeros(*mask.shape, *values.shape[2:])
    column[mask] = values[seen.batch["response_mask"]]
    return column
