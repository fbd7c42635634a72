"""ROLL's example files as published load, or are refused by the name of what they need (``PUBLIC_CONFIGS_DIR``)."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from roll.config.loader import LoadedConfig, load_config
from roll.config.reading.compose import compose_file
from roll.config.reading.errors import ConfigError, Problems
from roll.evaluate import load_evaluation
from roll.pipelines.agentic.checks_entries import EXTERNAL_ENVIRONMENTS
from roll.preflight import check_parts

ROOT = Path(os.environ.get("PUBLIC_CONFIGS_DIR", "")) / "roll" / "examples"
FRAGMENTS = "config"
NUMBER = 55
"""Files of the selection that the README speaks of."""
REFUSED = {
    "experts over ranks": r"\bep_size = ([2-9]|\d\d)",
    "audio or video": r"audio_folder|video_\w+ =",
    "an environment of its own": "env_type = (" + "|".join(EXTERNAL_ENVIRONMENTS) + ")\\b",
    "playing without training": "env_manager",
    "something that is not available yet": ".",
}
"""Reasons of a refusal, each with what a file that has it says somewhere."""

pytestmark = pytest.mark.skipif(
    "PUBLIC_CONFIGS_DIR" not in os.environ or not ROOT.is_dir(),
    reason="PUBLIC_CONFIGS_DIR does not name a folder of published configurations",
)


def files() -> list[Path]:
    return sorted(file for file in ROOT.glob("*/*.yaml") if file.parent.name != FRAGMENTS) if ROOT.is_dir() else []


def flat(data: Any, prefix: str = "") -> list[str]:
    """``key.path = value`` of every leaf."""
    if isinstance(data, dict):
        return [line for key, value in data.items() for line in flat(value, f"{prefix}.{key}")]
    return [f"{prefix[1:]} = {data}"] if data not in (None, False, "") else []


@cache
def outcome(file: Path) -> str:
    """``loaded``, or the reason of the refusal; a message that is none of the known reasons is one by itself."""
    try:
        loaded: LoadedConfig[Any] = load_config(None, file, check_files=False)
        check_parts(loaded)
    except ConfigError as error:
        rules = [str(problem) for problem in error.problems]
        told = "\n".join(rules)
        if "without training" in told:
            return "playing without training"
        if "is not part of this package" in told:
            return "an environment of its own"
        if re.search("audio_folder|video_", told):
            return "audio or video"
        other = [rule for rule in rules if "not available yet" not in rule and "does not exist" not in rule]
        return other[0] if other else "something that is not available yet"
    return "loaded"


@pytest.mark.parametrize("file", files(), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_published_file_loads_or_is_refused_by_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x")
    lines = "\n".join(flat(compose_file(file, [], Problems()).data))
    found = outcome(file)
    assert found == "loaded" or found.endswith("pipeline") or re.search(REFUSED[found], lines), found


def test_as_many_load_as_the_readme_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x")
    if len(files()) != NUMBER:
        pytest.skip("another selection than the one that the sentence is about")
    counts = Counter(outcome(file) for file in files())
    environments = counts["an environment of its own"]
    others = counts.total() - counts["loaded"] - environments
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    said = re.search(r"of (\d+) in the tests, (\d+) pass `roll check`, (\d+) .*? and (\d+) ", " ".join(readme.split()))
    assert said is not None
    assert [int(count) for count in said.groups()] == [counts.total(), counts["loaded"], environments, others]


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("qwen2.5-7B-rlvr_megatron/rlvr_rollout_mock_dump.yaml", ["actor_infer", "rewards.math_rule"]),
        ("qwen2.5-0.5B-agentic/agentic_rollout_sokoban.yaml", ["actor_infer"]),
    ],
)
def test_rollout_files_are_evaluations(name: str, roles: list[str]) -> None:
    loaded = load_evaluation(str(ROOT / name), None, [], {}, check_files=False)
    assert list(loaded.plan.roles) == roles
    check_parts(loaded)
