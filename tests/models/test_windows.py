"""Attention by one kernel, in windows and with soft caps: every layout against plain transformers, row by row."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from roll.models import attention, patterns, self_test
from roll.models.attention import Scores, layout_attention
from roll.models.build import attention_implementation, checked_config
from roll.models.invariant import make_invariant
from roll.models.layout_setup import use_layout_attention
from roll.models.layouts import TokenLayout, on_device, packed_layout, padded, tree_layout
from roll.models.log_probs import ResponseModel
from roll.models.patterns import PackedSequences, PrefixTree
from tests.models.test_layouts import batch_of, random_tree
from tests.models.test_self_test import config_of, role_of

WINDOW = 4
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"sliding_window": WINDOW, "layer_types": MIXED, "query_pre_attn_scalar": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {},  # no window
    "Mistral": {"sliding_window": WINDOW},
    "Qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED},
    "Gemma3Text": GEMMA,
    # caps in attention and after the output matrix, both small enough to bend most scores
    "Gemma2": {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
}


def slow_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """FlashAttention's definition: query i of q sees the keys from i + k - q - left to i + k - q + right."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert all(one.is_contiguous() for one in (query, key, value, cu_seq_q, cu_seq_k))
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max())
    assert len(query) == int(cu_seq_q[-1]) and len(key) == len(value) == int(cu_seq_k[-1])
    group, outputs = query.shape[1] // key.shape[1], []
    for sequence in range(len(cu_seq_q) - 1):
        asked = query[int(cu_seq_q[sequence]) : int(cu_seq_q[sequence + 1])]
        keys, values = (
            part[int(cu_seq_k[sequence]) : int(cu_seq_k[sequence + 1])].repeat_interleave(group, 1)
            for part in (key, value)
        )
        last = torch.arange(len(asked), device=query.device)[:, None] + len(keys) - len(asked)
        places = torch.arange(len(keys), device=query.device)
        seen = torch.ones(len(asked), len(keys), dtype=torch.bool, device=query.device)
        if window_size[0] >= 0:
            seen &= places >= last - window_size[0]
        if window_size[1] >= 0:
            seen &= places <= last + window_size[1]
        scores = torch.einsum("qhd,khd->hqk", asked, keys) * (query.shape[2] ** -0.5 if scale is None else scale)
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The path of a GPU, with a plain kernel; the sequences of each call are noted."""
    calls: list[int] = []

    def kernel(*args: Any, **options: Any) -> Tensor:
        calls.append(len(args[3]) - 1)
        return slow_varlen_attn(*args, **options)

    def capping_kernel(*args: Any, softmax_scale: float, causal: bool, softcap: float, **options: Any) -> Tensor:
        assert causal
        return kernel(*args, scale=softmax_scale, softcap=softcap, enable_gqa=True, **options)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    package = SimpleNamespace(flash_attn_varlen_func=capping_kernel, __spec__=ModuleSpec("flash_attn", None))
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(attention, "takes_varlen", lambda *_: True)
    return calls


def model_of(kind: str, **options: Any) -> Any:
    import transformers

    config = config_of(kind, **MODELS[kind] | options)
    torch.manual_seed(0)
    # transformers' sdpa drops a cap without a word.
    implementation = "eager" if kind == "Gemma2" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.double()


def groups() -> tuple[Tensor, Tensor]:
    """Three prompts with 1, 3 and 4 responses, most rows longer than the window."""
    rows, random = [], torch.Generator().manual_seed(2)
    for prompt, lengths in ((7, (9,)), (2, (5, 1, 12)), (11, (3, 8, 2, 6))):
        ids = torch.randint(1, 40, (prompt,), generator=random).tolist()
        for length in lengths:
            answer = torch.randint(1, 40, (length,), generator=random).tolist()
            rows.append((ids + answer, [False] * prompt + [True] * length))
    return batch_of(rows)


def plain(model: Any, input_ids: Tensor, mask: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """By transformers alone, each row alone."""
    values = torch.zeros(input_ids.shape, dtype=torch.float64)
    for row, ids in enumerate(input_ids):
        values[row, 1:] = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return differentiated(model, values * mask, weights)


def differentiated(model: Any, values: Tensor, weights: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (values * weights).sum().backward()
    return {"log_probs": values.detach()} | {name: one.grad.clone() for name, one in model.named_parameters()}


BATCHES = {"groups": groups, "tree-0": lambda: batch_of(random_tree(0)), "tree-1": lambda: batch_of(random_tree(1))}
PATHS = ["kernel", "calls"]


@pytest.mark.default_rows(
    "*-Gemma2-groups-*", "kernel-*-groups-tree*", "kernel-Qwen3-tree-1-*", "calls-Mistral-tree-0-*"
)
@pytest.mark.parametrize("lay_out", [packed_layout, tree_layout])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("path", PATHS)
def test_every_layout_is_each_row_alone(
    path: str, kind: str, batch: str, lay_out: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Log-probs and every gradient, with padding at the end; scores with a cap in blocks of a few queries."""
    monkeypatch.setattr(attention, "SCORES", 100)
    calls = request.getfixturevalue("by_kernel") if path == "kernel" else None
    monkeypatch.setattr(patterns, "MIN_SHARED", 2)
    input_ids, mask = BATCHES[batch]()
    mask[:, 0] = False
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1)).double()
    model = model_of(kind)
    wanted = plain(model, input_ids, mask, weights)
    use_layout_attention(model, "use_prefix_sharing")
    layout: TokenLayout = lay_out(input_ids, mask)
    assert isinstance(layout.pattern, PrefixTree if lay_out is tree_layout else PackedSequences)
    layout = padded(layout, 1, layout.input_ids.shape[1] + 3)
    found = layout.scatter(ResponseModel(model)(layout, ("log_probs",))["log_probs"], mask.shape)
    actual = differentiated(model, found, weights)
    if calls is not None:
        assert isinstance(layout.pattern, PrefixTree | PackedSequences)
        assert calls == [len(layout.pattern.varlen.lengths)] * 3, "one call a layer"
    for name, value in wanted.items():
        # What models compute in float32 (norms, rotary angles) leaves 1e-7 of the largest element.
        scale = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(actual[name], value, rtol=0, atol=2e-6 * scale, msg=name)


