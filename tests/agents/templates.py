"""Tokenizers with chat templates of model families: written here in short, and TRL's copies of the published ones."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from roll.agents.chat_ids import ChatTemplate
from tests.agents.tiny import make_tokenizer

CHATML = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
DROPS_THOUGHTS = (
    "{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}{%- for m in messages -%}{%- set c = m.content -%}"
    "{%- if m.role == 'assistant' and loop.index0 < ns.last -%}{%- set c = c.split('</think>')[-1] -%}{%- endif -%}"
    "{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
# As Mistral's: no generation prompt, tools in front of the last user message.
MISTRAL = (
    "{{ bos_token }}{%- for m in messages -%}{%- if m.role == 'user' -%}{%- if loop.last and tools -%}"
    "{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif -%}"
    "{{ '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' -%}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{%- else -%}{{ ' ' + m.content + '</s>' }}{%- endif -%}{%- endfor -%}"
)


@dataclass(frozen=True)
class Family:
    name: str
    template: str
    ends: tuple[str, ...] = ("<|im_end|>",)
    tools: bool = True  # renders tool messages in turn after turn
    # Writes a plain response as it was sampled: no thinking or channel is put in or left out around it.
    plain: bool = True
    two_tools: bool = True  # renders two tool messages behind one response

    def tokenizer(self) -> Any:
        tokenizer = make_tokenizer()
        tokenizer.add_special_tokens({"extra_special_tokens": [*self.ends, "<think>", "</think>"]})
        tokenizer.bos_token = "<|endoftext|>"
        tokenizer.chat_template = self.template
        return tokenizer

    def chat_template(self, tools: list[dict[str, Any]] | None = None) -> ChatTemplate:
        tokenizer = self.tokenizer()
        return ChatTemplate(tokenizer, [tokenizer.convert_tokens_to_ids(end) for end in self.ends], tools)


WRITTEN_HERE = [
    Family("chatml", CHATML),
    Family("drops thoughts", DROPS_THOUGHTS),
    Family("mistral", MISTRAL, ("</s>",)),
]

_PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2_5": {},
    "qwen3": {},
    "qwen3_instruct_2507": {},
    "qwen3_5_think": {"plain": False},
    "llama3": {"ends": ("<|eot_id|>",)},
    "llama3_1": {"ends": ("<|eot_id|>", "<|eom_id|>"), "two_tools": False},
    "deepseekv3": {"ends": ("<｜end▁of▁sentence｜>",), "tools": False, "plain": False},
    "deepseek_r1_distill": {"ends": ("<｜end▁of▁sentence｜>",), "plain": False},
    "glm4moe": {"ends": ("<|user|>", "<|observation|>", "<|endoftext|>"), "plain": False},
    "gptoss": {"ends": ("<|return|>", "<|call|>", "<|end|>"), "plain": False},
}


@cache
def published() -> list[Family]:
    """Published templates as TRL packages them; none where it is not installed."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent / "chat_templates"
    return [Family(name, (folder / f"{name}.jinja").read_text("utf-8"), **rest) for name, rest in _PUBLISHED.items()]
