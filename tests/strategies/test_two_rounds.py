"""A rollout loop of two rounds, from what engines sampled to the gradient, against float64 by the book."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from roll.datasets.types import PromptRow
from roll.rollout.groups import FinishedGroup, build_batch
from roll.rollout.loops import GroupSettings, RolloutContext
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from tests.strategies import jobs
from tests.strategies.samples import ENTROPY_WEIGHT, PACKING, make_role, plain_model

PROMPT, OBSERVATION = [3, 14, 15, 9, 2], [70, 71, 72]
SCRIPT = {"0.0": [[26, 5]], "0.1": [[35, 8, 9], [7]], "0.2": [[93], [23, 8, 46]]}
"""By request, what the engine samples."""
ADVANTAGES = (0.75, -1.125, 0.5, 0.25)


class ScriptedEngines:
    """Engines that answer by the script."""

    def __init__(self) -> None:
        self.contexts: dict[str, list[int]] = {}

    def submit(self, request: GenerationRequest) -> Any:
        self.contexts[request.request_id] = list(request.prompt_token_ids)
        return SimpleNamespace(request=request)

    def finished(self, name: str) -> FinishedGroup:
        samples = SCRIPT[name]
        lengths = np.array([len(sample) for sample in samples])
        return FinishedGroup(
            request_id=name,
            token_ids=np.array([token for sample in samples for token in sample], dtype=np.int32),
            log_probs=np.full(lengths.sum(), -1.0, dtype=np.float32),
            lengths=lengths,
            finish_reasons=["stop"] * len(samples),
            texts=[""] * len(samples),
            weight_versions=[[(0, 0, len(sample))] for sample in samples],
            context=self.contexts[name],
        )


def two_rounds() -> tuple[dict[str, torch.Tensor], list[list[tuple[list[int], list[int]]]]]:
    """The columns of a batch of four samples, and of each of them what the engine sampled behind what."""
    engines: Any = ScriptedEngines()
    flow: Any = SimpleNamespace(engines=engines, settings=GroupSettings(4, SamplingParams(max_new_tokens=4)))
    prompt = PromptRow("p", "domain", "tag", PROMPT, "prompt", "truth", {})
    context = RolloutContext(flow, 0, prompt)
    context.start(PROMPT, 1)
    draft = engines.finished("0.0")
    seen = [*PROMPT, *draft.token_ids.tolist(), *OBSERVATION]
    context.start(seen, 2)
    answers = engines.finished("0.1")
    context.start(PROMPT, 2)
    plain = engines.finished("0.2")
    group = context.group(prompt, answers, plain)
    batch = build_batch([group], pad_token_id=0).batch
    rounds = [[(seen, answer)] for answer in SCRIPT["0.1"]] + [[(PROMPT, own)] for own in SCRIPT["0.2"]]
    columns = {name: batch[name] for name in ("input_ids", "attention_mask", "response_mask")}
    count = columns["response_mask"].sum()
    advantages = torch.tensor(ADVANTAGES)[:, None] * columns["response_mask"]
    return columns | {"advantages": advantages, "num_tokens": count.expand(4)}, rounds


@pytest.mark.long
@pytest.mark.default_rows("True")
@pytest.mark.parametrize("packed", [False, True])
def test_loss_and_gradient_are_those_of_the_engine_s_contexts(run_ranks, tied_model, packed):
    """The reference computes every call of the engine by itself: context, then the tokens that were sampled there."""
    batch, rounds = two_rounds()
    model = plain_model(tied_model).double()
    terms = []
    for row, calls in enumerate(rounds):
        for context, sampled in calls:
            logits = model(torch.tensor([[*context, *sampled]])).logits[0, len(context) - 1 : -1]
            table = logits.log_softmax(-1)
            log_probs = table.gather(1, torch.tensor(sampled)[:, None])[:, 0]
            terms.append(-ADVANTAGES[row] * log_probs.sum() + ENTROPY_WEIGHT * (table.exp() * table).sum())
    count = sum(len(sampled) for calls in rounds for _, sampled in calls)
    assert count == int(batch["num_tokens"][0])
    (torch.stack(terms).sum() / count).backward()
    role = make_role(tied_model, micro_batch=2, **(PACKING | {"use_prefix_sharing": True} if packed else {}))
    (result,) = run_ranks(1, jobs.train, role, batch)
    for name, parameter in model.named_parameters():
        wanted = parameter.grad
        assert wanted is not None
        # float32 sums of a few dozen terms.
        limit = 1e-5 * float(wanted.abs().max()) + 1e-8
        torch.testing.assert_close(result["gradients"][name].double(), wanted, rtol=0, atol=limit)
