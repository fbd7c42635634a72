"""An optimizer step on episodes of many turns, each turn a row of its own: the tokens computed, and what they cost.

    python -m benchmarks.shared_turns
    python -m benchmarks.shared_turns --model qwen2.5-1.5B --dtype bf16 --prompt 1024 --thought 512 --answer 128 \\
        --seen 512 --repeats 2                                                          # on a GPU

A turn is thoughts, an answer and what the environment says to it.  Thoughts stay in the history, so that a row goes on
where the one before ends, or are left out of it, so that rows leave a common history one after another.  Three ways to
compute the same rows on one rank under fsdp2, in one micro-batch:

* ``rows alone``: packed without padding, each with its whole history;
* ``shared``: ``use_prefix_sharing``;
* ``as many tokens``: ordinary packed rows with as many tokens in all as ``shared`` computes, each of which sees as many
  on average, and as many to learn from.  Its cost is what the union of the tokens costs without any sharing.

Models are random.  The cost is CPU seconds of the best of several steps, on a GPU its seconds.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.train_step import SHAPES, loss_fn, write_model
from roll.config.roles import ModelArguments, StrategyArguments, TrainingArguments, WorkerConfig
from roll.models.layouts import tree_layout
from roll.platforms import current_platform
from roll.strategies.base import Output, TensorBatch, create_strategy

Row = tuple[list[int], int]
"""Token ids, and how many of them, the last ones, are learnt from."""


def episodes(args: argparse.Namespace, keeps_thoughts: bool) -> list[Row]:
    """The rows of all episodes, turn by turn; those of a group have one prompt."""
    random = torch.Generator().manual_seed(0)

    def some(count: int) -> list[int]:
        return torch.randint(1, SHAPES[args.model]["vocab"], (count,), generator=random).tolist()

    rows: list[Row] = []
    for _ in range(args.groups):
        prompt = some(args.prompt)
        for _ in range(args.group_size):
            history = prompt
            for _ in range(args.turns):
                thought, answer = some(args.thought), some(args.answer)
                rows.append(([*history, *thought, *answer], args.thought + args.answer))
                history = [*history, *(thought if keeps_thoughts else []), *answer, *some(args.seen)]
    return rows


def as_many_tokens(args: argparse.Namespace, rows: list[Row]) -> list[Row]:
    """Rows of random tokens, as many as the tree of ``rows`` has; each sees as many before it on average."""
    batch = batch_of(rows)
    positions = tree_layout(batch["input_ids"], batch["response_mask"]).position_ids
    assert positions is not None
    count, learnt = positions.numel(), sum(learnt for _, learnt in rows)
    length = round(2 * float(positions.double().mean() + 1))
    random, vocabulary = torch.Generator().manual_seed(1), SHAPES[args.model]["vocab"]
    lengths = [min(length, count - begin) for begin in range(0, count, length)]
    return [
        # The last token of a row predicts nothing, and is not computed.
        (torch.randint(1, vocabulary, (own + 1,), generator=random).tolist(), round(learnt * own / count))
        for own in lengths
    ]


def batch_of(rows: list[Row]) -> TensorBatch:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    columns, ends = torch.arange(width), torch.tensor([[len(ids)] for ids, _ in rows])
    learnt = torch.tensor([[count] for _, count in rows])
    mask = (columns < ends) & (columns >= ends - learnt)
    return {
        "input_ids": ids,
        "attention_mask": columns < ends,
        "response_mask": mask,
        "advantages": torch.randn(mask.shape, generator=torch.Generator().manual_seed(2)) * mask,
        "num_tokens": mask.sum().expand(len(rows)),
    }


def measure(folder: Path, args: argparse.Namespace, rows: list[Row], **keys: Any) -> tuple[int, float, float]:
    """Tokens computed in a step, CPU seconds (on a GPU seconds), and the norm of the gradient of the first step."""
    role = WorkerConfig(
        name="actor_train",
        model_args=ModelArguments(str(folder), dtype=args.dtype, disable_gradient_checkpointing=not args.recompute),
        training_args=TrainingArguments(learning_rate=1e-5, per_device_train_batch_size=len(rows)),
        strategy_args=StrategyArguments("fsdp2_train"),
        use_remove_padding=True,
        **keys,
    )
    platform, batch = current_platform(), batch_of(rows)
    clock = time.process_time if platform.device_type == "cpu" else time.perf_counter
    strategy = create_strategy(role, max_grad_norm=1.0)
    strategy.initialize(num_training_steps=1000)
    costs, metrics = [], []
    for _ in range(args.repeats + 1):
        begin = clock()
        metrics.append(strategy.train_step(copy.copy(batch), loss_fn, (Output.LOG_PROBS,)))
        platform.synchronize()
        costs.append(clock() - begin)
    tokens, norm = (float(metrics[0][name].value()) for name in ("tokens_per_micro_batch", "grad_norm"))
    return int(tokens), min(costs[1:]), norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="10M")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    counts = {"groups": 1, "group-size": 4, "turns": 8, "prompt": 192, "thought": 64, "answer": 32, "seen": 64}
    for name, default in (counts | {"repeats": 3}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    platform = current_platform()
    torch.set_num_threads(1)
    platform.set_device()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, SHAPES[args.model])
        dist.init_process_group(
            platform.process_group_backend, init_method=f"file://{folder / 'store'}", rank=0, world_size=1
        )
        print("| thoughts | | tokens | cost | cost to that of as many tokens | gradient norm |\n" + "|---" * 6 + "|")
        for keeps in (True, False):
            rows = episodes(args, keeps)
            found = {
                "rows alone": measure(folder, args, rows),
                "shared": measure(folder, args, rows, use_prefix_sharing=True),
                "as many tokens": measure(folder, args, as_many_tokens(args, rows)),
            }
            for way, (tokens, cost, norm) in found.items():
                ratio = cost / found["as many tokens"][1]
                cells = [
                    "kept" if keeps else "left out",
                    way,
                    f"{tokens:,}",
                    f"{cost:.3f}",
                    f"{ratio:.2f}",
                    f"{norm:.5f}",
                ]
                print("| " + " | ".join(cells) + " |", flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
