"""The same recipes with TRL's trainers: same model, data, batch, loss and optimizer; GRPO recomputes no old log-probs.

python benchmarks/rlvr/trl_recipes.py MODEL TRAIN.jsonl --steps 20 [--threads 1] [--recipe smollm2] ...  (--help)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "--gpu" not in sys.argv:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
from bare_loop import reward
from datasets import Dataset
from markers import mark_step
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from roll.rewards.ifeval import CHECKS


class Markers(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        mark_step(0)

    def on_log(self, args, state, control, logs=None, **kwargs):
        named = {name: float(logs[name]) for name in ("reward", "loss") if name in (logs or {})}
        if named:
            mark_step(state.global_step, **named)


class SavedModels(TrainerCallback):
    """A model folder every ``every`` steps, named by the step."""

    def __init__(self, folder: Path, every: int = 10) -> None:
        self._folder, self._every = folder, every

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        if state.global_step % self._every == 0:
            folder = self._folder / str(state.global_step)
            model.save_pretrained(folder)
            processing_class.save_pretrained(folder)


def score(completions, truth, **_):
    """Of the digits' answer, or of an instruction's check with its arguments."""
    texts = [completion[0]["content"] for completion in completions]
    judged = [json.loads(one) for one in truth]
    return [
        reward(text, one) if isinstance(one, str) else float(CHECKS[one[0]](text, **one[1]))
        for text, one in zip(texts, judged, strict=True)
    ]


def question(row):
    checks = row.get("instruction_id_list")
    truth = [checks[0], row["kwargs"][0]] if checks else row["ground_truth"]
    return {"prompt": row["messages"], "truth": json.dumps(truth)}


def said(text):
    return [{"role": "assistant", "content": text}]


def demonstration(row):
    return {"prompt": row["messages"], "completion": said(row["solution"])}


def pair(row):
    return {"prompt": row["messages"], "chosen": said(row["chosen"]), "rejected": said(row["rejected"])}


@dataclass(frozen=True)
class Recipe:
    """What differs between the recipes; ``bf16``: autocast over float32 weights, activations computed again."""

    trainer: type
    config: type
    example: Callable[[dict[str, Any]], dict[str, Any]]
    batch: int
    learning_rate: float
    bf16: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the trainer, besides those that all have."""


def grpo(prompts: int, max_new_tokens: int, learning_rate: float, bf16: bool, group: int = 8) -> Recipe:
    options = {
        "num_generations": group,
        "max_completion_length": max_new_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "epsilon": 0.2,
        "num_iterations": 1,
        "loss_type": "grpo",
        "scale_rewards": "group",
    }
    arguments = {"reward_funcs": score}
    return Recipe(GRPOTrainer, GRPOConfig, question, prompts * group, learning_rate, bf16, options, arguments)


LENGTH = {"max_length": 144}
PREFERENCE = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0], "beta": 0.1}
RECIPES = {
    "tiny": grpo(32, 36, 8e-4, bf16=False),
    "smollm2": grpo(8, 48, 1e-5, bf16=True),
    "smollm2_sft": Recipe(SFTTrainer, SFTConfig, demonstration, 16, 2e-5, options=LENGTH),
    "smollm2_dpo": Recipe(DPOTrainer, DPOConfig, pair, 8, 2e-5, options=LENGTH | PREFERENCE),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--recipe", choices=RECIPES, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", action="store_true", help="on the first GPU")
    parser.add_argument("--save", type=Path, help="folder for the model after every 10 steps")
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.recipe]
    torch.set_num_threads(arguments.threads)
    rows = [json.loads(line) for line in Path(arguments.data).read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        config = recipe.config(
            **recipe.options,
            output_dir=folder,
            use_cpu=not arguments.gpu,
            bf16=recipe.bf16,
            gradient_checkpointing=recipe.bf16,
            per_device_train_batch_size=recipe.batch,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            weight_decay=0.0,
            max_steps=arguments.steps,
            seed=arguments.seed,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=0,
            dataloader_pin_memory=False,
        )
        trainer = recipe.trainer(
            **recipe.arguments,
            model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
            args=config,
            train_dataset=Dataset.from_list([recipe.example(row) for row in rows]),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            callbacks=[Markers(), *([SavedModels(arguments.save)] if arguments.save else [])],
        )
        trainer.train()


if __name__ == "__main__":
    main()
