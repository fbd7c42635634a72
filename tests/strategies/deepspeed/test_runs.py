"""The six cases of ``examples/deepspeed``, PPO and GRPO, run on two ranks and learn what FSDP2 learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from roll.config.loader import load_config
from roll.pipelines import rlvr
from tests.datasets.conftest import tiny  # noqa: F401  fixtures of other folders
from tests.pipelines.conftest import shared_ray, world  # noqa: F401
from tests.pipelines.tiny_runs import FinishedRun, TinyWorld

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[3] / "examples/deepspeed"
CASES = sorted(file.stem for file in EXAMPLES.glob("zero*.yaml"))
ALGORITHMS = ["gae", "grpo"]
STEPS = 2
LEARNED = {
    "gae": ("actor/pg_loss", "actor/grad_norm", "critic/loss", "critic/grad_norm"),
    "grpo": ("actor/pg_loss", "actor/grad_norm"),
}
Run = Callable[..., FinishedRun]


def overrides(world: TinyWorld, output: Path, algorithm: str) -> list[str]:  # noqa: F811
    """A world of the tests' own; 16 samples in two micro-batches on each of two ranks."""
    batch = ["per_device_train_batch_size=4", "gradient_accumulation_steps=2"]
    return [
        f"adv_estimator={algorithm}",
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
        "actor_infer.generating_args.stop_token_ids=[" + ",".join(map(str, range(0, 400, 8))) + "]",
        "rewards.word_problems.worker_cls=tests.pipelines.rewards.digit_share",
        "~rewards.word_problems.reward_kwargs",
        *(f"{role}.training_args.{setting}" for role in ("actor_train", "critic") for setting in batch),
    ]


@pytest.fixture(scope="module")
def run_case(shared_ray: str, world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Run:  # noqa: F811
    def run(case: str, algorithm: str, *more: str) -> FinishedRun:
        output = tmp_path_factory.mktemp(case)
        words = [*overrides(world, output, algorithm), *more]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", shared_ray)
            rlvr.run(load_config(None, EXAMPLES / f"{case}.yaml", overrides=words))
        return FinishedRun(output)

    return run


@pytest.fixture(scope="module")
def fsdp2_runs(run_case: Run) -> dict[str, FinishedRun]:
    """The switch back, one key a role: DeepSpeed's options stay in the file and have no effect."""
    names = {"actor_train": "fsdp2_train", "critic": "fsdp2_train", "reference": "fsdp2_infer"}
    switch = [f"{role}.strategy_args.strategy_name={name}" for role, name in names.items()]
    return {algorithm: run_case("zero2_no_offload", algorithm, *switch) for algorithm in ALGORITHMS}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("case", CASES)
def test_a_case_learns_what_fsdp2_learns(
    run_case: Run, fsdp2_runs: dict[str, FinishedRun], case: str, algorithm: str
) -> None:
    finished = run_case(case, algorithm)
    assert len(finished.steps) == STEPS
    for name in LEARNED[algorithm]:
        wanted: Any = fsdp2_runs[algorithm].values(name)
        assert any(wanted), name
        # Sums in another order, once through AdamW, whose small second moments enlarge differences.
        assert finished.values(name) == pytest.approx(wanted, rel=1e-3, abs=1e-6), name
