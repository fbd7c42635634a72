"""The numbers of a step depend neither on how its samples, or rows of episodes, are spread over ranks and micro-batches
nor on packing and shared prompts."""

from __future__ import annotations

from importlib.util import find_spec
from shutil import which
from typing import Any

import pytest

from tests.pipelines.conftest import Run
from tests.support.tiny_runs import FinishedRun, role, training_args

pytestmark = pytest.mark.e2e

TWO_MINI_BATCHES = {
    "max_steps": 1,
    "estimator": "gae",
    "ppo_epochs": 2,
    "value_clip": 0.5,
    "loss_agg_mode": "token-mean",
    "use_kl_loss": True,
    "kl_loss_coef": 0.05,
    "entropy_loss_coef": 0.01,
    "max_grad_norm": 0.5,
    "reference": role("fsdp2_infer", [0]),
}
"""Two optimizer steps of 8 samples in each of two passes. Responses differ in length, so shares weigh differently."""


def layout(devices: list[int], micro_batch_size: int, accumulation: int, **changes: Any) -> dict[str, Any]:
    """Actor and critic on these devices."""
    arguments = training_args(micro_batch_size, accumulation)
    return {
        "actor_train.device_mapping": devices,
        "actor_train.training_args": arguments,
        "critic": role("fsdp2_train", devices, training_args=arguments, infer_batch_size=micro_batch_size) | changes,
    } | {f"actor_train.{key}": value for key, value in changes.items()}


def fsdp1() -> dict[str, Any]:
    """Two ranks under the older wrapper, the reference with its parameters in host memory."""
    changes = layout([0, 1], 2, 2) | {"actor_train.strategy_args": strategy_args("fsdp_train", {})}
    changes["critic"]["strategy_args"] = strategy_args("fsdp_train", {})
    return changes | {"reference.strategy_args": strategy_args("fsdp_infer", {"cpu_offload": True})}


def compiled() -> dict[str, Any]:
    """Compiled layers of actor, critic and reference."""
    changes = layout([0], 4, 2) | {f"{name}.model_args.compile": True for name in ("actor_train", "reference")}
    changes["critic"]["model_args"] |= {"compile": True}
    return changes


def megatron(actor: dict[str, int], critic: dict[str, int]) -> dict[str, Any]:
    """One replica of each, cut over both devices."""
    changes = layout([0, 1], 4, 2) | {"actor_train.strategy_args": strategy_args("megatron_train", actor)}
    changes["critic"]["strategy_args"] = strategy_args("megatron_train", critic)
    return changes


def strategy_args(strategy: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"strategy_name": strategy, "strategy_config": config}


