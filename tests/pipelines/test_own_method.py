"""A method of a user's own on given rows: one file with keys, loss and batch, named in YAML by its dotted path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from roll import cli
from roll.config.pipelines import TRAINS, Headline, Role
from roll.config.reading.fields import setting
from roll.config.roles import WorkerConfig
from roll.datasets import SftDataset, SftRow
from roll.methods.base import MODEL_COLUMNS, Loss, Totals
from roll.methods.rows import RowMethod, demonstration_batch
from roll.methods.supervised import SupervisedConfig, SupervisedDefinition
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.strategies.base import Output, TensorBatch
from roll.tracking import METRICS_NAME, read_metrics
from tests.pipelines.test_own_pipeline import logging_restored
from tests.support.tiny_runs import FinishedRun, TinyWorld, role, training_args

HERE = "tests.pipelines.test_own_method"


@dataclass(frozen=True)
class SmoothedConfig(SupervisedConfig):
    """Imitation in which early tokens of a response count less."""

    pretrain: str = ""
    ramp: int = setting(8, ge=1)
    """Tokens until a token counts fully."""
    imitator: WorkerConfig = field(default_factory=WorkerConfig)


class Smoothed(SupervisedDefinition):
    """Definition of the method."""

    name = "smoothed"
    config_class = SmoothedConfig
    role = "imitator"
    method_class = f"{HERE}.SmoothedImitation"
    roles = (Role("imitator", TRAINS),)
    headlines = (Headline("imitator/loss", "loss"),)


@dataclass(frozen=True)
class WeightedNll(Loss):
    """The weighted mean of -log pi(y_t | y_<t) over all ranks."""

    prefix: str = field(default="imitator/", kw_only=True)
    columns = (*MODEL_COLUMNS, "weights")

    def counts(self, batch: TensorBatch) -> Totals:
        return {"weight": batch["weights"].double().sum()}

    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        nll = -(outputs[Output.LOG_PROBS] * batch["weights"]).sum()
        return nll / float(totals["weight"]), {f"{self.prefix}loss": Mean(float(nll), float(batch["weights"].sum()))}


class SmoothedImitation(RowMethod[SmoothedConfig, SftRow]):
    """All that the run asks of a method."""

    stream = "smoothed"
    state_key = "rows"
    loss = WeightedNll()

    @classmethod
    def data_set(cls, config: SmoothedConfig) -> Callable[..., SftDataset]:
        return SftDataset.build

    def batch(self, rows: Sequence[SftRow], pad: int, ranks: int = 1) -> DataProto:
        batch = demonstration_batch(rows, pad)
        mask = batch.batch["response_mask"]
        batch.batch["weights"] = (mask.cumsum(1) / self.config.ramp).clamp(max=1.0) * mask
        return batch


@pytest.mark.long
@pytest.mark.e2e
def test_it_trains_evaluates_and_is_resumed(
    world: TinyWorld, tmp_path: Path, shared_ray: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"file_name": str(world.demonstrations), "messages": "messages", "response": "response"}
    settings: dict[str, Any] = {
        "pipeline": f"{HERE}.Smoothed",
        "pretrain": str(world.model),
        "output_dir": str(tmp_path),
        "track_with": ["jsonl"],
        "logging_dir": str(tmp_path / "logs"),
        "seed": 7,
        "max_steps": 2,
        "save_steps": 2,
        "eval_steps": 2,
        "rpc_timeout": 120,
        "num_gpus_per_node": 1,
        "sequence_length": 160,
        "imitator": role("fsdp2_train", [0], training_args=training_args(4, 2), data_args=data),
        "validation": {"data_args": {"file_name": str(world.validation_answers)}},
    }
    file = tmp_path / "smoothed.yaml"
    file.write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("RAY_ADDRESS", shared_ray)
    with logging_restored():
        assert cli.main(["run", str(file)]) == 0
        monkeypatch.setenv("RAY_ADDRESS", shared_ray)
        assert cli.main(["run", str(file), "max_steps=3", "resume_from_checkpoint=true"]) == 0
    steps = FinishedRun(tmp_path).steps
    assert [row["system/global_step"] for row in steps] == [0, 1, 2]
    assert 0 < steps[2]["imitator/loss"] < steps[0]["imitator/loss"]
    validations = [row["val/loss"] for row in read_metrics(tmp_path / "logs" / METRICS_NAME) if "val/loss" in row]
    assert len(validations) == 2 and validations[1] < validations[0]


def test_weights_rise_from_the_first_token_of_a_response() -> None:
    row = SftRow("0", None, list(range(10)), 6)
    method: Any = SmoothedImitation.__new__(SmoothedImitation)
    method.config = SmoothedConfig(ramp=2)
    weights = method.batch([row], 0).batch["weights"]
    assert torch.equal(weights, torch.tensor([[0.0] * 6 + [0.5, 1.0, 1.0, 1.0]]))
