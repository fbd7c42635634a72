"""Conversations to texts and token ids, the whole set in one tokenizer call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roll.datasets.columns import Message
from roll.datasets.reading import SourceRow
from roll.datasets.templates import PLAIN_TEMPLATES, get_template
from roll.datasets.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TemplateChoice:
    """The template of a row: that of its tag, else the common one. Names are checked on creation."""

    common: str
    by_tag: Mapping[str, str] | None = field(default=None)

    def __post_init__(self) -> None:
        for name in {self.common, *(self.by_tag or {}).values()}:
            get_template(name)

    def of(self, tag: str) -> str:
        return (self.by_tag or {}).get(tag, self.common)


def render_and_tokenize(
    tokenizer: PreTrainedTokenizerBase,
    templates: TemplateChoice,
    conversations: Sequence[Sequence[Message]],
    tags: Sequence[str],
    sources: Sequence[SourceRow],
) -> list[tuple[str, list[int]]]:
    """Text and token ids of each conversation. Equal conversations share one list of ids.

    Raises:
        DataError: a conversation that its template cannot render, or that comes out empty.
    """
    # Sets with several rows a prompt are common (demonstrations, samples of one question): each is rendered once.
    keys = [(templates.of(tag), repr(messages)) for tag, messages in zip(tags, conversations, strict=True)]
    texts: dict[tuple[str, str], str] = {}
    for key, messages, source in zip(keys, conversations, sources, strict=True):
        if key not in texts:
            texts[key] = render(tokenizer, key[0], messages, source)
    encoded = tokenize(tokenizer, list(texts.values()), [name in PLAIN_TEMPLATES for name, _ in texts])
    rendered = dict(zip(texts, zip(texts.values(), encoded, strict=True), strict=True))
    for key, source in zip(keys, sources, strict=True):
        if not rendered[key][1]:
            raise DataError(f"{source.place}: the prompt is empty")
    return [rendered[key] for key in keys]


def render(tokenizer: PreTrainedTokenizerBase, name: str, messages: Sequence[Message], source: SourceRow) -> str:
    from jinja2 import TemplateError

    try:
        return get_template(name)(tokenizer, messages)
    except (TemplateError, TypeError) as error:
        raise DataError(f"{source.place}: template {name!r} cannot render this conversation: {error}") from error


def tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], add_special_tokens: Sequence[bool]
) -> list[list[int]]:
    """Token ids of each text; a text whose template has written the special tokens itself gets no others."""
    result: list[list[int]] = [[] for _ in texts]
    for special in sorted(set(add_special_tokens)):
        where = [i for i, wanted in enumerate(add_special_tokens) if wanted == special]
        encoded = tokenizer([texts[i] for i in where], add_special_tokens=special, return_attention_mask=False)
        for i, ids in zip(where, encoded["input_ids"], strict=True):
            result[i] = ids
    return result
