"""Small models, batches and roles for the tests of strategies, and the plain computation that they must equal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from roll.config.roles import (
    ModelArguments,
    SequencePackingArguments,
    StrategyArguments,
    TrainingArguments,
    WorkerConfig,
)
from roll.protocol.metrics import Mean, Metrics

VOCABULARY = 96
ENTROPY_WEIGHT = 0.05

# The longest row of `make_batch` has 19 tokens.
PACKING: dict[str, Any] = {
    "use_sequence_packing": True,
    "sequence_packing_args": SequencePackingArguments(
        algorithm="load_balance", max_packed_sequence_length_train=45, max_packed_sequence_length_forward=60
    ),
}
DYNAMIC: dict[str, Any] = {
    "use_dynamic_batching_in_train": True,
    "use_dynamic_batching_in_infer": True,
    "max_tokens_per_microbatch_in_train": 48,
    "max_tokens_per_microbatch_in_infer": 64,
}

TensorBatch = dict[str, torch.Tensor]
PADDING_AND_TEXT = 5
"""A token that pads and stands in the text of :func:`make_batch`, as the end of a turn does in many chat models."""


def write_model(folder: Path, tied: bool = True) -> Path:
    """A Qwen2 model with grouped-query attention; seconds matter, so it is tiny."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    model = Qwen2ForCausalLM(config)
    model.config.pad_token_id = PADDING_AND_TEXT
    model.save_pretrained(folder)
    return folder


def make_batch(groups: int = 4, group_size: int = 3, seed: int = 0, extra_padding: int = 0) -> TensorBatch:
    """Groups of rows behind one prompt, of many lengths; the second row has no response, the last is two-turn."""
    random = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=random))

    width = 10 + 9 + extra_padding
    rows = groups * group_size
    input_ids = torch.zeros(rows, width, dtype=torch.int64)
    attention_mask = torch.zeros(rows, width, dtype=torch.bool)
    response_mask = torch.zeros_like(attention_mask)
    for group in range(groups):
        prompt = torch.randint(1, VOCABULARY, (number(3, 11),), generator=random)
        for row in range(group * group_size, (group + 1) * group_size):
            length = number(1, 10)
            end = len(prompt) + length
            input_ids[row, : len(prompt)] = prompt
            input_ids[row, len(prompt) : end] = torch.randint(1, VOCABULARY, (length,), generator=random)
            attention_mask[row, :end] = True
            response_mask[row, len(prompt) : end] = True
    response_mask[1] = False
    response_mask[-1, int(response_mask[-1].int().argmax()) + 1] = False
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "response_mask": response_mask,
        "advantages": torch.randn(rows, 1, generator=random) * response_mask,
        "num_tokens": response_mask.sum().expand(rows),
    }


def batch_of(prompts: list[list[int]], responses: list[list[int]]) -> TensorBatch:
    """Each of the responses, of which the first is good, to each of the prompts."""
    rows = [(prompt, response) for prompt in prompts for response in responses]
    width = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    attention, mask = torch.zeros(len(rows), width, dtype=torch.bool), torch.zeros(len(rows), width, dtype=torch.bool)
    for index, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        ids[index, :end] = torch.tensor([*prompt, *response])
        attention[index, :end] = mask[index, len(prompt) : end] = True
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "response_mask": mask,
        "advantages": torch.tensor([1.0, *[-0.5] * (len(responses) - 1)] * len(prompts))[:, None] * mask,
        "num_tokens": mask.sum().expand(len(rows)),
    }


