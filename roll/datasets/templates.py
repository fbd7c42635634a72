"""Conversations to prompts: templates, rendering and tokenising many at a time, truncation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from roll.config.data import TEMPLATE_ENDINGS, DataArguments
from roll.config.reading.errors import did_you_mean
from roll.datasets.columns import Message, with_system
from roll.datasets.reading import SourceRow
from roll.datasets.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Render = Callable[..., str]
"""``(tokenizer, messages, **variables) -> text``; the variables go to the tokenizer's template."""

BASE_INTRODUCTION = (
    "A dialogue between a user, who asks, and an assistant, who solves. The assistant first reasons inside "
    "<think> </think> and then answers inside <answer> </answer>, with the final result in \\boxed{{}}."
)
LONG_COT_SYSTEM = (
    "Think step by step before you answer: explore, check and correct your reasoning, then give a clear final solution."
)
LONG_COT_REQUEST = "Return your final response within \\boxed{}. "


def render_native(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **variables: Any) -> str:
    """The tokenizer's own template, with the opening of the assistant's turn; ``variables`` go to the template."""
    if tokenizer.chat_template is None and "chat_template" not in variables:
        raise DataError(
            f"template: the tokenizer of {tokenizer.name_or_path!r} has no chat template; "
            "use template: chatml for chat models, template: base or raw for base models"
        )
    options = {"add_generation_prompt": True} | variables
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    assert isinstance(text, str)
    return text


def render_chatml(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **variables: object) -> str:
    """ChatML spelled out, whatever the tokenizer's own template is."""
    if variables.get("tools"):
        raise TypeError("it has no place for tools")
    turns = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return f"{turns}<|im_start|>assistant\n" if variables.get("add_generation_prompt", True) else turns


def render_long_cot(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **variables: object) -> str:
    """Asks for a long chain of thought and a boxed answer."""
    conversation = [
        {**message, "content": LONG_COT_REQUEST + message["content"]} if message["role"] == "user" else message
        for message in messages
    ]
    if conversation[0]["role"] != "system":
        conversation.insert(0, {"role": "system", "content": LONG_COT_SYSTEM})
    return render_native(tokenizer, conversation, **variables)


def render_opened_thought(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **variables: object) -> str:
    """The tokenizer's own template followed by an opened thought."""
    return render_native(tokenizer, messages, **variables) + "<think>\n"


def render_plain(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], frame: str, **variables: object
) -> str:
    """The contents alone in a frame of plain text, for models without chat training."""
    return frame.format("\n".join(message["content"] for message in messages))


TEMPLATES: dict[str, Render] = {
    "native": render_native,
    "qwen2_5": render_native,
    "qwen2-vl": render_native,
    "qwen3_coder": render_native,
    "qwen3": partial(render_native, enable_thinking=True),
    "qwen3_nothink": partial(render_native, enable_thinking=False),
    "chatml": render_chatml,
    "empty": render_chatml,
    # The idea of DeepSeek-R1-Zero's template (arXiv 2501.12948, table 1): thought, answer and box in tags.
    "base": partial(render_plain, frame=f"{BASE_INTRODUCTION}\nUser: {{}}\nAssistant:"),
    "raw": partial(render_plain, frame="{}"),
    "longCOT_qwen2.5": render_long_cot,
    "longcot_V3": render_opened_thought,
}
PLAIN_TEMPLATES = frozenset({"base", "raw"})
"""Render no special tokens themselves: the tokenizer adds its own (a BOS, where the model wants one)."""


def template_text(name: str) -> str:
    """Content of a template file. Raises ``DataError``: the file cannot be read."""
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"template {name!r}: the file cannot be read: {error}") from error


