"""Drafts change no distribution: log-probs, greedy tokens, and what is sampled where a draft is verified (chi-square).

Without the repairs of :mod:`roll.strategies.vllm.worker` log-probs are 12 nats off, and weight updates are found
wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.strategies.engine_cases import SETTINGS
from tests.strategies.engine_checks import FP32_GAP
from tests.strategies.engine_process import engine_process
from tests.strategies.vllm import cases
from tests.support.engines import whole_engines

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture
def in_own_process() -> Iterator[Callable[..., Any]]:
    """vLLM makes no further engine in a process that has looked for drafts: it trips over a module of numba's."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed: make install-vllm")
    with engine_process() as in_process:
        yield in_process


ARCTIC = pytest.mark.skipif(find_spec("arctic_inference") is None, reason="arctic-inference is not installed")
CASES = [
    pytest.param("qwen2", {"method": "ngram"}, id="ngram"),
    pytest.param("qwen2", {"method": "suffix"}, id="suffix", marks=ARCTIC),
    pytest.param("qwen3", {"method": "ngram", "tensor_parallel_size": 2}, id="ngram-two-ranks", marks=whole_engines),
]


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.timeout(900)
def test_speculation_changes_no_distribution(in_own_process, folders, name, options):
    settings = [params for params in SETTINGS if not params.min_p]
    found = in_own_process(cases.speculating, folders[name], settings, **options)
    assert not found["wrong"] and found["gap"] < FP32_GAP
    assert all(tokens == wanted for tokens, wanted in found["greedy"])
    second, wanted, counts = found["second"], found["wanted"], found["pair_counts"]
    number = second.total()
    assert counts["drafts"] >= number > 200 and 0 < counts["accepted_tokens"] < counts["drafts"]
    likely = sorted(range(len(wanted)), key=wanted.__getitem__)[-5:]
    assert found["prompt"][1] in likely
    cells = [(second[token], number * wanted[token]) for token in likely]
    cells.append((number - sum(seen for seen, _ in cells), number - sum(expected for _, expected in cells)))
    # Five degrees of freedom: by chance, one seed in 10,000 is above.
    assert sum((seen - expected) ** 2 / expected for seen, expected in cells) < 25.7, cells
