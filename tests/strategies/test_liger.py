"""``model_args.use_liger_kernel``: Liger's kernels compute what transformers' layers compute, here in Triton's
interpreter: ``make test-liger``."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("liger_kernel", reason="needs liger-kernel: make test-liger")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: make test-liger", allow_module_level=True)

from roll.config.roles import ModelArguments, WorkerConfig
from roll.models.build import enable_gradient_checkpointing
from roll.models.kernels import use_liger
from roll.models.lora import add_adapters
from roll.models.self_test import check_role
from tests.models.builders import tiny
from tests.strategies import jobs
from tests.strategies.comparison import assert_step_equals
from tests.strategies.samples import PACKING

LIGER = {"model_args": {"use_liger_kernel": True}}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"mlp_bias": True},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
    model = tiny(family, initializer_range=0.3, **FAMILIES[family])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # no weight of a norm is 1
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.to(dtype)


def computed(model: Any) -> dict[str, Tensor]:
    """Log-probs of tokens, and the gradients of a weighted sum of them, in float32."""
    ids = torch.randint(0, 40, (3, 11), generator=torch.Generator().manual_seed(1))
    table = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    log_probs = table.gather(2, ids[:, 1:, None])
    (log_probs * torch.linspace(0.5, 1.5, log_probs.numel()).view_as(log_probs)).sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"log_probs": log_probs.detach()} | {name: one.float() for name, one in gradients.items()}


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_transformers(family: str) -> None:
    wanted, model = computed(build(family)), build(family)
    use_liger(model)
    assert "Liger" in repr(model)
    found = computed(model)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert distance(found[name], value) < 5e-6, name


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_far_from_float32_as_transformers(family: str) -> None:
    exact, plain = (computed(build(family, dtype)) for dtype in (torch.float32, torch.bfloat16))
    model = build(family, torch.bfloat16)
    use_liger(model)
    for name, value in computed(model).items():
        # Two draws of rounding errors: norms of a hundred numbers vary by a few tenths.
        assert distance(value, exact[name]) < 1.5 * distance(plain[name], exact[name]) + 1e-3, name


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_adapters_and_checkpointing(reentrant: bool) -> None:
    results = []
    for uses in (False, True):
        model = build("Qwen3")
        args = ModelArguments(
            lora_target="all-linear",
            additional_target=["input_layernorm", "norm"],
            gradient_checkpointing_use_reentrant=reentrant,
        )
        add_adapters(model, args, 0, torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.linspace(-0.2, 0.2, parameter.numel()).view_as(parameter))
        if uses:
            use_liger(model)
        enable_gradient_checkpointing(model, args)
        results.append(computed(model.train()))
    plain, liger = results
    assert liger.keys() == plain.keys() and any("lora_A" in name for name in liger)
    assert any("modules_to_save" in name for name in liger)
    for name, value in plain.items():
        assert distance(liger[name], value) < 5e-6, name


def test_other_models_of_the_process_are_left_alone() -> None:
    module = import_module("transformers.models.llama.modeling_llama")
    before, first = dict(vars(module)), build("Llama")
    wanted = computed(build("Llama"))
    use_liger(first)
    assert vars(module) == before
    second = build("Llama")
    assert "Liger" not in repr(second)
    with mock.patch("liger_kernel.ops.rope.LigerRopeFunction.forward", side_effect=AssertionError):
        assert all(torch.equal(value, wanted[name]) for name, value in computed(second).items())
        with pytest.raises(AssertionError):
            computed(first)


def test_a_family_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"use_liger_kernel: true, but .* a stablelm model; .*llama.*: false"):
        use_liger(tiny("StableLm"))


@pytest.mark.parametrize("key", ["use_remove_padding", "use_prefix_sharing", None])
def test_the_self_test_computes_its_copy_by_them(tmp_path: Path, key: str | None) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "head_dim": 8, "max_position_embeddings": 128}
    tiny("Qwen3", **sizes).config.save_pretrained(tmp_path)
    args = ModelArguments(model_name_or_path=str(tmp_path), use_liger_kernel=True)
    role = WorkerConfig(name="actor_train", model_args=args, **({} if key is None else {key: True}))
    check_role(role, "causal_lm", trains=True)
    check_role(role, "value", trains=True)
    with (
        mock.patch("liger_kernel.transformers.rope.dispatch", lambda name, q, k, *others: (q, k)),
        pytest.raises(ValueError, match=r"this qwen3 model.*off by .*use_liger_kernel: false"),
    ):
        check_role(role, "causal_lm", trains=True)


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fsdp2-1-rank": (1, "fsdp2", LIGER),
    "fsdp2-packed": (2, "fsdp2", LIGER | PACKING),
    "fsdp2-tiled-mlp": (2, "fsdp2", LIGER | {"config": {"apply_tiled_mlp": True}}),
    "fsdp-shared-prompts": (2, "fsdp", LIGER | {"use_prefix_sharing": True}),
    "zero2": (2, "zero2", LIGER),
    "zero3-checkpointed": (2, "zero3", {"model_args": LIGER["model_args"] | {"disable_gradient_checkpointing": False}}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_the_plain_model_s(run: Any, expected: Any, case: str) -> None:
    world, strategy, options = CASES[case]
    assert_step_equals(run(jobs.train, world, strategy, "tied", **options), expected("tied"), relative=4e-6)
