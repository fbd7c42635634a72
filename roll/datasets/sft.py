"""Demonstrations for supervised training: prompt and response as one sequence, with the loss on the response alone, or
on every turn of the assistant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

from roll.config.data import TEMPLATE_ENDINGS, DataArguments
from roll.datasets.columns import Columns, Message, parsed, require, with_system
from roll.datasets.images import ImageReader
from roll.datasets.making import Draft, RowMaker
from roll.datasets.preparation import load_rows
from roll.datasets.reading import TOOLS, SourceRow
from roll.datasets.sampling import PreparedRows
from roll.datasets.templates import Conversation, Rendered, Renderer, TemplateChoice, end_of_response, tokenize
from roll.datasets.types import DataError, SftRow
from roll.datasets.vision_model import VisionModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.datasets.store import StoredRow

TrainOn = Literal["last", "assistant"]
DOMAIN = "sft"  # domain that demonstrations are counted under
GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
GROWING_TEMPLATES = frozenset(("native", "qwen2_5", "qwen3_coder", "qwen3", "qwen3_nothink", "chatml", "empty"))
"""Templates that render a conversation turn by turn; a file is taken for one, too."""


@dataclass(frozen=True)
class Masked:
    """The tokens of a conversation, and which of them carry the loss."""

    token_ids: list[int]
    mask: list[bool]


class SftDataset(PreparedRows[SftRow]):
    """Demonstrations in file order; draw from it with :class:`roll.datasets.ShuffledEpochs`."""

    @classmethod
    def build(
        cls,
        data_args: DataArguments,
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        *,
        global_template: str | None = None,
        tag_to_template: Mapping[str, str] | None = None,
        query_key: str | None = None,
        system_key: str | None = None,
        vision: VisionModel | None = None,
        train_on: TrainOn = "last",
    ) -> SftDataset:
        """Read ``data_args.file_name`` and keep the demonstrations of at most ``sequence_length`` tokens.

        The response is the column ``data_args.response``; in conversations without that column it is the last message,
        which must then be the assistant's.  Prompt and response are tokenised apart, as they are when the model
        generates, and the tokenizer's end-of-turn token closes the response.

        Args:
            query_key: a column appended to the prompt after an empty line (instruction data sets keep inputs apart).
            system_key: a column with the system message of conversations that have none of their own.
            vision: of a model that sees images.
            train_on: ``assistant``: every turn of the assistant carries the loss, as
                :class:`AssistantTurns` finds them.

        Raises:
            DataError: a file, row or template that cannot be used, or no row left.
        """
        renderer = Renderer(tokenizer, TemplateChoice.of_settings(data_args, global_template, tag_to_template))
        images = ImageReader.of(data_args, vision)
        return cls(*load_rows(SftMaker(data_args, renderer, sequence_length, images, train_on, query_key, system_key)))

    def _row(self, position: int) -> SftRow:
        store = self._store
        input_ids = store.token_ids(position)
        return SftRow(
            row_id=store.value("id", position),
            tag=store.value("tag", position),
            input_ids=input_ids,
            prompt_length=store.value("prompt_length", position),
            vision=self._vision(
                position, (store.content("row", position) or {}) if self._images is not None else {}, input_ids
            ),
            spans=store.content("spans", position),
        )


@dataclass(eq=False)
class SftMaker(RowMaker[Masked]):
    """Makes demonstrations, of which the response alone carries the loss, or every turn of the assistant. ``train_on``,
    ``query_key``, ``system_key``: as :meth:`SftDataset.build` has them. Raises ``DataError``: no file, a tokenizer
    without an end of text, or a template that does not render turn by turn."""

    limit_key, example = "sequence_length", "data/sft.jsonl"
    what: str = field(init=False, default="demonstrations")
    train_on: TrainOn = "last"
    query_key: str | None = None
    system_key: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._end = end_of_response(self.renderer.tokenizer)
        every_turn = self.train_on == "assistant"
        self._turns = AssistantTurns(self.renderer.tokenizer, self.renderer.templates) if every_turn else None

    def settings(self) -> dict[str, Any]:
        keys = {"query_key": self.query_key, "system_key": self.system_key}
        return {**keys, "train_on": self.train_on, "eos_token": self._end}

    def read(self, source: SourceRow) -> tuple[list[Message], Any]:
        """The messages, and the response, or with ``train_on: assistant`` the tools."""
        rest: Any
        if self._turns is not None:
            messages, rest = read_dialogue(self.columns, source)
        else:
            messages, rest = read_demonstration(self.columns, source, self.query_key)
        return with_system(messages, self.system_key and source.row.get(self.system_key)), rest

    def tokenize(self, drafts: Sequence[Draft]) -> list[Masked | DataError]:
        if self._turns is not None:
            return [self._turns(replace(draft, tools=draft.content)) for draft in drafts]
        texts = [f"{draft.content}{self._end}" for draft in drafts]
        responses = tokenize(self.renderer.tokenizer, texts)
        found: list[Masked | DataError] = []
        for prompt, response in zip(self.renderer(drafts), responses, strict=True):
            if isinstance(prompt, Rendered):
                mask = [False] * len(prompt.token_ids) + [True] * len(response)
                found.append(Masked(prompt.token_ids + response, mask))
            else:
                found.append(prompt)
        return found

    def expand(self, draft: Draft, tokens: Masked) -> Masked:
        ids = self.images.expand(draft.source, tokens.token_ids, draft.vision)
        if draft.vision is None:
            return replace(tokens, token_ids=ids)
        widths = zip(self.images.widths(tokens.token_ids, draft.vision), tokens.mask, strict=True)
        return Masked(ids, [flag for (_, count), flag in widths for _ in range(count)])

    def finish(self, draft: Draft, tokens: Masked) -> StoredRow | None:
        length = len(tokens.token_ids)
        if length > self.limit:
            self.tally.leave_out(DOMAIN, length)
            return None
        spans, row = spans_of(tokens.mask), None if draft.vision is None else draft.source.row
        # A response after its prompt needs no spans.
        kept = spans if self._turns is not None else ()
        return self.stored(draft, DOMAIN, tokens.token_ids, spans[0], row, spans=kept)


def read_demonstration(columns: Columns, source: SourceRow, query_key: str | None = None) -> tuple[list[Message], str]:
    """The conversation up to the response, and the response. Raises ``DataError``: no response, or one that is not a
    text."""
    messages = columns.read_messages(source)
    if columns.response in source.row:
        response = require(source, columns.response)
    elif messages[-1]["role"] == "assistant":
        response = messages.pop()["content"]
        if not messages:
            raise DataError(f"{source.place}: the conversation has only an answer; expected a user's message before it")
    else:
        raise DataError(
            f"{source.place}: no response: neither a column {columns.response!r} (data_args.response) among "
            f"{sorted(source.row)} nor a last message from the assistant"
        )
    if not isinstance(response, str) or not response:
        raise DataError(f"{source.place}: the response must be a non-empty text, found {response!r}")
    if query := query_key and source.row.get(query_key):
        content, further = messages[-1]["content"], f"\n\n{query}"
        parts = [*content, {"type": "text", "text": further}] if isinstance(content, list) else f"{content}{further}"
        messages[-1] = {**messages[-1], "content": parts}
    return messages, response


def read_dialogue(columns: Columns, source: SourceRow) -> tuple[list[Message], list[Any] | None]:
    """The conversation of a row and its tools; a response in a column of its own becomes the last turn. Raises
    ``DataError``: no conversation, no assistant's turn in it, or tools that are no list."""
    messages = [plain_message(source, one) for one in columns.read_messages(source)]
    answer = source.row.get(columns.response)
    if isinstance(answer, str) and answer and messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": answer})
    if not any(one["role"] == "assistant" for one in messages):
        raise DataError(
            f"{source.place}: no assistant's turn in the conversation, and no column {columns.response!r} "
            "(data_args.response): there is nothing to learn"
        )
    tools = source.row.get(TOOLS)
    if isinstance(tools, str):
        tools = parsed(source, TOOLS, tools) if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{source.place}: {TOOLS} must be a list of schemas, found {type(tools).__name__}")
    return messages, list(tools) if tools else None


