from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from roll.config.roles import DataArguments
from roll.datasets import DataError, PromptDataset, SftDataset, ShuffledEpochs
from roll.datasets.templates import TEMPLATES
from tests.datasets.conftest import Write, row, rows_of


def build(
    tokenizer: Any, files: str | list[str], domains: dict[str, list[str]] | None = None, **more: Any
) -> PromptDataset:
    settings = {"prompt_length": 1000, **more}
    data_args = DataArguments(file_name=files, **settings.pop("data_args", {}))
    wanted = {"sums": ["easy", "hard"]} if domains is None else domains
    return PromptDataset.build(data_args, tokenizer, settings.pop("prompt_length"), wanted, **settings)


def test_a_row_carries_all_that_rewards_need(tokenizer: Any, write_jsonl: Write) -> None:
    written = row("r1", ground_truth=["72"], difficulty=3, extra={"a": 1})
    others = [row(str(i), text=text) for i, text in enumerate(["a", "How many eggs? é", "x" * 50, "1234 + 5"])]
    prompts = build(tokenizer, write_jsonl([written, *others]))
    prompt = prompts[0]
    assert (prompt.prompt_id, prompt.domain, prompt.tag, prompt.ground_truth) == ("r1", "sums", "easy", ["72"])
    assert prompt.row == written
    assert prompt.prompt_text == "<|im_start|>user\nHow many eggs?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.token_ids) == prompt.prompt_text
    for one, given in zip(prompts, [written, *others], strict=True):
        alone = tokenizer.apply_chat_template(given["messages"], add_generation_prompt=True)["input_ids"]
        assert one.token_ids == alone


STRICT_TEMPLATE = """{%- for m in messages %}{{ m.role + ' ' }}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}
{{- m.tool_calls[0].function.arguments | tojson }}{% if m.content is not none %}{{ 'and text' }}{% endif %}
{%- else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"""


def test_a_table_gives_the_prompts_of_its_json_lines(tokenizer: Any, write_jsonl: Write, tmp_path: Path) -> None:
    """Also where the lines were written from the table; the template is as strict as Llama-3.1's."""
    calls = [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "add", "arguments": {"a": 1, "b": 2}}]
    said = [{"role": "assistant", "content": None, "tool_calls": [{"function": one}]} for one in calls]
    talks = [[{"role": "user", "content": "Weather?"}, one, {"role": "tool", "content": "7"}] for one in said]
    rows = [row("r1", messages=talks[0], ground_truth="72"), row("r2", messages=talks[1], ground_truth=None)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "strict.jinja").write_text(STRICT_TEMPLATE)
    padded = json.loads(json.dumps(rows))
    for one in padded:
        one["messages"][0] |= {"tool_calls": None, "name": None}
        one["messages"][1]["tool_calls"][0] |= {"id": None}
    files = (write_jsonl(rows), write_jsonl(padded, "padded.jsonl"), str(tmp_path / "rows.parquet"))
    found = [build(tokenizer, file, data_args={"template": str(tmp_path / "strict.jinja")}) for file in files]
    texts = [[prompt.prompt_text for prompt in prompts] for prompts in found]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][1] == 'user Weather?\nassistant {"a": 1, "b": 2}\ntool 7\n'
    truths = {(prompt.prompt_id, prompt.ground_truth) for prompts in found for prompt in prompts}
    assert truths == {("r1", "72"), ("r2", None)}


def test_prompt_columns_in_all_their_forms(tokenizer: Any, write_jsonl: Write) -> None:
    message = {"role": "user", "content": "How many?"}
    forms: list[tuple[dict[str, object], dict[str, str]]] = [
        ({"messages": [message]}, {}),
        ({"messages": json.dumps([message])}, {}),
        ({"prompt": "How many?"}, {}),
        ({"prompt": json.dumps([message])}, {"messages": "prompt"}),
        ({"question": "How many?", "messages": "unused"}, {"prompt": "question"}),
        ({"text": "How many?"}, {}),
    ]
    for columns, names in forms:
        (prompt,) = build(tokenizer, write_jsonl([{"tag": "easy", **columns}]), data_args=names)
        assert prompt.prompt_text == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"


def test_templates_by_tag_before_global_before_role(tokenizer: Any, write_jsonl: Write) -> None:
    files = write_jsonl([row("1", "easy"), row("2", "hard")])
    templates = {"data_args": {"template": "chatml"}, "global_template": "raw", "tag_to_template": {"hard": "base"}}
    raw, base = (prompt.prompt_text for prompt in build(tokenizer, files, **templates))
    assert raw == "How many eggs?"
    assert base.endswith("User: How many eggs?\nAssistant:")
    chatml = build(tokenizer, files, data_args={"template": "chatml"})[0].prompt_text
    assert chatml == build(tokenizer, files)[0].prompt_text
    for name in TEMPLATES:
        assert "How many eggs?" in build(tokenizer, files, global_template=name)[0].prompt_text, name


