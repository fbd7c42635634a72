"""A batch through a cluster gives what one call in the driver gives."""

from __future__ import annotations

import pytest
import torch

from roll.distributed.dispatch import chunked, joined
from roll.protocol import DataProto


def _batch(rows: int, width: int = 5) -> DataProto:
    generator = torch.Generator().manual_seed(rows)
    return DataProto.from_dict(
        {
            "input_ids": torch.randint(1, 100, (rows, width), generator=generator),
            "attention_mask": torch.ones(rows, width, dtype=torch.bool),
            "response_mask": torch.rand(rows, width, generator=generator) > 0.4,
            "unread": torch.zeros(rows, width),
        },
        meta_info={"note": 7},
    )


@pytest.fixture(scope="module")
def clusters(resources):
    from roll.config.roles import WorkerConfig
    from roll.distributed import Cluster

    made = {
        "one": Cluster("one", "tests.distributed.workers.DataWorker", resources, WorkerConfig(device_mapping=[0])),
        "three": Cluster(
            "three", "tests.distributed.workers.DataWorker", resources, WorkerConfig(device_mapping=[0, 1, 2])
        ),
        "grid": Cluster(
            "grid", "tests.distributed.workers.GridWorker", resources, WorkerConfig(device_mapping=[0, 1, 2, 3])
        ),
    }
    yield made
    for cluster in made.values():
        cluster.shutdown(graceful=False)


@pytest.mark.parametrize("name", ["one", "three", "grid"])
@pytest.mark.parametrize("rows", [1, 2, 6, 7])
def test_result_does_not_depend_on_ranks(clusters, name, rows):
    batch = _batch(rows)
    result = clusters[name].double(batch, factor=3)
    assert torch.equal(result.batch["doubled"], batch.batch["input_ids"] * 3)
    assert torch.equal(result.batch["mask"], batch.batch["response_mask"])


@pytest.mark.parametrize("name", ["one", "three", "grid"])
@pytest.mark.parametrize("rows", [1, 6, 7])
def test_padding_weighs_nothing_in_metrics(clusters, name, rows):
    batch = _batch(rows)
    metrics, first_tokens = clusters[name].measure(batch)
    mask = batch.batch["response_mask"]
    expected = float((batch.batch["input_ids"] * mask).sum()) / int(mask.sum())
    assert metrics["mean"].value() == pytest.approx(expected, rel=1e-12)
    assert first_tokens == batch.batch["input_ids"][:, 0].tolist()


def test_only_data_sources_answer(clusters):
    ranks, rows = clusters["grid"].rows(_batch(6))
    assert (ranks, rows) == ([0, 2], [3, 3])
    assert clusters["grid"].all_rows(_batch(6)) == [6, 6, 6, 6]


def test_dispatch_first_gives_data_to_one_rank_of_a_replica(clusters):
    batch = _batch(4)
    result = clusters["grid"].columns_here(batch)
    assert torch.equal(result.batch["ids"], batch.batch["input_ids"])
    with_data, without = sorted(batch.batch.keys()), []
    assert clusters["grid"].last_seen() == [with_data, without, with_data, without]


def test_batches_of_different_lengths_are_refused(clusters):
    with pytest.raises(ValueError, match=r"same number of rows, got \[2, 3\]"):
        clusters["three"].double(_batch(2), factor=_batch(3))


def test_padding_rows_keep_attention_and_lose_other_masks():
    chunks = chunked(_batch(4), 3)
    assert [len(chunk) for chunk in chunks] == [2, 2, 2]
    assert not chunks[2].batch["response_mask"].any()
    assert chunks[2].batch["attention_mask"].all()
    assert _batch(4).batch["response_mask"].any(), "the batch itself is unchanged"


def test_joining_other_results():
    assert joined([None, None], 4, 0) is None
    assert joined(["a", "b"], 4, 0) == ["a", "b"]
    assert joined([[1, 2], [3, 4]], 4, 1) == [1, 2, 3]
    assert joined([[1], [2]], 4, 1) == [1, 2], "a list that has no entry a row is not shortened"
