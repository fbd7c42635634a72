"""SmolLM2-135M-Instruct in vLLM: greedy answers are those of ``generate``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.strategies import engine_cases
from tests.strategies.greedy_answers import PROMPTS, check_answers, engine_answers
from tests.strategies.vllm import cases

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


def greedy_answers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    cases.drop_shared_engine()
    with engine_cases.engine(folder, "vllm", max_num_seqs=PROMPTS, max_model_len=128) as engine:
        return engine_answers(engine, prompts)


def test_greedy_answers_are_those_of_generate(in_engine_process, smollm2):
    check_answers(smollm2, partial(in_engine_process, greedy_answers))
