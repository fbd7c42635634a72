"""Options of ``data_args`` besides files and columns: bad rows, filters, templates, lengths, order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.data import CurriculumArguments
from roll.config.roles import DataArguments
from roll.datasets import DataError, DomainSampler, EpochOrder, PromptDataset, SftDataset
from tests.datasets.conftest import Write, row

DOMAINS = {"sums": ["easy", "hard"], "programs": ["code"]}


def build(tokenizer: Any, files: str, prompt_length: int = 1000, **options: Any) -> PromptDataset:
    return PromptDataset.build(DataArguments(file_name=files, **options), tokenizer, prompt_length, DOMAINS)


def short_and_even(row: dict[str, Any]) -> bool:
    return len(row["messages"][0]["content"]) < 40 and int(row["id"]) % 2 == 0


def test_bad_rows_are_skipped_and_counted(
    tokenizer: Any, write_jsonl: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strict = tmp_path / "strict.jinja"
    strict.write_text("{% if messages|length > 1 %}{{ raise_exception('one turn') }}{% endif %}?")
    two = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    bad = ["{broken", row("2", "unknown"), {"id": "3", "tag": "easy"}, row("1"), row("4", messages=[{"role": "?"}])]
    files = write_jsonl([row("1"), *bad, row("5", "code"), row("6", messages=two)])
    dataset = build(tokenizer, files, on_bad_row="skip", template=str(strict))
    assert [(prompt.prompt_id, prompt.domain) for prompt in dataset] == [("1", "sums"), ("5", "programs")]
    assert (dataset.counts.read, dataset.counts.bad) == (8, 6)
    assert dataset.counts.kept == {"sums": 1, "programs": 1}
    assert "6 bad" in str(dataset.counts)
    for reason in ("row 2: not valid JSON", "row 3: unknown tag", "row 4: column 'messages'", "duplicate id '1'"):
        assert reason in caplog.text
    with pytest.raises(DataError, match="row 2: not valid JSON"):
        build(tokenizer, files)
    with pytest.raises(DataError, match=r"row 1: template '.*strict.jinja' cannot render .* one turn"):
        build(tokenizer, write_jsonl([row("6", messages=two)]), template=str(strict))
    with pytest.raises(DataError, match=r"no row is left: 1 rows read, 0 kept, 0 too long, 1 bad"):
        build(tokenizer, write_jsonl(["[1]"]), on_bad_row="skip")


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ({"difficulty": {"min": 0.2, "max": 0.5}}, ["2", "3"]),
        ({"difficulty": {"max": 0.1}}, ["1"]),
        ({"source": "a"}, ["1", "3"]),
        ({"source": ["b", "c"], "difficulty": {"min": 0.6}}, ["4"]),
        (f"{__name__}.short_and_even", ["2", "4"]),
    ],
)
def test_filters(tokenizer: Any, write_jsonl: Write, condition: Any, wanted: list[str]) -> None:
    values = [("1", 0.1, "a"), ("2", 0.2, "b"), ("3", "0.5", "a"), ("4", 0.9, "c")]
    files = write_jsonl([row(name, difficulty=hard, source=source) for name, hard, source in values])
    dataset = build(tokenizer, files, dataset_filter=condition)
    assert dataset.ids == wanted
    assert dataset.counts.filtered == 4 - len(wanted)


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ({"level": 1}, r"row 1: dataset_filter asks for the column 'level'"),
        ({"difficulty": {"min": 1}}, r"row 1: dataset_filter wants a number in column 'difficulty', found 'very'"),
        ("tests.datasets.nowhere.keep", "cannot be imported"),
        ({"difficulty": "other"}, "no row is left: 1 rows read, 0 kept, 0 too long, 1 filtered out"),
    ],
)
def test_filters_that_do_not_work_say_why(tokenizer: Any, write_jsonl: Write, condition: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        build(tokenizer, write_jsonl([row("1", difficulty="very")]), dataset_filter=condition)


def test_system_prompts_and_variables(tokenizer: Any, write_jsonl: Write, tmp_path: Path) -> None:
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "?"}]
    files = write_jsonl([row("1"), row("2", "hard"), row("3", messages=own)])
    template = tmp_path / "t.j2"
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{{ mood }}")
    options = {"system_prompt": "Be brief.", "chat_template_kwargs": {"mood": "!"}}
    dataset = build(tokenizer, files, template=str(template), **options)
    assert [prompt.prompt_text for prompt in dataset] == [
        "[system] Be brief.[user] How many eggs?!",
        "[system] Be brief.[user] How many eggs?!",
        "[system] Mine.[user] ?!",
    ]
    assert dataset[0].row["messages"] == [{"role": "user", "content": "How many eggs?"}]
    with pytest.raises(DataError, match=r"template '/nowhere\.jinja': the file cannot be read"):
        build(tokenizer, files, template="/nowhere.jinja")


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_truncation_cuts_the_question_and_keeps_the_template(tokenizer: Any, write_jsonl: Write, side: str) -> None:
    text = " ".join(f"{i} apples and" for i in range(40))
    files = write_jsonl([row("1"), row("2", text=text)])
    short, long = build(tokenizer, files)
    limit = len(short.token_ids) + 12
    dataset = build(tokenizer, files, limit, filter_overlong_prompts=False, truncation=side)
    kept, cut = dataset
    assert kept == short
    assert limit - 3 <= len(cut.token_ids) <= limit < len(long.token_ids)
    beginning, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert cut.prompt_text.startswith(beginning) and cut.prompt_text.endswith(end)
    assert tokenizer.decode(cut.token_ids) == cut.prompt_text
    inner = cut.prompt_text.removeprefix(beginning).removesuffix(end)
    assert (text.startswith(inner[:4]), text.endswith(inner[-4:])) == (side != "left", side != "right")
    assert (dataset.counts.truncated, dataset.counts.too_long) == ({"sums": 1}, {})
    with pytest.raises(DataError, match=rf"row 2: the prompt has \d+ tokens, prompt_length is {limit}; set"):
        build(tokenizer, files, limit, filter_overlong_prompts=False)
    # Where the template alone is too long, nothing can be cut.
    with pytest.raises(DataError, match="none of 2 prompts fits into prompt_length = 2"):
        build(tokenizer, files, 2, filter_overlong_prompts=False, truncation=side)


def test_a_curriculum_goes_from_easy_to_hard_and_then_shuffles() -> None:
    difficulties = [(7 * i) % 20 for i in range(20)]
    order = EpochOrder(20, 1, "d", True, CurriculumArguments(bands=4, epochs=2), difficulties)
    epochs = [order.of_epoch(epoch) for epoch in range(3)]
    for epoch in epochs[:2]:
        levels = [difficulties[i] for i in epoch]
        assert [set(levels[at : at + 5]) for at in range(0, 20, 5)] == [
            set(range(at, at + 5)) for at in range(0, 20, 5)
        ]
        assert levels != sorted(levels)
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert {difficulties[i] for i in epochs[2][:5]} != set(range(5))
    hard = EpochOrder(20, 1, "d", False, CurriculumArguments(bands=2, order="hard_first"), difficulties)
    assert min(difficulties[i] for i in hard.of_epoch(0)[:10]) == 10
    assert hard.of_epoch(1) == list(range(20))


def test_a_curriculum_over_files_and_its_state(tokenizer: Any, write_jsonl: Write) -> None:
    files = write_jsonl([row(str(i), difficulty=10 - i) for i in range(10)])
    data_args = DataArguments(file_name=files, curriculum=CurriculumArguments(bands=10))
    dataset = PromptDataset.build(data_args, tokenizer, 1000, DOMAINS)

    def sampler(seed: int = 42, **changes: Any) -> DomainSampler:
        return DomainSampler(
            dataset.by_domain(), None, seed, DataArguments(**{"curriculum": data_args.curriculum} | changes)
        )

    in_order = sampler(curriculum=None, shuffle=False).next_batch(12)
    assert [prompt.prompt_id for prompt in in_order] == [*map(str, range(10)), "0@1", "1@1"]
    one = sampler()
    assert [prompt.prompt_id for prompt in one.next_batch(4)] == ["9", "8", "7", "6"]
    other = sampler()
    other.load_state_dict(one.state_dict())
    assert other.next_batch(12) == one.next_batch(12)
    with pytest.raises(DataError, match=r"curriculum \{.*\}, now None"):
        sampler(curriculum=None).load_state_dict(one.state_dict())
    with pytest.raises(DataError, match=r"data_args\.curriculum wants a number in column 'difficulty', found None"):
        build(tokenizer, write_jsonl([row("1")]), curriculum=CurriculumArguments())


def test_demonstrations_have_the_same_options(tokenizer: Any, write_jsonl: Write) -> None:
    rows = [row(str(i), text=f"{i} eggs", response=f"{i}", level=i) for i in range(4)]
    files = write_jsonl([*rows, row("9", level=1)])
    options = {"response": "response", "dataset_filter": {"level": {"max": 2}}, "system_prompt": "Count."}
    data_args = DataArguments(file_name=files, on_bad_row="skip", **options)
    dataset = SftDataset.build(data_args, tokenizer, 1000)
    assert [one.row_id for one in dataset] == ["0", "1", "2"]
    assert (dataset.counts.filtered, dataset.counts.bad, dataset.counts.kept) == (1, 1, {"sft": 3})
    assert tokenizer.decode(dataset[1].input_ids).startswith("<|im_start|>system\nCount.")
    assert [one.row_id for one in dataset[1:]] == ["1", "2"]
