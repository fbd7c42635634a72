"""Rows of on-policy distillation beyond their prompts: responses of the data set (``lmbda``), and prompts that only
teachers see (``opd_teacher_prompt``)."""

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
from roll.methods.opd import PROMPT_LENGTHS, TEACHER_PROMPTS
from roll.protocol import DataProto
from roll.rollout.groups import FinishedGroup, SampleGroup
from roll.rollout.loops import RolloutContext, SingleTurn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def is_off_policy(order: int, lmbda: float) -> bool:
    """True if the prompt that was drawn as number ``order`` is answered by its row: a share of 1 - ``lmbda`` of all,
    evenly spread."""
    share = 1.0 - lmbda
    return int((order + 1) * share + 1e-9) > int(order * share + 1e-9)


class DatasetResponses:
    """A rollout loop: a share of the prompts is answered by the policy, the others by their rows (GKD, arXiv
    2306.13649, algorithm 1).

    Args:
        max_new_tokens: longer responses of rows are cut there.
    """

    def __init__(
        self, data_args: DataArguments, lmbda: float, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
    ) -> None:
        self._data_args = data_args
        self._tokenizer = tokenizer
        self._lmbda = lmbda
        self._max_new_tokens = max_new_tokens
        self._sampled = SingleTurn()
        self.version = 0
        """Version of the step's weights; a row's response counts as new as a sampled one."""

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

    def __init__(
        self,
        template: str,
        data_args: DataArguments,
        templates: TemplateChoice,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._data_args = data_args
        self._template = template
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
            rule = "has no user message to fill in" if last is None else "has images, which it does not take"
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
