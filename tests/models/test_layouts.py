"""Layouts say where every response token is predicted and written; packing and shared prompts change no number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.config.roles import ModelArguments
from roll.models import attention
from roll.models.attention import use_layout_attention
from roll.models.build import enable_gradient_checkpointing
from roll.models.layouts import (
    PackedSequences,
    PromptParts,
    TokenLayout,
    leads_a_group,
    packed_layout,
    padded,
    row_layout,
    shared_prompt_layout,
)
from roll.models.log_probs import ResponseModel
from tests.models.builders import tiny

VOCABULARY = 40


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups behind one prompt, of any lengths; some rows without response, some with gaps in it."""
    rows: list[tuple[list[int], list[bool]]] = []
    token = st.integers(1, 3)
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(token, min_size=1, max_size=6))
        for _ in range(draw(st.integers(1, 4))):
            response = draw(st.lists(token, min_size=0, max_size=5))
            sampled = draw(st.lists(st.booleans(), min_size=len(response), max_size=len(response)))
            rows.append((prompt + response, [False] * len(prompt) + sampled))
    width = max(len(ids) for ids, _ in rows) + draw(st.integers(0, 3))
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (ids, sampled) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = torch.tensor(sampled)
    return input_ids, mask


def visible_tokens(layout: TokenLayout, slot: int) -> list[tuple[int, int]]:
    """(position, token) of everything that token ``slot`` sees, itself included, by brute force."""
    length = layout.input_ids.shape[1]
    ids = layout.input_ids.flatten()
    if layout.pattern is None:
        start = slot - slot % length
        return [(index - start, int(ids[index])) for index in range(start, slot + 1)]
    assert layout.position_ids is not None
    positions = layout.position_ids.flatten()
    parts = layout.pattern
    if isinstance(parts, PackedSequences):
        start = max(offset for offset in parts.offsets.tolist() if offset <= slot)
        return [(int(positions[index]), int(ids[index])) for index in range(start, slot + 1)]
    place = int(parts.restore[slot])
    num_prompts, prompt_width = parts.prompts.shape
    if place < num_prompts * prompt_width:
        prompt, column = divmod(place, prompt_width)
        seen = parts.prompts[prompt, : column + 1]
    else:
        part, column = divmod(place - num_prompts * prompt_width, parts.parts.shape[1])
        keys = torch.cat([parts.prompts[parts.prompt_of_part[part]], parts.parts[part]])
        mask = parts.part_mask.expand(len(parts.parts), -1, -1, -1)[part, 0, column]
        seen = keys[mask]
    return sorted((int(positions[index]), int(ids[index])) for index in seen)


@settings(max_examples=150, deadline=None)
@given(
    batch=batches(),
    lay_out=st.sampled_from(
        [
            row_layout,
            partial(row_layout, width_multiple=8),
            packed_layout,
            shared_prompt_layout,
            partial(shared_prompt_layout, without_groups=packed_layout),
        ]
    ),
)
def test_each_response_token_is_predicted_from_what_stands_before_it(
    batch: tuple[torch.Tensor, torch.Tensor], lay_out: Callable[..., TokenLayout]
) -> None:
    input_ids, mask = batch
    layout = lay_out(input_ids, mask)
    mask = mask.clone()
    mask[:, 0] = False
    assert layout.destinations.tolist() == mask.flatten().nonzero()[:, 0].tolist()
    assert torch.equal(layout.targets, input_ids[mask])
    for slot, destination in zip(layout.predictors.tolist(), layout.destinations.tolist(), strict=True):
        row, column = divmod(destination, input_ids.shape[1])
        assert visible_tokens(layout, slot) == list(enumerate(input_ids[row, :column].tolist()))


