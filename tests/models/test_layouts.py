"""Layouts say where every response token is predicted and written; packing and trees change no number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.config.roles import ModelArguments
from roll.models import attention, patterns
from roll.models.attention import Scores
from roll.models.build import enable_gradient_checkpointing
from roll.models.layout_setup import use_layout_attention
from roll.models.layouts import TokenLayout, packed_layout, padded, row_layout, tree_layout, with_token_rows
from roll.models.log_probs import ResponseModel
from roll.models.patterns import PackedSequences, PrefixTree, Run, common_beginnings
from tests.models.builders import tiny

VOCABULARY = 40
WIDE_ROWS = partial(row_layout, width_multiple=8)
TREE_OR_PACKED = partial(tree_layout, without_tree=packed_layout)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups behind one prompt, of any lengths; some rows without response, some with gaps in it, and some that go on
    where an earlier row ends or leave it midway."""
    rows: list[tuple[list[int], list[bool]]] = []
    token = st.integers(1, 3)
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(token, min_size=1, max_size=6))
        if rows and draw(st.booleans()):
            earlier, _ = draw(st.sampled_from(rows))
            prompt = [*earlier[: draw(st.integers(0, len(earlier)))], *prompt]
        for _ in range(draw(st.integers(1, 4))):
            response = draw(st.lists(token, min_size=0, max_size=5))
            sampled = draw(st.lists(st.booleans(), min_size=len(response), max_size=len(response)))
            rows.append((prompt + response, [False] * len(prompt) + sampled))
    rows = draw(st.permutations(rows)) if draw(st.booleans()) else rows
    return batch_of(rows, draw(st.integers(0, 3)))


def batch_of(rows: list[tuple[list[int], list[bool]]], more: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids, _ in rows) + more
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
    pattern = layout.pattern
    if isinstance(pattern, PackedSequences):
        start = max(offset for offset in pattern.offsets.tolist() if offset <= slot)
        return [(int(positions[index]), int(ids[index])) for index in range(start, slot + 1)]
    place, seen = int(pattern.restore[slot]), None
    for batch in pattern.batches:  # the batch, the run and the column of the place
        count, width = batch.own.shape
        if place < count * width:
            run, column = divmod(place, width)
            keys = torch.cat([batch.contexts[batch.context_of_run[run]], batch.own[run]])
            seen = batch.own[run, : column + 1]
            if batch.mask is not None:
                seen = keys[batch.mask.expand(count, -1, -1, -1)[run, 0, column]]
            break
        place -= count * width
    assert seen is not None
    by_batch = [(int(positions[index]), int(ids[index])) for index in seen]
    # The runs say the same.
    starts = [sum(run.length for run in pattern.runs[:index]) for index in range(len(pattern.runs))]
    index = max(index for index, start in enumerate(starts) if start <= slot and pattern.runs[index].length)
    before = [starts[other] + column for other, length in pattern.runs[index].before for column in range(length)]
    by_run = [(int(positions[one]), int(ids[one])) for one in [*before, *range(starts[index], slot + 1)]]
    assert by_run == by_batch
    return by_run


@settings(max_examples=60)
@given(
    batch=batches(),
    lay_out=st.sampled_from([row_layout, WIDE_ROWS, packed_layout, tree_layout, TREE_OR_PACKED]),
    least=st.sampled_from([1, 3, 64]),
)
def test_each_response_token_is_predicted_from_what_stands_before_it(
    batch: tuple[torch.Tensor, torch.Tensor], lay_out: Callable[..., TokenLayout], least: int
) -> None:
    input_ids, mask = batch
    with mock.patch.object(patterns, "MIN_SHARED", least):
        layout = lay_out(input_ids, mask)
    mask = mask.clone()
    mask[:, 0] = False
    assert layout.destinations.tolist() == mask.flatten().nonzero()[:, 0].tolist()
    assert torch.equal(layout.targets, input_ids[mask])
    for slot, destination in zip(layout.predictors.tolist(), layout.destinations.tolist(), strict=True):
        row, column = divmod(destination, input_ids.shape[1])
        assert visible_tokens(layout, slot) == list(enumerate(input_ids[row, :column].tolist()))


@settings(max_examples=40)
@given(batch=batches(), ranks=st.integers(1, 4), lay_out=st.sampled_from([row_layout, packed_layout, tree_layout]))
def test_chunks_of_a_padded_layout_are_the_whole(
    batch: tuple[torch.Tensor, torch.Tensor], ranks: int, lay_out: Callable[..., TokenLayout]
) -> None:
    input_ids, mask = batch
    whole = lay_out(input_ids, mask)
    sequences, width = whole.input_ids.shape
    wide = padded(whole, sequences, width + -width % ranks)
    added = wide.input_ids.numel() - whole.input_ids.numel()
    mask[:, 0] = False
    needed = sum(int(row.nonzero().max()) for row in mask if row.any())
    if lay_out is not tree_layout:
        assert whole.input_ids.numel() - whole.num_padding == needed
        assert lay_out is row_layout or whole.num_padding == 0 or not needed
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


