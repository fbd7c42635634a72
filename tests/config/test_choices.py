"""A choice, such as the policy loss, is a section with the options of its row; flat names mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.algorithm import CorrectionRule, correction_options
from roll.config.choices import ADV_ESTIMATORS, POLICY_LOSSES
from roll.config.json_schema import json_schema, key_paths
from roll.config.reading.fields import Table
from roll.config.reading.legacy_keys import FLAT_NAMES
from roll.config.reference import explain
from roll.pipelines.rlvr.config import RLVRConfig
from tests.config.good import changed, load


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


def test_the_filters_of_a_correction_are_sections_of_their_own(tmp_path: Path) -> None:
    filters = [{"agg_type": "sequence", "ratio_enabled": True, "ratio_high": 1.3}, {"enabled": False}]
    correction = {"is_weight": {"enabled": True, "upper_bound": "2e0"}, "filters": filters}
    loaded = load(tmp_path, changed({"train_infer_correction": correction}))
    rules = correction_options(loaded.config.train_infer_correction).rules
    weight, mask = CorrectionRule(high=2.0), CorrectionRule("sequence", "mask", "ratio", 0.8, 1.3)
    assert rules == (weight, mask)
