"""The policy loss is a section with the options of its row; the flat names of files from before mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.completion import key_paths
from roll.config.policy_losses import FLAT_NAMES, POLICY_LOSSES
from roll.config.reading.errors import ConfigError
from roll.config.reading.fields import Choice
from roll.config.reference import explain, json_schema
from roll.pipelines.rlvr.config import RLVRConfig
from tests.config.good import changed, load

TRAIN = "actor_train"
VESPO = Choice("vespo", {"k_pos": 2.5})


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({}, Choice("ppo")),
        ({"loss": "vespo"}, Choice("vespo")),
        ({"loss": {"name": "vespo", "k_pos": "2.5"}}, VESPO),
        ({"pg_variant": "vespo", "vespo_k_pos": 2.5}, VESPO),
        ({"pg_variant": "vespo", "pg_variant_args": {"k_pos": 2.5}}, VESPO),
        ({"loss": "vespo", "vespo_k_pos": 2.5}, VESPO),
        ({"loss": {"name": "vespo", "k_pos": 2.5}, "vespo_k_pos": 2.5}, VESPO),
        ({f"{TRAIN}.pg_variant": "vespo", "vespo_k_pos": 2.5}, VESPO),
        ({f"{TRAIN}.pg_variant": None, "loss": {"name": "vespo", "k_pos": 2.5}}, VESPO),
        ({"pg_variant": "cispo", "cispo_use_unified_mask": True}, Choice("cispo", {"unified_mask": True})),
        ({"loss": {"name": "cispo", "use_unified_mask": True}}, Choice("cispo", {"unified_mask": True})),
        ({"loss": {"name": "my_package.loss", "gate": 1.5}}, Choice("my_package.loss", {"gate": 1.5})),
        (
            {"pg_variant": "roll.algorithms.skyrl_losses.engine_dppo", "dppo_divergence": "kl"},
            Choice("roll.algorithms.skyrl_losses.engine_dppo", {"divergence": "kl"}),
        ),
    ],
)
def test_nested_and_flat_spellings_mean_the_same(tmp_path: Path, changes: dict[str, Any], loss: Choice) -> None:
    loaded = load(tmp_path, changed(changes))
    assert loaded.config.loss == loss
    assert not [notice for notice in loaded.warnings if "pg_" in notice.key or "_k_pos" in notice.key]


@pytest.mark.parametrize(
    ("changes", "key", "rule"),
    [
        ({"loss": "vesp"}, "loss", "loss: vespo"),
        ({"loss": {"name": "vesp"}}, "loss", "loss: vespo"),
        ({"pg_variant": "vesp"}, "pg_variant", "pg_variant: vespo"),
        ({f"{TRAIN}.pg_variant": "vesp"}, f"{TRAIN}.pg_variant", "pg_variant: vespo"),
        ({"loss": {"name": "vespo", "k_poss": 1}}, "loss.k_poss", "the nearest known one is k_pos"),
        ({"loss": {"name": "cispo", "k_pos": 1}}, "loss.k_pos", "known here: epsilon_low, epsilon_high"),
        ({"loss": {"name": "ppo", "k_pos": 1}}, "loss.k_pos", "there are no options here"),
        ({"loss": {"name": "vespo", "k_pos": -1}}, "loss.k_pos", "must be at least 0"),
        ({"loss": "vespo", "vespo_k_pos": -1}, "vespo_k_pos", "must be at least 0"),
        ({"vespo_k_pos": -1}, "vespo_k_pos", "must be at least 0"),
        ({"loss": {"name": "vespo", "k_pos": 2}, "vespo_k_pos": 3}, "vespo_k_pos", "is another spelling of the option"),
        ({"loss": "cispo", "pg_variant": "vespo"}, "pg_variant", "is another spelling of loss"),
        ({"pg_variant_args": 3}, "pg_variant_args", "must be a section of keys"),
        ({"vespo_k_poss": 2}, "vespo_k_poss", "the nearest known one is vespo_k_pos"),
    ],
)
def test_mistakes_name_the_key_that_was_written(tmp_path: Path, changes: dict[str, Any], key: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, changed(changes))
    (problem,) = caught.value.problems
    assert problem.key == key and rule in str(problem)


def test_the_policy_loss_of_another_role_is_noted(tmp_path: Path) -> None:
    warnings = load(tmp_path, changed({"reference.pg_variant": "topr"})).warnings
    assert any(notice.key == "reference.pg_variant" and "has no effect" in notice.text for notice in warnings)


def test_every_option_is_explained_completed_and_in_the_schema() -> None:
    paths, properties = set(key_paths()), json_schema(RLVRConfig, "file")["properties"]
    options = {name: flat for name, flat in FLAT_NAMES.items() if flat.row is not None and "." not in name}
    assert len(options) == 30
    for name, flat in options.items():
        assert f"loss.{flat.option}" in paths and name not in paths
        assert name in properties
        assert any(row.key == flat.option and f"name: {flat.row}}}" in row.section for row in explain(name))
    sections = [entry for entry in properties["loss"]["anyOf"] if "additionalProperties" in entry]
    assert [entry["properties"]["name"]["enum"][0] for entry in sections] == [
        row.name for row in POLICY_LOSSES.rows if row.options is not None
    ]


@pytest.mark.parametrize(
    ("settings", "overrides", "expected"),
    [
        ({"pg_variant": "cispo"}, ["loss=vespo"], Choice("vespo")),
        ({"loss": "cispo"}, ["pg_variant=vespo"], Choice("vespo")),
        ({}, ["loss=cispo", "pg_variant=vespo"], Choice("vespo")),
        ({"pg_variant": "cispo"}, ["loss={name: vespo, k_pos: 2.5}"], VESPO),
        ({f"{TRAIN}.pg_variant": "cispo"}, ["loss=vespo"], Choice("vespo")),
        ({"loss": "cispo"}, [f"{TRAIN}.pg_variant=vespo"], Choice("vespo")),
        ({"loss": {"name": "vespo", "k_pos": 1.5}}, ["vespo_k_pos=2.5"], VESPO),
        ({"pg_variant": "vespo", "vespo_k_pos": 1.5}, ["loss={name: vespo, k_pos: 2.5}"], VESPO),
    ],
)
def test_of_two_spellings_the_one_on_the_command_line_counts(
    settings: dict[str, Any], overrides: list[str], expected: Choice, tmp_path: Path
) -> None:
    assert load(tmp_path, changed(settings), *overrides).config.loss == expected
