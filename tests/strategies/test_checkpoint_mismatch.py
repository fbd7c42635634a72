"""A strategy does not load a checkpoint of which its model would leave something behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.checkpoint.contents import CheckpointMismatchError
from roll.config.roles import WorkerConfig
from tests.strategies.jobs import POLICY, started, weights_of
from tests.strategies.samples import TensorBatch, make_batch, make_role, policy_loss, split_rows

ADAPTERS = {"lora_target": ["q_proj", "v_proj"], "lora_rank": 4, "lora_alpha": 8}
ROLES: dict[str, dict[str, Any]] = {
    "whole": {},
    "frozen": {"freeze_module_prefix": "model.embed_tokens,model.layers.0"},
    "adapters": ADAPTERS,
    "fewer adapters": ADAPTERS | {"lora_target": ["q_proj"]},
    "rank": ADAPTERS | {"lora_rank": 2},
    "alpha": ADAPTERS | {"lora_alpha": 16},
}
REFUSED = [  # written, loaded, words
    ("whole", "frozen", r"trained weights of model.embed_tokens.weight, .* model_args.freeze_module_prefix freezes"),
    ("frozen", "whole", r"were frozen \(model_args.freeze_module_prefix\) and are trained here"),
    ("whole", "adapters", r"this run does not train"),
    ("adapters", "whole", r"lora_A.default.weight.* which this run does not train \(model_args.lora_target"),
    ("adapters", "fewer adapters", r"v_proj.lora_A.default.weight.* does not train \(model_args.lora_target"),
    ("fewer adapters", "adapters", r"holds nothing of .*v_proj.lora_A"),
    ("adapters", "rank", r"\(model_args.lora_rank\)"),
    ("adapters", "alpha", r"scaled by 2 there and by 4 here"),
    ("whole", "critic", r"lm_head.weight, which this run does not train"),
    ("frozen", "frozen in another model", r"another model folder \(pretrain"),
    ("adapters", "adapters in another model", r"another model folder \(pretrain"),
]  # fmt: skip


def cross(roles: dict[str, WorkerConfig], batch: TensorBatch, folder: Path) -> dict[tuple[str, str], str]:
    """Refusals of each role to load what others wrote, by writer and reader; empty where it goes on."""
    writers = {writer for writer, *_ in REFUSED} & roles.keys()
    for name in writers:
        strategy = started(roles[name], 10)
        strategy.train_step(batch, policy_loss, POLICY)
        strategy.save(folder / name)
        strategy.saved()
    said = {}
    for name, role in roles.items():
        strategy = started(role, 10, value=name == "critic")
        before = weights_of(strategy)
        for writer in writers - {name}:
            try:
                strategy.load(folder / writer)
                said[writer, name] = ""
            except CheckpointMismatchError as error:
                said[writer, name] = str(error)
        now = weights_of(strategy)
        assert all(torch.equal(now[key], before[key]) for key in before), "nothing was loaded"
    return said


@pytest.mark.long
@pytest.mark.default_rows("fsdp2_train")
@pytest.mark.parametrize("strategy", ["fsdp2_train", "fsdp_train", "deepspeed_train", "megatron_train"])
def test_nothing_of_a_checkpoint_is_dropped(run_ranks, untied_model, tmp_path, strategy):
    pytest.importorskip({"deepspeed_train": "deepspeed", "megatron_train": "megatron.core"}.get(strategy, "peft"))
    other = another(untied_model, tmp_path / "model")
    has_adapters = strategy != "megatron_train"
    kinds = {name: args for name, args in ROLES.items() if has_adapters or "lora_target" not in args}
    roles = {name: make_role(untied_model, strategy, model_args=args) for name, args in kinds.items()}
    roles["critic"] = make_role(untied_model, strategy)
    for name in {"frozen", "adapters"} & kinds.keys():
        roles[f"{name} in another model"] = make_role(other, strategy, model_args=kinds[name])
    (said,) = run_ranks(1, cross, roles, make_batch(), tmp_path / "saved")
    assert all(said.values()), "each of these roles differs from each other"
    matching = [case for case in REFUSED if case[0] in kinds and case[1] in roles]
    assert len(matching) == (len(REFUSED) if has_adapters else 4)
    for writer, reader, words in matching:
        assert re.search(words, said[writer, reader]), said[writer, reader]


def settings(strategy: Any) -> list[dict[str, Any]]:
    """The optimizer's hyperparameters, by parameter group."""
    optimizer = strategy.engine.basic_optimizer if hasattr(strategy, "engine") else strategy.optimizer
    adam = getattr(optimizer, "optimizer", optimizer)
    return [{name: value for name, value in group.items() if name != "params"} for group in adam.param_groups]


def go_round(roles: dict[str, WorkerConfig], batch: TensorBatch, folder: Path) -> dict[str, torch.Tensor]:
    """From one role's checkpoint to the next role's, and back under the first; the weights, which must not change."""
    strategy = started(roles["first"], 10)
    for _ in range(2):
        strategy.train_step(batch, policy_loss, POLICY)
    wanted = weights_of(strategy)
    written = folder / "first"
    strategy.save(written)
    strategy.saved()
    for name in ("other", "first"):
        strategy = started(roles[name], 10)
        own = settings(strategy)
        strategy.load(written)
        assert settings(strategy) == own, "hyperparameters are the configuration's"
        assert strategy.progress.step == 2
        written = folder / f"again_{name}"
        strategy.save(written)
        strategy.saved()
    again = weights_of(strategy)
    assert all(torch.equal(again[key], wanted[key]) for key in wanted)
    strategy.train_step(batch, policy_loss, POLICY)
    return weights_of(strategy)


@pytest.mark.long
@pytest.mark.default_rows("deepspeed_train")
@pytest.mark.parametrize("strategy", ["fsdp2_train", "fsdp_train", "deepspeed_train", "megatron_train"])
def test_another_type_and_other_hyperparameters_go_on(run_ranks, untied_model, tmp_path, strategy):
    """Float32 weights and moments through a run in bf16, to the bit."""
    pytest.importorskip({"deepspeed_train": "deepspeed", "megatron_train": "megatron.core"}.get(strategy, "torch"))
    changed = {"learning_rate": 3e-3, "weight_decay": 0.5, "adam_beta1": 0.7, "adam_beta2": 0.8, "adam_epsilon": 1e-4}
    roles = {
        "first": make_role(untied_model, strategy),
        "other": make_role(untied_model, strategy, dtype="bf16", training=changed),
    }
    parts = split_rows(make_batch(), (7, 5))
    results = run_ranks(2, go_round, roles, parts, tmp_path)
    direct = run_ranks(2, three_steps, roles["first"], parts)
    assert direct[0].keys() == results[0].keys()
    assert all(torch.equal(results[0][name], weight) for name, weight in direct[0].items())


def three_steps(role: WorkerConfig, batch: TensorBatch) -> dict[str, torch.Tensor]:
    strategy = started(role, 10)
    for _ in range(3):
        strategy.train_step(batch, policy_loss, POLICY)
    return weights_of(strategy)


def another(model: Path, folder: Path) -> Path:
    """A model like ``model`` in which one number is another."""
    from transformers import Qwen2ForCausalLM

    changed = Qwen2ForCausalLM.from_pretrained(model)
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    changed.save_pretrained(folder)
    return folder
