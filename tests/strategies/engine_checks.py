"""Checks of the answers to :mod:`tests.strategies.engine_cases`, whichever engine gave them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.strategies.engine_cases import KEY, VALUE

FP32_GAP = 5e-5  # measured: 2e-5 with vLLM, 1e-5 with SGLang
BF16_GAP = 0.15  # measured: 0.08; eight bits of mantissa, logits of magnitude 10


def check_greedy(found: Sequence[dict[str, Any]], dtype: str = "fp32") -> None:
    assert len(found) == 12 and all(case["versions"] and case["wrong"] == [] for case in found)
    assert max(case["gap"] for case in found) < (FP32_GAP if dtype == "fp32" else BF16_GAP)
    if dtype == "fp32":
        assert all(case["tokens"] == case["hf_infer"] == case["generate"] for case in found)


def check_in_flight(found: dict[str, Any], mode: str, versions: tuple[int, int] = (0, 5)) -> None:
    """``mode``: of the cache of samples that are in flight, as in ``in_flight_update``."""
    (old, start, split), (new, begin, end) = found["spans"]
    assert (old, new) == versions and (start, begin, end) == (0, split, 60) and 0 < split < 60
    assert found["wrong"] == []
    assert found["before"] < FP32_GAP and found["again"]
    if mode == "recompute":
        assert found["after"] < FP32_GAP and found["continued"]
    else:
        assert found["after"] > 0.01, "the old weights' keys and values are still in use"


def check_interrupted(found: dict[str, Any]) -> None:
    assert found["rounds"] > 2, "they were stopped on the way"
    assert len(found["whole"]) == 6 and found["pieces"] == found["whole"]
    token_ids, reason, _ = found["whole"][-1]
    assert reason == "stop" and len(token_ids) > 3, "the stop string was not in the first piece"
    assert found["gap"] < FP32_GAP


def check_aborted(found: dict[str, Any]) -> None:
    assert found["aborted"] == [("1", 0, "abort"), ("1", 1, "abort"), ("2", 0, "abort"), ("2", 1, "abort")]
    assert all(0 < tokens < 60 for tokens in found["tokens"][:2]) and found["tokens"][2:] == [0, 0]
    assert found["told before"], "the same was to be heard of them while they ran"
    assert found["gap"] < FP32_GAP
    assert found["left"] == 2 and found["finished"] == [("0", 0, 60), ("0", 1, 60)]
    assert found["rest"] == [("1", [], "abort")]


def check_growing(found: dict[str, Any]) -> None:
    assert len(found["alike"]) == 5 and all(found["alike"].values()), "asking disturbs nothing"
    assert all(found["grows"].values()), found["grows"]
    assert found["reasons"] == {"abort"}
    assert found["versions"][0] == (-1, 0, found["begun"]) and found["begun"] > 0
    assert any(len(set(lengths)) > 3 for lengths in found["lengths"].values()), "they were told of on the way"


def check_cut_to_fit(found: tuple[int, str]) -> None:
    assert found == (6, "length"), "the response ends with the engine's sequence"


def check_refusals(messages: Sequence[str], more: Sequence[str] = ()) -> None:
    expected = [
        "the prompt has 96 tokens, must have 1 to 95",
        "must be in [0, 320)",
        "top_p is 0.0, must be in",
        "update_weights outside of",
        "finish_weight_update without start_weight_update",
        *more,
    ]
    assert all(part in message for part, message in zip(expected, messages, strict=True)), messages


def check_not_finite_alone(found: dict[str, Any], may_spread: bool = False) -> None:
    """``may_spread``: the engine's attention lets nan into other requests of a batch; these have to fail as well."""
    assert found["wrong"] == []
    assert found["failed"].keys() >= {"bad 1", "bad 2"}
    for name in ("bad 1", "bad 2"):
        assert found["failed"][name].endswith(": the log-probs of token 0 are not finite")
    others = set("abc") - (found["failed"].keys() if may_spread else set())
    assert found["same"] == {(name, index): True for name in others for index in range(2)}


def check_faulty_updates(found: dict[str, list[str]]) -> None:
    assert found["none"] == found["put right"] == found["no number"] == []
    assert found["lost"] == found["element"] == [KEY]
    assert sorted(found["swapped"]) == sorted([KEY, VALUE])
    assert len(found["old"]) > 20, "an old version differs everywhere"


def check_adapters(found: dict[str, Any]) -> None:
    assert len(found["same"]) == 12 and all(found["same"])
    assert max(found["gaps"]) < FP32_GAP
    (tensors, _), *later = found["sent"]
    assert later == [(tensors, found["adapter bytes"])] * 2, "adapters alone, and everything is verified"
    split, continued = found["in flight"]
    assert 0 < split < 30 and continued


def check_experts(found: list[tuple[list[str], bool, float]]) -> None:
    """Of :func:`tests.strategies.engine_cases.experts_after_updates`."""
    assert [(wrong, same) for wrong, same, _ in found] == [([], True)] * 3
    assert max(gap for *_, gap in found) < FP32_GAP
