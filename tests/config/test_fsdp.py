"""Options of FSDP1 and FSDP2: what each role may ask for, and what is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.config.strategies.base import StrategyConfig
from roll.config.strategies.fsdp import Fsdp1StrategyConfig, Fsdp2StrategyConfig
from roll.config.strategies.megatron import MegatronStrategyConfig
from roll.config.strategies.registry import typed_strategy_config
from tests.config.good import changed, mistakes

NAME, CONFIG = "strategy_args.strategy_name", "strategy_args.strategy_config"


@pytest.mark.parametrize("key", ["cpu_offload", "offload_policy"])
@pytest.mark.parametrize("strategy", ["fsdp2_train", "fsdp2_infer", "fsdp_infer"])
def test_both_spellings_of_offload_mean_the_same(strategy: str, key: str) -> None:
    options = typed_strategy_config(StrategyArguments(strategy, {key: True}))
    assert isinstance(options, Fsdp1StrategyConfig | Fsdp2StrategyConfig) and options.offload_policy


def test_experts_over_ranks_are_the_models() -> None:
    role = WorkerConfig(model_args=ModelArguments())
    config = Fsdp2StrategyConfig(ep_size=4)
    path = "actor_train.strategy_args.strategy_config.ep_size"
    (dense,) = config.shape_problems("actor_train", role, {"model_type": "qwen3"})
    assert (dense[0], dense[3]) == (path, 1) and "model_type qwen3 is not" in dense[2]
    (odd,) = config.shape_problems("actor_train", role, {"model_type": "qwen3_moe", "num_experts": 6})
    assert odd[0] == path and odd[2:] == ("must divide the model's 6 experts", 3)
    assert list(config.shape_problems("actor_train", role, {"model_type": "qwen3_moe", "num_experts": 8})) == []


ARGUMENTS = "actor_train.training_args"


def test_muon_is_refused_where_it_is_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = "megatron_train"
    monkeypatch.setattr(MegatronStrategyConfig, "optimizers", StrategyConfig.optimizers)  # as a backend of one's own
    data = changed({f"actor_train.{NAME}": strategy, f"{ARGUMENTS}.optimizer": "muon"})
    (problem,) = [one for one in mistakes(tmp_path, data) if "optimizer" in one.key]
    assert problem.key == f"{ARGUMENTS}.optimizer" and problem.value == "muon"
    assert f"not available under {strategy}" in problem.rule and "fsdp2_train has muon" in problem.rule
    again = mistakes(tmp_path, changed({f"{ARGUMENTS}.optimizer": problem.example}, data))
    assert not [one for one in again if "optimizer" in one.key]
