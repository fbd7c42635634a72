from types import SimpleNamespace

import pytest
import torch

from roll.config.roles import WorkerConfig
from roll.pipelines.rlvr.phases import computed
from roll.protocol import DataProto


@pytest.mark.parametrize("dp_size", [1, 2])
def test_what_ranks_compute_comes_back_in_the_order_of_the_batch(dp_size: int) -> None:
    ids = torch.arange(48).view(8, 6)
    mask = torch.arange(6) < torch.tensor([6, 6, 5, 5, 1, 2, 1, 1])[:, None]
    batch = DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask, "response_mask": mask, "advantages": torch.rand(8, 6)},
        non_tensors={"prompt_id": list("aabbccdd")},
        meta_info={"temperature": 0.5},
    )
    seen: list[DataProto] = []

    def compute(shares: DataProto) -> DataProto:
        seen.append(shares)
        return DataProto.from_dict({"log_probs": shares.batch["input_ids"] * 2.0})

    cluster = SimpleNamespace(dp_size=dp_size, role=WorkerConfig())
    assert torch.equal(computed(batch, cluster, compute)["log_probs"], ids * 2.0)  # type: ignore[arg-type]
    assert seen[0].meta_info["temperature"] == 0.5
    if dp_size == 2:
        work = seen[0].batch["attention_mask"].view(2, 4, 6).sum((1, 2))
        assert work.max() - work.min() <= 1, "each rank's share in tokens"
        assert set(seen[0].batch.keys()) == {"input_ids", "attention_mask", "response_mask"}