@given(batch=batches())
def test_padding_is_counted(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    input_ids, mask = batch
    mask[:, 0] = False
    needed = sum(int(row.nonzero().max()) for row in mask if row.any())
    rows = row_layout(input_ids, mask, width_multiple=4)
    assert rows.input_ids.shape[1] % 4 == 0
    assert rows.input_ids.numel() - rows.num_padding == needed
    packed = packed_layout(input_ids, mask)
    if needed:
        assert packed.input_ids.shape == (1, needed) and packed.num_padding == 0
        assert isinstance(packed.pattern, PackedSequences)
        assert sum(packed.pattern.lengths) == needed == int(packed.pattern.offsets[-1])


@given(
    batch=batches(), ranks=st.integers(1, 4), lay_out=st.sampled_from([row_layout, packed_layout, shared_prompt_layout])
)
def test_chunks_of_a_padded_layout_are_the_whole(
    batch: tuple[torch.Tensor, torch.Tensor], ranks: int, lay_out: Callable[..., TokenLayout]
) -> None:
    input_ids, mask = batch
    whole = lay_out(input_ids, mask)
    sequences, width = whole.input_ids.shape
    wide = padded(whole, sequences, width + -width % ranks)
    added = wide.input_ids.numel() - whole.input_ids.numel()
    assert wide.num_padding - whole.num_padding == added
    assert torch.equal(wide.input_ids.flatten()[wide.predictors], whole.input_ids.flatten()[whole.predictors])
    if isinstance(wide.pattern, PackedSequences):
        assert sum(wide.pattern.lengths) == wide.input_ids.numel() == int(wide.pattern.offsets[-1])
    chunks = [wide.chunk(rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat([chunk.input_ids for chunk in chunks], 1), wide.input_ids)
    # Each prediction is some rank's, made at the same token and position as in the whole.
    found = {}
    for chunk in chunks:
        assert chunk.position_ids is not None
        tokens, positions = chunk.input_ids.flatten(), chunk.position_ids.flatten()
        for slot, target, place in zip(
            chunk.predictors.tolist(), chunk.targets.tolist(), chunk.destinations.tolist(), strict=True
        ):
            found[place] = (int(tokens[slot]), int(positions[slot]), target)
    length = input_ids.shape[1]
    assert found == {
        place: (int(input_ids.flatten()[place - 1]), place % length - 1, target)
        for place, target in zip(whole.destinations.tolist(), whole.targets.tolist(), strict=True)
    }


def test_rows_that_lead_a_group() -> None:
    ids = torch.tensor([[5, 6, 1], [5, 6, 2], [5, 6, 9], [5, 6, 3], [5, 7, 3], [5, 3, 3]])
    mask = torch.tensor([[0, 0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 1], [0, 0, 1], [0, 1, 1]], dtype=torch.bool)
    assert leads_a_group(ids, mask).tolist() == [True, False, False, False, True, True]


def test_a_shared_prompt_is_laid_out_once() -> None:
    prompts = torch.arange(1, 42).expand(8, 41)
    input_ids = torch.cat([prompts, torch.randint(1, VOCABULARY, (8, 27))], dim=1)
    mask = torch.zeros(8, 68, dtype=torch.bool)
    mask[:, 41:] = True
    layout = shared_prompt_layout(input_ids, mask)
    # The last token of each response predicts nothing.
    assert layout.input_ids.shape == (1, 41 + 8 * 26)
    assert row_layout(input_ids, mask).input_ids.numel() == 8 * 67


def test_rows_of_different_prompts_stay_rows() -> None:
    input_ids = torch.tensor([[1, 2, 3, 4], [1, 9, 3, 4]])
    mask = torch.tensor([[False, False, True, True]] * 2)
    assert shared_prompt_layout(input_ids, mask).pattern is None


def _model(kind: str, head: str = "CausalLM", **options: Any) -> Any:
    return tiny(kind, head, hidden_size=32, intermediate_size=40, initializer_range=0.2, **options).double()


def _outputs(model: Any, layout: TokenLayout, seed: int) -> dict[str, torch.Tensor]:
    """Log-probs, entropies and gradients of a random combination of them; sums of squares."""
    model.zero_grad()
    values = ResponseModel(model)(layout, ("log_probs", "entropy", "sum_of_squares"), temperature=0.8)
    random = torch.Generator().manual_seed(seed)
    learnt = (values["log_probs"], values["entropy"])
    total = sum((value * torch.randn(value.shape, generator=random)).sum() for value in learnt)
    total.backward()
    return values | {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


LAYOUTS = {
    "packed": packed_layout,
    "shared": shared_prompt_layout,
}


@pytest.mark.default_rows("packed-Qwen2-*", "shared-Qwen3-recomputed", "shared-Llama-kept")
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["kept", "recomputed", "recomputed-reentrant"])
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Llama"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_change_no_log_prob_and_no_gradient(name: str, kind: str, checkpointing: bool | None) -> None:
    random = torch.Generator().manual_seed(3)
    input_ids = torch.randint(1, VOCABULARY, (9, 20), generator=random)
    mask = torch.zeros(9, 20, dtype=torch.bool)
    for row in range(9):
        prompt = (4, 4, 4, 7, 7, 5, 5, 5, 5)[row]
        input_ids[row, :prompt] = torch.arange(prompt) + prompt
        mask[row, prompt : prompt + (13, 1, 6, 10, 3, 0, 9, 2, 15)[row]] = True
    mask[3, 9] = False
    plain, other = _model(kind), _model(kind)
    use_layout_attention(other, "use_remove_padding")
    if checkpointing is not None:
        enable_gradient_checkpointing(other, ModelArguments(gradient_checkpointing_use_reentrant=checkpointing))
        other.train()
    layout = LAYOUTS[name](input_ids, mask)
    assert layout.pattern is not None
    actual, wanted = _outputs(other, layout, 1), _outputs(plain, row_layout(input_ids, mask), 1)
    for key, value in wanted.items():
        # Parameters are float64, so that nothing hides in rounding; what the model itself does in float32 (norms,
        # rotary angles) leaves about 1e-7 of the largest element.
        scale = max(1.0, float(value.detach().abs().max()))
        torch.testing.assert_close(actual[key], value, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_change_no_value(name: str) -> None:
    models = [_model("Qwen2", "TokenClassification") for _ in range(2)]
    use_layout_attention(models[1], "use_prefix_sharing")
    input_ids = torch.tensor([[5, 6, 7, 8, 1, 2, 3], [5, 6, 7, 8, 2, 1, 0], [5, 6, 7, 8, 3, 3, 3]])
    mask = torch.tensor([[False] * 4 + [True] * 3] * 3)
    wanted = ResponseModel(models[0])(row_layout(input_ids, mask), ("values",))["values"]
    actual = ResponseModel(models[1])(LAYOUTS[name](input_ids, mask), ("values",))["values"]
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-6)
    assert float(wanted.detach().std()) > 1e-3


def test_models_without_full_attention_are_refused() -> None:
    sliding = _model("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ValueError, match=r"use_prefix_sharing: this qwen2 model has layers of type sliding_attention"):
        use_layout_attention(sliding, "use_prefix_sharing")
    with pytest.raises(ValueError, match="attn_implementation: sdpa"):
        use_layout_attention(_model("Qwen2", attn_implementation="eager"), "use_prefix_sharing")
    dropping = _model("Qwen2", attention_dropout=0.1).train()
    use_layout_attention(dropping, "use_remove_padding")
    with pytest.raises(ValueError, match=r"Qwen2Attention computes attention with dropout of 0\.1"):
        dropping(torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("padding", [0, 3])
def test_pairs_are_attended_to_part_by_part_as_all_at_once(monkeypatch: pytest.MonkeyPatch, padding: int) -> None:
    """Prompts and responses of all lengths, one token among them; output and gradients, in float64."""
    input_ids, mask = torch.zeros(6, 9, dtype=torch.int64), torch.zeros(6, 9, dtype=torch.bool)
    for row, (prompt, response) in enumerate([(3, 1), (3, 4), (5, 4), (5, 2), (1, 3), (1, 8)]):
        input_ids[row, : prompt + response] = 1 + row // 2
        mask[row, prompt : prompt + response] = True
    layout = shared_prompt_layout(input_ids, mask)
    assert isinstance(layout.pattern, PromptParts)
    assert layout.pattern.lengths == ((3, 0, 3), (5, 3, 1), (1, 2, 7))
    parts, count = layout.pattern.padded(padding), layout.input_ids.numel()
    found = []
    for most in (0, 2):
        monkeypatch.setattr(attention, "MOST_PARTS", most)
        generator = torch.Generator().manual_seed(0)
        given = [torch.randn(1, 2, count + padding, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
        leaves = [one.requires_grad_() for one in given]
        output = attention.shared_prompt_attention(*leaves, parts, None)[:, :count]
        output.square().sum().backward()
        found.append([output.detach(), *(leaf.grad[:, :, :count] for leaf in leaves if leaf.grad is not None)])
    assert len(found[0]) == 4
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
