"""Masks of every assistant's turn against a reference that builds the tokens message by message."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roll.config.roles import DataArguments
from roll.datasets import DataError, SftDataset
from roll.datasets.sft import spans_of
from tests.datasets.conftest import Write, rows_of

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many eggs?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "It is 7."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "\nYes\n"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}[MARK]{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{% set f = c.function %}"
    "{{ 'call ' + f.name + ' ' + (f.arguments | tojson) }}{% endfor %}"
    "{{ '<|im_end|>' }}[END]{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = TEMPLATE.replace("[MARK]", "").replace("[END]", "")
MARKED = TEMPLATE.replace("[MARK]", "{% generation %}").replace("[END]", "{% endgeneration %}")


def reference(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[list[int], list[bool]]:
    """Each message by itself; what the assistant says, and its end, is learned."""
    ids: list[int] = []
    mask: list[bool] = []

    def add(text: str, learned: bool) -> None:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.extend(found)
        mask.extend([learned] * len(found))

    if tools:
        add(f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n", False)
    for message in messages:
        calls = [one["function"] for one in message.get("tool_calls") or ()]
        text = message["content"] + "".join(f"call {c['name']} {json.dumps(c['arguments'])}" for c in calls)
        add(f"<|im_start|>{message['role']}\n", False)
        add(f"{text}<|im_end|>", message["role"] == "assistant")
        add("\n", False)
    return ids, mask


def build(tokenizer: Any, file: str, tmp_path: Any, template: str | None = PLAIN, limit: int = 1000) -> SftDataset:
    name = "native"
    if template is not None:
        (tmp_path / "chat.jinja").write_text(template)
        name = str(tmp_path / "chat.jinja")
    return SftDataset.build(
        DataArguments(file_name=file, messages="messages", template=name), tokenizer, limit, train_on="assistant"
    )


def in_columns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a file of columns has them: every message has every key, arguments are texts."""
    found = []
    for message in messages:
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        texts = [one | {"arguments": json.dumps(one["arguments"])} for one in functions]
        calls = [{"id": None, "type": "function", "function": one} for one in texts] or None
        found.append({"role": message["role"], "content": message["content"] or None, "tool_calls": calls})
    return found


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by beginnings", "by marks"])
@pytest.mark.parametrize("tools", [None, TOOLS, json.dumps(TOOLS)], ids=["no tools", "tools", "tools as text"])
def test_every_turn_of_the_assistant_is_learned(
    tokenizer: Any, write_jsonl: Write, tmp_path: Any, template: str, tools: Any
) -> None:
    rows = [{"messages": TALK, "tools": tools}, {"messages": in_columns(TALK), "tools": tools}]
    wanted = reference(tokenizer, TALK, TOOLS if tools else None)
    for row in build(tokenizer, write_jsonl(rows), tmp_path, template):
        assert (row.input_ids, row.response_mask) == wanted
        assert row.prompt_length == row.response_mask.index(True)
        assert row.spans == spans_of(row.response_mask) and len(row.spans) == 6


def test_a_single_turn_is_learned_as_the_last_response_is(tokenizer: Any, write_jsonl: Write, tmp_path: Any) -> None:
    file = write_jsonl([{"messages": TALK[1:2], "solution": "It is 7."}])
    (one,) = build(tokenizer, file, tmp_path, None)
    (other,) = SftDataset.build(DataArguments(file_name=file, messages="messages"), tokenizer, 1000)
    end = len(other.input_ids)  # the template writes a line's end behind the turn
    assert one.input_ids[:end] == other.input_ids and one.response_mask[:end] == other.response_mask
    assert not any(one.response_mask[end:])


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any, write_jsonl: Write, tmp_path: Any) -> None:
    forgetful = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else '...' }}")
    file = write_jsonl([{"messages": TALK}])
    with pytest.raises(DataError, match=r"row 1: .* up to message 2 is no beginning of the whole conversation"):
        build(tokenizer, file, tmp_path, forgetful)
    (row,) = build(tokenizer, write_jsonl([{"messages": TALK[:3]}]), tmp_path, forgetful)
    assert sum(row.response_mask) > 3


@pytest.mark.parametrize(("row", "message"), rows_of("bad_rows", "dialogues"))
def test_rows_that_teach_nothing_say_so(
    tokenizer: Any, write_jsonl: Write, tmp_path: Any, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        build(tokenizer, write_jsonl([row]), tmp_path)


def test_templates_and_lengths(tokenizer: Any, write_jsonl: Write, tmp_path: Any) -> None:
    file = write_jsonl([{"messages": TALK}, {"messages": TALK[:5]}])
    with pytest.raises(DataError, match="template 'base' renders no conversation turn by turn"):
        arguments = DataArguments(file_name=file, messages="messages", template="base")
        SftDataset.build(arguments, tokenizer, 1000, train_on="assistant")
    lengths = build(tokenizer, file, tmp_path).lengths.tolist()
    kept = build(tokenizer, file, tmp_path, limit=max(lengths) - 1)
    assert kept.lengths.tolist() == [min(lengths)] and kept.counts.too_long == {"sft": 1}
