"""The entropy that is logged without a bonus: the same update to the last bit, and a number that is right."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from roll.config.roles import WorkerConfig
from roll.methods.base import PolicyLoss
from roll.protocol.metrics import to_floats
from roll.strategies.base import Output
from tests.strategies import jobs
from tests.strategies.comparison import assert_same_bits
from tests.strategies.samples import TensorBatch, make_batch, plain_model, plain_outputs
from tests.support.keys import loss_options

STRATEGIES = {"fsdp2": {}, "fsdp": {}, "zero3": {}, "megatron": {"tp": 2}}


def update(role: WorkerConfig, batch: TensorBatch, outputs: tuple[Output, ...], steps: int = 2) -> dict[str, Any]:
    """``steps`` updates by the actor's loss without a bonus; the metrics of each, and the weights afterwards."""
    strategy = jobs.started(role, 10, max_grad_norm=1.0)
    rows = {**batch, "loss_mask": batch["response_mask"]}
    actor = PolicyLoss(options=loss_options({}))
    loss = partial(actor, totals={"rows": strategy.all_reduce_sum(actor.counts(rows)["rows"])})
    metrics = [to_floats(strategy.train_step(rows, loss, outputs, 0.7)) for _ in range(steps)]
    return {"metrics": metrics, "weights": jobs.weights_of(strategy)}


@pytest.mark.long
@pytest.mark.default_rows("fsdp2")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_update_is_the_same_bit_for_bit(run, untied_model, strategy):
    batch = make_batch()
    plain, logged = (
        run(update, 2, strategy, "untied", batch, outputs, config=STRATEGIES[strategy], batch=None)
        for outputs in ((Output.LOG_PROBS,), (Output.LOG_PROBS, Output.ENTROPY))
    )
    for one, other in zip(plain, logged, strict=True):
        entropies = [row.pop("actor/entropy") for row in other["metrics"]]
        assert one["metrics"] == other["metrics"]
        assert_same_bits(other["weights"], one["weights"])
        assert len(entropies) == 2
    expected = plain_outputs(plain_model(untied_model), batch, 0.7)["entropy"].sum() / batch["response_mask"].sum()
    assert entropies[0] == pytest.approx(float(expected), rel=1e-5)
    assert other["metrics"][0]["grad_norm"] > 0
