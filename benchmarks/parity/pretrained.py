"""Rows of a pretrained model, and what plain transformers computes of them: log-probs, gradients and three optimizer
steps of GRPO.

The reference computes in two orders, whose difference is what rounding does to this model: each figure of a strategy is
judged by it.
"""

from __future__ import annotations

import importlib.util
import sys
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from tests.strategies.samples import TensorBatch, plain_model, plain_outputs

EXAMPLE = Path(__file__).parents[2] / "examples/smollm2/prepare.py"
GROUPS, GROUP_SIZE, LONGEST = 4, 2, 96
CLIP, KL_WEIGHT, ENTROPY_WEIGHT = 0.2, 0.05, 0.01
RATE, DECAY, MAX_NORM = 1e-5, 0.1, 1.0


def chat_prompts(folder: Path, count: int) -> list[list[int]]:
    """Token ids of prompts of examples/smollm2: half instructions, half word problems."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    spec = importlib.util.spec_from_file_location("smollm2_prepare", EXAMPLE)
    assert spec is not None and spec.loader is not None
    prepare = sys.modules["smollm2_prepare"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    random = Random(0)
    messages = [[prepare.instruction, prepare.word_problem][index % 2](random)["messages"] for index in range(count)]
    return [
        list(tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=True)["input_ids"])
        for one in messages
    ]


def sampled_rows(folder: Path) -> TensorBatch:
    """Answers of the model to ``GROUPS`` prompts, ``GROUP_SIZE`` each and no two of a length limit, with the columns of
    GRPO.

    The policy that sampled is some updates behind: of some tokens the ratio is clipped, and none is near the bound.
    """
    model = plain_model(folder)
    torch.manual_seed(0)
    answers = []
    for group, prompt in enumerate(chat_prompts(folder, GROUPS)):
        ids = torch.tensor([prompt] * GROUP_SIZE)
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, max_new_tokens=28
        )
        for index, row in enumerate(whole[:, len(prompt) :].tolist()):
            limit = 5 + (7 * (GROUP_SIZE * group + index)) % 23
            end = row.index(model.config.eos_token_id) + 1 if model.config.eos_token_id in row else len(row)
            answers.append((prompt, row[: min(limit, end)]))
    width = max(len(prompt) + len(answer) for prompt, answer in answers)
    assert width <= LONGEST
    shape = len(answers), width
    ids = torch.zeros(shape, dtype=torch.int64)
    attention, mask = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for index, (prompt, answer) in enumerate(answers):
        end = len(prompt) + len(answer)
        ids[index, :end] = torch.tensor([*prompt, *answer])
        attention[index, :end] = mask[index, len(prompt) : end] = True
    batch = {"input_ids": ids, "attention_mask": attention, "response_mask": mask, "loss_mask": mask}
    with torch.no_grad():
        log_probs = torch.cat(
            [
                plain_outputs(model, {k: v[i : i + 4] for k, v in batch.items()})["log_probs"]
                for i in range(0, shape[0], 4)
            ]
        )
    shifts = torch.tensor([-0.5, -0.05, 0.05, 0.5])[torch.randint(4, shape)]
    rewards = torch.rand(GROUPS, GROUP_SIZE)
    advantages = (rewards - rewards.mean(-1, keepdim=True)) / rewards.std(-1, keepdim=True)
    return batch | {
        "advantages": advantages.reshape(-1, 1) * mask,
        "old_log_probs": (log_probs + shifts) * mask,
        "ref_log_probs": (log_probs + 0.2 * torch.randn(shape)) * mask,
    }


def write_small_adapter(model: Path, folder: Path) -> Path:
    """An adapter on every matrix of the layers, neither of whose halves is zero, by peft."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    adapted = get_peft_model(
        plain_model(model), LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1e-3)
    adapted.save_pretrained(folder)
    return folder


