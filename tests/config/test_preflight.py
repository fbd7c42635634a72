"""Functions and options of a user's own are found, or missed, before anything starts."""

from __future__ import annotations

from pathlib import Path

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


@pytest.mark.parametrize("key", OWN_FUNCTION_KEYS)
def test_what_is_not_there_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_own_functions(load(tmp_path, changed({key: f"{OWN}.missing"})))
    assert [problem.key for problem in caught.value.problems] == [key]
    assert "has no attribute 'missing'" in str(caught.value)


def test_numbers_of_rules_and_of_components_may_be_weighted(tmp_path: Path) -> None:
    weights = {"correct": 1.0, "answered": 0.5, "score": 1.0}
    check_rewards(load(tmp_path, changed({"estimator": "gdpo", "reward_weights": weights})))
    parts = {"math_rule": {}, "format": {"gate": True}}
    weights = {"math_rule/score": 1.0, "format/score": 0.5}
    data = {"rewards": {"math": {"components": parts}}, "estimator": "gdpo", "reward_weights": weights}
    check_rewards(load(tmp_path, changed(data)))


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