@dataclass(frozen=True)
class TemplateChoice:
    """Template and system message of a row, by its tag, else the common ones. Raises ``DataError``: an unknown name;
    the message gives the nearest known one. A file that cannot be read."""

    common: str
    by_tag: Mapping[str, str] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # for the tokenizer's template or the Jinja file
    system: str | None = None
    renders: dict[str, Render] = field(init=False, repr=False, default_factory=dict)

    @classmethod
    def of_settings(
        cls, data_args: DataArguments, global_template: str | None, tag_to_template: Mapping[str, str] | None
    ) -> TemplateChoice:
        """``tag_to_template`` before ``global_template`` before the role's own ``template``."""
        return cls(
            global_template or data_args.template,
            tag_to_template,
            data_args.chat_template_kwargs,
            data_args.system_prompt,
        )

    def __post_init__(self) -> None:
        for name in {self.common, *(self.by_tag or {}).values()}:
            if name in TEMPLATES:
                self.renders[name] = TEMPLATES[name]
            elif name.endswith(TEMPLATE_ENDINGS):
                # A Jinja file sees what a tokenizer's template sees (``messages``, ``bos_token`` ...).
                self.renders[name] = partial(render_native, chat_template=template_text(name))
            else:
                hint = did_you_mean(name, TEMPLATES)
                raise DataError(f"template {name!r} is unknown; {hint}known: {', '.join(TEMPLATES)}, or a .jinja file")

    def of(self, tag: str) -> str:
        """The template's name."""
        return (self.by_tag or {}).get(tag, self.common)

    def with_system(self, messages: list[Message]) -> list[Message]:
        """The conversation with the system message, unless it has one of its own."""
        return with_system(messages, self.system)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages to render, system message included, under the tag that chooses the template."""

    source: SourceRow
    tag: str
    messages: list[Message]
    tools: list[Any] | None = None  # schemas of the tools that a training template is given


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model sees it."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Renderer:
    """Renders and tokenises with one tokenizer and one choice of templates."""

    tokenizer: PreTrainedTokenizerBase
    templates: TemplateChoice

    def __call__(self, conversations: Sequence[Conversation]) -> list[Rendered | DataError]:
        """Text and token ids of each conversation, or what is wrong with it; equal ones share one list of ids."""
        # Sets with several rows a prompt are common (demonstrations, samples of one question): each is rendered once.
        keys = [(self.templates.of(one.tag), repr(one.messages)) for one in conversations]
        texts: dict[tuple[str, str], str | DataError] = {}
        for key, one in zip(keys, conversations, strict=True):
            if key not in texts:
                texts[key] = self.render(one)
        good = {key: text for key, text in texts.items() if isinstance(text, str)}
        encoded = tokenize(self.tokenizer, list(good.values()), [name in PLAIN_TEMPLATES for name, _ in good])
        found: dict[tuple[str, str], Any] = dict(texts)
        found |= {key: Rendered(text, ids) for (key, text), ids in zip(good.items(), encoded, strict=True)}
        return [
            found[key]
            if isinstance(found[key], DataError) or found[key].token_ids
            else DataError(f"{one.source.place}: the prompt is empty")
            for key, one in zip(keys, conversations, strict=True)
        ]

    def render(self, one: Conversation) -> str | DataError:
        """Render one conversation; the error where its template refuses it."""
        from jinja2 import TemplateError

        name = self.templates.of(one.tag)
        try:
            return self.templates.renders[name](self.tokenizer, one.messages, **self.templates.variables)
        except (TemplateError, TypeError) as error:
            return DataError(f"{one.source.place}: template {name!r} cannot render this conversation: {error}")


def chat_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], response: str) -> str:
    """A finished conversation by the tokenizer's own template, as a reward model is trained on it and scores it; its
    special tokens are in the text."""
    conversation: list[Any] = [*messages, {"role": "assistant", "content": response}]
    return str(tokenizer.apply_chat_template(conversation, tokenize=False))


def end_of_response(tokenizer: PreTrainedTokenizerBase) -> str:
    """The token that closes a response. Raises ``DataError``: the tokenizer has none."""
    if tokenizer.eos_token is None:
        raise DataError(f"the tokenizer of {tokenizer.name_or_path!r} has no EOS token to close a response with")
    return str(tokenizer.eos_token)


def tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], add_special_tokens: Sequence[bool] = ()
) -> list[list[int]]:
    """Token ids of each text, on all cores where the tokenizer is a fast one; a text whose template has written the
    special tokens itself gets no others (so all texts, where ``add_special_tokens`` is empty)."""
    wanted = list(add_special_tokens) or [False] * len(texts)
    result: list[list[int]] = [[] for _ in texts]
    for special in sorted(set(wanted)):
        where = [i for i, one in enumerate(wanted) if one == special]
        encoded = tokenizer([texts[i] for i in where], add_special_tokens=special, return_attention_mask=False)
        for i, ids in zip(where, encoded["input_ids"], strict=True):
            result[i] = ids
    return result


Side = Literal["left", "right", "middle"]
MAX_ATTEMPTS = 4  # a cut text may take another token or two at the seam, and is then cut a little more


def truncate(one: Conversation, long: Rendered, limit: int, side: Side, renderer: Renderer) -> Rendered | None:
    """The conversation cut so that its prompt (now ``long``) has at most ``limit`` tokens; None where even an empty
    message would leave it too long. ``side``: which part of the last user message goes.

    Returns:
        None where even an empty message would leave the prompt too long.
    """
    users = [i for i, message in enumerate(one.messages) if message["role"] == "user"]
    if not users:
        return None
    position, decode = users[-1], renderer.tokenizer.decode
    ids = renderer.tokenizer(str(one.messages[position]["content"]), add_special_tokens=False)["input_ids"]
    excess = len(long.token_ids) - limit
    for _ in range(MAX_ATTEMPTS):
        if excess >= len(ids):
            return None
        keep = len(ids) - excess
        head = {"left": 0, "right": keep, "middle": (keep + 1) // 2}[side]
        parts = [part for part in (ids[:head], ids[head + excess :]) if part]
        text = "".join(str(decode(part, skip_special_tokens=False)) for part in parts)
        messages = list(one.messages)
        messages[position] = {**messages[position], "content": text}
        (result,) = renderer([Conversation(one.source, one.tag, messages)])
        if isinstance(result, DataError):
            return None
        if len(result.token_ids) <= limit:
            return result
        excess += len(result.token_ids) - limit
    return None
