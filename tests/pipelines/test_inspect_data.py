"""``roll inspect-data`` on the tiny world: counts, lengths, and rows whose colours say where their text comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from roll import cli
from roll.config.roles import DataArguments
from roll.datasets import DataError, PromptRow
from roll.pipelines.files import load_tokenizer
from roll.pipelines.inspect_data import STYLES, Painter, inspect_data
from tests.support.tiny_runs import (
    TinyWorld,
    dpo_settings,
    grpo_changes,
    load_changed,
    rlvr_settings,
    rm_settings,
    role,
    sft_settings,
)


def shown(loaded: Any, only: str | None = None, row_id: str | None = None, rows: int = 1) -> str:
    out = StringIO()
    inspect_data(loaded, Console(width=120, file=out, emoji=False), rows, only, row_id)
    return out.getvalue()


def pieces(text: Text) -> Iterator[tuple[str, str]]:
    """(text, its last style) of every stretch with one style."""
    stretches: list[list[str]] = []
    for i, character in enumerate(text.plain):
        style = str([span.style for span in text.spans if span.start <= i < span.end][-1])
        if stretches and stretches[-1][1] == style:
            stretches[-1][0] += character
        else:
            stretches.append([character, style])
    return ((stretch, style) for stretch, style in stretches)


def test_rlvr_sets(world: TinyWorld, tmp_path: Path) -> None:
    changes = grpo_changes(world) | {"actor_train.data_args.on_bad_row": "skip"}
    broken = tmp_path / "broken.jsonl"
    broken.write_text(world.train.read_text() + "{\n")
    loaded = load_changed(rlvr_settings(world, tmp_path), changes | {"actor_train.data_args.file_name": str(broken)})
    text = shown(loaded)
    assert "65 rows read, 64 kept, 0 too long, 1 bad" in text
    assert text.count("digits: tokens of a row") == 3 and "(limit" in text
    assert all(f" {name} " in text for name in ("train", "validation", "evens"))
    first = json.loads(world.train.read_text().splitlines()[0])
    assert first["messages"][0]["content"] in text.replace("\n", "") and first["id"] in text
    alone = shown(loaded, "evens")
    assert "train-" not in alone and "filtered out" in alone
    last = json.loads(world.train.read_text().splitlines()[-1])
    assert last["id"] in shown(loaded, "train", last["id"]) and first["id"] not in shown(loaded, "train", last["id"])
    with pytest.raises(DataError, match="no set is called 'odd'; the sets are train, validation, evens"):
        shown(loaded, "odd")
    with pytest.raises(DataError, match="no row has the id 'nobody'"):
        shown(loaded, None, "nobody")


def test_sft_sets_by_the_command(
    world: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_changed(sft_settings(world, tmp_path), {})
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["inspect-data", str(loaded.source), "--rows", "1"]) == 0
    text = capsys.readouterr().out
    assert "sft: tokens of a row" in text and "sft-0" in text
    assert cli.main(["inspect-data", str(loaded.source), "--set", "x"]) == 1


def test_colours_say_where_the_text_comes_from(world: TinyWorld) -> None:
    tokenizer = load_tokenizer(str(world.model), False)
    question = json.loads(world.train.read_text().splitlines()[0])["messages"][0]["content"]
    messages = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    row = PromptRow("r", "d", "t", ids, "", None, {"messages": messages})
    text = Painter(tokenizer)(row, DataArguments())
    assert text.plain == tokenizer.decode(ids)
    found = list(pieces(text))
    assert (question, STYLES["content"]) in found
    assert ("<|im_start|>", STYLES["special"]) in found and ("user\n", STYLES["template"]) in found


def test_rows_that_cannot_be_scored_or_are_answered_already(
    world: TinyWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Said by ``inspect-data`` and by the run; a set without any truth ends both."""
    rows = [json.loads(line) for line in world.train.read_text().splitlines()]
    rows[0].pop("ground_truth")
    rows[1]["messages"].append({"role": "assistant", "content": "4"})
    file = tmp_path / "odd.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = grpo_changes(world) | {
        "actor_train.data_args.file_name": str(file),
        "rewards.digits.worker_cls": "exact_match",
        "rewards.digits.reward_kwargs": {},
    }
    text = shown(load_changed(rlvr_settings(world, tmp_path), changes), "train").replace("\n", "")
    assert "digits: 1 row of 64 without ground_truth: exact_match cannot score them" in text
    assert "digits: 1 prompt of 64 with an assistant's turn at the end" in text
    assert "1 row of 64 without ground_truth" in caplog.text
    file.write_text("".join(json.dumps({**row, "ground_truth": None}) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"rewards\.digits: exact_match needs a ground_truth, and none of its 64 rows"):
        shown(load_changed(rlvr_settings(world, tmp_path), changes), "train")


def test_rows_and_teachers_that_do_not_meet(world: TinyWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    section = role("fsdp2_infer", [0]) | {"model_args": {"model_name_or_path": str(world.teacher)}}
    changes = {"pipeline": "opd", "is_pure_opd": True, "teacher": section | {"tag_included": ["even"]}}
    shown(load_changed(rlvr_settings(world, tmp_path), changes), "train")
    odd = sum(json.loads(line)["tag"] == "odd" for line in world.train.read_text().splitlines())
    assert f"no teacher sees {odd} rows ('odd'): nothing is learnt from them" in caplog.text
    changes["teacher"]["tag_included"] = ["evne"]
    with pytest.raises(DataError, match=r"teacher\.tag_included: no row of .* one of these tags, but 'odd', 'even'"):
        shown(load_changed(rlvr_settings(world, tmp_path), changes), "train")


@pytest.mark.parametrize("settings", [dpo_settings, rm_settings])
def test_preferences_are_shown_with_all_their_responses(world: TinyWorld, tmp_path: Path, settings: Any) -> None:
    text = shown(load_changed(settings(world, tmp_path), {}), only="train", row_id="pair-3")
    pair = json.loads(world.preferences.read_text().splitlines()[3])
    assert all(pair[side] in text.replace("<|im_end|>", "") or side == "chosen" for side in ("chosen", "rejected"))
    assert pair["chosen"].splitlines()[-1] in text and "64 kept" in text