def rows_of_step(rows: int, step: int) -> slice:
    """All rows in the first step, then the first quarter and the second."""
    return (slice(0, rows), slice(0, rows // 4), slice(rows // 4, rows // 2))[step]


def rows_after(batch: TensorBatch) -> TensorBatch:
    """The rows whose log-probs are computed after the steps."""
    return {name: column[len(column) // 4 :: 2] for name, column in batch.items()}


def grpo_loss(outputs: TensorBatch, batch: TensorBatch, rows: int) -> torch.Tensor:
    """The share of some rows in the loss over ``rows``: clipped ratio, k3 and entropy; the mean over each answer's
    tokens, then over answers (arXiv 2402.03300, equation 3)."""
    mask, advantages = batch["response_mask"], batch["advantages"]
    ratio = (outputs["log_probs"] - batch["old_log_probs"]).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    behind = batch["ref_log_probs"] - outputs["log_probs"]
    tokens = -gain + KL_WEIGHT * (behind.exp() - behind - 1) - ENTROPY_WEIGHT * outputs["entropy"]
    return ((tokens * mask).sum(-1) / mask.sum(-1)).sum() / rows


@dataclass(frozen=True)
class Order:
    """An order of the same sums."""

    attention: str
    at_once: int
    """Rows of a forward pass, as long as the longest of them."""
    head: torch.dtype
    """Of the log-softmax: of a token that is almost certain, float32 has the gradient to three digits only."""

    def outputs(self, model: Any, batch: TensorBatch) -> TensorBatch:
        """``log_probs`` and ``entropy`` by the book; float32 (B, L)."""
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits[:, :-1]
        table = logits.to(self.head).log_softmax(-1)
        log_probs = table.gather(2, batch["input_ids"][:, 1:, None])[..., 0]
        entropy = -(table.exp() * table).sum(-1)
        columns = {"log_probs": log_probs, "entropy": entropy}
        return {
            name: torch.nn.functional.pad(column.float(), (1, 0)) * batch["response_mask"]
            for name, column in columns.items()
        }


ORDERS = [Order("sdpa", 4, torch.float32), Order("eager", 3, torch.float64)]


def plain_training(
    folder: Path, adapter: Path | None, batch: TensorBatch, dtype: str, order: Order, into: Path
) -> dict[str, Any]:
    """Log-probs, the gradient norm, log-probs of the last rows after the steps, and in float32 the norm by which each
    tensor has ``moved``.  The first step's gradients and, in float32, the last weights are written into ``into``.

    In bf16 a copy of the model computes; gradients are summed and weights learn in float32.
    """
    masters = _plain(folder, adapter)
    masters.set_attn_implementation(order.attention)
    model = masters if dtype == "fp32" else deepcopy(masters).to(torch.bfloat16)
    trained = {name: p for name, p in masters.named_parameters() if p.requires_grad}
    copies = {} if model is masters else dict(model.named_parameters())
    groups = [
        {"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in trained.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, foreach=False)
    rows = len(batch["input_ids"])
    first, norm = [], 0.0
    for step in range(3):
        step_rows = {name: column[rows_of_step(rows, step)] for name, column in batch.items()}
        for part in _parts(step_rows, order.at_once):
            outputs = order.outputs(model, part)
            grpo_loss(outputs, part, len(step_rows["input_ids"])).backward()
            for name, copy in copies.items():
                if copy.grad is not None:
                    sum_ = trained[name].grad
                    trained[name].grad = copy.grad.float() if sum_ is None else sum_.add_(copy.grad)
                    copy.grad = None
            if step == 0:
                first.append(_wide(outputs["log_probs"].detach(), batch))
        if step == 0:
            gradients = {name.removeprefix("base_model.model."): p.grad for name, p in trained.items()}
            save_file(gradients, into / "gradients.safetensors")
        clipped = torch.nn.utils.clip_grad_norm_(list(trained.values()), MAX_NORM)
        norm = norm or float(clipped)
        optimizer.step()
        with torch.no_grad():
            for name, copy in copies.items():
                copy.copy_(masters.get_parameter(name))
        optimizer.zero_grad()
    with torch.no_grad():
        parts = _parts(rows_after(batch), order.at_once)
        after = torch.cat([_wide(order.outputs(model, part)["log_probs"], batch) for part in parts])
    numbers = {"log_probs": torch.cat(first), "grad_norm": norm, "after": after}
    if dtype == "fp32":
        del optimizer
        weights, before = _whole_weights(masters), _whole_weights(_plain(folder, adapter))
        numbers["moved"] = {name: float((weight - before[name]).norm()) for name, weight in weights.items()}
        save_file(weights, into / "weights.safetensors")
    return numbers


def _plain(folder: Path, adapter: Path | None) -> Any:
    model = plain_model(folder)
    if adapter is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter, is_trainable=True)


def _whole_weights(model: Any) -> TensorBatch:
    """With the adapters merged, for good."""
    whole = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    return {name: parameter.detach() for name, parameter in whole.named_parameters()}


def _parts(batch: TensorBatch, size: int) -> list[TensorBatch]:
    parts = []
    for start in range(0, len(batch["input_ids"]), size):
        part = {name: column[start : start + size] for name, column in batch.items()}
        width = int(part["attention_mask"].sum(-1).max())
        parts.append({name: column[:, :width] for name, column in part.items()})
    return parts


def _wide(column: torch.Tensor, batch: TensorBatch) -> torch.Tensor:
    return torch.nn.functional.pad(column, (0, batch["input_ids"].shape[1] - column.shape[1]))