def plain_message(source: SourceRow, message: Message) -> Message:
    """Return the message as templates expect it: text as content, arguments of tool calls as objects."""
    kept = message | {"content": message["content"] or ""}
    if "tool_calls" not in kept:
        return kept
    calls = []
    for call in kept["tool_calls"]:
        function = dict(call["function"] if isinstance(call.get("function"), Mapping) else call)
        if isinstance(function.get("arguments"), str):
            function["arguments"] = parsed(source, "tool_calls.arguments", function["arguments"] or "{}")
        # A call without the wrapper of OpenAI's interface is given one: templates look for it.
        rest = call if "function" in call else {"type": "function"}
        calls.append({**rest, "function": function})
    return kept | {"tool_calls": calls}


class AssistantTurns:
    """Renders, tokenises and masks conversations with the loss on every assistant turn, tool calls included, and on
    nothing else. Raises ``DataError``: a template that does not render turn by turn.

    The chat template determines these tokens: by its own ``{% generation %}`` marks, where it has them; else by
    what it renders of the conversation's beginnings. Turn i begins after ``render(messages[:i],
    add_generation_prompt=True)``, the prompt that the model would be given for it, and ends with
    ``render(messages[:i + 1])``, at the last special token of that (the model never has to write what a template
    adds after the end of a turn). Both must be beginnings of the whole, or a turn would be learned in a context
    that it is never generated in; a row for which they are not is refused (templates that drop the thoughts of
    earlier turns, for one).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, templates: TemplateChoice) -> None:
        for name in templates.renders:
            if name not in GROWING_TEMPLATES and not name.endswith(TEMPLATE_ENDINGS):
                raise DataError(
                    f"template {name!r} renders no conversation turn by turn, which train_on: assistant needs; "
                    f"use one of {', '.join(sorted(GROWING_TEMPLATES))}, or a .jinja file"
                )
        self._tokenizer = tokenizer
        self._templates = templates
        self._special = set(tokenizer.all_special_ids)

    def __call__(self, one: Conversation) -> Masked | DataError:
        """Tokens and mask of a conversation, or what is wrong with it."""
        from jinja2 import TemplateError

        name = self._templates.of(one.tag)
        # Arguments of the tokenizer's template by a template's name.
        variables = {**getattr(self._templates.renders[name], "keywords", {}), **self._templates.variables}
        template = str(variables.get("chat_template") or self._tokenizer.chat_template)
        try:
            if name in ("chatml", "empty") or GENERATION.search(template) is None:
                found = self._by_beginnings(one, name)
            else:
                options = {"tools": one.tools, "return_assistant_tokens_mask": True, **variables}
                marked: Any = self._tokenizer.apply_chat_template(
                    one.messages, tokenize=True, return_dict=True, **options
                )
                found = Masked(list(marked["input_ids"]), [bool(value) for value in marked["assistant_masks"]])
        except DataError as error:
            return error
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            return DataError(f"{one.source.place}: template {name!r} cannot render this conversation: {error}")
        if not any(found.mask):
            return DataError(f"{one.source.place}: the template {name!r} marks no token of an assistant's turn")
        return found

    def _by_beginnings(self, one: Conversation, name: str) -> Masked:
        """Find the turns by what the template renders of the conversation's beginnings, which are the whole's."""
        turns = [number for number, message in enumerate(one.messages) if message["role"] == "assistant"]
        text = self._render(one, name, len(one.messages), opens=False)
        beginnings = []
        for turn in turns:
            for beginning, what in (
                (self._render(one, name, turn, opens=True), "the prompt of"),
                (self._render(one, name, turn + 1, opens=False), "the conversation up to"),
            ):
                if not text.startswith(beginning):
                    raise DataError(
                        f"{one.source.place}: with template {name!r} {what} message {turn} is no beginning of the "
                        "whole conversation: that turn would be learned in a context in which it is never generated; "
                        "use train_on: last, or a template with {% generation %} marks"
                    )
                beginnings.append(beginning)
        # Where a token would span the end of a beginning, the parts are tokenised apart, as when the model generates.
        whole, *parts = tokenize(self._tokenizer, [text, *beginnings])
        edges = [len(part) for part in parts]
        if not all(whole[: len(part)] == part for part in parts):
            places = [0, *map(len, beginnings), len(text)]
            pieces = tokenize(self._tokenizer, [text[begin:end] for begin, end in pairwise(places)])
            whole, edges = [token for piece in pieces for token in piece], list(accumulate(map(len, pieces[:-1])))
        mask = [False] * len(whole)
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            # A turn ends with its last special token, if only space follows it.
            last = next((place for place in range(end - 1, begin - 1, -1) if whole[place] in self._special), None)
            if last is not None and not str(self._tokenizer.decode(whole[last + 1 : end])).strip():
                end = last + 1
            mask[begin:end] = [True] * (end - begin)
        if turns[-1] == len(one.messages) - 1 and mask[-1] and whole[-1] not in self._special:
            # A template without an end of turn: the model would never learn to stop.
            whole, mask = [*whole, self._tokenizer.eos_token_id], [*mask, True]
        return Masked(whole, mask)

    def _render(self, one: Conversation, name: str, count: int, opens: bool) -> str:
        """The first ``count`` messages, with the opening of the assistant's turn or without."""
        if count == 0:
            return ""
        tools: dict[str, Any] = {} if one.tools is None else {"tools": one.tools}
        render, variables = self._templates.renders[name], self._templates.variables
        return render(self._tokenizer, one.messages[:count], add_generation_prompt=opens, **tools, **variables)


def spans_of(mask: Sequence[bool]) -> list[int]:
    """Begin and end of every run of True, one after the other."""
    edges = [0, *map(int, mask), 0]
    return [number for number in range(len(mask) + 1) if edges[number] != edges[number + 1]]
