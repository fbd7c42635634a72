"""Each role's model against transformers, by a small copy: what is computed otherwise is found whatever its name."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from roll.config.roles import ModelArguments, WorkerConfig
from roll.models import self_test, small, vision
from roll.models.layout_setup import use_layout_attention
from roll.models.layouts import packed_layout, row_layout
from roll.models.log_probs import ResponseModel
from roll.models.self_test import Noise, check_role, plain_values
from roll.models.self_test_rows import rows_of
from roll.models.small import ORIGINAL_LENGTH, Divided, small_model
from roll.platforms import current_platform
from tests import vision_models

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
SIZES |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}


def config_of(kind: str, **options: Any) -> Any:
    cls = getattr(transformers, f"{kind}Config")
    has = vars(cls()).keys()
    return cls(**{key: value for key, value in SIZES.items() if key in has} | options)


def role_of(tmp_path: Path, config: Any, **options: Any) -> WorkerConfig:
    config.save_pretrained(tmp_path)
    arguments = {key: options.pop(key) for key in ("trust_remote_code", "ulysses_size") if key in options}
    return WorkerConfig(
        name="actor_train", model_args=ModelArguments(model_name_or_path=str(tmp_path), **arguments), **options
    )


@pytest.mark.default_rows("Qwen2-*", "Mistral-None-*", "Llama-use_prefix_sharing-causal_lm")
@pytest.mark.parametrize("head", ["causal_lm", "value"])
@pytest.mark.parametrize("key", [None, "use_remove_padding", "use_sequence_packing", "use_prefix_sharing"])
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Llama", "Mistral"])
def test_what_is_right_passes(tmp_path: Path, kind: str, key: str | None, head: Any) -> None:
    options: dict[str, Any] = {} if key is None else {key: True}
    config = config_of(kind, **({"sliding_window": None} if kind == "Mistral" else {}))
    state = torch.get_rng_state()
    noise = check_role(role_of(tmp_path, config, **options), head, trains=True)
    classifier = frozenset({(f"{kind}ForTokenClassification", "dropout")})
    assert noise == (Noise() if head == "causal_lm" else Noise(classifier))
    assert torch.equal(torch.get_rng_state(), state), "a run's random numbers do not depend on it"


@pytest.mark.parametrize("kind", ["FalconH1", "ModernBertDecoder", "Granite"])
def test_logits_that_are_not_the_output_matrix_s_are_found(tmp_path: Path, kind: str) -> None:
    falcon = {"lm_head_multiplier": 0.02, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8}
    config = config_of(kind, **{"FalconH1": falcon, "Granite": {"logits_scaling": 8.0}}.get(kind, {}))
    found = r"log_probs that are off by .* changed after the output matrix.*megatron_train"
    with pytest.raises(ValueError, match=found):
        check_role(role_of(tmp_path, config), "causal_lm", trains=False)


NOISY = {
    "SeedOss": {"residual_dropout": 0.3, "attention_dropout": 0.2},
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.3},
    "Llama": {"attention_dropout": 0.3},
}


@pytest.mark.default_rows("SeedOss", "GPT2")
@pytest.mark.parametrize("kind", NOISY)
def test_dropout_and_jitter_are_switched_off_whatever_their_name(tmp_path: Path, kind: str) -> None:
    """In the model itself: training mode gives the log-probs of evaluation mode, and layers still recompute."""
    config = config_of(kind, **NOISY[kind])
    noise = check_role(role_of(tmp_path, config), "causal_lm", trains=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(2, 60, (8, 24))
    mask = torch.arange(24).expand(8, -1) > 3
    layout = row_layout(ids, mask)
    wanted = ResponseModel(model.eval())(layout, ("log_probs",))["log_probs"]
    loud = ResponseModel(copy.deepcopy(model).train())(layout, ("log_probs",))["log_probs"]
    assert not torch.allclose(loud, wanted, atol=1e-3), "there is something to switch off"
    noise.silence(model)
    model.gradient_checkpointing_enable()
    model.train()
    for seed in range(3):
        torch.manual_seed(seed)
        torch.testing.assert_close(ResponseModel(model)(layout, ("log_probs",))["log_probs"], wanted)
    assert any(module.training for module in model.modules() if getattr(module, "gradient_checkpointing", False))


def test_a_router_that_draws_experts_is_refused_where_it_trains(tmp_path: Path) -> None:
    config = config_of("Phimoe", num_local_experts=4, router_jitter_noise=0.05, input_jitter_noise=0.1)
    with pytest.raises(ValueError, match="phimoe model gives other log-probs in training"):
        check_role(role_of(tmp_path, config), "causal_lm", trains=True)
    assert check_role(role_of(tmp_path, config), "causal_lm", trains=False) == Noise()


def test_without_a_copy_everything_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "small_model", lambda *args: None)
    for kind in ("SeedOss", "GPT2", "Llama"):
        noise = check_role(role_of(tmp_path, config_of(kind, **NOISY[kind])), "causal_lm", trains=True)
        model = AutoModelForCausalLM.from_config(config_of(kind, **NOISY[kind]))
        noise.silence(model)
        model.train()
        ids = torch.randint(2, 60, (2, 9))
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits), kind


def test_dropout_that_is_written_stays(tmp_path: Path) -> None:
    role = role_of(tmp_path, config_of("Llama", attention_dropout=0.3))
    written = ModelArguments(model_name_or_path=str(tmp_path), model_config_kwargs={"attention_dropout": 0.1})
    assert check_role(role, "causal_lm", trains=True).places == {("LlamaAttention", "attention_dropout")}
    assert check_role(WorkerConfig(name="actor_train", model_args=written), "causal_lm", trains=True) == Noise()


@pytest.mark.parametrize("key", ["use_remove_padding", "use_prefix_sharing"])
def test_layers_that_do_not_pass_keywords_on_are_found(tmp_path: Path, key: str) -> None:
    role = role_of(tmp_path, config_of("Nemotron"), **{key: True})
    with pytest.raises(ValueError, match=rf"nemotron model.*{key}: false"):
        check_role(role, "causal_lm", trains=True)
    check_role(role_of(tmp_path, config_of("Nemotron")), "causal_lm", trains=True)
    model = AutoModelForCausalLM.from_config(config_of("Nemotron"))
    use_layout_attention(model, "use_remove_padding")
    ids, mask = torch.randint(2, 60, (2, 6)), torch.arange(6).expand(2, -1) > 1
    with pytest.raises(ValueError, match=r"NemotronAttention is not given the layout.*use_remove_padding"):
        ResponseModel(model)(packed_layout(ids, mask), ("log_probs",))


SCALED = {
    "longrope": {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 5.0, 8.0]},
    "dynamic": {"factor": 4.0},
}


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("layout", [row_layout, packed_layout])
def test_rotary_angles_are_those_of_the_row_s_own_length(kind: str, layout: Any, tmp_path: Path) -> None:
    """Rows of 20, 7, 17, 16 and 30 tokens, the original length being 16; in any order, twice, against each alone."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 16, **SCALED[kind]}
    longest = 64 if kind == "longrope" else 16
    config = config_of("Llama", rope_parameters=rope, max_position_embeddings=longest)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    lengths = torch.tensor([20, 7, 17, 16, 30])
    ids, columns = torch.randint(2, 60, (5, 30)), torch.arange(30)
    mask = (columns > 2) & (columns < lengths[:, None])
    wanted = torch.zeros(5, 30)
    for row, length in enumerate(lengths.tolist()):
        logits = copy.deepcopy(model)(input_ids=ids[row : row + 1, :length]).logits[0, :-1].log_softmax(-1)
        wanted[row, 1:length] = logits.gather(1, ids[row, 1:length, None])[:, 0]
    changed = copy.deepcopy(model)
    use_layout_attention(changed, "use_remove_padding")
    own = ResponseModel(changed)
    for order in ([0, 1, 2, 3, 4], [3, 4, 1, 0, 2]):
        made = layout(ids[order], mask[order])
        values = made.scatter(own(made, ("log_probs",))["log_probs"], ids.shape)
        torch.testing.assert_close(values, (wanted * mask)[order], rtol=0, atol=1e-4)
    check_role(role_of(tmp_path, config, use_remove_padding=layout is packed_layout), "causal_lm", trains=True)


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_family"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = output.logits * {factor}
        return output
