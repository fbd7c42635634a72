"""Pipeline state and random generators come back from disk as they were."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.checkpoint.state import capture_rng_state, load_state, restore_rng_state, save_state

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**200), 2**200), st.floats(allow_nan=False), st.text(max_size=20)
)
keys = st.text(max_size=8).filter(lambda key: not key.startswith("__"))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=30)
@given(state=st.dictionaries(keys, values, max_size=5))
def test_plain_values_round_trip(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("state")
    save_state(folder, state)
    loaded = load_state(folder)
    assert loaded == state
    assert repr(loaded) == repr(state)  # tuples stay tuples, -0.0 stays -0.0


def test_arrays_and_tensors_round_trip(tmp_path: Path) -> None:
    shared, learnt = torch.arange(6.0), torch.randn(4, requires_grad=True)
    state = {
        "arrays": [
            np.arange(5, dtype=np.uint32),
            np.array(3.5, np.float16),
            np.eye(3)[:, ::2],
            np.zeros((0, 4), np.int8),
        ],
        "tensors": (torch.randn(2, 3).bfloat16(), torch.tensor(7), shared, shared[2:], torch.randn(3, 4).t(), learnt),
        "numpy scalars": [np.float32(0.5), np.int64(-3), np.bool_(True)],
        "not finite": [math.inf, -math.inf, math.nan],
    }
    save_state(tmp_path / "pipeline", state)
    loaded = load_state(tmp_path / "pipeline")
    for array, original in zip(loaded["arrays"], state["arrays"], strict=True):
        assert array.dtype == original.dtype and array.shape == original.shape
        np.testing.assert_array_equal(array, original)
    for tensor, original in zip(loaded["tensors"], state["tensors"], strict=True):
        assert tensor.dtype == original.dtype
        assert torch.equal(tensor, original.detach())
    assert loaded["numpy scalars"] == [0.5, -3, True]
    assert [type(value) for value in loaded["numpy scalars"]] == [float, int, bool]
    assert loaded["not finite"][:2] == [math.inf, -math.inf] and math.isnan(loaded["not finite"][2])
    assert {path.suffix for path in (tmp_path / "pipeline").iterdir()} == {".json", ".safetensors"}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": [object()]}}, r"state\.a\.b\[0\]: object cannot be saved"),
        ({"a": {1: "x"}}, r"state\.a: the key 1 is int"),
        ({"a": np.array(["x"], dtype=object)}, r"state\.a: ndarray of object cannot be saved"),
        ({"a": {"__array__": "0"}}, r"state\.a: the key '__array__' is reserved"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        save_state(tmp_path, state)


def draw() -> tuple[list[float], list[float], list[float]]:
    # A normal draw leaves half a pair behind in Python's and NumPy's generators: that half must come back, too.
    return ([random.gauss(0, 1) for _ in range(3)], np.random.standard_normal(3).tolist(), torch.randn(3).tolist())


def test_generators_continue_where_they_were(tmp_path: Path) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    draw()
    save_state(tmp_path, capture_rng_state())
    expected = draw(), draw()
    random.seed(11), np.random.seed(12), torch.manual_seed(13)
    assert draw() != expected[0]
    restore_rng_state(load_state(tmp_path))
    assert (draw(), draw()) == expected


@pytest.mark.gpu
def test_cuda_generators_continue_where_they_were(tmp_path: Path) -> None:
    torch.randn(3, device="cuda")
    save_state(tmp_path, capture_rng_state())
    expected = torch.randn(5, device="cuda")
    torch.cuda.manual_seed_all(99)
    restore_rng_state(load_state(tmp_path))
    assert torch.equal(torch.randn(5, device="cuda"), expected)
