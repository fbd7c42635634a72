"""Judged rows from every shape of file, and the tokens that training and scoring see."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.roles import DataArguments
from roll.datasets import DataError
from roll.datasets.preferences import JudgedColumns, JudgedDataset
from roll.rewards.base import RewardResult
from roll.rollout.rewarding import ModelInput
from roll.workers.model import RewardModelWorker
from tests.datasets.conftest import Write, rows_of

ASK = "How many eggs?"
USER = {"role": "user", "content": ASK}
PROMPT = f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n"


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def build(tokenizer: Any, file: str, judgement: str = "ranking", limit: int = 1000, **options: Any) -> JudgedDataset:
    names = {name: options.pop(name) for name in JudgedColumns.__dataclass_fields__ if name in options}
    score_input = options.pop("score_input", "tokens")
    data, columns = DataArguments(file_name=file, **options), JudgedColumns(**names)
    return JudgedDataset.build(data, tokenizer, limit, columns, judgement, score_input=score_input)  # type: ignore[arg-type]


PAIR = {"prompt": ASK, "chosen": "12", "rejected": "21"}


@pytest.mark.parametrize(("name", "judgement", "row", "responses", "scores"), rows_of("published_rows", "judged"))
def test_shapes_of_rows(
    tokenizer: Any, write_jsonl: Write, name: str, judgement: str, row: Any, responses: list[str], scores: list[float]
) -> None:
    (found,) = build(tokenizer, write_jsonl([row]), judgement)
    assert tokenizer.decode(found.prompt_ids) == PROMPT
    assert [tokenizer.decode(ids) for ids in found.responses] == [f"{text}<|im_end|>" for text in responses]
    assert found.step_ends == [] and (judgement == "pairs" or found.scores == scores)
    assert found.sides[0] == found.prompt_ids + found.responses[0]


def test_pairs_with_a_longer_side_are_left_out_and_counted(tokenizer: Any, write_jsonl: Write) -> None:
    long, limit = PAIR | {"rejected": "21 " * 40}, len(tokenizer(PROMPT)["input_ids"]) + 10
    dataset = build(tokenizer, write_jsonl([long, PAIR]), "pairs", limit)
    assert len(dataset) == 1 and dataset.counts.too_long == {"preferences": 1}
    with pytest.raises(DataError, match="none of 1 pairs fits into sequence_length"):
        build(tokenizer, write_jsonl([long]), "pairs", limit)


def test_points_labels_and_steps(tokenizer: Any, write_jsonl: Write) -> None:
    """By columns of other names, too."""
    file = write_jsonl([{"ask": ASK, "good": "12", "bad": "21", "gap": 2.5}])
    (row,) = build(tokenizer, file, "pairs", chosen="good", rejected="bad", margin="gap", prompt="ask")
    assert [tokenizer.decode(ids) for ids in row.responses] == ["12<|im_end|>", "21<|im_end|>"] and row.margin == 2.5
    graded = {"prompt": ASK, "responses": ["12", "21"], "scores": [4, 0]}
    (points,) = build(tokenizer, write_jsonl([graded]), "points")
    assert points.scores == [4, 0]
    label = {"prompt": ASK, "completion": "12", "label": True}
    (labels,) = build(tokenizer, write_jsonl([label]), "labels", responses="completion", scores="label")
    assert labels.scores == [1.0] and len(labels.responses) == 1
    steps = {"prompt": ASK, "completions": ["One", "So 12"], "labels": [True, False]}
    (judged,) = build(tokenizer, write_jsonl([steps]), "steps", responses="completions", scores="labels")
    (response,) = judged.responses
    first, second = judged.step_ends
    assert [tokenizer.decode(response[:first]), tokenizer.decode(response[first:])] == ["One\n", "So 12<|im_end|>"]
    assert second == len(response) and judged.scores == [1.0, 0.0]


@pytest.mark.parametrize(("row", "judgement", "message"), rows_of("bad_rows", "judged"))
def test_rows_that_say_nothing(tokenizer: Any, write_jsonl: Write, row: Any, judgement: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(tokenizer, write_jsonl([row]), judgement)
    if judgement == "pairs" and "prompt" in row:
        assert len(build(tokenizer, write_jsonl([row, PAIR]), "pairs", on_bad_row="skip")) == 1


@pytest.mark.parametrize(("judgement", "name"), [("ranking", "responses"), ("pairs", "preferences")])
def test_a_long_prompt_is_cut_and_its_responses_are_not(
    tokenizer: Any, write_jsonl: Write, judgement: str, name: str
) -> None:
    long = {"prompt": "very " * 40 + ASK, "chosen": "12", "rejected": "21 or so"}
    file, limit = write_jsonl([long, PAIR]), 30
    assert build(tokenizer, file, judgement, limit).counts.too_long == {name: 1}
    options = {"filter_overlong_prompts": False, "truncation": "left"}
    cut, _ = dataset = build(tokenizer, file, judgement, limit, **options)
    assert dataset.counts.truncated == {name: 1}
    text = tokenizer.decode(cut.prompt_ids)
    assert text.startswith("<|im_start|>user\n") and text.endswith(PROMPT[-25:]), "the template stays whole"
    assert [tokenizer.decode(ids) for ids in cut.responses] == ["12<|im_end|>", "21 or so<|im_end|>"]
    assert max(map(len, cut.sides)) <= limit


def worker(tokenizer: Any) -> RewardModelWorker:
    """Without a model: it only reads."""
    made = RewardModelWorker.__new__(RewardModelWorker)
    made._tokenizer, made._longest, made._image_token = tokenizer, None, None
    return made


@pytest.mark.parametrize(
    ("changes", "fits", "does_not", "words"),
    [
        ({"_image_token": 7}, [1, 2], [1, 7, 2], "the prompt has images"),  # else a placeholder is scored as a word
        ({"_longest": 3}, [1, 2, 3], [1, 2, 3, 4], "4 tokens are more than the reward model's 3"),
    ],
)
def test_what_a_reward_model_does_not_read(
    tokenizer: Any, changes: dict[str, int], fits: list[int], does_not: list[int], words: str
) -> None:
    reads = worker(tokenizer)
    vars(reads).update(changes)
    assert reads._read(ModelInput(token_ids=fits)) == fits
    found = reads._read(ModelInput(token_ids=does_not))
    assert isinstance(found, RewardResult) and words in str(found.error)


def test_trl_5813_training_and_scoring_see_the_same_tokens(tokenizer: Any, write_jsonl: Write) -> None:
    """A recipe that closes responses in training and not in scoring gives other scores than it learnt."""
    turns = [USER, answer("12"), {"role": "user", "content": "Sure?"}]
    file = write_jsonl([{"messages": turns, "chosen": "Yes, 12", "rejected": "No"}])
    (chat,) = build(tokenizer, file, score_input="chat")
    for side, text in zip(chat.sides, ("Yes, 12", "No"), strict=True):
        assert side == worker(tokenizer)._read(ModelInput(messages=turns, response=text))
    (tokens,) = build(tokenizer, file, score_input="tokens")
    for side, text in zip(tokens.sides, ("Yes, 12", "No"), strict=True):
        # What an engine returns of a finished response: its end token included.
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt)["input_ids"] + tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
        assert side == worker(tokenizer)._read(ModelInput(token_ids=ids))


def test_responses_of_which_one_begins_the_other_keep_an_end_of_their_own(tokenizer: Any, write_jsonl: Write) -> None:
    (row,) = build(tokenizer, write_jsonl([{"prompt": ASK, "chosen": "12 12", "rejected": "12"}]), score_input="chat")
    assert all(row.responses) and row.sides[0] != row.sides[1]
    assert row.prompt_ids == row.sides[1][: len(row.prompt_ids)] and len(row.prompt_ids) >= len(PROMPT.split())