"""


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_code_that_comes_with_a_model_is_tested_too(tmp_path: Path, factor: float) -> None:
    config = config_of("Llama")
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config.auto_map, folder = names, tmp_path / f"own_{int(factor * 10)}"
    role = role_of(folder, config, trust_remote_code=True)
    (folder / "modeling_own.py").write_text(REMOTE.replace("{factor}", str(factor)), encoding="utf-8")
    text = (folder / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(text.replace('"model_type": "llama"', '"model_type": "own_family"'))
    wrong = pytest.raises(ValueError, match="own_family model, computed in padded rows")
    with nullcontext() if factor == 1.0 else wrong:
        check_role(role, "causal_lm", trains=True)


def test_a_small_copy_keeps_every_kind_of_layer_and_what_is_no_size() -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config = config_of("Qwen3", num_hidden_layers=4, layer_types=kinds, use_sliding_window=True, sliding_window=64)
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32}
    config.rope_parameters = yarn
    model = small_model(config, "causal_lm", None)
    assert model is not None
    made = model.config
    assert made.layer_types == ["sliding_attention", "full_attention"] and made.num_hidden_layers == 2
    assert made.rope_parameters["original_max_position_embeddings"] == ORIGINAL_LENGTH
    assert made.rope_parameters["factor"] == 4.0 and made.max_position_embeddings == 4 * ORIGINAL_LENGTH
    assert config.num_hidden_layers == 4, "the model's own configuration is left alone"


def test_a_small_copy_divides_evenly_where_the_model_does() -> None:
    """SmolLM2 on three ranks: nine heads, three of keys."""
    config = config_of("Llama", hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
    model = small_model(config, "causal_lm", None, divided=Divided(3))
    assert model is not None
    made = model.config
    sizes = made.hidden_size, made.intermediate_size, made.num_attention_heads, made.num_key_value_heads
    assert [size % 3 for size in sizes] == [0] * 4 and made.num_key_value_heads < made.num_attention_heads


@pytest.mark.default_rows("qwen2_5_vl-None-causal_lm", "qwen3_vl-use_prefix_sharing-causal_lm", "qwen3_vl_moe-*-value")
@pytest.mark.parametrize("head", ["causal_lm", "value"])
@pytest.mark.parametrize("key", [None, "use_sequence_packing", "use_prefix_sharing"])
@pytest.mark.parametrize("kind", vision_models.KINDS)
def test_models_of_images_are_tested_with_one(
    kind: Any, key: str | None, head: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    vision_models.model(vision_models.tokenizer(), kind).config.save_pretrained(tmp_path)
    arguments = ModelArguments(model_name_or_path=str(tmp_path))
    role = WorkerConfig(name="actor_train", model_args=arguments, **({} if key is None else {key: True}))
    caplog.set_level(logging.INFO, logger="roll.models.self_test")
    check_role(role, head, trains=True)
    assert "passed in" in caplog.text

    monkeypatch.setattr(vision, "rope_positions", lambda features, mask, *_: mask.long()[..., None].expand(-1, -1, 3))
    with pytest.raises(ValueError, match=rf"small copy of this {kind} model, computed in .* off by up to"):
        check_role(role, head, trains=True)


@pytest.mark.parametrize("kind", vision_models.KINDS)
def test_a_small_copy_of_a_published_size_sees(kind: Any) -> None:
    """Sizes that depend on one another stay consistent: what the tower gives, sections of angles, chosen layers."""
    config = transformers.AutoConfig.for_model(kind)
    sections = [16, 24, 24] if kind == "qwen2_5_vl" else [24, 20, 20]
    config.text_config.rope_parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    model = small_model(config, "causal_lm", None)
    assert model is not None and sum(parameter.numel() for parameter in model.parameters()) < small.FEW_ELEMENTS
    tower, text = model.config.vision_config, model.config.text_config
    assert tower.out_hidden_size == text.hidden_size and tower.depth == text.num_hidden_layers == 2
    assert tower.to_dict().get("fullatt_block_indexes", tower.to_dict().get("deepstack_visual_indexes")) == [1]
    assert sum(text.rope_parameters["mrope_section"]) == (getattr(text, "head_dim", None) or 8) // 2
    rows = rows_of(model)
    values, gradient = plain_values(model, rows, "causal_lm")
    assert rows.images is not None and values.isfinite().all() and gradient is not None


@pytest.mark.parametrize("liger", [True, False])
def test_kernels_of_a_device_are_tested_on_it(liger: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is built on the host, where Triton has none."""
    compute = Mock(wraps=self_test._in_layout)
    monkeypatch.setattr(self_test, "_in_layout", compute)
    monkeypatch.setattr(self_test, "use_liger", lambda model: None)
    role = role_of(tmp_path, config_of("Llama"))
    check_role(replace(role, model_args=replace(role.model_args, use_liger_kernel=liger)), "causal_lm", trains=True)
    assert [call.args[-1] for call in compute.call_args_list] == [current_platform().device() if liger else None]


@pytest.mark.gpu
def test_ligers_kernels_pass_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    role = role_of(tmp_path, config_of("Llama"))
    check_role(replace(role, model_args=replace(role.model_args, use_liger_kernel=True)), "causal_lm", trains=True)