def test_long_prompts_are_left_out_and_counted(
    tokenizer: Any, write_jsonl: Write, caplog: pytest.LogCaptureFixture
) -> None:
    files = write_jsonl([row("1"), row("2", text="eggs " * 40), row("3", "code", text="eggs " * 50), row("4", "code")])
    domains = {"sums": ["easy"], "programs": ["code"]}
    length = len(build(tokenizer, files, domains)[0].token_ids)
    with caplog.at_level(logging.INFO, logger="roll.datasets"):
        dataset = build(tokenizer, files, domains, prompt_length=length)
    assert [prompt.prompt_id for prompt in dataset] == ["1", "4"]
    assert (dataset.counts.read, dataset.counts.kept) == (4, {"sums": 1, "programs": 1})
    assert dataset.counts.too_long == {"sums": 1, "programs": 1}
    assert "4 rows read, 2 kept, 2 too long" in caplog.text
    with pytest.raises(DataError, match=f"none of 4 prompts fits into prompt_length = 3; the shortest has {length}"):
        build(tokenizer, files, domains, prompt_length=3)


def test_tags_lead_to_domains(tokenizer: Any, write_jsonl: Write) -> None:
    files = write_jsonl([row("1", "easy"), row("2", "kod"), row("3", "kod", domain="sums"), row("4", "hard")])
    dataset = build(tokenizer, files, {"sums": ["easy", "hard"], "programs": ["kod"]})
    groups = {domain: [p.prompt_id for p in rows] for domain, rows in dataset.by_domain().items()}
    assert groups == {"sums": ["1", "3", "4"], "programs": ["2"]}
    (one,) = build(tokenizer, write_jsonl([row("1", "any")]), {"sums": []})
    assert one.domain == "sums", "without tags it takes every row"


TWO = {"math_rule": ["easy"], "programs": ["kod"]}


@pytest.mark.parametrize(
    ("given", "domains", "words"),
    [
        # A published fault: rows with unknown tags went to the domain ``math_rule`` without a word.
        (row("2", "esay"), TWO, r"data\.jsonl, row 1: unknown tag 'esay'; known tags are easy, kod"),
        (row("2", "esay"), {"math_rule": ["easy"]}, r"row 1: unknown tag 'esay'; known tags are easy;"),
        (row("1", domain="maths"), TWO, "row 1: unknown domain 'maths'; the configured rewards are math_rule"),
        ({"prompt": "?"}, TWO, "row 1: no tag and no domain"),
        (row("1"), {}, "no domain configured"),
        (row("1"), {"a": ["t"], "b": ["t"]}, r"rewards\.b\.tag_included: tag 't' already belongs to rewards\.a"),
        ({"tag": "easy", "n": "?"}, TWO, r"row 1: neither messages nor prompt among the columns \['n', 'tag'\]"),
    ],
)
def test_rows_without_a_place(
    tokenizer: Any, write_jsonl: Write, given: dict[str, Any], domains: dict[str, list[str]], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        build(tokenizer, write_jsonl([given]), domains)


def test_arguments_that_exclude_each_other(tokenizer: Any, write_jsonl: Write) -> None:
    files = write_jsonl([row("1")])
    with pytest.raises(DataError, match="exclude each other"):
        build(tokenizer, files, data_args={"messages": "messages", "prompt": "prompt"})
    with pytest.raises(DataError, match="file_name is not set"):
        PromptDataset.build(DataArguments(), tokenizer, 100, {"sums": []})
    with pytest.raises(DataError, match=r"template 'qwen2\.5' is unknown; did you mean 'qwen2_5'"):
        build(tokenizer, files, tag_to_template={"hard": "qwen2.5"})
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(DataError, match="has no chat template; use template: chatml"):
        build(bare, files)


@pytest.mark.parametrize(("bad", "message"), rows_of("bad_rows", "prompts"))
def test_bad_rows_say_where_and_what(tokenizer: Any, write_jsonl: Write, bad: object, message: str) -> None:
    with pytest.raises(DataError, match=rf"data\.jsonl, row 2: {message}"):
        build(tokenizer, write_jsonl([row("1"), bad]))


def test_ids_of_several_files_and_of_rows_without(tokenizer: Any, write_jsonl: Write, tmp_path: Path) -> None:
    """Files of different and of equal names, and one that is listed several times."""
    rows = [row("0"), {"tag": "easy", "messages": row("")["messages"]}]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    one, two = write_jsonl([row("0"), row("only")], "one.jsonl"), write_jsonl(rows, "two.jsonl")
    equal = [write_jsonl(rows, f"{folder}/train.jsonl") for folder in ("a", "b")]
    thrice = ["two/0", "two.jsonl:2", "two#2/0", "two.jsonl#2:2", "two#3/0", "two.jsonl#3:2"]
    for files, ids in (
        ([one, two], ["one/0", "only", "two/0", "two.jsonl:2"]),
        (equal, ["a/train.jsonl/0", "a/train.jsonl:2", "b/train.jsonl/0", "b/train.jsonl:2"]),
        ([two] * 3, thrice),
    ):
        assert [prompt.prompt_id for prompt in build(tokenizer, files)] == ids


def test_data_sets_load_without_the_heavy_packages() -> None:
    program = (
        "import sys, roll.datasets;"
        "print([m for m in ('torch', 'transformers', 'ray', 'datasets', 'pyarrow', 'numpy') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


QUESTION = [{"role": "user", "content": "How many eggs?"}]
VERL = {"data_source": "openai/gsm8k", "prompt": QUESTION, "reward_model": {"style": "rule", "ground_truth": "72"}}
VERL |= {"ability": "math", "extra_info": {"split": "train", "index": 0}}
"""A row as verl's own preparation scripts write it."""


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("jsonl", {}),
        ("parquet", {"prompt": "prompt"}),
        ("json text", {"messages": "prompt", "tag": "data_source"}),
        ("SkyRL's parquet", {}),
    ],
)
def test_verls_own_files_load_by_their_own_columns(
    tokenizer: Any, tmp_path: Path, write_jsonl: Write, kind: str, named: dict[str, str]
) -> None:
    rows = [VERL, {**VERL, "data_source": "lighteval/MATH"}]
    if kind.startswith("SkyRL"):
        rows = [{("reward_spec" if name == "reward_model" else name): row[name] for name in row} for row in rows]
    file = str(tmp_path / "train.parquet")
    if kind.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        text = {"reward_model": json.dumps(VERL["reward_model"])} if kind == "json text" else {}
        file = write_jsonl([row | text for row in rows])
    domains = {"sums": ["openai/gsm8k"], "proofs": ["lighteval/MATH"]}
    dataset = build(tokenizer, file, domains, data_args=named)
    wanted = [("sums", "openai/gsm8k", "72"), ("proofs", "lighteval/MATH", "72")]
    assert [(row.domain, row.tag, row.ground_truth) for row in dataset] == wanted
    assert "How many eggs?" in dataset[0].prompt_text and dataset.counts.without_truth == {}
    (one,) = build(tokenizer, write_jsonl([{**VERL, "ability": "easy"}]), data_args={"tag": "ability"})
    assert one.tag == "easy", "a tag column of one's own goes before data_source"


