"""A teacher's most probable tokens, and the gradient of a divergence from them, are those of plain models in one
process, under every strategy, however the rows are cut, padded or packed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.algorithms.distillation import divergence
from roll.config.losses import DivergenceConfig
from roll.models.layouts import TopTokens
from roll.protocol.metrics import Metrics
from roll.strategies.base import Comparison, Output
from roll.strategies.factory import create_strategy
from tests.strategies.comparison import assert_same_gradients
from tests.strategies.samples import (
    PACKING,
    VOCABULARY,
    TensorBatch,
    make_batch,
    make_role,
    plain_model,
    split_rows,
    write_model,
)

RunRanks = Callable[..., list[Any]]
SPLITS = {1: (12,), 2: (7, 5)}
TOP = 8
OPTIONS = DivergenceConfig(kd_objective="js_divergence", js_beta=0.3, kd_temperature=1.5, teacher_temperature=0.9)
TEACHER_TEMPERATURE = 1.5 * 0.9


@pytest.fixture(scope="module")
def teacher_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("teacher"))
    model = plain_model(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    model.save_pretrained(folder)
    return folder


def plain_table(model: Any, batch: TensorBatch, temperature: float) -> torch.Tensor:
    """(B, L, V) log-probs in place of each token; those of the first are of no use."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits
    return torch.nn.functional.pad((logits[:, :-1] / temperature).log_softmax(-1), (0, 0, 1, 0))


def plain_top(teacher: Path, batch: TensorBatch, k: int) -> TensorBatch:
    with torch.no_grad():
        table = plain_table(plain_model(teacher), batch, TEACHER_TEMPERATURE)
    mask = batch["response_mask"]
    log_probs, ids = table.topk(k, dim=-1)
    rest = table.exp().scatter(2, ids, 0).sum(-1).clamp(min=1e-38).log()
    return {
        "top_log_probs": log_probs * mask[..., None],
        "top_ids": (ids * mask[..., None]).int(),
        "tail_log_prob": rest * mask,
    }


def loss_of(outputs: TensorBatch, batch: TensorBatch) -> tuple[torch.Tensor, Metrics]:
    """The mean of the divergence and the likelihood over the tokens of all rows."""
    total = (outputs["teacher/divergence"] - 0.5 * outputs["log_probs"]) * batch["response_mask"]
    return total.sum() / batch["num_tokens"][0], {}


def distil(role: Any, batch: TensorBatch) -> dict[str, torch.Tensor]:
    """The gradient of one step on this rank's rows."""
    if role.strategy_args.strategy_name == "deepspeed_train":
        from tests.strategies.deepspeed.cases import trainer
    elif role.strategy_args.strategy_name == "megatron_train":
        from tests.strategies.megatron.cases import RecordingStrategy

        strategy = RecordingStrategy(role)
        strategy.initialize(num_training_steps=10)
        return step(strategy, batch)
    else:
        from tests.strategies.sharded_cases import trainer
    return step(trainer(role), batch)


def step(strategy: Any, batch: TensorBatch) -> dict[str, torch.Tensor]:
    of_both = partial(divergence_of, OPTIONS)
    strategy.train_step(
        batch, loss_of, [Output.LOG_PROBS], comparisons=[Comparison("teacher", OPTIONS.kd_temperature, of_both)]
    )
    return strategy.gradients


def divergence_of(options: DivergenceConfig, q: torch.Tensor, p: torch.Tensor, has_tail: bool) -> torch.Tensor:
    return divergence(q, p, options, has_tail)


def top_of(role: Any, batch: TensorBatch, k: int) -> TensorBatch:
    strategy = create_strategy(role)
    strategy.initialize()
    return strategy.forward_top_tokens(batch, TopTokens(k, VOCABULARY), TEACHER_TEMPERATURE)


def with_teacher(batch: TensorBatch, top: TensorBatch) -> TensorBatch:
    return batch | {f"teacher/{name}": column for name, column in top.items()}


