"""RLVR with vLLM as the engine: the trainer and the engine agree after every weight update."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pipelines.conftest import Run
from tests.pipelines.test_evaluate_run import evaluation, samples
from tests.support.tiny_runs import GENERATING, TinyWorld, role

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: make install-vllm"),
]

STEPS = 3
GAP = 1e-5  # float32 sums in another order; measured 9.5e-7


def test_trainer_and_engine_agree_at_every_step(run: Run, wide_heads: TinyWorld, tmp_path: Path) -> None:
    """Also where the engine verifies drafts of what followed any token before."""
    engine = role("vllm", [1], generating_args=GENERATING)
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    options = {"load_format": "dummy", "max_num_seqs": 8, "speculative_config": drafts}
    engine["strategy_args"]["strategy_config"] = options
    finished = run({"pretrain": str(wide_heads.model), "max_steps": STEPS, "actor_infer": engine}, output=tmp_path)
    assert finished.values("model_update/version") == list(range(STEPS))
    assert max(finished.values("actor/train_infer_log_diff_abs_max")) < GAP
    assert max(finished.values("actor/grad_norm")) > 0.0, "the weights move"
    assert all(length > 1 for length in finished.values("token/response_length/mean"))
    assert all(0 <= share <= 1 for share in finished.values("engine/draft_acceptance_rate"))


@pytest.mark.matrix
def test_a_teacher_in_an_engine_teaches_what_one_in_a_strategy_does(run: Run, wide_heads: TinyWorld) -> None:
    models = {"student_pretrain": str(wide_heads.model), "teacher_pretrain": str(wide_heads.teacher), "max_steps": 2}
    options = {"max_num_seqs": 8}
    engine = role("vllm", [1]) | {"strategy_args": {"strategy_name": "vllm", "strategy_config": options}}
    by_engine, by_strategy = (
        run({**models, "teacher": one}, "distill").steps for one in (engine, role("fsdp2_infer", [1]))
    )
    for mine, wanted in zip(by_engine, by_strategy, strict=True):
        for name in ("student/kd_loss", "student/nll", "student/grad_norm", "student/teacher_top_k_mass"):
            assert mine[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name


@pytest.mark.matrix
def test_evaluations_answer_as_under_the_embedded_engine(run: Run, wide_heads: TinyWorld) -> None:
    """Greedily, the second model after an exchange of weights."""
    found = []
    for name in ("vllm", "hf_infer"):
        engine = role(name, [1], generating_args=GENERATING)
        engine["strategy_args"]["strategy_config"] = {"max_num_seqs": 8}
        models = {"first": wide_heads.model, "second": wide_heads.teacher}
        changes = evaluation(wide_heads, models, temperatures=[0]) | {"pretrain": str(wide_heads.model)}
        done = run({**changes, "actor_infer": engine})
        found.append([samples(done, model) for model in models])
    assert found[0] == found[1] and found[0][0] != found[0][1]
