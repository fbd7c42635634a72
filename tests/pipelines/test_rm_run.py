"""Reward-model runs against a plain loop, in every layout, and such models as the rewards of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2ForSequenceClassification,
)

from roll import cli
from tests.pipelines.conftest import Run
from tests.support.tiny_runs import (
    HERE,
    FinishedRun,
    TinyWorld,
    constant_rate,
    drawn_pairs,
    learned,
    role,
    supervised_layouts,
    training_args,
)

pytestmark = pytest.mark.e2e

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
def wanted(world: TinyWorld) -> list[dict[str, float]]:
    found = plain_rm(world, drawn_pairs("rm", STEPS, PAIRS))
    assert found[2]["reward/loss"] < found[0]["reward/loss"], "three steps must change something"
    return found


LAYOUTS = {"one rank": {}, **supervised_layouts("reward_train")}


@pytest.mark.long
@pytest.mark.default_rows("token budget")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_numbers_of_a_plain_loop(run: Run, wanted: list[dict[str, float]], name: str) -> None:
    assert_same(run(LAYOUTS[name], pipeline="rm"), wanted)


@pytest.mark.matrix
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


@pytest.mark.long
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
    validations = first.with_metric("val/acc")
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
    scores_in_a_run(run, world, first.output / "model", config)


def scores_in_a_run(run: Run, world: TinyWorld, folder: Path, config: dict[str, Any]) -> None:
    """The reward worker scores the very tokens that were trained, and normalises by what was saved."""
    model = role("hf_infer", [1], infer_batch_size=4)
    model["model_args"] |= {"model_name_or_path": str(folder), "model_type": "auto_sequence_classification"}
    settings: dict[str, Any] = {
        "reward_model": model,
        "max_steps": 1,
        "rewards": {"preference": {"worker_cls": "reward_model", "reward_kwargs": {"normalize": True}}},
    }
    done = run(settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trained = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    questions = {row["id"]: row["messages"][0]["content"] for row in map(json.loads, world.train.open())}
    for sample in done.samples(0)[:6]:
        question = questions[sample["prompt_id"].partition("@")[0]]
        with torch.no_grad():
            raw = float(chat_score(trained, tokenizer, question, sample["response"]))
        wanted = (raw - config["score_mean"]) / config["score_std"]
        assert sample["score"] == pytest.approx(wanted, abs=1e-4)


@pytest.fixture(scope="module")
def reward_model(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the policy's tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("reward_model")
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    config = AutoConfig.from_pretrained(world.model, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_scores_are_those_of_the_model_alone(run: Run, world: TinyWorld, reward_model: Path) -> None:
    model = role("hf_infer", [1], infer_batch_size=4)
    model["model_args"] |= {"model_name_or_path": str(reward_model), "model_type": "auto_sequence_classification"}
    changes: dict[str, Any] = {
        "reward_model": model,
        "rewards": {
            "preference": {"worker_cls": "reward_model", "tag_included": ["even"], "reward_kwargs": {"squash": "tanh"}},
            "both": {
                "tag_included": ["odd"],
                "components": {
                    "reward_model": {"weight": 0.5},
                    "digits": {"worker_cls": f"{HERE}.rewards.digit_share"},
                },
            },
        },
        "validation": {"data_args": {"file_name": [str(world.validation)], "messages": "messages"}},
        "eval_steps": 2,
    }
    finished = run(changes)
    questions = {}
    for line in (*world.train.open(), *world.validation.open()):
        row = json.loads(line)
        questions[row["id"]] = row["messages"]
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    model_alone = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32).eval()
    domains = set()
    for row in finished.steps:
        samples = finished.samples(row["step"])
        raw = []
        for sample in samples:
            domains.add(sample["domain"])
            (question,) = questions[sample["prompt_id"].partition("@")[0]]
            with torch.no_grad():
                score = float(chat_score(model_alone, tokenizer, question["content"], sample["response"]))
            raw.append(score)
            digits = sum(map(str.isdigit, sample["response"])) / max(len(sample["response"]), 1)
            expected = math.tanh(score) if sample["domain"] == "preference" else 0.5 * score + digits
            assert sample["score"] == pytest.approx(expected, abs=1e-4)
        of = [score for score, sample in zip(raw, samples, strict=True) if sample["domain"] == "both"]
        if of:
            assert row["reward/both/reward_model/raw"] == pytest.approx(sum(of) / len(of), abs=1e-4)
            assert row["reward/both/reward_model/error_rate"] == 0.0
    assert domains == {"preference", "both"}
