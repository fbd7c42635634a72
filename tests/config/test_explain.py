"""Commands that explain the configuration or start a project; the wheel that carries the recipes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from roll import __version__, cli
from roll.config.loader import copy_recipes, load_config
from roll.config.reference import explain

ROOT = Path(__file__).parents[2]
RECIPES = sorted(file for file in (ROOT / "examples").rglob("*.yaml") if not {"artifacts", "cluster"} & set(file.parts))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"roll {__version__}\n"


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "actor_train.training_args.learning_rate"]) == 0
    text = capsys.readouterr().out
    assert "<role>.training_args" in text and "default 5e-05" in text and "Peak learning rate" in text
    assert {found.section for found in explain("temperature")} == {"<role>.generating_args"}
    assert [found.text for found in explain("training_args.seed")] == ["Has no effect; the run's seed decides"]
    assert cli.main(["explain", "lerning_rate"]) == 2
    assert "learning_rate" in capsys.readouterr().err


def test_the_command_alone_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    listed = re.findall(r"^  ([a-z][a-z-]*)  ", shown, re.M)
    (commands,) = cli.build_parser()._subparsers._group_actions  # type: ignore[union-attr]
    assert sorted(listed) == sorted(commands.choices or ())
    for line in re.findall(r"^  roll (.+?) +#", shown, re.M):
        assert cli.build_parser().parse_args(line.split())


def test_a_misspelt_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for word, hint in (("chek", "did you mean check?"), ("xyzzy", "roll alone lists")):
        with pytest.raises(SystemExit) as caught:
            cli.main([word])
        assert caught.value.code == 2 and hint in capsys.readouterr().err


def test_schema_names_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    validator = Draft202012Validator(json.loads(capsys.readouterr().out))
    wrong = {"max_steps": 0, "actor_train": {"training_args": {"lerning_rate": 1}}, "estimator": ["grpo"]}
    wrong["actor_infer"] = {"strategy_args": {"strategy_name": "fsdp3_train"}}
    assert {error.json_path for error in validator.iter_errors(wrong)} == {
        "$.max_steps",
        "$.actor_train.training_args",
        "$.actor_infer.strategy_args.strategy_name",
        "$.estimator",
    }
    assert not list(validator.iter_errors({"max_steps": "${steps}", "actor_train": None, "steps": 3}))


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last of some words."""
    typed = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; compopt() {{ :; }}; _roll_without_space"
    done = subprocess.run(
        ["bash", "--norc"],
        input=f"{script}\n{ask}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"",
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


def test_completion_knows_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "roll", "che") == ["check"]
    assert completed(script, "roll", "inspect-") == ["inspect-data"]
    assert completed(script, "roll", "check", "x.yaml", "actor_train.training_args.learn") == [
        "actor_train.training_args.learning_rate="
    ]
    assert "rollout_batch_size=" in completed(script, "roll", "run", "x.yaml", "max_steps=3", "rollout_")


def test_init_copies_recipes_and_replaces_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "recipes", str(tmp_path)]) == 0
    copied = {file.relative_to(tmp_path) for file in tmp_path.rglob("*.yaml")}
    assert {file.relative_to(ROOT) for file in RECIPES} <= copied
    assert load_config(None, tmp_path / "examples/gsm8k/rlvr_config.yaml", check_files=False)
    assert cli.main(["init", "recipes", str(tmp_path)]) == 2
    assert "already holds examples and configs" in capsys.readouterr().err


@pytest.mark.long
def test_wheel_carries_the_recipes(tmp_path: Path) -> None:
    """Outside a clone the commands and the first run need recipes, presets, tables and the generator."""
    source = tmp_path / "source"
    copy_recipes(source)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    (source / "roll").symlink_to(ROOT / "roll")
    build = "from setuptools import setup; import runpy; runpy.run_path('setup.py', run_name='__main__')"
    command = [sys.executable, "-c", build, "-q", "bdist_wheel", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("roll_rl-")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "-q", "--no-input", "install", "--no-deps"]
    subprocess.run([*pip, "--no-compile", "--target", str(site), str(wheel)], check=True, capture_output=True)
    (tmp_path / "elsewhere").mkdir()
    for words in (
        ["check", "gsm8k/rlvr_config", "--skip-files"],
        ["check", "qwen2.5-7B-rlvr_deepspeed/rlvr_config", "--skip-files"],
        ["translate", "--quiet", "data.train_batch_size=64"],
        ["explain", "num_generations"],
        ["init", "recipes", "."],
    ):
        process = subprocess.run(
            [sys.executable, "-m", "roll.cli", *words],
            cwd=tmp_path / "elsewhere",
            env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, (words, process.stdout, process.stderr)
    assert (tmp_path / "elsewhere" / "examples" / "tiny" / "prepare.py").is_file()
    asked = "from roll.config.installation import install_command; print(install_command('peft'))"
    environment = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"}
    shown = subprocess.run([sys.executable, "-c", asked], cwd=tmp_path, env=environment, capture_output=True, text=True)
    *install, source = shlex.split(shown.stdout)
    assert install == ["pip", "install"] and source == f"{wheel}[peft]"
    subprocess.run([*pip, "--dry-run", source], check=True, capture_output=True)
