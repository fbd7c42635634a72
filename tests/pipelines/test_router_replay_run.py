"""Whole runs of a tiny mixture of experts with router replay: every token has its route, in both modes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.pipelines.conftest import Run
from tests.strategies.moe_models import write_moe
from tests.support.tiny_runs import TinyWorld, role, training_args

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LAYOUT = {
    "actor_train.use_sequence_packing": True,
    "actor_train.use_prefix_sharing": True,
    "actor_train.device_mapping": [0, 1],
    "actor_train.training_args": training_args(8, 1),
    "use_kl_loss": True,
    "kl_loss_coef": 0.01,
    "reference": role("fsdp2_infer", [0, 1], infer_batch_size=4),
    "enable_old_logprobs_recompute": True,
    "shuffle_mini_batches": True,
}


@pytest.fixture(scope="module")
def experts(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    folder = write_moe(
        tmp_path_factory.mktemp("experts"),
        vocab_size=-(-len(tokenizer) // 8) * 8,
        max_position_embeddings=512,
        num_experts=16,
        num_experts_per_tok=4,
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(folder)
    shutil.copy(world.model / "generation_config.json", folder)
    return folder


def changes(folder: Path, mode: str) -> dict[str, Any]:
    modes = {
        "actor_train.router_replay.mode": mode,
        "actor_infer.router_replay.mode": "R3" if mode == "R3" else "disabled",
    }
    return LAYOUT | modes | {"pretrain": str(folder)}


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_every_token_has_its_route(run: Run, experts: Path, mode: str) -> None:
    """In float32 engine and trainer choose alike, so what is replayed is what would have been chosen."""
    finished = run(changes(experts, mode))
    assert finished.values("actor/moe_replay_missing") == [0.0, 0.0]
    assert finished.values("actor/moe_replay_changed") == pytest.approx([0.0, 0.0], abs=1e-3)
    assert max(finished.values("actor/train_infer_log_diff_abs_max")) < 1e-5


def test_the_routes_of_episodes_are_replayed(run: Run, experts: Path) -> None:
    """R2 with turns: every trained token of a conversation has the route of the pass before the update."""
    finished = run(
        {
            "pretrain": str(experts),
            "enable_old_logprobs_recompute": True,
            "actor_train.router_replay.mode": "R2",
            "actor_train.use_sequence_packing": True,
            "actor_train.device_mapping": [0, 1],
            "actor_train.training_args": training_args(8, 1),
        },
        "agentic",
    )
    assert finished.values("actor/moe_replay_missing") == [0.0]
    assert finished.values("actor/moe_replay_changed") == pytest.approx([0.0], abs=1e-3)
