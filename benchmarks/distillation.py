"""The speed of a distillation step on given responses alongside TRL's two trainers, on the same rows.

    pip install 'trl==1.16.*'            # into the environment that has roll, or one on top of it
    python -m benchmarks.distillation --model 10M --rows 16 --prompt 192 --response 64
    python -m benchmarks.distillation --model 10M --prompt 192 --response 64 --group 4 --top-k 64

Forward KL from a teacher of the same shape: TRL's ``GKDTrainer`` (``lmbda=0``, ``beta=0``) takes logits of all tokens,
its ``DistillationTrainer`` (``beta=0``) is given the responses in place of its own samples and projects them in chunks.
Here the teacher gives the whole vocabulary, or ``--top-k`` tokens and the rest as one bucket. ``teacher known`` reads
what the teacher said from memory, as a run with ``teacher_cache`` does from its second epoch on; TRL has no such thing.
With ``--group`` that many adjacent rows are responses to one prompt, as where a teacher was sampled several times;
``shared prompts`` is ``use_prefix_sharing``.

One process and one thread for each contestant, taking turns, float32, the least CPU time of ``--repeats`` steps, the
teacher's forward pass included. Tokens are prompt and response, the same for everybody. Before that the losses of the
first step are compared: those over the whole vocabulary agree to 1e-5 of their size, or the program ends.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.preferences import TRL_SETTINGS, Contestant, own_strategy, write_random
from benchmarks.train_step import SHAPES
from roll.config.losses import DivergenceConfig
from roll.methods.distill import DistillLoss
from roll.methods.teachers import TEACHER
from roll.models.layouts import TopTokens
from roll.strategies.base import TOP_COLUMNS, ModelStrategy, TensorBatch, target_columns

console = Console(width=130, highlight=False)
PAD = 1


def make_batch(rows: int, prompt: int, response: int, vocabulary: int, group: int) -> TensorBatch:
    """Rows of random tokens: prompts of one length, each for ``group`` adjacent rows; responses up to a quarter shorter
    than ``response``."""
    random = torch.Generator().manual_seed(1)
    lengths = response - torch.randint(0, response // 4 + 1, (rows, 1), generator=random)
    columns = torch.arange(prompt + response)
    attended = columns < prompt + lengths
    ids = torch.randint(2, vocabulary, attended.shape, generator=random)
    ids[:, :prompt] = ids[::group, :prompt].repeat_interleave(group, 0)[:rows]
    return {
        "input_ids": ids.where(attended, torch.tensor(PAD)),
        "attention_mask": attended,
        "response_mask": attended & (columns >= prompt),
    }


def trl_contestants(folder: Path, teacher: Path, batch: TensorBatch, prompt: int, micro: int) -> list[Contestant]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import DistillationConfig, DistillationTrainer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    settings = TRL_SETTINGS | {
        "output_dir": str(folder / "trl"),
        "beta": 0.0,
        "learning_rate": 1e-6,
        "per_device_train_batch_size": micro,
    }
    found = []
    for name, trainer_class, config in (
        ("TRL GKDTrainer", GKDTrainer, GKDConfig(lmbda=0.0, temperature=1.0, max_length=None, **settings)),
        ("TRL DistillationTrainer", DistillationTrainer, DistillationConfig(temperature=1.0, **settings)),
    ):
        student, taught_by = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (folder, teacher)
        )
        trainer = trainer_class(
            student,
            taught_by,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "w2"}]),
            processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        )
        trainer.create_optimizer_and_scheduler(10_000)
        parts = [
            {column: value[begin : begin + micro] for column, value in trl_columns(batch, prompt).items()}
            for begin in range(0, len(batch["input_ids"]), micro)
        ]
        found.append(Contestant(name, partial(trl_step, trainer, parts, batch["response_mask"].sum())))
    return found


def trl_columns(batch: TensorBatch, prompt: int) -> TensorBatch:
    """The rows under the names of both trainers."""
    ids, attended = batch["input_ids"], batch["attention_mask"].long()
    return {
        "input_ids": ids,
        "attention_mask": attended,
        "labels": ids.masked_fill(~batch["response_mask"], -100),
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": attended[:, :prompt],
        "completion_ids": ids[:, prompt:],
        "completion_mask": attended[:, prompt:],
    }


def trl_step(trainer: Any, parts: list[TensorBatch], tokens: torch.Tensor) -> float:
    """One optimizer step on the mean over all response tokens, which is returned."""
    trainer.model.train()
    total = 0.0
    for part in parts:
        loss = trainer.compute_loss(trainer.model, {**part, "num_items_in_batch": tokens}, num_items_in_batch=tokens)
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return total


def own_contestants(
    folder: Path, teacher: Path, batch: TensorBatch, args: argparse.Namespace, vocabulary: int
) -> list[Contestant]:
    found, micro = [], args.micro_batch
    layouts: list[tuple[str, dict[str, Any]]] = [("", {}), (", without padding", {"use_remove_padding": True})]
    layouts += [(", shared prompts", {"use_prefix_sharing": True})] if args.group > 1 else []
    for count in args.top_k:
        for layout, keys in layouts:
            # A student each: the loss of a contestant's first step is that of the weights that all begin with.
            first, second = (own_strategy(folder, "fsdp2_train", micro, **keys) for _ in range(2))
            taught_by = own_strategy(teacher, "fsdp2_infer", micro, **keys)
            ask = partial(taught_by.forward_top_tokens, batch, TopTokens(count, vocabulary))
            name = f"roll, {f'top {count}' if count else 'whole vocabulary'}{layout}"
            found.append(Contestant(name, partial(own_step, first, batch, ask)))
            known = ask()
            found.append(Contestant(f"{name}, teacher known", partial(own_step, second, batch, known.copy)))
    return found


def own_step(policy: ModelStrategy, batch: TensorBatch, ask: Any) -> float:
    columns = ask()
    taught = dict(zip(target_columns(TEACHER), (columns[name] for name in TOP_COLUMNS), strict=True))
    loss = DistillLoss(DivergenceConfig(kd_objective="forward_kl"), weight=1.0)
    metrics = policy.train_step(
        batch | taught,
        partial(loss, totals=loss.counts(batch)),
        loss.outputs,
        comparisons=loss.comparisons,
    )
    kd_loss: Any = metrics["student/kd_loss"]
    return float(kd_loss.value())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="10M")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--group", type=int, default=1, help="responses to a prompt")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--top-k", type=int, nargs="+", default=[0, 64], help="0: the whole vocabulary")
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    vocabulary = SHAPES[args.model]["vocab"]
    with tempfile.TemporaryDirectory() as name:
        dist.init_process_group("gloo", init_method=f"file://{name}/store", rank=0, world_size=1)
        folders = Path(name) / "student", Path(name) / "teacher"
        for seed, folder in enumerate(folders):
            write_random(folder, SHAPES[args.model], seed)
        batch = make_batch(args.rows, args.prompt, args.response, vocabulary, args.group)
        contestants = trl_contestants(*folders, batch, args.prompt, args.micro_batch)
        contestants += own_contestants(*folders, batch, args, vocabulary)
        compare(contestants, batch, args)
        dist.destroy_process_group()


def compare(contestants: list[Contestant], batch: TensorBatch, args: argparse.Namespace) -> None:
    losses = {one.name: one.step() for one in contestants}
    expected = losses["TRL GKDTrainer"]
    for name, loss in losses.items():
        whole = name.startswith("TRL") or "whole" in name
        assert not whole or abs(loss - expected) <= 1e-5 * abs(expected), (name, loss, expected)
    best = dict.fromkeys(losses, float("inf"))
    for _ in range(args.repeats):
        for one in contestants:
            begin = time.process_time()
            one.step()
            best[one.name] = min(best[one.name], time.process_time() - begin)
    tokens = int(batch["attention_mask"].sum())
    theirs = min(cpu for name, cpu in best.items() if name.startswith("TRL"))
    table = Table("", "loss of the first step", "CPU-s / step", "tokens / CPU-s", "relative to TRL's faster one")
    for name, cpu in best.items():
        table.add_row(name, f"{losses[name]:.7f}", f"{cpu:.3f}", f"{tokens / cpu:,.0f}", f"{theirs / cpu:.2f}")
    shape = f"{args.rows} rows, prompts of {args.prompt} and responses of up to {args.response} tokens"
    console.print(f"{args.model}: {tokens} tokens a step ({shape}), micro-batches of {args.micro_batch}")
    console.print(table)


if __name__ == "__main__":
    main()
