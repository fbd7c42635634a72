"""GSM8K from the published files to a trained model, as a user runs it: preparation, the script, trailing overrides.

The last test needs the published files in the folder that the environment variable ``GSM8K_DIR`` names.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from roll.datasets.reading import read_rows
from roll.rewards import RewardSample, build_reward
from roll.tracking import read_metrics
from tests.examples.metric_names import undocumented
from tests.examples.pages import ROOT

sys.path.insert(0, str(ROOT / "examples/data"))  # as the scripts there find one another
from convert import main, prepare_gsm8k

SCRIPT = "examples/gsm8k/run_gsm8k.sh"
VALIDATED = 48
SMALL = (
    "num_gpus_per_node=1",
    "max_steps=2",
    "eval_steps=2",
    "save_steps=2",
    "val_batch_size=32",
    "rollout_batch_size=8",
    "prompt_length=512",
    "response_length=24",
    "actor_train.training_args.per_device_train_batch_size=16",
    "actor_train.training_args.gradient_accumulation_steps=2",
    "actor_train.model_args.dtype=fp32",
    "actor_infer.model_args.dtype=fp32",
    "reference.model_args.dtype=fp32",
    "actor_infer.strategy_args.strategy_name=hf_infer",  # the recipe's vLLM is for GPUs
    "rewards.gsm8k_rule.reward_kwargs.method=flexible",
    "rewards.gsm8k_rule.reward_kwargs.format_score=0.1",
    "rewards.gsm8k_rule.world_size=1",
    "validation.data_args.file_name=[validation-head.jsonl]",
)
"""An untrained model never solves a problem; ``flexible`` with a score for any number gives it something to learn."""


ROWS = [
    {"question": "Ann has 3 hens and gets 4.", "answer": "3+4 = <<3+4=7>>7\n#### 7"},
    {"question": "A house for $1,200 and a barn?", "answer": "1200+34 = 1,234\n#### 1,234"},
    {"question": "How warm is it’s shade?", "answer": "5-8 = -3\n#### -3"},
]


def write_split(folder: Path, split: str, ending: str, rows: list[dict[str, str]]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if ending == ".jsonl":
        (folder / f"{split}.jsonl").write_text(lines)
    elif ending == ".jsonl.gz":
        with gzip.open(folder / f"{split}.jsonl.gz", "wt") as file:
            file.write(lines)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}{ending}")


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet", "-00000-of-00001.parquet"])
def test_every_published_form_gives_the_same_rows(tmp_path: Path, ending: str) -> None:
    write_split(tmp_path, "train", ending, ROWS)
    write_split(tmp_path, "test", ending, ROWS[:1])
    output = tmp_path / "out"
    assert main(["gsm8k", "--input", str(tmp_path), "--output", str(output), "--instruction", "Be brief."]) == 0
    train = [source.row for source in read_rows(str(output / "train.jsonl"))]
    assert [row["ground_truth"] for row in train] == ["7", "1234", "-3"]
    assert train[0] == {
        "id": "gsm8k-train-0",
        "tag": "gsm8k",
        "messages": [{"role": "user", "content": "Ann has 3 hens and gets 4. Be brief."}],
        "prompt": "Ann has 3 hens and gets 4. Be brief.",
        "ground_truth": "7",
        **ROWS[0],
    }
    assert len(read_rows(str(output / "validation.jsonl"))) == 1


def test_system_message_and_no_instruction(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_split(tmp_path, split, ".jsonl", ROWS)
    prepare_gsm8k(tmp_path, tmp_path / "out", instruction="", system="You count.")
    messages = read_rows(str(tmp_path / "out" / "train.jsonl"))[0].row["messages"]
    assert messages == [{"role": "system", "content": "You count."}, {"role": "user", "content": ROWS[0]["question"]}]


def test_what_is_wrong_with_the_input(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run() -> int:
        caplog.clear()
        return main(["gsm8k", "--input", str(tmp_path), "--output", str(tmp_path / "out")])

    assert run() == 2
    assert "expected train.jsonl (or .jsonl.gz, .parquet" in caplog.text
    write_split(tmp_path, "train", ".jsonl", [ROWS[0], {"question": "?", "answer": "no number"}])
    assert run() == 2
    assert "row 2: the answer must end in '#### <number>', found 'no number'" in caplog.text
    write_split(tmp_path, "train", ".jsonl", [{"question": "?"}])
    assert run() == 2
    assert "row 1: column 'answer' expected, found only ['question']" in caplog.text
    assert not (tmp_path / "out").exists()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The examples in a folder of their own, so that a run writes nothing into this one."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("artifacts", "__pycache__"))
    return tmp_path


def run_script(checkout: Path, *overrides: str, gsm8k_dir: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "GSM8K_DIR"}
    environment |= {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    if gsm8k_dir is not None:
        environment["GSM8K_DIR"] = gsm8k_dir
    return subprocess.run(
        [checkout / SCRIPT, *overrides], env=environment, cwd=checkout.parent, capture_output=True, text=True
    )


def read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:  # not splitlines(): some problems contain U+2028
        return [json.loads(line) for line in lines]


@pytest.mark.long_rows("overrides")
@pytest.mark.parametrize(
    ("overrides", "folder", "said"),
    [
        ((), None, ("git clone https://github.com/openai/grade-school-math", "GSM8K_DIR=")),
        ((), "no/such/folder", ("no/such/folder: expected train.jsonl",)),
        # Own files need no download; the recipe's own mistakes are all told at once.
        (
            ("actor_train.data_args.file_name=mine.jsonl", "max_step=3"),
            None,
            ("'mine.jsonl': no such file", "max_step = 3: unknown key; the nearest known one is max_steps"),
        ),
    ],
    ids=["no data", "wrong folder", "overrides"],
)
def test_mistakes_are_told_before_anything_starts(
    checkout: Path, overrides: tuple[str, ...], folder: str | None, said: tuple[str, ...]
) -> None:
    done = run_script(checkout, *overrides, gsm8k_dir=folder)
    assert done.returncode == 2
    assert all(text in done.stderr for text in said)
    assert not (checkout / "data").exists() and not (checkout / "output").exists()


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.skipif("GSM8K_DIR" not in os.environ, reason="GSM8K_DIR does not name a folder with the published files")
def test_two_steps_on_the_published_problems(checkout: Path, tiny_model: Path) -> None:
    published = Path(os.environ["GSM8K_DIR"]).resolve()
    with (published / "test.jsonl").open(encoding="utf-8") as lines:
        head = list(islice(lines, VALIDATED))
    (checkout / "head").mkdir()
    (checkout / "head/train.jsonl").write_text(head[0])
    (checkout / "head/test.jsonl").write_text("".join(head))
    prepare = [sys.executable, str(ROOT / "examples/data/convert.py"), "gsm8k", "--input", "head", "--output", "."]
    subprocess.run(prepare, cwd=checkout, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    (checkout / "validation.jsonl").rename(checkout / "validation-head.jsonl")

    done = run_script(checkout, f"pretrain={tiny_model}", *SMALL, gsm8k_dir=str(published))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    training, validation = (read(checkout / f"data/gsm8k/{name}.jsonl") for name in ("train", "validation"))
    assert (len(training), len(validation)) == (7473, 1319)
    rule = build_reward("gsm8k_rule")
    for ending, score in (("", 1.0), ("1", 0.0)):
        answers = [RewardSample(row["prompt"], row["answer"] + ending, row["ground_truth"]) for row in training]
        assert {result.score for result in rule(answers)} == {score}
    output = checkout / "output/gsm8k_grpo"
    check_samples(output / "samples", training)
    check_metrics(read_metrics(output / "logs/metrics.jsonl"))
    assert (output / "checkpoints/checkpoint-2/manifest.json").is_file()
    assert (output / "model/model.safetensors").is_file()
    assert (output / "report.html").is_file()
    assert "val/greedy/accuracy" in done.stdout


def check_samples(folder: Path, training: list[dict[str, Any]]) -> None:
    """Eight answers to each of eight problems a step, scored against the published answer."""
    truths = {row["prompt"]: row["ground_truth"] for row in training}
    scores = set()
    for step in range(2):
        rows = read(folder / f"train-{step:06d}.jsonl")
        assert len(rows) == 64
        assert len({row["prompt_id"] for row in rows}) == 8
        for row in rows:
            question = row["prompt"].removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
            assert question.endswith('the final answer after "####".')
            assert row["ground_truth"] == truths[question]
            assert row["response_tokens"] <= 24
            assert row["error"] is None
            scores.add(row["score"])
    assert scores <= {0.0, 0.1, 1.0}
    assert len(scores) > 1
    assert len(read(folder / "validation-000002.jsonl")) == VALIDATED


def check_metrics(rows: list[dict[str, float]]) -> None:
    """Two steps that learn something, between a first and a last validation; the documentation knows all names."""
    assert undocumented({name for row in rows for name in row} - {"step", "time"}) == []
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[:2]:
        assert row["actor/grad_norm"] > 0
        assert row["actor/lr"] > 0
        assert row["system/samples"] == 64
        # Engine and trainer hold the same float32 weights: what is left is rounding.
        assert row["actor/train_infer_log_diff_abs_max"] < 1e-3
    assert rows[0]["actor/kl_loss"] < rows[1]["actor/kl_loss"]
    for row in (rows[0], rows[2]):
        assert 0 <= row["val/greedy/accuracy"] <= 1
        assert 0 <= row["val_correct/gsm8k/mean"] <= 1
