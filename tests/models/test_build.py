"""Building a model says what is wrong with a role's model, and leaves nothing to chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config.roles import ModelArguments
from roll.models.build import build_model, enable_gradient_checkpointing, has_tied_embeddings


def write_model(path: Path, **options: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.3,
        **options,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def arguments(folder: Path | None, **options: Any) -> ModelArguments:
    return ModelArguments(model_name_or_path=None if folder is None else str(folder), **options)


def test_weights_are_float32_whatever_the_file_and_the_compute_type(folder: Path) -> None:
    model = build_model(arguments(folder, dtype="bf16"), "causal_lm")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_there_is_no_dropout_unless_asked_for(folder: Path) -> None:
    assert build_model(arguments(folder), "causal_lm").config.attention_dropout == 0.0
    asked = arguments(folder, model_config_kwargs={"attention_dropout": 0.1})
    assert build_model(asked, "causal_lm").config.attention_dropout == 0.1


def test_value_head_is_zero_and_scalar(folder: Path) -> None:
    model = build_model(arguments(folder), "value")
    assert model.score.weight.shape == (1, 16)
    assert not model.score.weight.any() and not model.score.bias.any()


def test_gradient_checkpointing_is_on_by_default(folder: Path) -> None:
    for disabled in (False, True):
        args = arguments(folder, disable_gradient_checkpointing=disabled)
        model = build_model(args, "causal_lm")
        enable_gradient_checkpointing(model, args)
        assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules()) is not disabled


def test_tied_embeddings_are_recognised(folder: Path, tmp_path: Path) -> None:
    assert not has_tied_embeddings(build_model(arguments(folder), "causal_lm"))
    tied = write_model(tmp_path, tie_word_embeddings=True)
    assert has_tied_embeddings(build_model(arguments(tied), "causal_lm"))


def test_models_that_change_their_logits_are_refused(folder: Path, tmp_path: Path) -> None:
    changed = write_model(tmp_path, final_logit_softcapping=30.0)
    with pytest.raises(ValueError, match=r"final_logit_softcapping=30\.0, a change of the logits"):
        build_model(arguments(changed), "causal_lm")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"freeze_module_prefix": "vision"},
            r"no parameter starts with 'vision'; the top modules are lm_head, model\.emb",
        ),
        (
            {"model_config_kwargs": {"atention_dropout": 0.1}},
            r"llama model has no atention_dropout; it has .*att",
        ),
    ],
)
def test_mistakes_are_named(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(arguments(folder, **options), "causal_lm")


def test_an_empty_path_is_named() -> None:
    with pytest.raises(ValueError, match="model_name_or_path: empty"):
        build_model(arguments(None), "causal_lm")
