"""A choice, such as the policy loss, is a section with the options of its row; flat names mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.estimators import (
    ADV_ESTIMATORS,
    DiscountOptions,
    GaeOptions,
    GdpoOptions,
    GigpoOptions,
    NoOptions,
    PassAtKOptions,
)
from roll.config.json_schema import json_schema, key_paths
from roll.config.policy_losses import (
    POLICY_LOSSES,
    CispoOptions,
    DualClipOptions,
    GmpoOptions,
    PpoOptions,
    VespoOptions,
)
from roll.config.reading.fields import Choice, Table
from roll.config.reading.legacy_keys import FLAT_NAMES
from roll.config.reference import explain
from roll.pipelines.agentic.config import AgenticConfig
from roll.pipelines.rlvr.config import RLVRConfig
from tests.config.good import changed, load
from tests.support.keys import config_of

TRAIN = "actor_train"
VESPO, CISPO = Choice("vespo", VespoOptions(k_pos=2.5)), Choice("cispo", CispoOptions(unified_mask=True))
PPO = Choice("ppo", PpoOptions())


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({}, PPO),
        ({"loss": "vespo"}, Choice("vespo", VespoOptions())),
        ({"loss": {"name": "vespo", "k_pos": "2.5"}}, VESPO),
        ({"pg_variant": "vespo", "vespo_k_pos": 2.5}, VESPO),
        ({"pg_variant": "vespo", "pg_variant_args": {"k_pos": 2.5}}, VESPO),
        ({"loss": "vespo", "vespo_k_pos": 2.5}, VESPO),
        ({"loss": {"name": "vespo", "k_pos": 2.5}, "vespo_k_pos": 2.5}, VESPO),
        ({f"{TRAIN}.pg_variant": "vespo", "vespo_k_pos": 2.5}, VESPO),
        ({f"{TRAIN}.pg_variant": None, "loss": {"name": "vespo", "k_pos": 2.5}}, VESPO),
        ({"pg_variant": "cispo", "cispo_use_unified_mask": True}, CISPO),
        ({"loss": {"name": "cispo", "use_unified_mask": True}}, CISPO),
        ({"loss": {"name": "my_package.loss", "gate": 1.5}}, Choice("my_package.loss", {"gate": 1.5})),
        (
            {"pg_variant": "roll.algorithms.skyrl_losses.engine_dppo", "dppo_divergence": "kl"},
            Choice("roll.algorithms.skyrl_losses.engine_dppo", {}, {"divergence": "kl"}),
        ),
        ({"pg_clip": 0.3}, Choice("ppo", PpoOptions(clip=0.3))),
        ({"pg_clip": 0.3, "use_pg_clip_range": True}, Choice("ppo", PpoOptions(clip=0.3, clip_low=0.2, clip_high=0.2))),
        (
            {"pg_variant": "gspo", "use_pg_clip_range": True, "pg_clip_high": 0.28},
            Choice("gspo", DualClipOptions(clip_low=0.2, clip_high=0.28)),
        ),
        ({"dual_clip_loss": True}, Choice("ppo", PpoOptions(dual_clip=True))),
        ({"dual_clip_loss": True, "dual_clip_coef": 3}, Choice("ppo", PpoOptions(dual_clip=3.0))),
        ({"loss": {"name": "ppo", "dual_clip": 3}}, Choice("ppo", PpoOptions(dual_clip=3.0))),
        ({"loss": {"name": "ppo", "clip_low": 0.1}, "pg_clip": 0.3}, Choice("ppo", PpoOptions(clip=0.3, clip_low=0.1))),
        ({"loss": "gmpo", "gmpo_clip_low": 0.1}, Choice("gmpo", GmpoOptions(clip_low=0.1))),
        ({"ratio_type": "segment"}, Choice("ppo", PpoOptions(importance_sampling="segment"))),
    ],
)
def test_nested_and_flat_spellings_mean_the_same(tmp_path: Path, changes: dict[str, Any], loss: Choice) -> None:
    loaded = load(tmp_path, changed(changes))
    assert loaded.config.loss == loss
    assert not [notice for notice in loaded.warnings if "pg_" in notice.key or "_k_pos" in notice.key]


@pytest.mark.parametrize(
    ("changes", "estimator"),
    [
        ({"estimator": "reinforce"}, Choice("reinforce", DiscountOptions())),
        ({"estimator": "reinforce", "gamma": 0.9}, Choice("reinforce", DiscountOptions(gamma=0.9))),
        ({"estimator": {"name": "reinforce", "gamma": 0.9}}, Choice("reinforce", DiscountOptions(gamma=0.9))),
        ({"estimator": {"name": "rloo"}}, Choice("rloo", NoOptions())),
        ({"estimator": "pass@k", "pass_k": 2}, Choice("pass@k", PassAtKOptions(k=2))),
        (
            {"estimator": "gdpo", "reward_weights": {"score": 1}},
            Choice("gdpo", GdpoOptions(weights={"score": 1.0})),
        ),
        ({"estimator": {"name": "my.own", "bar": 1}, "gamma": 0.9}, Choice("my.own", {"bar": 1}, {"gamma": 0.9})),
        ({"estimator": "my.own", "adv_estimator_args": {"bar": 1}}, Choice("my.own", {"bar": 1})),
    ],
)
def test_estimators_have_their_options(tmp_path: Path, changes: dict[str, Any], estimator: Choice) -> None:
    loaded = load(tmp_path, changed(changes))
    assert loaded.config.estimator == estimator
    assert not [notice for notice in loaded.warnings if "effect" in notice.text]


@pytest.mark.parametrize(("flat", "nested"), [({"lambd": 0.5}, "gae"), ({"step_reward_gamma": 0.5}, "gigpo")])
def test_flat_options_of_episodes_and_critics(flat: dict[str, Any], nested: str) -> None:
    options = {"gae": GaeOptions(lambd=0.5), "gigpo": GigpoOptions(step_gamma=0.5)}
    assert config_of(AgenticConfig, adv_estimator=nested, **flat).estimator == Choice(nested, options[nested])


def test_the_policy_loss_of_another_role_is_noted(tmp_path: Path) -> None:
    warnings = load(tmp_path, changed({"reference.pg_variant": "topr"})).warnings
    assert any(notice.key == "reference.pg_variant" and "has no effect" in notice.text for notice in warnings)


@pytest.mark.parametrize(("choice", "table", "number"), [("loss", POLICY_LOSSES, 37), ("estimator", ADV_ESTIMATORS, 7)])
def test_every_option_is_explained_completed_and_in_the_schema(choice: str, table: Table[Any], number: int) -> None:
    paths, properties = set(key_paths()), json_schema(RLVRConfig, "file")["properties"]
    options = {name: flat for name, flat in FLAT_NAMES[choice].items() if flat.of is not object and "." not in name}
    assert len(options) == number
    for name, flat in options.items():
        assert f"{choice}.{flat.option}" in paths and (name not in paths or name == flat.option)
        assert name in properties
        assert any(row.key == flat.option and f"{choice}: {{name: " in row.section for row in explain(name))
    sections = [entry for entry in properties[choice]["anyOf"] if "additionalProperties" in entry]
    assert [entry["properties"]["name"]["enum"][0] for entry in sections] == [
        row.name for row in table.rows if row.options is not None
    ]


@pytest.mark.parametrize(
    ("settings", "overrides", "expected"),
    [
        ({"pg_variant": "cispo"}, ["loss=vespo"], Choice("vespo", VespoOptions())),
        ({"loss": "cispo"}, ["pg_variant=vespo"], Choice("vespo", VespoOptions())),
        ({}, ["loss=cispo", "pg_variant=vespo"], Choice("vespo", VespoOptions())),
        ({"pg_variant": "cispo"}, ["loss={name: vespo, k_pos: 2.5}"], VESPO),
        ({f"{TRAIN}.pg_variant": "cispo"}, ["loss=vespo"], Choice("vespo", VespoOptions())),
        ({"loss": "cispo"}, [f"{TRAIN}.pg_variant=vespo"], Choice("vespo", VespoOptions())),
        ({"loss": {"name": "vespo", "k_pos": 1.5}}, ["vespo_k_pos=2.5"], VESPO),
        ({"pg_variant": "vespo", "vespo_k_pos": 1.5}, ["loss={name: vespo, k_pos: 2.5}"], VESPO),
    ],
)
def test_of_two_spellings_the_one_on_the_command_line_counts(
    settings: dict[str, Any], overrides: list[str], expected: Choice, tmp_path: Path
) -> None:
    assert load(tmp_path, changed(settings), *overrides).config.loss == expected