@pytest.fixture(scope="module")
def expected(tied_model: Path, teacher_model: Path) -> dict[int, dict[str, torch.Tensor]]:
    """The plain student's gradients in one process, with the teacher's top tokens and with all of them."""
    batch, found = make_batch(), {}
    mask = batch["response_mask"]
    for k in (TOP, VOCABULARY):
        student = plain_model(tied_model)
        top = plain_top(teacher_model, batch, k)
        table = plain_table(student, batch, OPTIONS.kd_temperature)
        q, p = table.gather(2, top["top_ids"].long()), top["top_log_probs"]
        if k < VOCABULARY:
            rest = table.exp().scatter(2, top["top_ids"].long(), 0).sum(-1).log()
            q, p = torch.cat([q, rest[..., None]], -1), torch.cat([p, top["tail_log_prob"][..., None]], -1)
        values = divergence(q.flatten(0, 1), p.flatten(0, 1), OPTIONS, k < VOCABULARY).view_as(mask)
        own = plain_table(student, batch, 1.0).gather(2, batch["input_ids"][..., None])[..., 0]
        (((values - 0.5 * own) * mask).sum() / mask.sum()).backward()
        found[k] = {name: parameter.grad for name, parameter in student.named_parameters()}
    return found


@pytest.mark.default_rows("2-ranks-packed")
@pytest.mark.parametrize(
    ("strategy", "world_size", "options"),
    [
        pytest.param("fsdp2", 1, {"micro_batch": 5}, id="1-rank"),
        pytest.param("fsdp2", 2, PACKING, id="2-ranks-packed"),
        pytest.param("fsdp2", 2, {"use_prefix_sharing": True}, id="2-ranks-shared-prompts"),
        pytest.param("fsdp2", 2, {"model_args": {"ulysses_size": 2}}, id="2-ranks-one-sequence"),
        pytest.param("fsdp", 2, {"use_remove_padding": True}, id="fsdp"),
        pytest.param("megatron", 2, {"config": {"tensor_model_parallel_size": 2}}, id="megatron-tensor"),
        pytest.param(
            "megatron",
            4,
            {"config": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, **PACKING},
            id="megatron-tensor-pipeline-packed",
        ),
        pytest.param("megatron", 2, {"config": {"context_parallel_size": 2}}, id="megatron-context"),
        pytest.param("deepspeed", 2, {"config": {"zero_stage": 3}}, id="zero3"),
    ],
)
def test_teacher_and_gradient_equal_the_plain_models(
    run_ranks: RunRanks,
    tied_model: Path,
    teacher_model: Path,
    expected: dict[int, dict[str, torch.Tensor]],
    strategy: str,
    world_size: int,
    options: dict[str, Any],
) -> None:
    batch = make_batch()
    shared = options.get("model_args", {}).get("ulysses_size", 1)
    sizes = options.get("config", {}) if strategy == "megatron" else {}
    shared *= prod(size for name, size in sizes.items() if name.endswith("_size"))
    parts = [part for part in split_rows(batch, SPLITS[world_size // shared]) for _ in range(shared)]
    student = make_role(tied_model, f"{strategy}_train", **options)
    teacher = make_role(teacher_model, f"{strategy}_infer", **{**options, "config": sizes})
    for k in (TOP, VOCABULARY):
        wanted = plain_top(teacher_model, batch, k)
        found = run_ranks(world_size, top_of, teacher, parts, k)
        whole = {name: torch.cat([one[name] for one in found[::shared]]) for name in wanted}
        for name in ("top_log_probs", "tail_log_prob") if k == TOP else ("top_log_probs",):
            torch.testing.assert_close(whole[name], wanted[name], rtol=1e-5, atol=2e-5)
        assert float((whole["top_ids"] != wanted["top_ids"]).float().mean()) < 1e-3  # of equal log-probs
        rows = [with_teacher(part, plain_top(teacher_model, part, k)) for part in parts]
        found = run_ranks(world_size, distil, student, rows)
        for gradients in found[:1] if strategy == "megatron" else found:  # whole on rank 0 alone
            assert_same_gradients(gradients, expected[k], relative=5e-6)
