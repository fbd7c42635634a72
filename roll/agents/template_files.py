"""The chat template of a model's folder without its tokenizer: texts alone, so that a check needs neither transformers
nor torch.

Jinja gets what transformers gives it (``apply_chat_template``): the same options, filters, globals and special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TOKENIZER = "tokenizer_config.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateFiles:
    """A tokenizer's chat template and special tokens, by the names under which a tokenizer has them. ``folder``: the
    model's, with ``tokenizer_config.json``. Raises ``ValueError``: the file is no JSON object."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = _read(folder / TOKENIZER)
        saved = folder / "special_tokens_map.json"
        self._tokens = (_read(saved) if saved.is_file() else {}) | self._config
        self.chat_template = self._template()

    @property
    def has_own_code(self) -> bool:
        """The model brings its own tokenizer class, which may render differently."""
        return "auto_map" in self._config

    @property
    def special_tokens_map(self) -> dict[str, Any]:
        return {name: text for name in _SPECIAL if (text := _text(self._tokens.get(name)))}

    @property
    def eos_token_id(self) -> int | None:
        end = self.special_tokens_map.get("eos_token")
        # -1: no added token. `convert_ids_to_tokens` knows it by that, and checks need no other id of it.
        return next((number for number, text in self._added.items() if text == end), -1) if end else None

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """The text of a special token; None for others, which end no turn."""
        return self.special_tokens_map["eos_token"] if token_id == -1 else self._added.get(token_id)

    def get_chat_template(self, tools: Sequence[Any] | None = None) -> str:
        """The template for conversations with or without tools."""
        templates = self.chat_template
        if isinstance(templates, str):
            return templates
        return templates["tool_use" if tools and "tool_use" in templates else "default"]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        **arguments: object,
    ) -> str:
        assert not tokenize
        template = _compiled(chat_template or self.get_chat_template(tools))
        variables = self.special_tokens_map | arguments
        return template.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **variables
        )

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        """Return no ids: checks only need texts."""
        return {"input_ids": []}

    @cached_property
    def _added(self) -> dict[int, str]:
        """Ids of added tokens to their texts."""
        listed = self._config.get("added_tokens_decoder")
        if isinstance(listed, dict):
            return {int(number): str(_text(token)) for number, token in listed.items()}
        saved = self._folder / "tokenizer.json"
        added = _read(saved).get("added_tokens", []) if saved.is_file() else []
        return {int(token["id"]): str(token["content"]) for token in added}

    def _template(self) -> str | dict[str, str]:
        """The template of a separate file, else of the tokenizer's; empty without one."""
        own = self._folder / "chat_template.jinja"
        further = sorted((self._folder / "additional_chat_templates").glob("*.jinja"))
        if own.is_file():
            default = own.read_text("utf-8")
            return {"default": default} | {one.stem: one.read_text("utf-8") for one in further} if further else default
        template = self._config.get("chat_template")
        if isinstance(template, list):
            return {one["name"]: one["template"] for one in template}
        return template if isinstance(template, str | dict) else ""


def _read(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text("utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is no JSON object")
    return value


def _text(token: str | dict[str, Any] | None) -> str | None:
    """A special token is a text, or an object with one."""
    return token.get("content") if isinstance(token, dict) else token


class _Generation(Extension):
    """``{% generation %}``: marks responses, which does not change the text."""

    tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    # Sandboxed, as in transformers: a template is code of whoever made the model.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
