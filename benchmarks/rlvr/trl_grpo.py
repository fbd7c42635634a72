"""The same recipe with TRL's GRPOTrainer: same model, data, reward, batch shape and loss, old log-probs not recomputed.

python benchmarks/rlvr/trl_grpo.py MODEL TRAIN.jsonl --steps 20 [--threads 1] [--recipe smollm2] ...  (--help)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "--gpu" not in sys.argv:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
from bare_loop import reward
from datasets import Dataset
from markers import mark_step
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from roll.rewards.ifeval_instructions import CHECKS


@dataclass(frozen=True)
class Recipe:
    """What differs between the recipes; ``bf16``: autocast over float32 weights, activations computed again."""

    prompts: int
    max_new_tokens: int
    learning_rate: float
    bf16: bool = False
    group: int = 8


RECIPES = {"tiny": Recipe(32, 36, 8e-4), "smollm2": Recipe(8, 48, 1e-5, bf16=True)}


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


def truth_of(row):
    checks = row.get("instruction_id_list")
    return json.dumps([checks[0], row["kwargs"][0]] if checks else row["ground_truth"])


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
    questions = Dataset.from_list([{"prompt": row["messages"], "truth": truth_of(row)} for row in rows])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=not arguments.gpu,
            bf16=recipe.bf16,
            gradient_checkpointing=recipe.bf16,
            per_device_train_batch_size=recipe.prompts * recipe.group,
            num_generations=recipe.group,
            max_completion_length=recipe.max_new_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            epsilon=0.2,
            num_iterations=1,
            loss_type="grpo",
            scale_rewards="group",
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
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
            reward_funcs=score,
            args=config,
            train_dataset=questions,
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            callbacks=[Markers(), *([SavedModels(arguments.save)] if arguments.save else [])],
        )
        trainer.train()


if __name__ == "__main__":
    main()
