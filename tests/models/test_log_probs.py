"""The chunked log-prob head equals log_softmax over all logits, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.models.layouts import TargetDistributions, TopTokens, row_layout
from roll.models.log_probs import HeadMemory, ResponseModel, token_log_probs
from tests.models.builders import tiny


def naive(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    table = (logits / temperature).log_softmax(-1)
    entropy, squares = -(table.exp() * table).sum(-1), table.detach().double().exp().square().sum(-1)
    return table.gather(1, targets[:, None])[:, 0], entropy, squares


def inputs(tokens: int, with_bias: bool, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 16, generator=random, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 16, generator=random, dtype=dtype, requires_grad=True)
    leaves = [hidden, weight]
    if with_bias:
        leaves.append(torch.randn(50, generator=random, dtype=dtype, requires_grad=True))
    return leaves


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 23),
    chunk_tokens=st.integers(1, 30),
    keep=st.booleans(),
    with_bias=st.booleans(),
    use=st.sampled_from(["log_probs", "entropy", "both"]),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    softcap=st.sampled_from([None, 4.0]),
    seed=st.integers(0, 100),
)
def test_equals_log_softmax(
    tokens: int, chunk_tokens: int, keep: bool, with_bias: bool, use: str, temperature: float, softcap: Any, seed: int
) -> None:
    leaves = inputs(tokens, with_bias, torch.float32, seed)
    targets = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(seed))
    upstream = torch.randn(2, tokens, generator=torch.Generator().manual_seed(seed + 1))
    memory = HeadMemory(chunk_bytes=0, min_chunk_tokens=chunk_tokens, kept_bytes=2**20 if keep else 0)
    bias = leaves[2] if with_bias else None

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        terms = {"log_probs": (log_probs * upstream[0]).sum(), "entropy": (entropy * upstream[1]).sum()}
        return sum(terms.values()) if use == "both" else terms[use]

    options = {"with_entropy": True, "with_sum_of_squares": True, "memory": memory, "softcap": softcap}
    log_probs, entropy, squares = token_log_probs(*leaves[:2], targets, bias=bias, temperature=temperature, **options)
    *wanted, wanted_squares = naive(leaves[0], leaves[1], targets, bias, temperature, softcap)
    assert squares is not None and not squares.requires_grad
    torch.testing.assert_close(squares.double(), wanted_squares, rtol=2e-5, atol=1e-7)
    assert entropy is not None
    torch.testing.assert_close(log_probs, wanted[0], rtol=0, atol=2e-6 * 20)
    torch.testing.assert_close(entropy, wanted[1], rtol=0, atol=2e-6 * 20)
    actual_gradients = torch.autograd.grad(loss(log_probs, entropy), leaves)
    for actual, expected in zip(actual_gradients, torch.autograd.grad(loss(*wanted), leaves), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_confident_predictions_keep_their_precision() -> None:
    """A token of probability 1 - 1e-9 has a log-prob of -1e-9, not log(1.0) of a rounded softmax; nothing overflows.
    A frozen matrix gets no gradient, and only what is asked for is computed."""
    weight = torch.tensor([[20.72], [0.0]])
    hidden = torch.tensor([[1.0], [1000.0]], requires_grad=True)
    log_probs, entropy, squares = token_log_probs(hidden, weight, torch.tensor([1, 0]), with_entropy=True)
    assert entropy is not None and squares is None
    assert log_probs[0].item() == pytest.approx(-20.72) and log_probs[1].item() == 0.0
    (log_probs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and bool(hidden.grad.isfinite().all()) and weight.grad is None


def test_bf16_inputs_give_float32_results_and_bf16_gradients() -> None:
    hidden, weight = inputs(40, False, torch.bfloat16)
    targets = torch.arange(40) % 50
    log_probs, *_ = token_log_probs(
        hidden, weight, targets, memory=HeadMemory(chunk_bytes=0, min_chunk_tokens=7, kept_bytes=0)
    )
    log_probs.sum().backward()
    assert log_probs.dtype is torch.float32
    assert hidden.grad is not None and hidden.grad.dtype is torch.bfloat16
    wanted, *_ = naive(hidden.float(), weight.float(), targets, None, 1.0)
    # The logits of the bf16 product carry 8 bits; they are about 10 here.
    torch.testing.assert_close(log_probs, wanted, rtol=0, atol=0.08)


def test_never_holds_all_logits() -> None:
    """Peak memory of forward and backward stays far below one float32 table of logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    tokens, vocabulary, largest = 2048, 8192, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    with Watch():
        memory = HeadMemory(chunk_bytes=2**19, min_chunk_tokens=1, kept_bytes=2**19)
        log_probs, *_ = token_log_probs(hidden, weight, torch.zeros(tokens, dtype=torch.int64), memory=memory)
        log_probs.sum().backward()
    assert largest <= max(2**19 // 4, weight.numel())
    assert largest < tokens * vocabulary // 100


@pytest.mark.parametrize("wanted", ["top", "comparison"])
def test_whole_distributions_of_capped_logits(wanted: str) -> None:
    """Through a tied head, against log-softmax of transformers' logits; the gradient of the embeddings too."""
    model = tiny("Gemma2", head_dim=4, final_logit_softcapping=2.0, attn_logit_softcapping=None, initializer_range=0.6)
    ids = torch.arange(2, 14)[None]
    layout, mask = row_layout(ids, torch.arange(12)[None] > 3), torch.arange(12) > 3
    table = model(ids).logits[0, :-1][mask[1:]].float().log_softmax(-1)
    if wanted == "top":
        found = ResponseModel(model)(replace(layout, top_tokens=TopTokens(5, 40)), ("log_probs",))
        log_probs, best = table.topk(5, dim=-1)
        torch.testing.assert_close(found["top_log_probs"], log_probs.detach(), rtol=0, atol=1e-5)
        assert torch.equal(found["top_ids"].long(), best)
        return
    others = torch.randn(table.shape, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    log_probs, best = others.topk(40, dim=-1)
    target = TargetDistributions("t", best, log_probs, others[:, 0], 1.0, lambda q, p, _: (p.exp() * (p - q)).sum(-1))
    found = ResponseModel(model)(replace(layout, comparisons=(target,)), ("log_probs",))
    divergence = (others.exp() * (others - table)).sum(-1)
    torch.testing.assert_close(found["t/divergence"], divergence, rtol=0, atol=1e-5)
    embeddings = model.get_input_embeddings().weight
    gradients = [torch.autograd.grad(one.sum(), embeddings)[0] for one in (found["t/divergence"], divergence)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", [True, False])
def test_an_adapter_and_several_targets_of_one_distribution(keep: bool) -> None:
    """``W h + B (A h)`` by autograd over all logits."""
    leaves = inputs(11, False)
    random = torch.Generator().manual_seed(3)
    low, up = (torch.randn(size, 4, generator=random, dtype=torch.float64, requires_grad=True) for size in (11, 50))
    targets = torch.randint(0, 50, (11, 3), generator=random)
    upstream = torch.randn(targets.shape, generator=random, dtype=torch.float64)
    memory = HeadMemory(chunk_bytes=0, min_chunk_tokens=4, kept_bytes=2**20 if keep else 0)
    found, *_ = token_log_probs(leaves[0], leaves[1], targets, temperature=0.7, memory=memory, adapter=(low, up))
    table = ((leaves[0] @ leaves[1].t() + low @ up.t()) / 0.7).log_softmax(-1)
    wanted = table.gather(1, targets)
    torch.testing.assert_close(found, wanted)
    leaves += [low, up]
    actual = torch.autograd.grad((found * upstream).sum(), leaves)
    torch.testing.assert_close(actual, torch.autograd.grad((wanted * upstream).sum(), leaves))
