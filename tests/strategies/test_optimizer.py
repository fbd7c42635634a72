from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import get_scheduler

from roll.config.roles import TrainingArguments
from roll.protocol.metrics import to_floats
from roll.strategies.training.adamw import HostAdamW
from roll.strategies.training.optimizer import LearningRateSchedule, TrainingProgress, decay_groups


def rates(kind: str, **options: object) -> list[float]:
    args = TrainingArguments(learning_rate=2.0, lr_scheduler_type=kind, **options)  # type: ignore[arg-type]
    schedule = LearningRateSchedule(args, total_steps=10)
    return [schedule(step) for step in range(12)]


def test_minimum_and_warm_up():
    """Linear falls to the minimum and stays; warm-up starts above zero; its ratio is a share of all steps."""
    values = rates("linear", min_lr_ratio=0.1)
    assert values[0] == 2.0 and values[5] == pytest.approx(2.0 * 0.55)
    assert values[10] == values[11] == pytest.approx(0.2)
    assert rates("linear", warmup_steps=4)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates("constant", warmup_ratio=0.11)[:3] == pytest.approx([1.0, 2.0, 2.0])
    assert rates("constant", warmup_ratio=0.5, warmup_steps=1)[0] == 2.0


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("cosine", {"num_cycles": 1.5}),
        ("constant_with_warmup", {}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("cosine_with_min_lr", {"min_lr": 0.3}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("polynomial", {"power": 2.0, "lr_end": 0.01}),
        ("polynomial", {}),
        ("inverse_sqrt", {}),
        ("inverse_sqrt", {"timescale": 7}),
        ("warmup_stable_decay", {"num_decay_steps": 5}),
        ("warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "1-sqrt", "min_lr_ratio": 0.2}),
        ("warmup_stable_decay", {"num_decay_steps": 4, "num_stable_steps": 2, "decay_type": "linear"}),
    ],
)
def test_equals_transformers_after_the_warm_up(kind, kwargs):
    total, warmup = 20, 3
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = get_scheduler(kind, optimizer, warmup, total, scheduler_specific_kwargs=dict(kwargs))
    args = TrainingArguments(
        learning_rate=2.0, lr_scheduler_type=kind, lr_scheduler_kwargs=dict(kwargs), warmup_steps=warmup
    )
    ours = LearningRateSchedule(args, total)
    for step in range(total + 1):
        if step >= warmup:
            assert ours(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), step
        optimizer.step()
        theirs.step()


def test_a_dropped_gradient_counts_as_a_step_and_halves_the_loss_scale():
    args = TrainingArguments(learning_rate=2.0, lr_scheduler_type="linear")
    progress = TrainingProgress(args, num_training_steps=4, compute_dtype=torch.float16)
    good, dropped = (to_floats(progress.finish_step(norm, dp_size=2)) for norm in (3.0, math.inf))
    assert good == {"grad_norm": 3.0, "lr": 2.0, "loss_scale": 2.0**16}
    assert dropped == {"grad_norm": math.inf, "lr": 1.5, "skipped_updates": 0.5, "loss_scale": 2.0**16}
    assert (progress.step, progress.learning_rate, progress.scale) == (2, 1.0, 2.0**15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_progress_continues_from_its_state(dtype):
    args = TrainingArguments(learning_rate=2.0, lr_scheduler_type="linear")
    progress, resumed = (TrainingProgress(args, 4, dtype) for _ in range(2))
    progress.finish_step(math.nan, dp_size=1)
    progress.finish_step(1.0, dp_size=1)
    resumed.restore(json.loads(json.dumps(progress.state())))
    assert resumed.state() == progress.state()
    assert (resumed.scale, resumed.learning_rate) == (progress.scale, progress.learning_rate)


def test_without_fp16_there_is_no_loss_scale():
    progress = TrainingProgress(TrainingArguments(), 4, torch.bfloat16)
    assert progress.scale == 1.0 and "loss_scale" not in progress.finish_step(1.0, dp_size=1)


def test_biases_of_stacked_experts_do_not_decay():
    from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    for config in (
        GptOssConfig(**shape, num_local_experts=4, num_experts_per_tok=2),
        Qwen3MoeConfig(**shape, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
    ):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        names = {parameter: name for name, parameter in model.named_parameters()}
        decayed, kept = ({names[one] for one in group["params"]} for group in decay_groups(model, 0.1))
        assert decayed | kept == set(names.values())
        assert {name for name in names.values() if "bias" in name or "norm" in name} <= kept
        assert {name for name in names.values() if "experts" in name and "bias" not in name} <= decayed
        assert any("q_proj.weight" in name for name in decayed) and "model.embed_tokens.weight" in decayed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fused", [True, None])
def test_moments_that_visit_the_device_give_the_same_bits(device, fused):
    """By the kernel that the groups ask for; a parameter may have no gradient, and a rank no element of one."""
    torch.manual_seed(0)
    shapes = [(33, 7), (5,), (0, 4), (3,)]
    held, plain = ([torch.nn.Parameter(torch.ones(shape, device=device)) for shape in shapes] for _ in range(2))
    optimizers = [
        cls([{"params": own[:2], "weight_decay": 0.5}, {"params": own[2:]}], lr=0.1, fused=fused)
        for cls, own in ((HostAdamW, held), (torch.optim.AdamW, plain))
    ]
    for _ in range(3):
        for one, other in zip(held[:3], plain[:3], strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    states, wanted = (optimizer.state for optimizer in optimizers)
    assert len(states) == len(wanted) == 3
    for one, other in zip(held[:3], plain[:3], strict=True):
        assert torch.equal(one, other) and states[one]["step"] == 3
        for kind in ("exp_avg", "exp_avg_sq"):
            moment = states[one][kind]
            assert torch.equal(moment, wanted[other][kind].cpu()) and moment.device.type == "cpu"
            assert moment.is_pinned() == (device == "cuda" and moment.numel() > 0)
