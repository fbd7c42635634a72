"""SFT and DPO of ``examples/smollm2`` with TRL: same model, rows, batch, loss and optimizer.

python benchmarks/rlvr/trl_rows.py MODEL TRAIN.jsonl --recipe smollm2_sft [--steps 20] [--threads 2] ...  (--help)
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
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl_grpo import Markers, SavedModels

RECIPES = {
    "smollm2_sft": (SFTTrainer, SFTConfig, {"per_device_train_batch_size": 16}),
    "smollm2_dpo": (
        DPOTrainer,
        DPOConfig,
        {"per_device_train_batch_size": 8, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0], "beta": 0.1},
    ),
}


def example(row):
    def said(text):
        return [{"role": "assistant", "content": text}]

    if "solution" in row:
        return {"prompt": row["messages"], "completion": said(row["solution"])}
    return {"prompt": row["messages"], "chosen": said(row["chosen"]), "rejected": said(row["rejected"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--recipe", choices=RECIPES, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="folder for the model after every 10 steps")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    trainer_class, config_class, options = RECIPES[arguments.recipe]
    rows = Dataset.from_list([example(json.loads(line)) for line in Path(arguments.data).read_text().splitlines()])
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            **options,
            output_dir=folder,
            use_cpu=True,
            bf16=True,
            gradient_checkpointing=True,
            max_length=144,
            learning_rate=2e-5,
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
        trainer = trainer_class(
            model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
            args=config,
            train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            callbacks=[Markers(), *([SavedModels(arguments.save)] if arguments.save else [])],
        )
        trainer.train()


if __name__ == "__main__":
    main()