@settings(max_examples=40)
@given(batch=batches(), least=st.sampled_from([1, 3, 64]))
def test_a_tree_holds_each_common_beginning_once(batch: tuple[torch.Tensor, torch.Tensor], least: int) -> None:
    """By brute force over all pairs of rows. With ``least`` 1 nothing that two rows have in common is there twice."""
    input_ids, mask = batch
    mask[:, 0] = False
    last = [int(row.nonzero().max()) if row.any() else 0 for row in mask]
    first = [int(row.nonzero().min()) if row.any() else 0 for row in mask]
    rows = input_ids.tolist()
    with mock.patch.object(patterns, "MIN_SHARED", least):
        common, layout = common_beginnings(input_ids, mask), tree_layout(input_ids, mask, packed_layout)
    for one in range(len(rows)):
        for other in range(len(rows)):
            most = min(last[one], last[other])
            alike = next((at for at in range(most) if rows[one][at] != rows[other][at]), most)
            prompt = first[one] if first[one] == first[other] <= alike else 0
            wanted = alike if alike >= prompt + least else prompt
            assert common[one, other] == (0 if one == other else wanted)
    beginnings = [(row[:end]) for row, end in zip(rows, last, strict=True) for end in range(1, end + 1)]
    distinct = len({tuple(beginning) for beginning in beginnings})
    computed = layout.input_ids.numel() if beginnings else 0
    assert distinct <= computed <= len(beginnings)
    if least == 1:
        assert computed == distinct
    if isinstance(layout.pattern, PrefixTree):
        weights = with_token_rows(layout).token_rows
        assert weights is not None and weights.sum() == len(beginnings)
        assert layout.pattern.rows.numel() == sum(run.length for run in layout.pattern.runs)


def episode(turns: int, forgets: bool, prompt: int = 40, thought: int = 12, answer: int = 5, seen: int = 8) -> Any:
    """A row for each turn, of distinct tokens; ``forgets``: a turn's thoughts are no part of later prompts."""
    rows, numbers = [], iter(range(100, 10_000))
    history = list(range(1, prompt + 1))
    for _ in range(turns):
        thoughts, said, heard = ([next(numbers) for _ in range(count)] for count in (thought, answer, seen))
        rows.append((history + thoughts + said, [False] * len(history) + [True] * (thought + answer)))
        history = [*history, *([] if forgets else thoughts), *said, *heard]
    return rows


def test_turns_are_one_run_or_leave_the_common_history() -> None:
    forgetful = (Run(64 + 16), Run(13 + 16, ((0, 64),)), Run(13 + 16, ((0, 64), (1, 13))))
    # The last token of the last turn predicts nothing; those of earlier turns are in the prompts of later ones.
    for turns, forgets, runs in ((8, False, (Run(64 + 8 * 25 - 8 - 1),)), (3, True, forgetful)):
        pattern = tree_layout(*batch_of(episode(turns, forgets, prompt=64))).pattern
        assert isinstance(pattern, PrefixTree) and pattern.runs == runs


def test_beginnings_of_prompts_and_answers_are_shared_where_they_are_long() -> None:
    for count in (63, 64):
        rows = [([*range(count), 100 + row, 7, 8], [False] * (count + 1) + [True] * 2) for row in range(2)]
        assert (tree_layout(*batch_of(rows)).pattern is not None) is (count == 64), "of different prompts"
        rows = [([*range(5), *range(count), 100 + row, 7, 8], [False] * 5 + [True] * (count + 3)) for row in range(2)]
        pattern = tree_layout(*batch_of(rows)).pattern
        assert isinstance(pattern, PrefixTree)
        parts = (Run(5), *[Run(65, ((0, 5),))] * 2)
        assert pattern.runs == (parts if count == 63 else (Run(5 + 66), Run(2, ((0, 69),))))


def _model(kind: str, head: str = "CausalLM", **options: Any) -> Any:
    return tiny(kind, head, hidden_size=32, intermediate_size=40, initializer_range=0.2, **options).double()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"layer_types": ["chunked_attention", "full_attention"]},
            "this qwen2 model has layers of type chunked_attention",
        ),
        ({"attn_implementation": "eager"}, "attn_implementation: sdpa"),
        ({"attention_dropout": 0.1}, r"Qwen2Attention computes attention with dropout of 0\.1"),
    ],
)
def test_models_with_other_attention_are_refused(options: dict[str, Any], words: str) -> None:
    model = _model("Qwen2", **{key: value for key, value in options.items() if key != "layer_types"}).train()
    model.config.layer_types = options.get("layer_types", model.config.layer_types)
    with pytest.raises(ValueError, match=words):
        use_layout_attention(model, "use_prefix_sharing")
        model(torch.tensor([[1, 2, 3]]))


