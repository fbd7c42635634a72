"""Losses that travel to workers: what each needs is in it, and a new one is one class."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from roll.config.losses import PreferenceLossConfig, RewardLossConfig
from roll.methods.base import MODEL_COLUMNS, Loss, PolicyLoss, Totals, ValueLoss
from roll.methods.distill import DistillLoss
from roll.methods.opd import TaughtPolicyLoss
from roll.methods.preferences import LabelLoss, PairLoss
from roll.methods.reward_model import RewardModelLoss
from roll.methods.sft import SftLoss
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics, to_floats
from roll.strategies.base import Output, TensorBatch
from roll.workers.model import TrainWorker, loss_columns
from tests.pipelines.in_process import worker_on
from tests.support.keys import loss_options

LOSSES = (
    SftLoss(),
    PairLoss(PreferenceLossConfig()),
    LabelLoss(PreferenceLossConfig(loss_type="kto")),
    RewardModelLoss(RewardLossConfig()),
    DistillLoss(),
    PolicyLoss(options=loss_options({"pg_variant": "vespo"})),
    TaughtPolicyLoss(names=("math", "code")),
    ValueLoss(),
)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_a_loss_travels_whole_and_small(loss: Loss) -> None:
    sent = pickle.dumps(loss)
    assert pickle.loads(sent) == loss and len(sent) < 4096
    assert set(MODEL_COLUMNS) <= set(loss.columns) == set(loss_columns(DataProto.from_dict({}), loss=loss))
    assert loss.prefix.endswith("/")


@dataclass(frozen=True)
class Unlikelihood(Loss):
    """-log(1 - pi(y_t)) of the tokens that ``bad`` marks: all that a new loss is."""

    columns = (*MODEL_COLUMNS, "bad")
    prefix: str = field(default="actor/", kw_only=True)

    def counts(self, batch: TensorBatch) -> Totals:
        return {"tokens": batch["bad"].sum()}

    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        bad = batch["bad"]
        loss = -torch.log1p(-outputs[Output.LOG_PROBS][bad].exp()).sum()
        return loss / totals["tokens"], {f"{self.prefix}loss": Mean(float(loss), float(bad.sum()))}


def test_a_new_loss_is_one_class() -> None:
    """Minimised and measured by the worker of every role, in two mini-batches that are merged by their tokens."""
    worker = worker_on(TrainWorker, None, seed=3)
    ids = torch.arange(24).view(4, 6) + 5
    response = torch.arange(6).expand(4, 6) > 2
    bad = response & (ids % 2 == 0)
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(response), "response_mask": response, "bad": bad}
    batch = DataProto.from_dict(rows)
    wanted = -torch.log1p(-worker.strategy.log_prob_of[ids].exp())[bad].mean()
    for metrics in (worker.step(batch, Unlikelihood(), mini_batches=2), worker.measure(batch, Unlikelihood())):
        assert to_floats(metrics) == {"actor/loss": pytest.approx(float(wanted), rel=1e-6)}
