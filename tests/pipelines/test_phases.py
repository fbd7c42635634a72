from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll.config.roles import WorkerConfig
from roll.methods.base import LOG_PROBS
from roll.methods.losses import PolicyLoss
from roll.pipelines.model_calls import start_computing, update_model
from roll.protocol import DataProto
from roll.protocol.metrics import Mean
from roll.workers.model import ModelWorker
from roll.workers.training import TrainWorker


@pytest.mark.parametrize("dp_size", [1, 2])
def test_what_ranks_compute_comes_back_in_the_order_of_the_batch(dp_size: int) -> None:
    ids = torch.arange(48).view(8, 6)
    mask = torch.arange(6) < torch.tensor([6, 6, 5, 5, 1, 2, 1, 1])[:, None]
    batch = DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask, "response_mask": mask, "advantages": torch.rand(8, 6)},
        non_tensors={"prompt_id": list("aabbccdd")},
    )
    seen: list[DataProto] = []

    def call(method: Any, shares: DataProto, ask: Any) -> Any:
        assert method is ModelWorker.forward and ask is LOG_PROBS
        seen.append(shares)
        answer = DataProto.from_dict({"log_probs": shares.batch["input_ids"] * 2.0})
        return SimpleNamespace(result=lambda: answer)

    cluster: Any = SimpleNamespace(dp_size=dp_size, role=WorkerConfig(), call=call)
    assert torch.equal(start_computing(batch, cluster, LOG_PROBS)()["log_probs"], ids * 2.0)
    if dp_size == 2:
        work = seen[0].batch["attention_mask"].view(2, 4, 6).sum((1, 2))
        assert work.max() - work.min() <= 1, "each rank's share in tokens"
        assert set(seen[0].batch.keys()) == {"input_ids", "attention_mask", "response_mask"}


class FakeTrainer:
    """Keeps the samples of each mini-batch of each pass, over all ranks."""

    name = "actor_train"

    def __init__(self, role: WorkerConfig, dp_size: int) -> None:
        self.role, self.dp_size = role, dp_size
        self.passes: list[list[list[int]]] = []

    def call(self, method: Any, shares: DataProto, loss: PolicyLoss, **arguments: Any) -> Any:
        assert method is TrainWorker.step and loss.num_groups == 4
        count, epochs = arguments["mini_batches"], arguments["epochs"]
        ranks = shares.batch["input_ids"][:, 0].view(self.dp_size, count, -1)
        mini_batches = [sorted(ranks[:, mini].flatten().tolist()) for mini in range(count)]
        self.passes += [mini_batches] * epochs
        return SimpleNamespace(result=lambda: {"actor/pg_loss": Mean(float(epochs), 1.0)})


@pytest.mark.parametrize("by_prompt", [False, True])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_mini_batches_are_drawn_anew_in_every_pass(dp_size: int, by_prompt: bool) -> None:
    rows = torch.arange(16)
    batch = DataProto.from_dict(
        {"input_ids": rows[:, None], "attention_mask": torch.ones(16, 1).bool(), "group_ids": rows // 4},
        non_tensors={"prompt_id": list("aaaabbbbccccdddd")},
    )

    def run(seed: tuple[int, ...] | None) -> list[list[list[int]]]:
        trainer = FakeTrainer(WorkerConfig(use_prefix_sharing=by_prompt), dp_size)
        update_model(batch, trainer, PolicyLoss(), 2, 3, seed)  # type: ignore[arg-type]
        return trainer.passes

    assert run(None) == [[list(range(8)), list(range(8, 16))]] * 3
    shuffled = run((42, 7))
    assert run((42, 7)) == shuffled != run((42, 8))
    assert all(sorted(chain(*mini_batches)) == list(range(16)) for mini_batches in shuffled)
    assert len({str(mini_batches) for mini_batches in shuffled}) > 1
    if by_prompt:
        assert all(len({row // 4 for row in mini}) == 2 for mini_batches in shuffled for mini in mini_batches)
