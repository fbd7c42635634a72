"""A teacher's most probable tokens, and the gradient of a divergence from them, are those of plain models in one
process, under every strategy, however the rows are cut, padded or packed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.algorithms.distillation import divergence
from roll.config.losses import DivergenceConfig
from roll.models.layouts import TopTokens
from roll.protocol.metrics import Metrics, RankInfo
from roll.strategies.base import Comparison, Output
from tests.strategies import jobs
from tests.strategies.comparison import assert_same_gradients
from tests.strategies.samples import PACKING, VOCABULARY, TensorBatch, make_batch, plain_model, write_model

TOP = 8
OPTIONS = DivergenceConfig(kd_objective="js_divergence", js_beta=0.3, kd_temperature=1.5, teacher_temperature=0.9)
TEACHER_TEMPERATURE = 1.5 * 0.9


@pytest.fixture(scope="module")
def teacher_model(tmp_path_factory):
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
    strategy = jobs.trainer(role)
    of_both = partial(divergence, options=OPTIONS)
    strategy.train_step(
        batch, loss_of, [Output.LOG_PROBS], comparisons=[Comparison("teacher", OPTIONS.kd_temperature, of_both)]
    )
    return strategy.gradients


def top_of(role: Any, batch: TensorBatch, k: int) -> tuple[RankInfo, TensorBatch]:
    strategy = jobs.started(role)
    return strategy.rank_info, strategy.forward_top_tokens(batch, TopTokens(k, VOCABULARY), TEACHER_TEMPERATURE)


def with_teacher(batch: TensorBatch, top: TensorBatch) -> TensorBatch:
    return batch | {f"teacher/{name}": column for name, column in top.items()}


@pytest.fixture(scope="module")
def expected(tied_model, teacher_model):
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
        values = divergence(q.flatten(0, 1), p.flatten(0, 1), k < VOCABULARY, OPTIONS).view_as(mask)
        own = plain_table(student, batch, 1.0).gather(2, batch["input_ids"][..., None])[..., 0]
        (((values - 0.5 * own) * mask).sum() / mask.sum()).backward()
        found[k] = {name: parameter.grad for name, parameter in student.named_parameters()}
    return found


CASES = {
    "2-ranks-packed": (2, "fsdp2", PACKING),
    "2-ranks-shared-prompts": (2, "fsdp2", {"use_prefix_sharing": True}),
    "2-ranks-one-sequence": (2, "fsdp2", {"model_args": {"ulysses_size": 2}}),
    "fsdp": (2, "fsdp", {"use_remove_padding": True}),
    "megatron-tensor": (2, "megatron", {"config": {"tp": 2}}),
    "megatron-tensor-pipeline-packed": (4, "megatron", {"config": {"tp": 2, "pp": 2}, **PACKING}),
    "zero3": (2, "zero3", {}),
}


@pytest.mark.default_rows("2-ranks-packed")
@pytest.mark.parametrize("case", CASES)
def test_teacher_and_gradient_equal_the_plain_models(run, tied_model, teacher_model, expected, case):
    world, strategy, options = CASES[case]
    batch = make_batch()
    for k in (TOP, VOCABULARY):
        wanted = plain_top(teacher_model, batch, k)
        found = run(top_of, world, f"{strategy}_infer", teacher_model, k, **options)
        sources = {info.dp_rank: top for info, top in found if info.is_data_source}
        whole = {name: torch.cat([sources[rank][name] for rank in sorted(sources)]) for name in wanted}
        for name in ("top_log_probs", "tail_log_prob") if k == TOP else ("top_log_probs",):
            torch.testing.assert_close(whole[name], wanted[name], rtol=1e-5, atol=2e-5)
        assert float((whole["top_ids"] != wanted["top_ids"]).float().mean()) < 1e-3  # of equal log-probs
        found = run(distil, world, strategy, tied_model, batch=with_teacher(batch, wanted), **options)
        for gradients in found[:1] if strategy == "megatron" else found:  # whole on rank 0 alone
            assert_same_gradients(gradients, expected[k], relative=5e-6)
