"""Reward-model runs against a plain loop, in every layout, and the exported model as the reward of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from roll import cli
from roll.tracking import METRICS_NAME, read_metrics
from tests.pipelines.conftest import Run
from tests.support.tiny_runs import (
    FinishedRun,
    TinyWorld,
    constant_rate,
    drawn_pairs,
    learned,
    role,
    supervised_layouts,
    training_args,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LEARNING_RATE, STEPS, PAIRS, SEED = 1e-4, 3, 8, 7
NUMBERS = ("reward/loss", "reward/acc", "reward/chosen_score", "reward/reject_score", "reward/grad_norm")


def fresh_model(world: TinyWorld) -> Any:
    """transformers' own, with the head that a run of seed 7 draws."""
    model = AutoModelForSequenceClassification.from_pretrained(world.model, dtype=torch.float32, num_labels=1)
    size = model.config.hidden_size
    head = torch.zeros(1, size).normal_(std=(size + 1) ** -0.5, generator=torch.Generator().manual_seed(SEED))
    model.score.weight.data.copy_(head)
    return model.eval()


def chat_score(model: Any, tokenizer: Any, question: str, answer: str) -> torch.Tensor:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state
    return model.score(hidden[0, -1])[0]


def plain_rm(world: TinyWorld, pair_ids: list[list[str]]) -> list[dict[str, float]]:
    """One row at a time, no padding, no sharing: the metrics of each step on the named pairs."""
    tokenizer, model = AutoTokenizer.from_pretrained(world.model), fresh_model(world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    pairs = {pair["id"]: pair for pair in map(json.loads, world.preferences.read_text().splitlines())}
    found = []
    for step_ids in pair_ids:
        rows = [pairs[name] for name in step_ids]
        scores = torch.stack(
            [
                torch.stack([chat_score(model, tokenizer, row["instruction"], row[side]) for row in rows])
                for side in ("chosen", "rejected")
            ]
        )
        loss = -torch.nn.functional.logsigmoid(scores[0] - scores[1]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        numbers = (loss, (scores[0] > scores[1]).float().mean(), scores[0].mean(), scores[1].mean(), norm)
        found.append({name: float(value.detach()) for name, value in zip(NUMBERS, numbers, strict=True)})
    return found


def assert_same(run: FinishedRun, wanted: list[dict[str, float]], rel: float = 2e-4) -> None:
    assert len(run.steps) == len(wanted)
    for row, numbers in zip(run.steps, wanted, strict=True):
        for name in NUMBERS:
            assert row[name] == pytest.approx(numbers[name], rel=rel, abs=2e-5), (row["step"], name)


@pytest.fixture(scope="module")
def whole(run: Run) -> FinishedRun:
    return run({}, pipeline="rm")


def test_a_run_is_a_plain_loop(whole: FinishedRun, world: TinyWorld) -> None:
    wanted = plain_rm(world, drawn_pairs("rm", STEPS, PAIRS))
    assert wanted[2]["reward/loss"] < wanted[0]["reward/loss"], "three steps must change something"
    assert_same(whole, wanted)


LAYOUTS = supervised_layouts("reward_train")


@pytest.mark.default_rows("token budget")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_numbers(run: Run, whole: FinishedRun, name: str) -> None:
    assert_same(run(LAYOUTS[name], pipeline="rm"), whole.steps)


@pytest.fixture(scope="module")
def rankings(world: TinyWorld) -> Path:
    """From two to four responses to a question, with scores."""
    path = world.folder / "rankings.jsonl"
    pairs = list(map(json.loads, world.preferences.read_text().splitlines()))
    rows = []
    for index, pair in enumerate(pairs):
        responses = [pair["chosen"], pair["rejected"], "no", "#### 1 #### 2"][: 2 + index % 3]
        scores = [2, 1, 0, 0][: len(responses)]
        row = {"id": pair["id"], "prompt": pair["instruction"], "responses": responses, "scores": scores}
        rows.append(row | {"margin": index % 3 / 2})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rankings_do_not_depend_on_the_layout(run: Run, rankings: Path) -> None:
    changes = {
        "reward_train.data_args": {"file_name": str(rankings)},
        "margin_key": "margin",
        "center_rewards_coefficient": 0.01,
        "label_smoothing": 0.1,
    }
    one = run(changes, pipeline="rm")
    two = run(LAYOUTS["two ranks, shared prompts"] | changes, pipeline="rm")
    assert_same(two, one.steps)
    assert any(name.startswith("reward/acc_margin/") for name in one.steps[0])


def test_steps_of_one_response_do_not_depend_on_the_layout(run: Run, world: TinyWorld) -> None:
    """Scores behind every step, and the new head of a LoRA model trained with its adapters."""
    path = world.folder / "steps.jsonl"
    rows = []
    for pair in map(json.loads, world.preferences.read_text().splitlines()):
        steps = pair["chosen"].splitlines()
        labels = [1] * (len(steps) - 1) + [0]
        rows.append({"id": pair["id"], "prompt": pair["instruction"], "completions": steps, "labels": labels})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "reward_train.data_args": {"file_name": str(path)},
        "loss_type": "process",
        "score_input": "tokens",
        "responses_key": "completions",
        "scores_key": "labels",
        "reward_train.model_args.lora_target": "all-linear",
        "reward_train.model_args.lora_rank": 4,
    }
    one = run(changes, pipeline="rm")
    two = run(LAYOUTS["packed to equal work"] | changes, pipeline="rm")
    names = ("reward/loss", "reward/acc", "reward/score", "reward/score_std", "reward/grad_norm")
    for row, wanted in zip(two.steps, one.steps, strict=True):
        assert {name: row[name] for name in names} == pytest.approx({name: wanted[name] for name in names}, rel=5e-4)
    assert one.steps[-1]["reward/loss"] < one.steps[0]["reward/loss"]


def test_it_goes_on_where_it_was_and_its_model_scores_in_a_run(run: Run, world: TinyWorld, tmp_path: Path) -> None:
    changes = {
        "max_steps": 4,
        "save_steps": 2,
        "eval_steps": 2,
        "validation": {"data_args": {"file_name": str(world.preferences)}},
        "reward_train.training_args": constant_rate(training_args(4, 2, 1e-3)) | {"save_hf_model": True},
    }
    first = run(changes, pipeline="rm")
    checkpoint = first.output / "checkpoints" / "checkpoint-2"
    resumed = run(changes | {"resume_from_checkpoint": str(checkpoint)}, pipeline="rm")
    assert [row["step"] for row in resumed.steps] == [2, 3]
    assert [learned(row) for row in resumed.steps] == [learned(row) for row in first.steps[2:]]
    validations = [row for row in read_metrics(first.logs / METRICS_NAME) if "val/acc" in row]
    assert validations[1]["val/loss"] < validations[0]["val/loss"]
    assert validations[1]["val/acc"] > 0.9 and 0 < validations[1]["val/ece"] < 0.5
    assert -1 <= validations[1]["val/length_correlation"] <= 1

    config = json.loads((first.output / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"] and config["score_input"] == "chat"
    assert config["score_mean"] == pytest.approx(validations[1]["val/score_mean"], rel=1e-5)
    exported = tmp_path / "exported"
    assert cli.main(["export", str(checkpoint), "--output", str(exported), "--no-check"]) == 0
    described = json.loads((exported / "config.json").read_text())
    assert {name: described[name] for name in ("score_input", "pad_token_id")} == {
        name: config[name] for name in ("score_input", "pad_token_id")
    }
    scores_in_a_run(run, world, first.output / "model", config, tmp_path)


def scores_in_a_run(run: Run, world: TinyWorld, folder: Path, config: dict[str, Any], output: Path) -> None:
    """The reward worker scores the very tokens that were trained, and normalises by what was saved."""
    model = role("hf_infer", [1], infer_batch_size=4)
    model["model_args"] |= {"model_name_or_path": str(folder), "model_type": "auto_sequence_classification"}
    settings: dict[str, Any] = {
        "rollout_dump_dir": str(output / "rollouts"),
        "reward_model": model,
        "max_steps": 1,
        "rewards": {"preference": {"worker_cls": "reward_model", "reward_kwargs": {"normalize": True}}},
    }
    run(settings, output=output)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trained = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    questions = {row["id"]: row["messages"][0]["content"] for row in map(json.loads, world.train.open())}
    samples = [json.loads(line) for line in (output / "rollouts/train-000000.jsonl").open()]
    for sample in samples[:6]:
        question = questions[sample["prompt_id"].partition("@")[0]]
        with torch.no_grad():
            raw = float(chat_score(trained, tokenizer, question, sample["response"]))
        wanted = (raw - config["score_mean"]) / config["score_std"]
        assert sample["score"] == pytest.approx(wanted, abs=1e-4)