def test_a_window_changes_log_probs() -> None:
    """Otherwise the comparison would say nothing."""
    input_ids, mask = groups()
    mask[:, 0] = False
    weights = torch.ones(mask.shape)
    found = [plain(model_of("Mistral", sliding_window=size), input_ids, mask, weights) for size in (None, 4, 5)]
    for one, other in ((0, 1), (1, 2)):
        assert float((found[one]["log_probs"] - found[other]["log_probs"]).abs().max()) > 1e-2


def test_an_own_run_without_context_and_padding_have_sequences() -> None:
    layout = tree_layout(*groups())
    assert isinstance(layout.pattern, PrefixTree)
    call = layout.pattern.padded(2).varlen
    # The last token of a response predicts nothing: the response of one token has no tokens of its own.
    responses = ((7, 8), (2, 4), (2, 11), (11, 2), (11, 7), (11, 1), (11, 5))
    of_runs = [(own, before + own) for before, own in responses]
    assert sorted(call.lengths) == sorted([(7, 7), (2, 2), (11, 11), *of_runs, (2, 2)])
    assert call.key_offsets.tolist()[-1] == sum(keys for _, keys in call.lengths)
    assert call.query_offsets.tolist()[-1] == layout.input_ids.numel() + 2


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"softcap": 50.0, "attend": attention._attend}, "softcap"),
        ({"s_aux": torch.ones(4)}, "s_aux"),
        ({"is_causal": False}, "no causal mask"),
        ({"position_bias": torch.ones(4, 8, 8), "s_aux": 3.0}, "position_bias, s_aux"),
    ],
)
def test_what_a_layer_adds_is_refused_by_name(keywords: dict[str, Any], named: str) -> None:
    states = [torch.ones(1, 4, 8, 8)] * 3
    with pytest.raises(ValueError, match=rf"Linear computes attention with {named}, which no .* use_remove_padding"):
        layout_attention(torch.nn.Linear(1, 1), *states, None, **keywords)
    passed_down = {"position_ids": torch.arange(8)[None], "use_cache": True, "softcap": None, "output_attentions": True}
    layout_attention(torch.nn.Linear(1, 1), *states, None, **passed_down)


def test_soft_caps_pass_the_self_test_and_a_dropped_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, dropped = attention.causal_attention, r"this gemma2 model, .*, gives log_probs that are off"
    for key in ({}, {"use_remove_padding": True}, {"use_prefix_sharing": True}):
        role = role_of(tmp_path, config_of("Gemma2", **MODELS["Gemma2"]), **key)
        args = role.model_args
        assert attention_implementation(args, checked_config(args, "causal_lm")) == "eager"
        self_test.check_role(role, "causal_lm", trains=True)
    without = lambda *given: right(*given[:3], replace(given[3], softcap=None))  # noqa: E731
    monkeypatch.setattr(attention, "causal_attention", without)
    with pytest.raises(ValueError, match=dropped):
        self_test.check_role(role, "causal_lm", trains=True)


