"""Images travel with their rows: encoded, once for all rows that speak of one, to the ranks that compute these rows."""

from __future__ import annotations

import io
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PilImage

from roll.distributed.dispatch import spread
from roll.distributed.worker import Dispatch, Registration
from roll.methods.base import MODEL_COLUMNS
from roll.protocol import DataProto
from roll.protocol.images import EncodedImage, ImageError
from roll.protocol.metrics import RankInfo
from roll.protocol.vision import IMAGES, VisionInputs
from roll.workers.model import columns_of, equal_parts
from tests.protocol.batches import num_bytes, send
from tests.strategies import vision_cases

GROUP = 8


@pytest.fixture(scope="module")
def batch() -> DataProto:
    """Groups of eight behind one image, two images, one of another size, and text."""
    columns = vision_cases.make_batch(which=(0, 2, 3, 4), group_size=GROUP)
    images = columns.pop(IMAGES)
    return DataProto.from_dict(columns, {IMAGES: images})


def images_of(data: DataProto) -> list[VisionInputs]:
    """Distinct objects, in the order of rows."""
    column = data.non_tensor_batch[IMAGES]
    return list({id(row): row for row in column if row is not None}.values())


def encoded_bytes(data: DataProto) -> int:
    return sum(image.data.nbytes for row in images_of(data) for image in row.images)


def test_a_group_carries_its_images_once(batch: DataProto) -> None:
    text = batch.select(None, [])
    cost = num_bytes(batch) - num_bytes(text)
    pixels = sum(row.pixel_values().nbytes for row in batch.non_tensor_batch[IMAGES] if row is not None)
    assert encoded_bytes(batch) <= cost < encoded_bytes(batch) + 2500
    assert pixels > 200 * cost, "what eight copies of float32 patches would weigh"
    arrived = send(batch)
    assert len(images_of(arrived)) == 3, "rows of a group hold one object there as well"
    for row, other in zip(batch.non_tensor_batch[IMAGES], arrived.non_tensor_batch[IMAGES], strict=True):
        assert (row is None) == (other is None)
        assert row is None or torch.equal(row.pixel_values(), other.pixel_values())


def test_rows_keep_their_images(batch: DataProto) -> None:
    """Shuffled, cut into mini-batches, repeated and joined."""
    numbered = batch.select()
    numbered.batch["row"] = torch.arange(len(batch))
    order = np.random.default_rng(0).permutation(len(batch))
    parts = list(numbered.select().reorder(order).make_iterator(10, seed=1))
    joined = DataProto.concat([*parts, numbered.repeat(2)])
    assert len(joined) == 3 * len(batch)
    for row, images in zip(joined.batch["row"].tolist(), joined.non_tensor_batch[IMAGES], strict=True):
        assert images is batch.non_tensor_batch[IMAGES][row]
    shares = equal_parts(columns_of(numbered), 4)
    assert [share["row"].tolist() for share in shares] == [list(range(s, s + GROUP)) for s in range(0, 32, GROUP)]
    assert all(len(share[IMAGES]) == GROUP for share in shares)


def test_ranks_get_the_images_of_their_rows(batch: DataProto, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three replicas of two Ulysses ranks: those of a replica share what is sent; rows that pad have images too."""
    monkeypatch.setattr("roll.distributed.cluster.ray.put", lambda value: [value])
    infos = [RankInfo(rank=r, world_size=6, dp_rank=r // 2, dp_size=3, cp_rank=r % 2, cp_size=2) for r in range(6)]
    registration: Any = Registration(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS)
    sent = [one[0][0] for one in spread(registration, 6, lambda: infos, (batch,), {})[0].values()]
    assert sent[0] is sent[1] and sent[2] is sent[3] and sent[4] is sent[5]
    chunks: list[DataProto] = [sent[rank][0] for rank in (0, 2, 4)]
    assert [len(chunk) for chunk in chunks] == [11, 11, 11]
    assert all(set(chunk.batch.keys()) == {"input_ids", "attention_mask", "response_mask"} for chunk in chunks)
    first, second, third = images_of(batch)
    assert [images_of(chunk) for chunk in chunks] == [[first, second], [second, third], [third, first]]
    assert not chunks[2].batch["response_mask"][-1].any(), "the last row pads, with the image of the first"
    for chunk in chunks:
        alone = chunk.select(None, [])
        assert num_bytes(chunk) - num_bytes(alone) < encoded_bytes(chunk) + 2500


def test_a_decompression_bomb_is_refused_while_another_thread_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread begins while the first decodes, and goes on when that has restored the filters of warnings."""
    file = io.BytesIO()
    PilImage.new("RGB", (4, 4)).save(file, "PNG")
    image, open_image = EncodedImage.of(file.getvalue()), PilImage.open
    outcomes: dict[str, str] = {}
    events = {name: threading.Event() for name in ("first is in", "second is in", "first is out")}

    def opened(stream: io.BytesIO) -> PilImage.Image:
        is_first = threading.current_thread().name == "first"
        events["first is in" if is_first else "second is in"].set()
        events["second is in" if is_first else "first is out"].wait(10)
        if not is_first:
            monkeypatch.setattr(PilImage, "MAX_IMAGE_PIXELS", 15)
        return open_image(stream)

    def decode() -> None:
        name = threading.current_thread().name
        try:
            image.decode()
            outcomes[name] = "decoded"
        except ImageError as error:
            outcomes[name] = str(error)

    monkeypatch.setattr(PilImage, "open", opened)
    with warnings.catch_warnings(action="ignore"):
        first, second = (threading.Thread(target=decode, name=name) for name in ("first", "second"))
        first.start()
        events["first is in"].wait(10)
        second.start()
        first.join()
        events["first is out"].set()
        second.join()
    assert outcomes == {"first": "decoded", "second": "4 x 4 pixels are more than the limit of 15"}
