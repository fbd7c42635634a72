"""Every recipe of ``examples/algorithms`` as two training steps. They share one set of clusters, since starting takes
longer than training here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll.config.loader import load_config
from roll.pipelines.rlvr.pipeline import PromptSource, RLVRPipeline
from tests.config.good import changed, load
from tests.config.test_preflight import ALL_KINDS
from tests.support.tiny_runs import GENERATING, HERE, TinyWorld

pytestmark = pytest.mark.e2e

FOLDER = Path(__file__).parents[2] / "examples/algorithms"
NO_RECIPES = ("base_config", "with_reference")
RECIPES = sorted(file.stem for file in FOLDER.glob("*.yaml") if file.stem not in NO_RECIPES)
SHRINK = 8
"""Samples of a step are so many times fewer, on one trainer instead of two."""


def shrunk(name: str, world: TinyWorld, output: Path, **changes: Any) -> RLVRPipeline:
    """The recipe as a pipeline that is not started yet."""
    recipe = load_config(None, FOLDER / f"{name}.yaml", check_files=False).resolved
    per_device = "training_args.per_device_train_batch_size"
    sizes = {
        f"{role}.{per_device}": 2 * recipe[role]["training_args"]["per_device_train_batch_size"] // SHRINK
        for role in ("actor_train", "critic")
        if role in recipe
    }
    small = {
        "pretrain": str(world.model),
        "reward_pretrain": str(world.model),
        "output_dir": str(output),
        "logging_dir": str(output / "logs"),
        "track_with": ["jsonl"],
        "eval_steps": 0,
        "rollout_batch_size": recipe["rollout_batch_size"] // SHRINK,
        "response_length": 12,
        "prompt_length": 128,
        "actor_train.data_args.file_name": [str(world.train)],
        "actor_infer.generating_args": GENERATING,
        "rewards.word_problems.worker_cls": f"{HERE}.rewards.digits_in_parts",
        "rewards.word_problems.reward_kwargs": {},
        "rewards.word_problems.tag_included": ["even", "odd"],
        "validation": None,
    }
    devices = {f"{role}.device_mapping": [0] for role in ("actor_train", "critic", "reference") if recipe.get(role)}
    (output / "input").mkdir(parents=True, exist_ok=True)
    return RLVRPipeline(load(output / "input", changed({**small, **sizes, **devices, **changes}, recipe)))


@pytest.fixture(scope="module")
def started(shared_ray: str, world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RLVRPipeline]:
    """Clusters of every role: PPO's, and a reference."""
    reference = load_config(None, FOLDER / "grpo.yaml", check_files=False).resolved["reference"]
    changes = {"enable_reference": True, "reference": {**reference, "device_mapping": [0]}}
    pipeline = shrunk("ppo", world, tmp_path_factory.mktemp("clusters"), **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", shared_ray)
        with pipeline.context.running() as resources:
            pipeline.start(resources)
            yield pipeline
            pipeline.rollout.close()


def on_clusters_of(started: RLVRPipeline, recipe: RLVRPipeline) -> RLVRPipeline:
    """The recipe with those of the started clusters that it would have started itself."""
    plan = recipe.plan
    recipe.clusters = replace(
        started.clusters,
        reference=started.clusters.reference if plan.needs_reference else None,
        critic=started.clusters.critic if plan.needs_critic else None,
    )
    assert isinstance(started.source, PromptSource)
    recipe.source = PromptSource(recipe.config, plan, recipe.clusters, started.source.data)
    recipe.residency, recipe.models = started.residency, started.models
    started.rollout.close()  # a thread has one event loop
    recipe.connect()
    started.rollout = recipe.rollout
    return recipe


def one_step(pipeline: RLVRPipeline, step: int) -> dict[str, float]:
    """The work of ``train_one_step`` between validation and checkpoint; the step's metrics."""
    pipeline.update_engines(step)
    batch = pipeline.generate(step)
    pipeline.add_model_columns(batch)
    pipeline.context.record(pipeline.method.credit(batch))
    pipeline.learn(batch, step)
    return pipeline.context.recorded()


def test_the_engines_log_probs_stand_in_for_old_ones(started: RLVRPipeline, world: TinyWorld, tmp_path: Path) -> None:
    """``force_disable_old_logprobs_recompute`` saves the pass; the second optimizer step is off-policy all the same."""
    recipe = shrunk("grpo", world, tmp_path, force_disable_old_logprobs_recompute=True)
    metrics = one_step(on_clusters_of(started, recipe), 0)
    assert metrics["actor/ratio_max"] > 1 > metrics["actor/ratio_min"]
    assert metrics["actor/train_infer_log_diff_abs_max"] > 0, "the policy of the second step against the engine's"


def test_functions_of_ones_own_of_every_kind(started: RLVRPipeline, world: TinyWorld, tmp_path: Path) -> None:
    changes = {key: value for key, value in ALL_KINDS.items() if not key.startswith("rewards.")}
    recipe = on_clusters_of(started, shrunk("grpo", world, tmp_path, **changes))
    metrics = one_step(recipe, 0)
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/gated"] > 0.5
    assert 0 < metrics["actor/unlikely"] <= 1


@pytest.mark.default_rows("dapo", "grpo", "high_entropy_tokens", "ppo", "remax")
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains(name: str, started: RLVRPipeline, world: TinyWorld, tmp_path: Path) -> None:
    recipe = on_clusters_of(started, shrunk(name, world, tmp_path))
    for step in range(2):
        metrics = one_step(recipe, step)
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["actor/grad_norm"] > 0
        assert metrics["actor/train_infer_log_diff_abs_max"] < 1e-4, "the engines follow every update"
        assert metrics["system/samples"] == 32
        is_off_policy = recipe.plan.training["actor_train"].optimizer_steps_per_step > 1
        assert (metrics["actor/ratio_max"] > 1) == is_off_policy
        assert ("actor/kl_loss" in metrics) == recipe.config.use_kl_loss
        assert ("critic/baseline_score/mean" in metrics) == (name == "remax")
        assert ("critic/overlong_penalty" in metrics) == (name == "dapo")
        assert ("actor/top_entropy_mean" in metrics) == (name == "high_entropy_tokens")
        assert ("critic/loss" in metrics) == (name == "ppo")
