"""The same recipe with TRL's GRPOTrainer: same model, data, reward, batch shape and loss, old log-probs not recomputed.

python benchmarks/rlvr/trl_grpo.py MODEL TRAIN.jsonl --steps 20 [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
from bare_loop import reward
from datasets import Dataset
from markers import mark_step
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS, GROUP, MAX_NEW_TOKENS = 32, 8, 36


class Markers(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        mark_step(0)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "reward" in logs:
            mark_step(state.global_step, reward=float(logs["reward"]))


def score(completions, ground_truth, **_):
    return [
        reward(completion[0]["content"], truth) for completion, truth in zip(completions, ground_truth, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=8e-4)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [json.loads(line) for line in Path(arguments.data).read_text().splitlines()]
    questions = Dataset.from_list([{"prompt": r["messages"], "ground_truth": r["ground_truth"]} for r in rows])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=MAX_NEW_TOKENS,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            epsilon=0.2,
            num_iterations=1,
            loss_type="grpo",
            scale_rewards="group",
            learning_rate=arguments.lr,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            weight_decay=0.0,
            max_steps=arguments.steps,
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
            callbacks=[Markers()],
        )
        trainer.train()


if __name__ == "__main__":
    main()
