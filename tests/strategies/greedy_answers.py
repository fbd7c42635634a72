"""Greedy answers of a pretrained model: those of ``generate``, and when an engine's may be others."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from roll.strategies.engines.base import GenerationStrategy
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from tests.conftest import ROOT
from tests.strategies.samples import plain_model

EXAMPLE = ROOT / "examples/smollm2/prepare.py"
NEW_TOKENS, PROMPTS = 48, 32
_COMPARED = 20


def chat_prompts(folder: Path, count: int) -> list[list[int]]:
    """Token ids of prompts of examples/smollm2: half instructions, half word problems."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    spec = importlib.util.spec_from_file_location("smollm2_prepare", EXAMPLE)
    assert spec is not None and spec.loader is not None
    prepare = sys.modules["smollm2_prepare"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    random = Random(0)
    messages = [[prepare.instruction, prepare.word_problem][index % 2](random)["messages"] for index in range(count)]
    return [
        list(tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=True)["input_ids"])
        for one in messages
    ]


def token_ids(folder: Path, *texts: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text)["input_ids"] for text in texts]


def engine_answers(engine: GenerationStrategy, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(NEW_TOKENS, temperature=0.0)
    engine.add_requests([GenerationRequest(str(index), prompt, params) for index, prompt in enumerate(prompts)])
    found: dict[int, list[int]] = {}
    while engine.num_unfinished:
        found |= {int(output.request_id): output.token_ids for output in engine.step()}
    return [found[index] for index in range(len(prompts))]


def plain_answers(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """By ``generate``, of a padded batch; the end token is part of an answer."""
    ids, mask = _padded(prompts)
    whole = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, top_k=None, top_p=None)
    end, rows = model.config.eos_token_id, whole[:, ids.shape[1] :].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def _padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


@torch.no_grad()
def logit_noise(model: Any, prompts: list[list[int]]) -> float:
    """The largest difference between the last logits of prompts that the model reads alone, and in a padded batch."""
    ids, mask = _padded(prompts)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    together = model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=1).logits[:, 0]
    alone = torch.cat([model(torch.tensor([prompt]), logits_to_keep=1).logits[:, 0] for prompt in prompts])
    return float((together - alone).abs().max())


@dataclass(frozen=True)
class Comparison:
    """Greedy answers beside those of ``generate``."""

    same: int
    noise: float
    """See :func:`logit_noise`."""
    gaps: list[float]
    """Where an answer differs first: how far the engine's token is below the best logit."""

    def unexplained(self) -> list[float]:
        """Gaps that rounding does not explain: two computations, each as far from exact logits as two of the plain
        model's own are from each other, choose different tokens only where these are less than four times that
        apart."""
        return [gap for gap in self.gaps if not gap < 4 * self.noise]

    def __str__(self) -> str:
        compared = f"{self.same} of {self.same + len(self.gaps)} answers are those of `generate`"
        noise = f"the last logits of a prompt alone and in a padded batch differ by up to {self.noise:.0e}"
        gaps = (
            f"; the others begin to differ where two logits are up to {max(self.gaps):.0e} apart" if self.gaps else ""
        )
        return f"{compared}{gaps} ({noise})"


@torch.no_grad()
def compare_answers(folder: Path, prompts: list[list[int]], found: list[list[int]]) -> Comparison:
    model = plain_model(folder)
    wanted = plain_answers(model, prompts)
    assert len({tuple(answer) for answer in wanted}) > len(prompts) // 2, "they are answers to different prompts"
    gaps = []
    for prompt, answer, own in zip(prompts, wanted, found, strict=True):
        if answer != own:
            place = next(i for i, (one, other) in enumerate(zip(answer, own, strict=False)) if one != other)
            logits = model(torch.tensor([prompt + answer[:place]]), logits_to_keep=1).logits[0, 0]
            gaps.append(float(logits.max() - logits[own[place]]))
    return Comparison(len(prompts) - len(gaps), logit_noise(model, prompts[:_COMPARED]), gaps)


def check_answers(folder: Path, answers: Callable[[Path, list[list[int]]], list[list[int]]]) -> None:
    """An engine's greedy answers are those of ``generate``, but where rounding explains the difference."""
    prompts = chat_prompts(folder, PROMPTS)
    compared = compare_answers(folder, prompts, answers(folder, prompts))
    assert compared.unexplained() == [], str(compared)