def test_rows_without_truth_and_answered_prompts_are_counted(tokenizer: Any, write_jsonl: Write) -> None:
    answered = row("c")
    answered["messages"] = [*answered["messages"], {"role": "assistant", "content": "72"}]  # type: ignore[misc]
    rows = [row("a", ground_truth="1"), row("b"), {**answered, "ground_truth": "72"}]
    counts = build(tokenizer, write_jsonl(rows)).counts
    assert (counts.without_truth, counts.answered) == ({"sums": 1}, {"sums": 1})


@pytest.mark.parametrize("column", ["prompt", "messages", "ground_truth"])
def test_half_a_character_is_a_bad_row(tokenizer: Any, tmp_path: Path, column: str) -> None:
    """JSON can write one half of a surrogate pair; neither a tokenizer nor a file takes it."""
    good = {"prompt": "How many?", "tag": "easy", "ground_truth": "\U0001f600"}
    half = {"prompt": "How many?", "tag": "easy", column: "cut \ud83d"}
    if column == "messages":
        half = {"messages": json.dumps([{"role": "user", "content": "cut \ud83d"}]), "tag": "easy"}
    good |= {"messages": json.dumps([{"role": "user", "content": "ok"}])} if column == "messages" else {}
    for name, text in (
        ("rows.jsonl", f"{json.dumps(good)}\n{json.dumps(half)}\n"),
        ("rows.json", json.dumps([good, half])),
    ):
        (tmp_path / name).write_text(text)
        file = str(tmp_path / name)
        with pytest.raises(DataError, match=r"row 2: .*half of a character"):
            build(tokenizer, file)
        kept = build(tokenizer, file, data_args={"on_bad_row": "skip"})
        assert len(kept) == 1 and kept[0].ground_truth == "\U0001f600"


def test_a_state_belongs_to_the_contents_of_its_rows(tokenizer: Any, write_jsonl: Write) -> None:
    rows = [row(str(i), ground_truth=str(i), response=str(i)) for i in range(4)]
    changed = [*rows[:3], {**rows[3], "ground_truth": "7", "response": "7"}]
    longer = [row(f"r{i}", ground_truth=str(i), response=str(i)) for i in range(4)]

    def prompts(found: list[dict[str, object]]) -> ShuffledEpochs[Any]:
        return ShuffledEpochs(build(tokenizer, write_jsonl(found)), 1)

    def demonstrations(found: list[dict[str, object]]) -> ShuffledEpochs[Any]:
        data_args = DataArguments(file_name=write_jsonl(found), response="response")
        return ShuffledEpochs(SftDataset.build(data_args, tokenizer, 1000), 1)

    for stream in (prompts, demonstrations):
        state = json.loads(json.dumps(stream(rows).state_dict()))
        stream(rows).load_state_dict(state)
        for others in (changed, longer, rows[::-1]):
            with pytest.raises(DataError, match="contents"):
                stream(others).load_state_dict(state)
