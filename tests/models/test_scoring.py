"""Where a reward model's score is read, against transformers' own classifier on a sequence without padding. The traps
are named after the reports of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roll.algorithms.reward_models import end_scores, scoring_batch
from roll.models.layout_setup import use_layout_attention
from roll.models.layouts import TokenLayout, packed_layout, row_layout, tree_layout
from roll.models.log_probs import ResponseModel
from tests.models.builders import tiny

PAD = EOS = 2
LAYOUTS = {"rows": row_layout, "packed": packed_layout, "shared": tree_layout}


@pytest.fixture(scope="module")
def model() -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    ends = {"num_labels": 1, "pad_token_id": PAD, "eos_token_id": EOS}
    made = tiny("Qwen2", "SequenceClassification", 1, vocab_size=32, initializer_range=0.4, **heads, **ends).eval()
    use_layout_attention(made, "use_remove_padding")
    return made


def alone(model: Any, sequence: list[int]) -> float:
    """The output at the last token of a sequence by itself."""
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([sequence])).last_hidden_state
        return float(model.score(hidden[0, -1])[0])


def scored(model: Any, sequences: list[list[int]], layout: str, shared: list[int] | None = None) -> list[float]:
    batch = scoring_batch(sequences, shared)
    laid_out: TokenLayout = LAYOUTS[layout](batch["input_ids"], batch["response_mask"])
    with torch.no_grad():
        values = ResponseModel(model)(laid_out, ["values"])["values"]
    found: list[float] = end_scores(laid_out.scatter(values, batch["input_ids"].shape), batch["score_mask"]).tolist()
    return found


TRAPS = {
    "rlhflow_49_pad_token_is_eos": [[5, 9, EOS], [5, 9, 7, EOS]],
    "trl_6952_first_pad_id_in_a_chat_of_several_turns": [[5, EOS, 9, 8, EOS], [5, EOS, 4, EOS]],
    "trl_3750_score_on_the_pad_after_eos": [[5, 9, 8, 7, 6, EOS], [5, EOS]],
    "a_response_that_ends_in_pads_of_its_own": [[5, 9, PAD, PAD], [5, 9]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trap", TRAPS)
def test_the_score_is_read_at_the_last_attended_token(model: Any, trap: str, layout: str) -> None:
    sequences = TRAPS[trap]
    wanted = [alone(model, sequence) for sequence in sequences]
    assert abs(wanted[0] - wanted[1]) > 1e-3, "the two sides have different scores"
    assert scored(model, sequences, layout) == pytest.approx(wanted, abs=1e-5)
    assert scored(model, sequences, layout, shared=[1, 1]) == pytest.approx(wanted, abs=1e-5)


def test_a_new_head_is_small_and_the_same_every_time() -> None:
    from roll.models.build import new_head

    parameter = torch.empty(1, 4095)
    first = new_head("score", parameter, 3)
    assert torch.equal(first, new_head("score", parameter, 3))
    assert not torch.equal(first, new_head("score", parameter, 4))
    assert float(first.std()) == pytest.approx(1 / 64, rel=0.05)
    assert not new_head("value", parameter, 3).any()
