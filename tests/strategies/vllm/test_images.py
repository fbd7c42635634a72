"""vLLM with images and videos: the patches, ids, positions and log-probs of the trainer, placeholders never sampled,
fresh features after updates; and linear attention, whose file in vLLM imports torchvision as well (``make
install-vllm-vision``)."""

from __future__ import annotations

import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import pytest

from tests import vision_models
from tests.strategies.engine_process import engine_process
from tests.strategies.vllm import image_cases, linear_cases

FOLDER = os.environ.get("ROLL_TORCHVISION") or str(Path(sys.prefix) / "roll-torchvision")

LONG = (
    "its seconds reach to position 8, its 3 rows and 3 columns to 2: the text behind it is 6 positions further in vllm "
    "than in the trainer"
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(
        find_spec("torchvision") is None and not Path(FOLDER).is_dir(), reason="no torchvision: install-vllm-vision"
    ),
]


@pytest.mark.default_rows("qwen3_vl")
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_images_and_videos_before_and_after_an_update(tmp_path, kind):
    image_cases.make_models(tmp_path, kind)
    with engine_process() as in_process:  # a new one, in which transformers is not imported yet
        found = in_process(image_cases.generated, tmp_path, kind, FOLDER)
    assert found["wrong"] == []
    assert found["refused"] == (
        "request 'r': the prompt has 8 placeholders of images, and its 1 images have 9; it has 0 of videos, and its 0 "
        "videos have 0; they must be as many, and in the same order"
    )
    gaps, same = image_cases.compared(tmp_path, kind, found)
    assert len(gaps) == 66 and max(gaps) < 2e-5
    assert same == 32
    if kind == "qwen2_5_vl":
        assert LONG in found["placed"]
    else:
        assert found["placed"] == "", "its times are words"


@pytest.mark.matrix
def test_videos_are_placed_differently_where_it_is_said(tmp_path):
    """Qwen2.5-VL's positions by vLLM's own code and processor, in engines of three dtypes, next to transformers'."""
    vision_models.save(tmp_path, "qwen2_5_vl")
    with engine_process() as in_process:
        found = in_process(image_cases.placed, tmp_path, FOLDER)
    assert [case for case, same, said in found if same != said] == []
    counts = Counter((case[0], same) for case, same, _ in found)
    assert counts["float32", True] > 10 and counts["float32", False] > 10
    assert counts["bfloat16", False] > counts["float32", False], "seconds are rounded"


@pytest.mark.default_rows("qwen3_5-1")
@pytest.mark.parametrize(("family", "ranks"), [("qwen3_5", 1), ("qwen3_5", 2), ("qwen3_5_moe", 1), ("qwen3_next", 1)])
def test_linear_attention_before_and_after_updates(tmp_path, family, ranks):
    """In bf16, which vLLM computes it in on a CPU: as near to the model in float32 as transformers in bf16 is. Every
    tensor is read back from where it belongs, also where ranks share the channels of a convolution."""
    with engine_process() as in_process:
        in_process(linear_cases.write, tmp_path, family)
    with engine_process() as in_process:  # a new one, in which transformers is not imported yet
        found = in_process(linear_cases.after_updates, tmp_path, FOLDER, ranks)
    for wrong, theirs, own in found:
        assert wrong == [] and len(theirs) > 100
        assert mean(theirs) < 1.5 * mean(own) and mean(own) > 0


def test_another_type_is_refused_on_a_cpu(tmp_path):
    with engine_process() as in_process:
        in_process(linear_cases.write, tmp_path, "qwen3_next")
        refused = in_process(linear_cases.refusal, tmp_path)
    assert "actor_infer.model_args.dtype: vLLM on a CPU computes linear attention in bf16 alone" in refused
