"""Weight updates that go wrong are found; aborts, growing samples, refusals, lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.vllm import cases, stream_cases

pytestmark = pytest.mark.e2e

KEY = "model.layers.0.self_attn.k_proj.weight"
VALUE = KEY.replace("k_proj", "v_proj")


def test_aborted_samples_keep_what_they_have(in_engine_process: Callable[..., Any], folders: dict[str, Path]) -> None:
    found = in_engine_process(cases.aborted, folders["qwen2"])
    assert found["aborted"] == [("1", 0, 5, "abort"), ("1", 1, 5, "abort"), ("2", 0, 0, "abort"), ("2", 1, 0, "abort")]
    assert found["gap"] < 5e-5
    assert found["left"] == 2 and found["finished"] == [("0", 0, 30), ("0", 1, 30)]
    assert found["rest"] == [("1", [], "abort")]


def test_what_is_said_of_growing_samples_is_how_they_begin(
    in_engine_process: Callable[..., Any], folders: dict[str, Path]
) -> None:
    found = in_engine_process(stream_cases.growing_samples, folders["qwen2"])
    assert len(found["same"]) == 5 and all(found["same"].values()), "asking disturbs nothing"
    assert all(found["grows"].values()), found["grows"]
    lengths, begun = found["lengths"], found["begun"]
    assert lengths["seeded", 0] == lengths["seeded", 1] == list(range(30)), "every step is told of"
    assert lengths["begun", 0] == list(range(begun, 30)) and found["versions"] == [(-1, 0, begun), (0, begun, 29)]
    assert lengths["stop", 0] == list(range(len(lengths["stop", 0]))) and len(lengths["stop", 0]) < 30
    assert lengths["late", 0][:3] == [0, 0, 0] and lengths["late", 0][-1] == 11, "it waited for room"
    assert found["reasons"] == {"abort"}


def test_a_response_ends_with_the_engine_s_sequence(
    in_engine_process: Callable[..., Any], folders: dict[str, Path]
) -> None:
    token_ids, reason = in_engine_process(cases.cut_to_fit, folders["qwen2"])
    assert len(token_ids) == 6 and reason == "length"


def test_refusals(in_engine_process: Callable[..., Any], folders: dict[str, Path]) -> None:
    messages = in_engine_process(cases.refusals, folders["qwen2"])
    expected = [
        "the prompt has 96 tokens, must have 1 to 95",
        r"must be in \[0, 320\)",
        "top_p is 0.0, must be in",
        "update_weights outside of",
        "finish_weight_update without",
        "step() between",
        "no_such",
    ]
    assert all(part.replace("\\", "") in message for part, message in zip(expected, messages, strict=True)), messages


def test_refused_at_start(in_engine_process: Callable[..., Any], tmp_path: Path) -> None:
    heads = in_engine_process(cases.refused_at_start, tmp_path)
    assert "no attention for heads of size 16" in heads and "hf_infer" in heads


def test_faulty_updates_are_found_and_the_next_one_puts_them_right(
    in_engine_process: Callable[..., Any], folders: dict[str, Path]
) -> None:
    found = in_engine_process(cases.faulty_updates, folders["qwen3"])
    assert found["none"] == found["put right"] == found["no number"] == []
    assert found["lost"] == found["element"] == [KEY]
    assert sorted(found["swapped"]) == sorted([KEY, VALUE])
    assert len(found["old"]) > 20, "an old version differs everywhere"


def test_faults_behind_the_receiver_are_found(in_engine_process: Callable[..., Any], folders: dict[str, Path]) -> None:
    wrong = in_engine_process(cases.mixed_up_by_the_loader, folders["qwen2"])
    assert len(wrong) == 4 and all(name.endswith(("k_proj.weight", "v_proj.weight")) for name in wrong)
    error = in_engine_process(cases.left_unpacked, folders["qwen2"])
    assert "does not compute with the weights it was loaded with" in error


def test_an_engine_of_another_dtype(in_engine_process: Callable[..., Any], folders: dict[str, Path]) -> None:
    assert in_engine_process(cases.other_dtype, folders["qwen3"]) == ([], ["model.layers.1.mlp.up_proj.weight"])