def make_turns(seed: int = 0) -> TensorBatch:
    """Three episodes of four turns, a row each: the second one's turns go on where the turn before ends, thoughts are
    left out of the history of the others. The first two have one prompt; all are longer than ``MIN_SHARED``."""
    random = torch.Generator().manual_seed(seed)

    def some(count: int) -> list[int]:
        return torch.randint(1, VOCABULARY, (count,), generator=random).tolist()

    rows: list[tuple[list[int], int]] = []
    prompts = [some(68), some(66)]
    for number, prompt in enumerate([prompts[0], prompts[0], prompts[1]]):
        history = prompt
        for turn in range(4):
            thought, answer, seen = some(4), some(2 + turn % 2), some(4)
            rows.append(([*history, *thought, *answer], len(history)))
            history = [*history, *(thought if number == 1 else []), *answer, *seen]
    width = max(len(ids) for ids, _ in rows)
    input_ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    columns, ends = torch.arange(width), torch.tensor([[len(ids)] for ids, _ in rows])
    response_mask = (columns >= torch.tensor([[first] for _, first in rows])) & (columns < ends)
    return {
        "input_ids": input_ids,
        "attention_mask": columns < ends,
        "response_mask": response_mask,
        "advantages": torch.randn(len(rows), 1, generator=random) * response_mask,
        "num_tokens": response_mask.sum().expand(len(rows)),
    }


def split_rows(batch: TensorBatch, sizes: tuple[int, ...]) -> list[TensorBatch]:
    assert sum(sizes) == len(batch["input_ids"])
    parts = {name: column.split(sizes) for name, column in batch.items()}
    return [{name: columns[rank] for name, columns in parts.items()} for rank in range(len(sizes))]


def make_role(model: Path, strategy: str = "fsdp2_train", **options: Any) -> WorkerConfig:
    """``options``: ``dtype``, ``micro_batch``, ``config`` (strategy_config), ``training``, ``model_args``; the rest are
    keys of the role."""
    training = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.1}
    training |= {"per_device_train_batch_size": options.pop("micro_batch", 4)} | options.pop("training", {})
    model_args = {"dtype": options.pop("dtype", "fp32"), "disable_gradient_checkpointing": True}
    return WorkerConfig(
        name="actor_train",
        model_args=ModelArguments(model_name_or_path=str(model), **(model_args | options.pop("model_args", {}))),
        training_args=TrainingArguments(**training),
        strategy_args=StrategyArguments(strategy, options.pop("config", {})),
        infer_batch_size=options.pop("infer_batch_size", 3),
        **options,
    )


def policy_loss(outputs: TensorBatch, batch: TensorBatch) -> tuple[torch.Tensor, Metrics]:
    """REINFORCE with an entropy bonus: its gradient goes through both outputs."""
    total = batch["num_tokens"][0]
    gain = (outputs["log_probs"] * batch["advantages"]).sum() + ENTROPY_WEIGHT * outputs["entropy"].sum()
    count = batch["response_mask"].sum()
    return -gain / total, {
        "entropy": Mean(outputs["entropy"].detach().sum(), count),
        "rows": Mean(float(len(batch["input_ids"])), 1.0),
    }


def value_loss(outputs: TensorBatch, batch: TensorBatch) -> tuple[torch.Tensor, Metrics]:
    error = (outputs["values"] - batch["advantages"]) * batch["response_mask"]
    return error.square().sum() / batch["num_tokens"][0], {}


def plain_outputs(model: Any, batch: TensorBatch, temperature: float = 1.0) -> TensorBatch:
    """Log-probs, entropies and sums of squares by the book: padded, masked, all logits, log_softmax."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    table = (logits[:, :-1] / temperature).log_softmax(-1)
    log_probs = table.gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    entropy = -(table.exp() * table).sum(-1)
    pad = torch.nn.functional.pad
    return {
        "log_probs": pad(log_probs, (1, 0)) * batch["response_mask"],
        "entropy": pad(entropy, (1, 0)) * batch["response_mask"],
        "sum_of_squares": pad(table.exp().square().sum(-1), (1, 0)) * batch["response_mask"],
    }


def plain_adamw(parameters: Iterable[torch.nn.Parameter], **options: Any) -> torch.optim.AdamW:
    """By the book, with the roles' weight decay: vectors have none."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    matrices, vectors = ([one for one in trained if (one.ndim > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **({"foreach": False} | options))


def plain_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.get_input_embeddings().padding_idx = None  # a token of the text has its gradient
    return model