def random_tree(seed: int) -> list[tuple[list[int], list[bool]]]:
    """Rows that begin as an earlier row does, up to anywhere in it, or with a prompt of their own."""
    random = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=random))

    def some(low: int, high: int) -> list[int]:
        return torch.randint(1, VOCABULARY, (number(low, high),), generator=random).tolist()

    rows: list[tuple[list[int], list[bool]]] = []
    for _ in range(12):
        prompt = some(1, 9)
        if rows and number(0, 5):
            earlier, sampled = rows[number(0, len(rows))]
            at = number(1, len(earlier) + 1)
            prompt = [*earlier[:at], *some(0, 4)]
            if number(0, 3) == 0:  # the same answer is learnt from in both rows
                answer = some(1, 9)
                rows.append((earlier[:at] + answer, sampled[:at] + [True] * len(answer)))
                continue
        answer = some(1, 9)
        rows.append((prompt + answer, [False] * len(prompt) + [bool(number(0, 4)) for _ in answer]))
    return rows


@pytest.mark.parametrize(("tokens", "path"), [(8, "_all_at_once"), (80, "_run_by_run")])
def test_a_cpu_computes_long_responses_one_by_one(monkeypatch: pytest.MonkeyPatch, tokens: int, path: str) -> None:
    rows = [([*range(1, 5), *range(row, row + tokens)], [False] * 4 + [True] * tokens) for row in range(5, 500, 99)]
    layout, called = tree_layout(*batch_of(rows)), []
    for name in ("_all_at_once", "_run_by_run"):
        monkeypatch.setattr(attention, name, lambda *_, name=name: called.append(name))
    states = [torch.ones(1, 2, layout.input_ids.shape[1], 4)] * 3
    assert isinstance(layout.pattern, PrefixTree) and layout.pattern.only_prompts
    attention.tree_attention(*states, layout.pattern, Scores())
    assert called == [path]


@pytest.mark.default_rows("True-*-1-CausalLM", "False-1-4-*")
@pytest.mark.parametrize("head", ["CausalLM", "TokenClassification"])
@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("one_by_one", [True, False])
def test_random_trees_change_no_log_prob_and_no_gradient(
    monkeypatch: pytest.MonkeyPatch, head: str, seed: int, least: int, one_by_one: bool
) -> None:
    """Against each row computed alone by the plain model; a token of several rows gets the gradients of all of them."""
    monkeypatch.setattr(patterns, "MIN_SHARED", least)
    input_ids, mask = batch_of(random_tree(seed))
    plain, other = _model("Qwen3", head), _model("Qwen3", head)
    use_layout_attention(other, "use_prefix_sharing")
    if not one_by_one:  # and recomputed
        monkeypatch.setattr(attention, "_run_by_run", attention._all_at_once)
        enable_gradient_checkpointing(other, ModelArguments(gradient_checkpointing_use_reentrant=least == 1))
        other.train()
    layout = tree_layout(input_ids, mask)
    assert isinstance(layout.pattern, PrefixTree) and not layout.pattern.only_prompts
    outputs = ("log_probs", "entropy") if head == "CausalLM" else ("values",)
    weights = torch.randn(len(outputs), input_ids.numel(), generator=torch.Generator().manual_seed(seed))
    actual = {
        name: layout.scatter(value, input_ids.shape) for name, value in ResponseModel(other)(layout, outputs).items()
    }
    wanted = {name: torch.zeros(input_ids.shape, dtype=actual[name].dtype) for name in outputs}
    for row in range(len(input_ids)):
        alone = row_layout(input_ids[row : row + 1], mask[row : row + 1])
        if len(alone.predictors):
            for name, value in ResponseModel(plain)(alone, outputs).items():
                wanted[name][row] = alone.scatter(value, input_ids[:1].shape)[0]
    for values in (actual, wanted):
        sum((value.flatten() * weight).sum() for value, weight in zip(values.values(), weights, strict=True)).backward()
    for name in outputs:
        torch.testing.assert_close(actual[name].float(), wanted[name].float(), rtol=0, atol=1e-6)
    for one, (name, two) in zip(other.parameters(), plain.named_parameters(), strict=True):
        scale = max(1.0, float(two.grad.abs().max()))
        torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=2e-6 * scale, msg=name)