PACKING = {"use_sequence_packing": True, "sequence_packing_args": {"algorithm": "load_balance"}}
LAYOUTS = {
    "one micro-batch": layout([0], 8, 1),
    "micro-batches of one": layout([0], 1, 8),
    "two ranks": layout([0, 1], 2, 2),
    "two ranks, packed": layout([0, 1], 2, 2)
    | {f"{name}.{key}": value for name in ("actor_train", "reference") for key, value in PACKING.items()},
    "two ranks, fsdp1": fsdp1(),
    "compiled": compiled(),
    "pipeline stages, halved critic": megatron({"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}),
}

# Only the order of float32 additions differs: a relative 2^-24 for each, some thousand of them in a sum of a step.
# AdamW's first updates divide each gradient by its own size, so a weight whose gradient is nothing but rounding may
# move by the learning rate (1e-3) in one layout and not in another; single ratios after that are compared more loosely.
UPDATE = {"rel": 2e-4, "abs": 1e-7}
AFTERWARDS = {"rel": 2e-3, "abs": 2e-4}


COMPARED = {
    "actor": {"pg_loss": UPDATE, "total_loss": UPDATE, "grad_norm": UPDATE}
    | dict.fromkeys(("ratio_mean", "ratio_max", "ratio_min", "clipfrac", "approxkl"), AFTERWARDS),
    "critic": dict.fromkeys(("loss", "grad_norm", "advantages/mean", "returns/mean"), UPDATE),
}


def assert_same(row: dict[str, Any], expected: dict[str, Any], sampled: tuple[str, ...], least: int) -> None:
    """What was sampled, whose names begin so, to the last bit; what was learnt from it but for rounding."""
    names = [metric for metric in expected if metric.startswith(sampled)]
    assert len(names) > least
    assert {metric: row[metric] for metric in names} == {metric: expected[metric] for metric in names}
    for name, metrics in COMPARED.items():
        for metric, tolerance in metrics.items():
            assert row[f"{name}/{metric}"] == pytest.approx(expected[f"{name}/{metric}"], **tolerance), (name, metric)


@pytest.fixture(scope="module")
def reference_run(run: Run) -> FinishedRun:
    return run(TWO_MINI_BATCHES | layout([0], 4, 2))


@pytest.mark.long
@pytest.mark.default_rows("two ranks, fsdp1")
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_of_the_update(run: Run, reference_run: FinishedRun, name: str) -> None:
    if name == "pipeline stages, halved critic" and find_spec("megatron") is None:
        pytest.skip("needs megatron-core")
    if name == "compiled" and which("g++") is None:
        pytest.skip("needs g++")
    (row,), (expected,) = run(TWO_MINI_BATCHES | LAYOUTS[name]).steps, reference_run.steps
    assert_same(row, expected, ("critic/score", "token/", "digits/", "system/samples"), 20)
    for metric in ("kl_loss", "entropy"):
        assert row[f"actor/{metric}"] == pytest.approx(expected[f"actor/{metric}"], **UPDATE), metric
    for metric in ("actor/valid_samples", "actor/total_samples", "actor/lr", "critic/lr"):
        assert row[metric] == expected[metric]
    assert expected["actor/ratio_max"] > 1.01, "later optimizer steps must be off-policy"
    assert expected["token/response_length/max"] > expected["token/response_length/min"]
    assert min(expected["actor/grad_norm"], expected["critic/grad_norm"]) > 0.01


EPISODES = {
    "estimator": "turn_gae",
    "gamma": 0.9,
    "lambd": 0.8,
    "ppo_epochs": 2,
    "ratio_type": "segment",
    "loss_agg_mode": "seq-mean-token-mean",
    "value_loss_agg_mode": "seq-mean-token-mean",
    "value_clip": 0.5,
    "max_grad_norm": 0.5,
}
"""Two optimizer steps of 8 episodes in each of two passes, with turns of different lengths; some end at the limit."""
STEPS = {"custom_envs.game.samples": "step"}
EPISODE_LAYOUTS = {
    "micro-batches of one": layout([0], 1, 8),
    "two ranks, packed": layout([0, 1], 2, 2, **PACKING),
    "a row a turn": layout([0], 4, 2) | STEPS,
    "a row a turn, two ranks": layout([0, 1], 4, 1) | STEPS,
    "a row a turn, two ranks, shared prompts": layout([0, 1], 4, 1, use_prefix_sharing=True) | STEPS,
    "tensor ranks": megatron(*[{"tensor_model_parallel_size": 2}] * 2),
}


@pytest.fixture(scope="module")
def episodes_run(run: Run) -> FinishedRun:
    return run(EPISODES | layout([0], 4, 2), "agentic")


@pytest.mark.long
@pytest.mark.default_rows("a row a turn, two ranks, shared prompts")
@pytest.mark.parametrize("name", EPISODE_LAYOUTS)
def test_layout_of_the_update_on_episodes(run: Run, episodes_run: FinishedRun, name: str) -> None:
    (row,), (expected,) = run(EPISODES | EPISODE_LAYOUTS[name], "agentic").steps, episodes_run.steps
    assert_same(row, expected, ("critic/score", "rollout/", "episode/outcome"), 8)
    assert row["critic/values/mean"] == pytest.approx(expected["critic/values/mean"], **UPDATE)
    assert expected["actor/ratio_max"] > 1.01 and min(expected["actor/grad_norm"], expected["critic/grad_norm"]) > 0.01
    assert expected["trajectory/turns/max"] > expected["trajectory/turns/min"] and expected["critic/advantages/max"] > 0
    assert expected["episode/outcome/turn_limit"] > 0, "some episodes go on with the critic's value"
