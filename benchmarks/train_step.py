"""CPU seconds of an optimizer step: ``fsdp2_train`` beside a bare PyTorch loop, with and without shared prompts.

    python benchmarks/train_step.py                      # the tiny GRPO recipe: 32 prompts x 8, 135,872 parameters
    python benchmarks/train_step.py --ranks 2 --hidden 256 --layers 8 --micro-batch 64

The bare loop does what one would write by hand: padded micro-batches with an attention mask, logits of the response
part only, log_softmax, ``clip_grad_norm_``, AdamW.  Each figure is the best of several, in CPU milliseconds summed over
all ranks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll.config.roles import ModelArguments, StrategyArguments, TrainingArguments, WorkerConfig
from roll.protocol.metrics import Metrics
from roll.strategies.base import Output, TensorBatch, TrainStrategy
from roll.strategies.factory import create_strategy

VOCABULARY = 448


def write_model(folder: Path, args: argparse.Namespace) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 16),
        num_key_value_heads=max(1, args.hidden // 16),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")


def make_batch(args: argparse.Namespace) -> TensorBatch:
    """``groups`` x ``group_size`` rows; prompts and responses up to three tokens shorter than their longest."""
    random = torch.Generator().manual_seed(0)
    rows = args.groups * args.group_size
    prompts = args.prompt - torch.randint(0, 4, (args.groups,), generator=random).repeat_interleave(args.group_size)
    lengths = prompts + args.response - torch.randint(0, 4, (rows,), generator=random)
    columns = torch.arange(args.prompt + args.response)
    ids = torch.randint(0, VOCABULARY, (rows, len(columns)), generator=random)
    shared = ids[:: args.group_size].repeat_interleave(args.group_size, 0)
    ids = torch.where(columns < prompts[:, None], shared, ids)
    attention_mask = columns < lengths[:, None]
    response_mask = attention_mask & (columns >= prompts[:, None])
    return {
        "input_ids": ids * attention_mask,
        "attention_mask": attention_mask,
        "response_mask": response_mask,
        "advantages": torch.randn(rows, 1, generator=random) * response_mask,
        "num_tokens": response_mask.sum().expand(rows),
    }


def loss_fn(outputs: TensorBatch, batch: TensorBatch) -> tuple[torch.Tensor, Metrics]:
    return -(outputs["log_probs"] * batch["advantages"]).sum() / batch["num_tokens"][0], {}


def bare_step(model: Any, optimizer: torch.optim.Optimizer, batch: TensorBatch, rows: int, response: int) -> None:
    for start in range(0, len(batch["input_ids"]), rows):
        part = {name: column[start : start + rows] for name, column in batch.items()}
        keep = response + 4
        logits = model(
            input_ids=part["input_ids"], attention_mask=part["attention_mask"].long(), logits_to_keep=keep + 1
        ).logits[:, :-1]
        log_probs = logits.float().log_softmax(-1).gather(2, part["input_ids"][:, -keep:, None])[..., 0]
        tail = {name: column[:, -keep:] if column.ndim == 2 else column for name, column in part.items()}
        loss_fn({"log_probs": log_probs}, tail)[0].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def best_cpu_seconds(step: Callable[[], object], repeats: int) -> float:
    step()
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        step()
        best = min(best, time.process_time() - begin)
    return best


def run_rank(rank: int, folder: Path, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks)
    batch = {name: column.chunk(args.ranks)[rank] for name, column in make_batch(args).items()}
    config = {"wrap_policy": {"transformer_layer_cls_to_wrap": []}} if args.one_unit else {}
    role = WorkerConfig(
        name="actor_train",
        model_args=ModelArguments(str(folder), dtype="fp32", disable_gradient_checkpointing=True),
        training_args=TrainingArguments(learning_rate=1e-5, per_device_train_batch_size=args.micro_batch),
        strategy_args=StrategyArguments("fsdp2_train", config),
    )
    for shared in (False, True):
        strategy = create_strategy(replace(role, use_prefix_sharing=shared), max_grad_norm=1.0)
        assert isinstance(strategy, TrainStrategy)
        strategy.initialize(num_training_steps=1000)
        step = partial(strategy.train_step, batch, loss_fn, (Output.LOG_PROBS,))
        _report(f"fsdp2_train, {args.ranks} rank(s)" + (", shared prompts" if shared else ""), step, args.repeats)
    dist.destroy_process_group()


def _report(name: str, step: Callable[[], object], repeats: int) -> None:
    seconds = torch.tensor(best_cpu_seconds(step, repeats))
    dist.all_reduce(seconds)
    if dist.get_rank() == 0:
        print(f"{name:40s} {float(seconds) * 1e3:8.0f} ms", flush=True)


def run_bare(folder: Path, args: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model, batch = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), make_batch(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    step = partial(bare_step, model, optimizer, batch, args.micro_batch, args.response)
    seconds = best_cpu_seconds(step, args.repeats)
    print(f"{'bare loop, 1 process':40s} {seconds * 1e3:8.0f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "ranks": 1,
        "hidden": 64,
        "layers": 2,
        "groups": 32,
        "group-size": 8,
        "prompt": 42,
        "response": 28,
        "micro-batch": 64,
        "repeats": 8,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--one-unit", action="store_true", help="shard the whole model as one FSDP unit")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args)
        bare = context.Process(target=run_bare, args=(Path(folder), args))
        bare.start()
        bare.join()
        ranks = [context.Process(target=run_rank, args=(rank, Path(folder), args)) for rank in range(args.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
