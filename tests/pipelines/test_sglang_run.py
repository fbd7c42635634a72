"""SGLang as the engine: trainer and engine agree after every weight update, and evaluations are those of hf_infer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pipelines.conftest import Run
from tests.pipelines.test_evaluate_run import PROMPTS, changed_model, evaluation, samples
from tests.support.tiny_runs import GENERATING, TinyWorld, role

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        find_spec("sglang") is None or find_spec("sgl_kernel") is None,
        reason="SGLang is not installed, or its kernels are not: make test-sglang",
    ),
]

STEPS = 3
GAP = 1e-5  # float32 sums in another order


@pytest.mark.parametrize("devices", [[1], [0]], ids=["apart", "colocated"])
def test_trainer_and_engine_agree_at_every_step(run: Run, tmp_path: Path, devices: list[int]) -> None:
    engine = role("sglang", devices, generating_args=GENERATING)
    engine["strategy_args"]["strategy_config"] = {"load_format": "dummy", "max_num_seqs": 8}
    finished = run({"max_steps": STEPS, "actor_infer": engine}, output=tmp_path)
    assert finished.values("model_update/version") == list(range(STEPS))
    assert max(finished.values("actor/train_infer_log_diff_abs_max")) < GAP
    assert max(finished.values("actor/grad_norm")) > 0.0, "the weights move"
    assert all(length > 1 for length in finished.values("token/response_length/mean"))


def test_an_evaluation_of_two_models(run: Run, world: TinyWorld, tmp_path: Path) -> None:
    """Weights are exchanged between them, and greedy answers are those of ``hf_infer``, token for token."""
    other = changed_model(world.model, tmp_path / "other")
    changes = evaluation(world, {"first": world.model, "other": other}, temperatures=[0])
    engine = role("sglang", [1], generating_args=GENERATING)
    engine["strategy_args"]["strategy_config"] = {"max_num_seqs": 8}
    ours, theirs = run(changes), run(changes | {"actor_infer": engine})
    for model in ("first", "other"):
        assert len(samples(theirs, model)) == PROMPTS
        assert samples(theirs, model) == samples(ours, model)
    assert samples(theirs, "first") != samples(theirs, "other")
