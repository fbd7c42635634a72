"""Agentic files: ROLL's keys and ours, what they mean, and mistakes that are found before anything starts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from roll.config.estimators import ADV_ESTIMATORS
from roll.config.loader import LoadedConfig
from roll.config.reading.errors import ConfigError
from roll.config.reading.legacy_keys import DEAD_KEYS
from roll.pipelines.agentic.checks_entries import EXTERNAL_ENVIRONMENTS, TEMPLATE_FIELDS
from roll.pipelines.agentic.plan import MANAGERS, AgenticPlan
from roll.pipelines.agentic.preflight import check_environments, own_group_filter
from roll.preflight import check_parts
from tests.config.good import GONE, LAKE, changed, load, mistakes

PUBLISHED = "roll.pipeline.agentic.env_manager"
PROXY = {"env_manager_cls": f"{PUBLISHED}.x.ProxyEnvManager", "agent_runner_cls": "roll.x.GEMRunner", "http_timeout": 9}


def planned(folder: Path, changes: dict[str, Any] | None = None) -> AgenticPlan:
    plan = load(folder, changed(changes or {}, LAKE)).plan
    assert isinstance(plan, AgenticPlan)
    return plan


def notes(loaded: LoadedConfig[Any]) -> dict[str, str]:
    return {notice.key: notice.text for notice in loaded.warnings}


def test_episodes_need_not_divide_into_optimizer_steps(tmp_path: Path) -> None:
    for accumulation, steps, size in ((3, 1, "at most 96"), (1, 2, "32")):
        changes = {"actor_train.training_args.gradient_accumulation_steps": accumulation}
        loaded = load(tmp_path, changed(changes, LAKE))
        training = loaded.plan.training["actor_train"]
        assert training.optimizer_steps_per_step == steps and f" of {size};" in training.sentence()
        assert ("actor_train.training_args.gradient_accumulation_steps" in notes(loaded)) == ("most" in size)


def test_what_a_plan_says(tmp_path: Path) -> None:
    loaded = load(tmp_path, LAKE)
    plan = loaded.plan
    assert loaded.pipeline.name == "agentic" and isinstance(plan, AgenticPlan)
    assert (plan.prompts_per_step, plan.group_size, plan.samples_per_step) == (8, 8, 64)
    assert plan.training["actor_train"].optimizer_steps_per_step == 1
    assert plan.validation is not None and plan.validation.groups_by_tag == {"lake": 16, "box": 16}
    lake, box = plan.entries["lake"], plan.entries["box"]
    assert (lake.turns, lake.new_tokens, lake.context, lake.samples) == (5, 32, "append", "trajectory")
    assert box.new_tokens == 64, "actor_infer.generating_args.max_new_tokens is smaller"
    facts = dict(loaded.pipeline.facts(plan))
    assert facts["episodes"].startswith("8 tasks x 8 = 64 episodes a step, at most 10,240 new tokens")
    (sentence,) = dict(loaded.pipeline.batch_facts(plan)).values()
    assert sentence.startswith("64 episodes, at most 64 rows; 1 optimizer step of 64")


@pytest.mark.parametrize(
    ("written", "context", "samples"),
    [
        ({}, "append", "trajectory"),
        ({"env_manager_cls": f"{PUBLISHED}.traj_env_manager.TrajEnvManager"}, "append", "trajectory"),
        ({"env_manager_cls": f"{PUBLISHED}.x.VLTrajEnvManager"}, "append", "trajectory"),
        ({"env_manager_cls": f"{PUBLISHED}.step_env_manager.StepEnvManager"}, "observation", "step"),
        ({"env_manager_cls": f"{PUBLISHED}.step_concat_env_manager.StepConcatEnvManager"}, "last", "step"),
        (
            {
                "env_manager_cls": f"{PUBLISHED}.x.StepConcatEnvManager",
                "agent_template": "{history}{current_observation}",
            },
            "observation",
            "step",
        ),
        ({"env_manager_cls": f"{PUBLISHED}.x.AgentNativeStepEnvManager"}, "own", "step"),
        (PROXY, "append", "trajectory"),
        ({**PROXY, "config": {"trajectory_mode": "step", "enable_fork": True}}, "append", "step"),
        ({"context": "last"}, "last", "step"),
        ({"samples": "step"}, "append", "step"),
        ({"context": "own", "samples": "trajectory"}, "own", "trajectory"),
    ],
)
def test_context_and_samples(tmp_path: Path, written: dict[str, Any], context: str, samples: str) -> None:
    entry = planned(tmp_path, {f"custom_envs.lake.{key}": value for key, value in written.items()}).entries["lake"]
    assert (entry.context, entry.samples) == (context, samples)


@pytest.mark.parametrize(
    ("section", "norm", "by_tag"),
    [
        (None, ("auto", "auto"), False),
        ({"grouping": "traj_group_id", "method": "mean_std"}, ("group", "group"), False),
        ({"grouping": "traj_group_id", "method": "mean"}, ("group", None), False),
        ({"grouping": "batch", "method": "asym_clip"}, ("batch", "batch"), False),
        ({"grouping": "tags", "method": "mean_std"}, ("batch", "batch"), True),
        ({"grouping": "batch"}, (None, None), False),
        ({"grouping": "traj_group_id", "norm_mean_type": "batch", "norm_std_type": "group"}, ("batch", "group"), False),
        ({"grouping": "tags", "norm_mean_type": "group"}, ("batch", None), True),
    ],
)
def test_reward_normalization(tmp_path: Path, section: Any, norm: tuple[Any, Any], by_tag: bool) -> None:
    plan = planned(tmp_path, {"reward_normalization": section} if section else {})
    assert (plan.norm_types, plan.normalizes_by_tag) == (norm, by_tag)


def test_sampling_of_training_and_validation(tmp_path: Path) -> None:
    own = {"val_env_manager.generating_args": {"temperature": 0.5}, "actor_infer.generating_args.temperature": 0.9}
    plan = planned(tmp_path, own | {"train_env_manager.generating_args": {"temperature": 0.1}})
    assert plan.validation is not None
    validation = plan.validation.generating_args
    assert (plan.train.generating_args.temperature, validation.temperature, validation.top_p) == (0.9, 0.5, 1.0)
    only = {"train_env_manager.generating_args": {"temperature": 0.3}, "actor_infer.generating_args": GONE}
    assert planned(tmp_path, only).train.generating_args.temperature == 0.3


def test_shares(tmp_path: Path) -> None:
    changes = {"tags": ["lake", "box", "dip"], "num_groups_partition": GONE}
    more = {f"train_env_manager.{key}": value for key, value in changes.items()}
    more |= {"custom_envs.dip": {"env_type": "frozen_lake"}}
    train = planned(tmp_path, more).train
    assert train.groups_by_tag == {"lake": 3, "box": 3, "dip": 2}


LOCKED = {"use_thread_lock": True, "max_env_step_concurrent": 5}


def test_calls_at_a_time(tmp_path: Path) -> None:
    assert planned(tmp_path).entries["lake"].concurrent is None
    assert planned(tmp_path, {"custom_envs.lake.max_env_step_concurrent": 5}).entries["lake"].concurrent == 5
    both = {f"custom_envs.lake.{key}": value for key, value in LOCKED.items()}
    assert planned(tmp_path, both).entries["lake"].concurrent == 1


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"env_config": {"sise": 5}}, "env_config.sise", "did you mean 'size'"),
        ({"env_config": {"p": 3}}, "env_config", "the probability of ice"),
        ({"env_type": "frozen_like"}, "env_type", "did you mean 'frozen_lake'"),
        ({"env_type": "no_such_module.Env"}, "env_type", "cannot be imported"),
        ({"env_type": "./my/games.py:Maze"}, "env_type", "must be a dotted path, such as my.games.Maze"),
        ({"env_type": "verifiers:sums", "env_config": {}}, "env_config.python", ".venv-verifiers/bin/python"),
        ({"env_type": "verifiers:sums", "env_config": {"python": "/no/python"}}, "env_config.python", "/no/python"),
        ({"verifier": {"worker_cls": "math_rulle"}}, "verifier", "math_rule"),
        ({"verifier": {"worker_cls": "math_rule", "score": "all"}}, "verifier.score", "did you mean 'scores'"),
        ({"verifier": {"worker_cls": "reward_model"}}, "verifier.worker_cls", "http_reward"),
        (
            {"verifier": {"worker_cls": "llm_judge", "reward_kwargs": {"model_type": "inference"}}},
            "verifier.reward_kwargs.model_type",
            "cluster asks the role reward",
        ),
    ],
)
def test_environments_are_checked(tmp_path: Path, changes: dict[str, Any], key: str, words: str) -> None:
    loaded = load(tmp_path, changed({f"custom_envs.lake.{name}": value for name, value in changes.items()}, LAKE))
    with pytest.raises(ConfigError) as caught:
        check_environments(loaded)
    (problem,) = caught.value.problems
    assert problem.key == f"custom_envs.lake.{key}" and words in str(problem)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("estimator", "no_such_module.estimate"),
        ("train_env_manager.group_filter_cls", "no_such_module.Filter"),
        ("train_env_manager.group_filter_config", {"type": "no_such_module.make"}),
        ("router_args.router_name", "no_such_module.Router"),
    ],
)
def test_functions_of_ones_own_are_looked_up(tmp_path: Path, key: str, value: Any) -> None:
    check_parts(load(tmp_path, LAKE))
    with pytest.raises(ConfigError, match="no_such_module") as caught:
        check_parts(load(tmp_path, changed({key: value}, LAKE)))
    assert [problem.key for problem in caught.value.problems] == [key]


def test_environments_of_other_libraries_are_not_built(tmp_path: Path) -> None:
    check_environments(load(tmp_path, changed({"custom_envs.lake.env_type": "math:ASDiv2K"}, LAKE)))


def test_keys_without_effect_are_named(tmp_path: Path) -> None:
    told = {
        "render_save_dir": "x",
        "batch_adjust_mode": "delete",
        "train_env_manager.format_penalty": -0.1,
        "train_env_manager.max_traj_per_env": 2,
        "reward_normalization.global_scale_factor": 2.0,
        "custom_envs.lake.max_env_step_concurrent": 5,
        "val_env_manager.group_size_redundancy": 1,
        "step_reward_weight": 0.5,
        "parse_tool_call_parameter_to_dict": True,
        "env_monitor": {"enable": True},
        "train_env_manager.system_envs": {"A": "1"},
        "val_env_manager.world_size": 2,
    }
    loaded = load(tmp_path, changed({**told, "custom_envs.lake.use_thread_lock": True}, LAKE))
    found = notes(loaded)
    for key in told:
        assert "has no effect" in found[key], key


def test_the_short_keys_of_agents(tmp_path: Path) -> None:
    data = {"data_args": {"file_name": "questions.jsonl"}, "verifier": {"worker_cls": "math_rule"}}
    changes = {
        "custom_envs.lake": {"tools": ["python"], **data},
        "custom_envs.box": {"command": "python 'my agent.py'", "agent_config": {"reward": "exit"}},
    }
    entries = planned(tmp_path, changes).entries
    lake, box = entries["lake"], entries["box"]
    assert (lake.agent, lake.agent_config) == ("tools", {"tools": ["python"], "verifier": {"worker_cls": "math_rule"}})
    assert (box.agent, box.agent_config) == ("black_box", {"command": ["python", "my agent.py"], "reward": "exit"})
    own = {"custom_envs.lake": {"agent": "my_agents.negotiate", "agent_config": {"rounds": 3}}}
    entry = planned(tmp_path, own).entries["lake"]
    assert (entry.agent, entry.agent_config) == ("my_agents.negotiate", {"rounds": 3})


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
