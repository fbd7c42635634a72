"""Agentic files: ROLL's keys and ours, what they mean, and mistakes that are found before anything starts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from roll.config.choices import ADV_ESTIMATORS
from roll.config.reading.legacy_keys import DEAD_KEYS
from roll.pipelines.agentic.checks_entries import EXTERNAL_ENVIRONMENTS, TEMPLATE_FIELDS
from roll.pipelines.agentic.config import MANAGERS, AgenticPlan
from roll.pipelines.agentic.definition import check_environments, own_group_filter
from tests.config.good import LAKE, changed, load, mistakes


def planned(folder: Path, changes: dict[str, Any] | None = None) -> AgenticPlan:
    plan = load(folder, changed(changes or {}, LAKE)).plan
    assert isinstance(plan, AgenticPlan)
    return plan


def test_environments_of_other_libraries_are_not_built(tmp_path: Path) -> None:
    check_environments(load(tmp_path, changed({"custom_envs.lake.env_type": "math:ASDiv2K"}, LAKE)))


class DropsAll:
    """A ``group_filter_cls``."""

    def filter(self, group_id: str, episode_id: int, group: list[Any]) -> bool:
        return True


def test_group_filters_of_ones_own() -> None:
    assert own_group_filter(f"{__name__}.DropsAll").filter("g", 0, [])
    for path, words in ((f"{__name__}.Missing", "cannot be built"), (f"{__name__}.planned", "cannot be built")):
        with pytest.raises(ValueError, match=words):
            own_group_filter(path)


def test_a_filter_leaves_out_groups(tmp_path: Path) -> None:
    from roll.pipelines.agentic.pipeline import group_filter

    section = planned(tmp_path, {"train_env_manager.group_filter_cls": f"{__name__}.DropsAll"}).train.section
    keeps = group_filter(section)
    assert not keeps(_group([1.0, 0.0]))
    spread = {"train_env_manager.group_filter_config": {"type": "std_filter"}}
    keeps = group_filter(planned(tmp_path, spread).train.section)
    assert keeps(_group([1.0, 0.0])) and not keeps(_group([1.0, 1.0]))


def _group(rewards: list[float]) -> Any:
    from roll.agents.conversation import Conversations
    from roll.agents.episode import Episode, Task
    from roll.rollout.episodes import EpisodeGroup

    task = Task("lake", 1)
    none: Any = None
    episodes = [Episode(task, Conversations(none), outcome="terminated", reward=reward) for reward in rewards]
    return EpisodeGroup(0, task, episodes)


def test_variables_of_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    from roll.pipelines.agentic.players import make_with_variables

    monkeypatch.setenv("OF_THE_ENVIRONMENT", "none")
    given: Any = make_with_variables(
        {"OF_THE_ENVIRONMENT": "one"}, lambda: cast("Any", os.environ["OF_THE_ENVIRONMENT"])
    )
    assert given == "one"


PAGE = (Path(__file__).parents[2] / "docs" / "agentic.md").read_text(encoding="utf-8")


def test_the_configurations_of_the_page_load(tmp_path: Path) -> None:
    first, second, judged = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
    entries = {**first["custom_envs"], **second["custom_envs"]}
    more = {"custom_envs": entries, "train_env_manager": first["train_env_manager"] | {"tags": list(entries)}}
    assert mistakes(tmp_path, first) == () == mistakes(tmp_path, first | more)
    plan = load(tmp_path, first | more).plan
    assert isinstance(plan, AgenticPlan)
    assert [entry.agent for entry in plan.entries.values()] == [None, "tools", "black_box"]
    lake = first["custom_envs"]["lake"] | judged["custom_envs"]["lake"]
    plan = load(tmp_path, first | judged | {"custom_envs": {"lake": lake}}).plan
    assert "reward" in plan.roles


def test_the_tables_of_the_page(tmp_path: Path) -> None:
    for name, (context, samples) in MANAGERS.items():
        assert f"| `{name}` | `context: {context}`, `samples: {samples}`" in PAGE
    for name in DEAD_KEYS["AgenticConfig"]:
        assert f"`{name}`" in PAGE or name in ("model_name", "response_length", "batch_adjust_mode")
    for name in EXTERNAL_ENVIRONMENTS:
        assert f"`{name}`" in PAGE
    reference = (Path(__file__).parents[2] / "docs" / "configuration-reference.md").read_text(encoding="utf-8")
    for name in {field for names in TEMPLATE_FIELDS.values() for field in names}:
        assert f"{{{name}}}" in reference
    for row in ADV_ESTIMATORS.rows:
        if row.works_in_turns:
            assert f"| `{row.name}` |" in PAGE
