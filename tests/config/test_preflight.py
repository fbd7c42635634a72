"""Functions and options of a user's own are found, or missed, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.checks.base import check_output
from roll.config.reading.errors import ConfigError
from roll.pipelines.policy_preflight import OWN_FUNCTION_KEYS
from roll.pipelines.rlvr.definition import check_rewards
from roll.preflight import check_own_functions
from tests.config.good import changed, load

OWN = "tests.own_algorithms"
ALL_KINDS = {
    "estimator": f"{OWN}.above_a_bar",
    "adv_estimator_args": {"bar": 0.25},
    "pg_variant": f"{OWN}.gated",
    "pg_variant_args": {"gate": 1.2},
    "kl_loss_type": f"{OWN}.squared",
    "kl_penalty": f"{OWN}.squared",
    "loss_agg_mode": f"{OWN}.row_sum",
    "kl_loss_agg_mode": f"{OWN}.row_sum",
    "entropy_loss_agg_mode": f"{OWN}.row_sum",
    "value_loss_agg_mode": f"{OWN}.row_sum",
    "train_infer_correction": f"{OWN}.halved_where_unlikely",
    "actor_train.data_args.dataset_filter": "tests.datasets.test_options.short_and_even",
    "rewards.math.query_filter_config": {"type": f"{OWN}.best_at_least", "filter_args": {"score": 0.5}},
    "router_args": {"router_name": "tests.rollout.test_engines.ByFirstToken", "router_config": {"shift": 1}},
}


def test_a_configuration_may_name_functions_of_every_kind(tmp_path: Path) -> None:
    assert set(OWN_FUNCTION_KEYS) <= set(ALL_KINDS)
    check_own_functions(load(tmp_path, changed(ALL_KINDS)))


MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    *(({key: f"{OWN}.missing"}, key, "has no attribute 'missing'") for key in OWN_FUNCTION_KEYS),
    ({"pg_variant": "no_such_package.loss"}, "loss", "No module named 'no_such_package'"),
    ({"pg_variant": f"{OWN}.OWN_NUMBER"}, "loss", "cannot be imported"),
    ({"pg_variant": f"{OWN}.gated", "pg_variant_args": {"gaet": 1}}, "loss", "the nearest known one is gate"),
    ({"pg_variant_args": {"gate": 1}}, "pg_variant_args.gate", "unknown key; known here: clip"),
    (
        {"rewards.math.query_filter_config": {"type": f"{OWN}.best_at_least", "filter_args": {"scor": 1}}},
        "rewards.math.query_filter_config",
        "do not fit",
    ),
    (
        {"validation.data_args.dataset_filter": f"{OWN}.gone"},
        "validation.data_args.dataset_filter",
        "cannot be imported",
    ),
    ({"router_args.router_name": f"{OWN}.missing"}, "router_args.router_name", "has no attribute 'missing'"),
    ({"router_args.router_config": {"shift": 1}}, "router_args.router_config", "does not fit PromptAffinityRouter"),
]


@pytest.mark.parametrize(("changes", "key", "message"), MISTAKES)
def test_what_is_not_there_is_named(tmp_path: Path, changes: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_own_functions(load(tmp_path, changed(changes)))
    assert [problem.key for problem in caught.value.problems] == [key]
    assert message in str(caught.value)


def test_numbers_that_a_rule_does_not_return_are_named(tmp_path: Path) -> None:
    weights = {"correct": 1.0, "answered": 0.5, "score": 1.0}
    gdpo = {"estimator": "gdpo", "reward_weights": weights}
    check_rewards(load(tmp_path, changed(gdpo)))
    with pytest.raises(ConfigError, match=r"estimator\.weights\.f1.*rewards\.math returns.*correct, answered, score"):
        check_rewards(load(tmp_path, changed(gdpo | {"reward_weights": {"f1": 1.0}})))


def test_a_reward_that_cannot_be_found_is_named_where_it_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.math\.worker_cls = 'no_such\.reward': cannot import 'no_such'"):
        check_rewards(load(tmp_path, changed({"rewards.math.worker_cls": "no_such.reward"})))
    parts = {"own": {"worker_cls": "json.no_such"}}
    data = changed({"rewards.math": {"tag_included": ["math"], "components": parts}})
    with pytest.raises(ConfigError, match=r"components\.own\.worker_cls = 'json\.no_such': 'json' has no function"):
        check_rewards(load(tmp_path, data))


def test_components_are_built_before_anything_starts(tmp_path: Path) -> None:
    parts = {"math_rule": {}, "format": {"gate": True, "reward_kwargs": {"patern": "x"}}}
    data = changed({"rewards.math": {"tag_included": ["math"], "components": parts}})
    with pytest.raises(ConfigError, match=r"rewards\.math\.components\.format\.reward_kwargs.*did you mean 'pattern'"):
        check_rewards(load(tmp_path, data))
    parts["format"] = {"gate": True}
    weights = {"estimator": "gdpo", "reward_weights": {"math_rule/score": 1.0, "format/score": 0.5}}
    data = changed({"rewards": {"math": {"components": parts}}} | weights)
    loaded = load(tmp_path, data)
    check_rewards(loaded)
    assert loaded.plan.roles["rewards.math"].worker_cls == "math_rule + format"
    data = changed({"reward_weights": {"style/score": 1.0}}, data)
    with pytest.raises(ConfigError, match=r"returns no such number; it returns math_rule/score"):
        check_rewards(load(tmp_path, data))


def test_keys_of_one_reward_say_that_they_do_nothing_for_another(tmp_path: Path) -> None:
    keys = {"reward_type": "soft", "response_length_penalty_coef": 0.1}
    data = changed({f"rewards.math.{key}": value for key, value in keys.items()})
    told = {notice.key for notice in load(tmp_path, data).warnings}
    assert {f"rewards.math.{key}" for key in keys} <= told
    published = "roll.pipeline.rlvr.rewards.crossthinkqa_rule_reward_worker.CrossThinkQARuleRewardWorker"
    loaded = load(tmp_path, changed({"rewards.math.worker_cls": published}, data))
    assert not {notice.key for notice in loaded.warnings} & {f"rewards.math.{key}" for key in keys}
    check_rewards(loaded)
    with pytest.raises(ConfigError, match=r"reward_type = 'softly': must be one of loose, soft, strict"):
        check_rewards(load(tmp_path, changed({"rewards.math.reward_type": "softly"}, loaded.resolved)))


def test_a_judge_that_cannot_be_asked_is_named_and_its_key_is_not_shown(tmp_path: Path) -> None:
    changes = {
        "rewards.math.worker_cls": "llm_judge",
        "rewards.math.judge_api_key": "top-secret",
        "rewards.math.reward_kwargs": {"api_key": "top-secret", "extract": "number"},
    }
    with pytest.raises(ConfigError) as caught:
        check_rewards(load(tmp_path, changed(changes)))
    assert "judge_api_url must be set" in str(caught.value)
    assert "top-secret" not in str(caught.value)


def test_an_output_folder_under_a_file_or_without_the_right_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "run.yaml"
    check_output(tmp_path / "new" / "run", source)
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"1 mistake.*\n.*output_dir = .*file is a file.*name another folder"):
        check_output(tmp_path / "file" / "run", source)
    (tmp_path / "foreign").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path / "foreign")  # root may write anywhere
    with pytest.raises(ConfigError, match=r"1 mistake.*\n.*output_dir = .*no right to write in .*/foreign"):
        check_output(tmp_path / "foreign" / "run", source)
