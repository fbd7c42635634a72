"""The six files of ``examples/deepspeed`` run as they stand: PPO with a critic, and GRPO, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from roll.config.loader import load_config
from roll.pipelines.rlvr.pipeline import RLVRPipeline
from tests.datasets.conftest import tiny  # noqa: F401  fixtures of other folders
from tests.pipelines.conftest import world  # noqa: F401
from tests.support.tiny_runs import FinishedRun, TinyWorld

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

EXAMPLES = Path(__file__).parents[3] / "examples/deepspeed"
STEPS = 2
# A run takes ten seconds of starting processes, so each file runs once; every stage meets both algorithms.
GRPO = ["zero1_no_offload", "zero2_cpu_offload", "zero3_no_offload"]
PPO = ["zero1_cpu_offload", "zero2_no_offload", "zero3_cpu_offload"]
# GRPO brings a reference; PPO here does without, and has a critic.
ALGORITHMS = {"grpo": ["adv_estimator=grpo"], "ppo": ["adv_estimator=gae", "use_kl_loss=false"]}
LEARNED = {
    "grpo": ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm"),
    "ppo": ("actor/pg_loss", "actor/grad_norm", "critic/loss", "critic/grad_norm"),
}
Runs = Callable[[str], dict[str, FinishedRun]]


def overrides(world: TinyWorld, output: Path) -> list[str]:  # noqa: F811
    """A world of the tests' own; 16 samples in two micro-batches on each of two ranks."""
    batch = ["per_device_train_batch_size=4", "gradient_accumulation_steps=2"]
    return [
        f"pretrain={world.model}",
        f"actor_train.data_args.file_name=[{world.train}]",
        f"validation.data_args.file_name=[{world.validation}]",
        "rewards.word_problems.tag_included=[even,odd]",
        f"output_dir={output}",
        f"logging_dir={output / 'logs'}",
        "track_with=[jsonl]",
        f"max_steps={STEPS}",
        "eval_steps=0",
        "rpc_timeout=120",
        "prompt_length=128",
        "response_length=12",
        "rollout_batch_size=4",
        "num_return_sequences_in_group=4",
        "actor_infer.device_mapping=[0]",
        "actor_infer.generating_args.stop_token_ids=[" + ",".join(map(str, range(0, 400, 8))) + "]",
        "rewards.word_problems.worker_cls=tests.pipelines.rewards.digit_share",
        "~rewards.word_problems.reward_kwargs",
        *(f"{role}.training_args.{setting}" for role in ("actor_train", "critic") for setting in batch),
    ]


@pytest.fixture(scope="module")
def runs(shared_ray: str, world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Runs:  # noqa: F811
    def run(case: str, *more: str) -> FinishedRun:
        output = tmp_path_factory.mktemp(case)
        words = [*overrides(world, output), *more]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", shared_ray)
            RLVRPipeline(load_config(None, EXAMPLES / f"{case}.yaml", overrides=words)).run()
        return FinishedRun(output)

    groups = {"grpo": GRPO, "ppo": PPO}
    return cache(lambda name: {case: run(case, *ALGORITHMS[name]) for case in groups[name]})


def test_there_is_no_other_file():
    assert sorted(GRPO + PPO) == sorted(file.stem for file in EXAMPLES.glob("zero*.yaml"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_stages_and_offload_learn_the_same(runs, algorithm):
    found = runs(algorithm)
    for case, finished in found.items():
        assert max(finished.values("actor/train_infer_log_diff_abs_max")) < 1e-4, f"{case}: engines have its weights"
    first, *others = found.values()
    for name in LEARNED[algorithm]:
        wanted = first.values(name)
        assert len(wanted) == STEPS and any(wanted), name
        for other in others:
            # Sums in another order, once through AdamW, whose small second moments enlarge differences.
            assert other.values(name) == pytest.approx(wanted, rel=1e-3, abs=1e-6), name
