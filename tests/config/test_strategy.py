"""Typed options of strategies, and the registry of backends: every row names classes that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config.reading.errors import ConfigError
from roll.config.roles import StrategyArguments
from roll.config.strategies import registry
from roll.config.strategies.base import Backend
from roll.config.strategies.deepspeed import DeepSpeedStrategyConfig
from roll.config.strategies.engines import HfInferStrategyConfig
from roll.config.strategies.fsdp import Fsdp1StrategyConfig, Fsdp2StrategyConfig
from roll.config.strategies.registry import BACKENDS, checkpoint_readers, strategy_keys, trains, typed_strategy_config

SECTION_E_KEYS = {
    *("fsdp_size", "param_dtype", "reduce_dtype", "reshard_after_forward", "offload_policy", "async_save_ckpt"),
    *("reduce_scatter_during_grad_accumulation", "save_only_model", "wrap_policy", "apply_expert_patch", "model_type"),
    *("apply_tiled_mlp", "tiled_num_shards", "ep_size", "efsdp_size", "moe_use_grouped_mm"),
}


def test_defaults() -> None:
    assert typed_strategy_config(StrategyArguments()) == Fsdp2StrategyConfig()
    assert typed_strategy_config(StrategyArguments("hf_infer")) == HfInferStrategyConfig()
    for task in ("train", "infer"):
        assert typed_strategy_config(StrategyArguments(f"fsdp_{task}")) == Fsdp1StrategyConfig()
        assert typed_strategy_config(StrategyArguments(f"deepspeed_{task}")) == DeepSpeedStrategyConfig()
    assert strategy_keys("fsdp2_train") >= SECTION_E_KEYS


def test_values_are_read_as_their_types() -> None:
    written = {
        "fsdp_size": "1e1",
        "param_dtype": "bfloat16",
        "reduce_dtype": "torch.float32",
        "reshard_after_forward": 4,
        "wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"], "wrap_lm_output": True},
    }
    options = typed_strategy_config(StrategyArguments("fsdp2_infer", written))
    assert isinstance(options, Fsdp2StrategyConfig)
    assert (options.fsdp_size, options.param_dtype, options.reduce_dtype) == (10, "bf16", "fp32")
    assert options.reshard_after_forward == 4 and options.reshard_after_forward is not True
    assert options.wrap_policy.transformer_layer_cls_to_wrap == ["Qwen2DecoderLayer"]
    assert options.wrap_policy.wrap_lm_output and not options.wrap_policy.wrap_embeddings
    no_reshard = typed_strategy_config(StrategyArguments("fsdp2_train", {"reshard_after_forward": False}))
    assert isinstance(no_reshard, Fsdp2StrategyConfig) and no_reshard.reshard_after_forward is False
    chosen = typed_strategy_config(StrategyArguments("fsdp2_train", {"reshard_after_forward": "auto"}))
    assert isinstance(chosen, Fsdp2StrategyConfig) and chosen.reshard_after_forward == "auto"


def test_options_of_other_strategies_are_left_out() -> None:
    options = typed_strategy_config(StrategyArguments("hf_infer", {"gpu_memory_utilization": 0.5, "max_num_seqs": 3}))
    assert options == HfInferStrategyConfig(max_num_seqs=3)


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"strategy_args\.strategy_config\.offload_polic = .*nearest.* offload_policy"
    ):
        typed_strategy_config(StrategyArguments("fsdp2_train", {"offload_polic": True}))


def test_every_strategy_has_options() -> None:
    assert all(strategy_keys(name) for name in BACKENDS)
    with pytest.raises(ConfigError, match=r"must be one of fsdp2_train.*sglang"):
        typed_strategy_config(StrategyArguments("sglnag"))


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("backend", BACKENDS.rows, ids=lambda backend: backend.name)
def test_every_class_is_there(backend: Backend) -> None:
    """Read as text: the packages of most backends are optional."""
    paths = [path for path in (backend.computes, backend.generates, backend.scores) if path]
    assert paths and (not backend.trains or (backend.computes and backend.checkpoints))
    for path in paths:
        module, _, name = path.rpartition(".")
        file = ROOT / (module.replace(".", "/") + ".py")
        text = (file if file.is_file() else file.with_suffix("") / "__init__.py").read_text(encoding="utf-8")
        assert f"class {name}(" in text or f'"{name}"' in text, path


def test_names_of_every_task() -> None:
    assert registry.train_strategies() == ("fsdp2_train", "fsdp_train", "deepspeed_train", "megatron_train")
    assert (
        registry.infer_strategies()[:2] == ("fsdp2_infer", "fsdp2_train") and "vllm" not in registry.infer_strategies()
    )
    assert registry.generation_strategies() == ("hf_infer", "vllm", "sglang")
    assert registry.scoring_strategies() == ("vllm", "remote")
    assert registry.all_scoring_strategies() == (*registry.infer_strategies(), "vllm", "remote")
    assert [name for name in BACKENDS if trains(name)] == list(registry.train_strategies())


def test_backends_of_one_format_read_each_others_checkpoints() -> None:
    for name in registry.train_strategies():
        assert checkpoint_readers(name) == registry.train_strategies()
    assert checkpoint_readers("of_another_version") == ("of_another_version",)