@pytest.mark.parametrize("left", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_soft_caps_cannot_be_rounded_alike_by_engine_and_trainer(left: str) -> None:
    with pytest.raises(ValueError, match=r"this gemma2 model caps .* strict_on_policy: false"):
        make_invariant(model_of("Gemma2", **{left: None}))


def test_torch_s_kernel_knows_no_cap_and_the_package_s_does(monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.ones(1, 4, 8, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(attention, "has_varlen", lambda device: True)
    for installed in (False, True):
        monkeypatch.setattr(attention, "is_installed", lambda module, found=installed: found)
        assert attention.takes_varlen(states, states) and attention.takes_varlen(states, states, 50.0) is installed


def test_windows_pass_the_self_test_and_one_of_another_size_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = role_of(tmp_path, config_of("Mistral", sliding_window=64), use_prefix_sharing=True, use_remove_padding=True)
    self_test.check_role(role, "causal_lm", trains=True)
    right = attention.visible
    for module in (attention, patterns):
        monkeypatch.setattr(module, "visible", lambda *sizes: right(*sizes[:2], WINDOW, sizes[3]))
    with pytest.raises(ValueError, match=r"mistral model, computed in shared prompts, gives log_probs that are off"):
        self_test.check_role(role, "causal_lm", trains=True)


@pytest.mark.parametrize("key", ["use_prefix_sharing", "use_remove_padding"])
@pytest.mark.parametrize("kind", ["Qwen3", "Mistral"])
def test_kernels_of_half_precision_are_tested_where_a_role_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, key: str
) -> None:
    """A kernel that does not align its mask to the last key is found in a tree."""

    def unaligned(*args: Any, **options: Any) -> Tensor:
        if bool((args[3] != args[4]).any()):
            options["window_size"] = (-1, -1)  # as if each run saw all of itself
        return slow_varlen_attn(*args, **options)

    monkeypatch.setattr(varlen, "varlen_attn", slow_varlen_attn)
    for module in (attention, self_test):
        monkeypatch.setattr(module, "has_varlen", lambda device: True)
    role = role_of(tmp_path, config_of(kind), **{key: True})
    self_test.check_role(role, "causal_lm", trains=True)
    monkeypatch.setattr(varlen, "varlen_attn", unaligned)
    if key == "use_prefix_sharing":
        with pytest.raises(ValueError, match=r"shared prompts, gives in half precision log_probs that are off by"):
            self_test.check_role(role, "causal_lm", trains=True)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", ["Qwen3", "Mistral"])
def test_the_kernel_of_a_gpu_is_each_row_alone(kind: str, batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of a tree in bfloat16 against plain rows in float32 of the same numbers: output and gradients."""
    monkeypatch.setattr(patterns, "MIN_SHARED", 2)
    layout = tree_layout(*BATCHES[batch]())
    tree, window = layout.pattern, MODELS[kind].get("sliding_window")
    assert isinstance(tree, PrefixTree)
    random, count = torch.Generator().manual_seed(0), layout.input_ids.shape[1]
    states = [torch.randn(1, heads, count, 32, generator=random).bfloat16() for heads in (4, 2, 2)]
    weights = torch.randn(1, count, 4, 32, generator=random)
    found = []
    for dtype, attend in ((torch.bfloat16, attention.tree_attention), (torch.float32, _of_rows)):
        leaves = [state.detach().to("cuda", dtype, copy=True).requires_grad_() for state in states]
        assert attention.takes_varlen(leaves[0], leaves[2]) is (dtype is torch.bfloat16)
        output = attend(*leaves, on_device(tree, torch.device("cuda")), Scores(window=window))
        (output * weights.to("cuda")).sum().backward()
        found.append([output.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))


def _of_rows(query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, how: Scores) -> Tensor:
    """Each run after its own copy of its context, in plain arithmetic."""
    call = tree.varlen
    assert call.keys is not None
    keys, values = (part[0].transpose(0, 1)[call.keys].contiguous() for part in (key, value))
    sizes = [max(lengths) for lengths in zip(*call.lengths, strict=True)]
    offsets = (call.query_offsets.cpu(), call.key_offsets.cpu())
    asked = query[0].transpose(0, 1).contiguous()
    left = -1 if how.window is None else how.window - 1
    return slow_varlen_attn(asked, keys, values, *offsets, *sizes, window_size=(left, 0), enable_gqa=True)[None]
