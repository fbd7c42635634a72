"""Options of FSDP1 and FSDP2: what each role may ask for, and what is said."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from roll.config.roles import ModelArguments, OptimizerConfig, StrategyArguments, WorkerConfig
from roll.config.strategies.base import StrategyConfig
from roll.config.strategies.fsdp import Fsdp1StrategyConfig, Fsdp2StrategyConfig
from roll.config.strategies.megatron import MegatronStrategyConfig
from roll.config.strategies.registry import typed_strategy_config
from tests.config.good import GOOD, GOOD_SFT, changed, load, mistakes

NAME, CONFIG = "strategy_args.strategy_name", "strategy_args.strategy_config"
OFFLOAD = "FSDP1 does not support gradient accumulation outside no_sync together with CPU offload"


@pytest.mark.parametrize("key", ["cpu_offload", "offload_policy"])
@pytest.mark.parametrize("strategy", ["fsdp2_train", "fsdp2_infer", "fsdp_infer"])
def test_both_spellings_of_offload_mean_the_same(strategy: str, key: str) -> None:
    options = typed_strategy_config(StrategyArguments(strategy, {key: True}))
    assert isinstance(options, Fsdp1StrategyConfig | Fsdp2StrategyConfig) and options.offload_policy


@pytest.mark.parametrize("key", ["cpu_offload", "offload_policy"])
@pytest.mark.parametrize("role", ["actor_train", "critic"])
def test_offload_is_refused_where_fsdp1_trains(tmp_path: Path, role: str, key: str) -> None:
    data = changed({"estimator": "gae", "critic": copy.deepcopy(GOOD["actor_train"]), f"{role}.{NAME}": "fsdp_train"})
    (problem,) = mistakes(tmp_path, changed({f"{role}.{CONFIG}": {key: True}}, data))
    assert problem.key == f"{role}.{CONFIG}.{key}"
    assert OFFLOAD in problem.rule and "documentation of FullyShardedDataParallel" in problem.rule
    assert mistakes(tmp_path, changed({f"{role}.{CONFIG}": {key: problem.example}}, data)) == ()


def test_offload_is_refused_for_sft_under_fsdp1(tmp_path: Path) -> None:
    data = changed({f"sft_train.{NAME}": "fsdp_train", f"sft_train.{CONFIG}": {"cpu_offload": True}}, GOOD_SFT)
    (problem,) = mistakes(tmp_path, data)
    assert OFFLOAD in problem.rule


@pytest.mark.parametrize(("role", "strategy"), [("reference", "fsdp_infer"), ("actor_train", "fsdp2_train")])
def test_offload_loads_elsewhere(tmp_path: Path, role: str, strategy: str) -> None:
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    assert (
        mistakes(tmp_path, changed({**kl, f"{role}.{NAME}": strategy, f"{role}.{CONFIG}": {"cpu_offload": True}})) == ()
    )


def test_experts_over_ranks_are_the_models() -> None:
    role = WorkerConfig(model_args=ModelArguments())
    config = Fsdp2StrategyConfig(ep_size=4)
    path = "actor_train.strategy_args.strategy_config.ep_size"
    (dense,) = config.shape_problems("actor_train", role, {"model_type": "qwen3"})
    assert (dense[0], dense[3]) == (path, 1) and "model_type qwen3 is not" in dense[2]
    (odd,) = config.shape_problems("actor_train", role, {"model_type": "qwen3_moe", "num_experts": 6})
    assert odd[0] == path and odd[2:] == ("must divide the model's 6 experts", 3)
    assert list(config.shape_problems("actor_train", role, {"model_type": "qwen3_moe", "num_experts": 8})) == []


def notices(tmp_path: Path, strategy: str, config: dict[str, Any]) -> dict[str, str]:
    loaded = load(tmp_path, changed({f"actor_train.{NAME}": strategy, f"actor_train.{CONFIG}": config}))
    return {notice.key.rpartition(".")[2]: notice.text for notice in loaded.warnings}


def test_what_fsdp1_does_another_way_is_said(tmp_path: Path) -> None:
    late = {"reduce_scatter_during_grad_accumulation": False, "use_orig_params": True}
    said = notices(tmp_path, "fsdp_train", late)
    assert "in bf16" in said["reduce_scatter_during_grad_accumulation"]
    assert said["use_orig_params"] == "has no effect; parameters keep their names and weight decay"
    assert "reduce_scatter_during_grad_accumulation" not in notices(tmp_path, "fsdp2_train", late)


def test_one_changed_name_is_the_whole_switch(tmp_path: Path) -> None:
    both = {"fsdp_size": 2, "offload_policy": False, "ep_size": 1}
    assert "fsdp2_train" in notices(tmp_path, "fsdp_train", both)["ep_size"]
    said = notices(tmp_path, "deepspeed_train", {"cpu_offload": True})
    assert "fsdp2_train" in said["cpu_offload"] and "fsdp_train" in said["cpu_offload"]


def test_fp16_trains_under_every_strategy(tmp_path: Path) -> None:
    half = {"actor_train.model_args.dtype": "fp16", "actor_infer.model_args.dtype": "fp16", f"actor_train.{CONFIG}": {}}
    for strategy in ("fsdp2_train", "fsdp_train", "deepspeed_train", "megatron_train"):
        assert mistakes(tmp_path, changed({**half, f"actor_train.{NAME}": strategy})) == ()


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


@pytest.mark.parametrize("written", ["muon", {"name": "muon"}, {"name": "muon", "scaling": "original"}])
@pytest.mark.parametrize("strategy", ["fsdp2_train", "fsdp_train", "deepspeed_train", "megatron_train"])
def test_muon_is_a_word_or_a_section(tmp_path: Path, strategy: str, written: Any) -> None:
    data = changed({f"actor_train.{NAME}": strategy, f"{ARGUMENTS}.optimizer": written})
    found = load(tmp_path, data).config.actor_train.training_args.optimizer
    options = {} if isinstance(written, str) else {key: value for key, value in written.items() if key != "name"}
    assert found == OptimizerConfig("muon", **options)
