"""``roll init``: files that pass the check as they are, whatever the data hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll import cli
from tests.datasets.conftest import tiny  # noqa: F401  the modules of examples/tiny, as a fixture
from tests.support.tiny_runs import TinyWorld, make_world

DATA: dict[str, dict[str, Any]] = {
    "grpo": {"question": "Mia has 2 books and buys 3. How many?", "answer": "2+3=5\n#### 5"},
    "sft": {"instruction": "Add.", "input": "2 3", "output": "5"},
    "dpo": {"prompt": "2 + 3?", "chosen": "5", "rejected": "6"},
    "rm": {"prompt": "2 + 3?", "chosen": "5", "rejected": "6"},
    "distill": {"conversations": [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}]},
}
KINDS = (*DATA, "agent")


@pytest.fixture(scope="module")
def world(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:  # noqa: F811
    return make_world(tiny, tmp_path_factory.mktemp("world"))


@pytest.fixture
def start(world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``roll init KIND`` in a folder with data for it."""
    monkeypatch.chdir(tmp_path)

    def run(kind: str, *words: str, row: dict[str, Any] | None = None) -> int:
        (tmp_path / "my data.jsonl").write_text("\n".join([json.dumps(row or DATA.get(kind, {}))] * 300))
        given = () if kind == "agent" else ("--data", "my data.jsonl")
        teacher = ("--teacher", str(world.model)) if kind == "distill" else ()
        return cli.main(["init", kind, "--model", str(world.model), *given, *teacher, *words])

    return run


@pytest.mark.default_rows("*-8", "grpo-0", "agent-3")
@pytest.mark.parametrize("gpus", ["0", "3", "8"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_passes_the_check_without_a_note(
    kind: str, gpus: str, start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = () if kind == "agent" else ("--validation", "my data.jsonl")
    assert start(kind, "--gpus", gpus, *held_out) == 0
    assert cli.main(["check", f"{kind}.yaml"]) == 0, capsys.readouterr().err
    assert "\nnote" not in capsys.readouterr().out
    keys = sum(":" in line for line in Path(f"{kind}.yaml").read_text().splitlines() if not line.startswith("#"))
    assert keys <= 35
    assert start(kind) == 2, "a file that is there is not replaced"
    assert "is there and is not replaced" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"question": "2 + 3?", "answer": "5"}, "math_rule"),
        ({"prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, "ifeval"),
        ({"prompt": "Write f.", "test_cases": [{"assert": "f() == 1"}]}, "code_sandbox"),
    ],
)
def test_the_reward_follows_from_the_rows(row: dict[str, Any], rule: str, start: Any) -> None:
    assert start("grpo", row=row) == 0
    assert yaml.safe_load(Path("grpo.yaml").read_text())["rewards"] == {rule: {"worker_cls": rule}}


def test_rows_that_do_not_fit_are_refused(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("grpo", row={"prompt": "Say something."}) == 2
    error = capsys.readouterr().err
    assert "no ground truth, and no reward of your own is named by --reward; the columns are prompt: say by" in error
    assert start("dpo", row={"prompt": "?", "better": "a"}) == 2
    assert "need the columns chosen and rejected; the columns are better, prompt" in capsys.readouterr().err
    assert start("sft", row={"prompt": "?"}) == 2
    assert "no response" in capsys.readouterr().err
    assert start("sft", "--columns", "promt=x") == 2
    assert "must be KEY=COLUMN, with a key of prompt" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_columns_under_other_names(kind: str, start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"prompt": "Question text", "grpo": "Right: answer", "sft": "Reply"}
    row, key = dict.fromkeys(names.values(), "2 + 3?"), "ground_truth" if kind == "grpo" else "response"
    assert start(kind, row=row) == 2
    assert "say by --columns which is which" in capsys.readouterr().err
    words = [f"prompt={names['prompt']}", f"{key}={names[kind]}"]
    assert start(kind, "--validation", "my data.jsonl", "--columns", *words, row=row) == 0
    assert cli.main(["check", f"{kind}.yaml"]) == 0, capsys.readouterr().err


def test_models_that_are_none(start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for path in ("./gone", "empty"):
        assert start("sft", "--model", path) == 2
        assert f"--model = '{path}': must be a model folder (with a config.json)" in capsys.readouterr().err
    (tmp_path / "empty/config.json").write_text("{}")
    assert start("sft", "--model", "empty") == 2
    assert "--model = 'empty'" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.default_rows("grpo", "agent")
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_runs_as_it_is(kind: str, start: Any) -> None:
    assert start(kind) == 0
    batch = "rollout_batch_size=2 response_length=8 actor_train.training_args.gradient_accumulation_steps=4"
    small = {"grpo": batch, "agent": "sequence_length=512 custom_envs.lake.max_tokens_per_step=4"}.get(kind, "")
    assert cli.main(["run", f"{kind}.yaml", "max_steps=1", "eval_steps=0", "save_steps=0", *small.split()]) == 0
