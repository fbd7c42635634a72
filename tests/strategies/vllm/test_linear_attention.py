"""vLLM with linear attention, which it computes in bf16 on a CPU: as near to the model in float32 as transformers in
bf16 is (``make install-vllm-vision``: its file of Qwen3.5 imports torchvision)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import pytest

from tests.strategies.engine_process import engine_process
from tests.strategies.vllm import linear_cases
from tests.strategies.vllm.test_images import FOLDER

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(
        find_spec("torchvision") is None and not Path(FOLDER).is_dir(), reason="no torchvision: install-vllm-vision"
    ),
]


@pytest.mark.parametrize(("family", "ranks"), [("qwen3_5", 1), ("qwen3_5", 2), ("qwen3_5_moe", 1), ("qwen3_next", 1)])
def test_log_probs_before_and_after_updates(tmp_path, family, ranks):
    """Every tensor is read back from where it belongs, also where ranks share the channels of a convolution."""
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
