"""Features still to come are refused, and neutral values of their keys are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.checks.keys import REFUSALS
from tests.config.good import changed, mistakes

SHARD = "actor_train.strategy_args.strategy_config"
REFUSED: list[tuple[str, Any]] = [
    ("actor_infer.model_args.ulysses_size", 2),
    (f"{SHARD}.tp_size", 2),
    ("actor_infer.generating_args.num_beams", 4),
    ("rewards.math.worker_cls", "roll.pipeline.rlvr.rewards.video_r1_reward_worker.VideoR1RewardWorker"),
    ("rewards.math.worker_cls", "RemoteRewardSystemWorker"),
    ("rewards.math.worker_cls", "video_r1"),
    ("rewards.math.reward_manager_config", {"plugin": "x"}),
    ("actor_infer.model_update_frequency", 2),
    ("transfer_backend.backend_name", "TransferQueue"),
    ("actor_train.data_args.audio_folder", "sounds"),
    ("router_args.router_name", "EnvAffinityRouter"),
]
NO_WAY_OUT = ("audio_folder",)
"""Keys of files for models that are not trained yet, whatever is written there."""
NEUTRAL = {
    "actor_train.model_args.lora_target": None,
    "actor_train.model_args.lora_rank": 32,
    "actor_train.model_args.lora_alpha": 64,
    "actor_train.model_args.ulysses_size": 1,
    "actor_infer.generating_args.num_beams": 1,
    "actor_train.data_args.image_folder": "images",
    "actor_train.data_args.image_max_pixels": 1024 * 1024,
    "actor_train.data_args.video_folder": "videos",
    "actor_train.data_args.video_total_pixels": 16384 * 28 * 28,
    "use_opd": False,
    f"{SHARD}.apply_expert_patch": False,
    "rollout_mock": {"enable": True, "mode": "dump", "dump_dir": "x"},
    "router_args.router_name": "PromptAffinityRouter",
    "teacher": None,
    "is_pure_opd": False,
    "lora_rank": 8,
}


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_refused(tmp_path: Path, key: str, value: Any) -> None:
    (problem,) = mistakes(tmp_path, changed({key: value}))
    assert problem.key == key and problem.rule.startswith(f"not available yet: {key} (")
    assert (problem.example is None) == key.endswith(NO_WAY_OUT)
    if problem.example is not None:
        works = {"~": None, "{}": {}}.get(str(problem.example), problem.example)
        assert mistakes(tmp_path, changed({key: works})) == (), "the value that the message offers"


def test_neutral_values_load(tmp_path: Path) -> None:
    assert mistakes(tmp_path, changed(NEUTRAL)) == ()


def test_every_refusal_can_happen() -> None:
    """No pattern of the table is a dead letter: each names a key of the schema."""
    from roll.config.reading.legacy_keys import DEAD_KEYS
    from roll.config.reading.schema import schema_paths
    from roll.config.strategies.registry import BACKENDS
    from roll.methods.sft_keys import SFTConfig
    from roll.pipelines.agentic.config import AgenticConfig
    from roll.pipelines.rlvr.config import RLVRConfig

    known = {*schema_paths(RLVRConfig), *schema_paths(SFTConfig), *schema_paths(AgenticConfig)}
    known |= {path for options in {backend.options for backend in BACKENDS.values()} for path in schema_paths(options)}
    known |= {"backend_name", "proxy_type", *(key for keys in DEAD_KEYS.values() for key in keys)}
    for refusal in REFUSALS:
        last = refusal.pattern.rsplit(".", 1)[-1]
        assert last in known or "*" in last, refusal.pattern
