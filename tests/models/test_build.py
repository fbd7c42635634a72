"""Building a model says what is wrong with a role's model, and leaves nothing to chance."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from roll.config.roles import ModelArguments
from roll.config.weight_files import weights_problem
from roll.models.build import (
    attention_implementation,
    build_model,
    checked_config,
    enable_gradient_checkpointing,
    has_tied_embeddings,
)
from roll.models.loading import build_on_meta


def write_model(path: Path, **options: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**shape | {"num_attention_heads": 2, "attention_dropout": 0.3} | options)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def arguments(folder: Path, **options: Any) -> ModelArguments:
    return ModelArguments(model_name_or_path=str(folder), **options)


def test_weights_are_float32_and_layers_recompute_by_default(folder: Path) -> None:
    """Whatever the type of the file and of computation; without its package flash attention is sdpa."""
    model = build_model(arguments(folder, dtype="bf16"), "causal_lm")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    head = build_model(arguments(folder), "value").score
    assert head.weight.shape == (1, 16) and not head.weight.any() and not head.bias.any(), "a critic's is zero"
    for disabled, written in ((False, "fa2"), (True, "flash_attention_2")):
        args = arguments(folder, disable_gradient_checkpointing=disabled, attn_implementation=written)
        assert attention_implementation(args, checked_config(args, "causal_lm")) is None
        model = build_model(args, "causal_lm")
        enable_gradient_checkpointing(model, args)
        assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules()) is not disabled
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"freeze_module_prefix": "vision"},
            r"no parameter starts with 'vision'; the top modules are lm_head, model\.emb",
        ),
        ({"model_config_kwargs": {"atention_dropout": 0.1}}, r"llama model has no atention_dropout; it has .*att"),
        ({"model_name_or_path": None}, "model_name_or_path: empty"),
    ],
)
def test_mistakes_are_named(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(replace(arguments(folder), **options), "causal_lm")


def save(folder: Path, weights: dict[str, torch.Tensor], config: Path) -> Path:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(config / "config.json", folder)
    return folder


Weights = dict[str, torch.Tensor]
INCOMPLETE: dict[str, Callable[[Weights], Weights]] = {
    "lm_head.weight": lambda w: {k: v for k, v in w.items() if k != "lm_head.weight"},
    "_orig_mod.": lambda w: {f"_orig_mod.{k}": v for k, v in w.items()},
    "_fsdp_wrapped_module.": lambda w: {k.replace("layers", "_fsdp_wrapped_module.layers"): v for k, v in w.items()},
    "model.layers.0.mlp.up_proj.weight": lambda w: {k: v for k, v in w.items() if "0.mlp.up" not in k},
    "model.layers.2.mlp.up_proj.weight": lambda w: {k: v for k, v in w.items() if "2.mlp.up" not in k},
    "o_proj.weight": lambda w: {k: v for k, v in w.items() if "o_proj" not in k},
    "model.norm.weight": lambda w: {k: v for k, v in w.items() if k != "model.norm.weight"},
    "module.": lambda w: {f"module.{k}": v for k, v in w.items()},
    "shape [3, 32]": lambda w: w | {"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 32)},
    "model.layers.3.mlp.up_proj.weight": lambda w: w | {"model.layers.3.mlp.up_proj.weight": torch.zeros(3, 32)},
    "o_proj.bias": lambda w: w | {"model.layers.0.self_attn.o_proj.bias": torch.zeros(32)},
    "base_model.model.": lambda w: {
        f"base_model.model.{k.replace('proj.weight', 'proj.base_layer.weight')}": v for k, v in w.items()
    },
}


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("three"), num_hidden_layers=3, tie_word_embeddings=False)


@pytest.mark.parametrize("name", INCOMPLETE)
def test_a_folder_that_lacks_a_tensor_is_refused_by_the_loader_and_by_the_check(
    three_layers: Path, tmp_path: Path, name: str
) -> None:
    damaged = save(tmp_path / "model", INCOMPLETE[name](load_file(three_layers / "model.safetensors")), three_layers)
    with pytest.raises(ValueError, match=re.escape(name)):
        build_model(arguments(damaged), "causal_lm")
    with pytest.raises(ValueError, match=re.escape(name)):
        assert build_on_meta(arguments(damaged), "causal_lm") is None
        build_model(arguments(damaged), "causal_lm")
    problem = weights_problem(damaged, {})
    assert problem is not None and name in problem
    assert weights_problem(damaged, {}) == problem, "only a whole folder is remembered"
    without_head = weights_problem(damaged, {}, without_head=True)
    assert (without_head is None) == (name == "lm_head.weight")
    if name != "lm_head.weight":
        for head in ("value", "score"):
            with pytest.raises(ValueError, match="lacks"):
                build_model(arguments(damaged), head)  # type: ignore[arg-type]


def test_a_cut_file_and_an_absent_shard_are_found_by_their_headers(three_layers: Path, tmp_path: Path) -> None:
    assert weights_problem(three_layers, {}) is None
    shutil.copytree(three_layers, tmp_path / "cut")
    whole = (tmp_path / "cut" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[:-100])
    assert "cut off" in str(weights_problem(tmp_path / "cut", {}))
    (tmp_path / "sharded").mkdir()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors" in str(weights_problem(tmp_path / "sharded", {}))


def test_files_of_the_older_format_are_compared_as_well(three_layers: Path, tmp_path: Path) -> None:
    weights = load_file(three_layers / "model.safetensors")
    (tmp_path / "model").mkdir()
    shutil.copy(three_layers / "config.json", tmp_path / "model")
    file = tmp_path / "model" / "pytorch_model.bin"
    torch.save(weights, file)
    assert weights_problem(tmp_path / "model", {}) is None
    torch.save({name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}, file)
    assert "lacks model.norm.weight" in str(weights_problem(tmp_path / "model", {}))
    file.write_bytes(b"no pickle")
    assert "holds no tensors that can be read" in str(weights_problem(tmp_path / "model", {}))
    file.unlink()
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    assert "holds an adapter and no model" in str(weights_problem(tmp_path / "model", {}))


@pytest.mark.parametrize("differs", [True, False])
def test_whether_embeddings_are_tied_is_what_the_files_say(three_layers: Path, tmp_path: Path, differs: bool) -> None:
    weights = load_file(three_layers / "model.safetensors")
    if not differs:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    folder = save(tmp_path / "model", weights, three_layers)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    model = build_model(arguments(folder), "causal_lm")
    assert model.config.tie_word_embeddings is not differs and has_tied_embeddings(model) is not differs
    assert torch.equal(model.get_output_embeddings().weight, weights["lm_head.weight"].float())
