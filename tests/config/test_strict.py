"""``strict_on_policy``: what it cannot do is refused by the key, before anything starts; what follows for the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.names import INVARIANT_ATTENTION
from roll.config.reading.errors import ConfigError
from roll.pipelines.policy_preflight import check_policy_host
from tests.config.good import changed, load

STRICT = {"strict_on_policy": True}


def test_the_plan_has_no_pass_before_the_update(tmp_path: Path) -> None:
    plan: Any = load(tmp_path, changed(STRICT | {"ppo_epochs": 2})).plan
    assert plan.engine_log_probs_as_old and not plan.needs_old_log_probs
    chosen = {name: role.section.model_args.attn_implementation for name, role in plan.roles.items()}
    assert chosen["actor_train"] == chosen["actor_infer"] == INVARIANT_ATTENTION
    plain: Any = load(tmp_path, changed({"ppo_epochs": 2})).plan
    assert plain.needs_old_log_probs and plain.roles["actor_train"].section.model_args.attn_implementation is None


def test_a_family_whose_attention_cannot_be_replaced(tmp_path: Path) -> None:
    from transformers import GPTNeoConfig

    folder = tmp_path / "model"
    GPTNeoConfig(hidden_size=32, num_layers=2, attention_types=[[["global"], 2]], num_heads=4).save_pretrained(folder)
    loaded = load(tmp_path, changed(STRICT | {"pretrain": str(folder)}))
    with pytest.raises(ConfigError, match="strict_on_policy = true: does not work here"):
        check_policy_host(loaded)
