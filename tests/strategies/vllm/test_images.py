"""vLLM with images: the patches, ids and log-probs of the trainer, placeholders never sampled, fresh features after
updates (``make install-vllm-vision``)."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.strategies.engine_process import engine_process
from tests.strategies.vllm import image_cases

FOLDER = os.environ.get("ROLL_TORCHVISION") or str(Path(sys.prefix) / "roll-torchvision")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(
        find_spec("torchvision") is None and not Path(FOLDER).is_dir(), reason="no torchvision: install-vllm-vision"
    ),
]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_images_before_and_after_an_update(tmp_path: Path, kind: str) -> None:
    image_cases.make_models(tmp_path, kind)
    with engine_process() as in_process:  # a new one, in which transformers is not imported yet
        found = in_process(image_cases.generated, tmp_path, FOLDER)
    assert found["wrong"] == []
    assert found["refused"] == (
        "request 'r': the prompt has 8 placeholders of images, and its 1 images have 9; it has 0 of videos, and its 0 "
        "videos have 0; they must be as many, and in the same order"
    )
    gaps, same = image_cases.compared(tmp_path, found)
    assert max(gaps) < 2e-5
    assert same == 16
