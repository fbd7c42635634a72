"""Preference losses against TRL's trainers on the same rows, and the speed of a DPO step alongside TRL's DPOTrainer.

    pip install 'trl==1.16.*'            # into the environment that has roll, or one on top of it
    python -m benchmarks.preferences                                  # both tables
    python -m benchmarks.preferences --only speed --model 10M --prompt 192 --response 64

Losses: a random policy and another random model as its reference, one batch of rows as TRL's collator makes it, given
to TRL's ``compute_loss`` and to a strategy of this project with its preference loss.  ``sft`` is left out: TRL takes
the mean over all tokens of the batch, this project (as RPO's equation) the mean over responses.

Speed: optimizer steps of ``--pairs`` pairs, one process and one thread for each contestant, taking turns, float32, the
best of ``--repeats`` steps.  Tokens are those of both sequences of a pair, prompts counted twice for everybody.  The
reference is computed in every step (``reference``) or known beforehand (``cached``; TRL: ``precompute_ref_log_probs``).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.train_step import SHAPES, write_model
from roll.algorithms.preferences import PairSums, pair_sums, preference_loss, unpaired_loss
from roll.config.losses import PREFERENCE_LOSSES, PreferenceLossConfig
from roll.config.roles import ModelArguments, StrategyArguments, TrainingArguments, WorkerConfig
from roll.methods.preferences import PairLoss
from roll.strategies.base import ModelStrategy, Output, TensorBatch, create_strategy

console = Console(width=130, highlight=False)
BETA, SMOOTHING, PAIRS = 0.1, 0.1, 8
PAIR_LOSSES = [row.name for row in PREFERENCE_LOSSES.rows if row.needs_reference and not row.is_unpaired]
SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
"""In TRL, too; its ``sigmoid`` takes no label smoothing."""


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Words ``w0 w1 ...`` for the model's ids, so that a text has exactly the tokens that it was made of."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, "<pad>": 1} | {f"w{index}": index for index in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(folder)


def texts(count: int, prompt: int, response: int, vocabulary: int) -> list[dict[str, Any]]:
    """Pairs of which the responses are up to a quarter shorter than ``response`` words."""
    random = torch.Generator().manual_seed(1)

    def words(length: int) -> str:
        return " ".join(f"w{index}" for index in torch.randint(2, vocabulary, (length,), generator=random).tolist())

    def shorter() -> int:
        return response - int(torch.randint(0, response // 4 + 1, (1,), generator=random)) - 1

    return [{"prompt": words(prompt), **{side: f" {words(shorter())}" for side in SIDES}} for _ in range(count)]


SIDES = ("chosen", "rejected")


TRL_SETTINGS: dict[str, Any] = {
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
"""Of every trainer of TRL: float32 on a CPU, without logging or saving."""


def trl_trainer(kind: str, folder: Path, reference: Path, rows: list[dict[str, Any]], **options: Any) -> Any:
    """TRL's ``DPOTrainer`` or ``KTOTrainer`` on the rows in their order, without logging or saving."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    settings = TRL_SETTINGS | {
        "output_dir": str(folder / "trl"),
        "shuffle_dataset": False,
        "max_length": None,
        "beta": BETA,
    }
    config = getattr(trl, f"{kind}Config")
    known = set(config.__dataclass_fields__)
    settings = {name: value for name, value in (settings | options).items() if name in known}
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (folder, reference)]
    return getattr(trl, f"{kind}Trainer")(
        models[0],
        ref_model=models[1],
        args=config(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
    )


def own_strategy(folder: Path, name: str, micro_batch: int, **keys: Any) -> ModelStrategy:
    role = WorkerConfig(
        name="actor_train",
        model_args=ModelArguments(str(folder), dtype="fp32", disable_gradient_checkpointing=True),
        training_args=TrainingArguments(learning_rate=1e-6, per_device_train_batch_size=micro_batch),
        strategy_args=StrategyArguments(name, {}),
        infer_batch_size=micro_batch,
        **keys,
    )
    strategy = create_strategy(role, max_grad_norm=1.0)
    strategy.initialize(num_training_steps=10_000 if strategy.trains else 0)
    return strategy


def as_pairs(inputs: Mapping[str, torch.Tensor]) -> TensorBatch:
    """TRL's rows, first all chosen, then all rejected ones, as adjacent rows of pairs."""
    count = len(inputs["input_ids"]) // 2
    order = torch.arange(count).repeat_interleave(2) + count * torch.arange(2).repeat(count)
    return {
        "input_ids": inputs["input_ids"][order],
        "attention_mask": inputs["attention_mask"][order].bool(),
        "response_mask": inputs["completion_mask"][order].bool(),
        "unit_ids": torch.arange(count).repeat_interleave(2),
    }


def log_probs(strategy: ModelStrategy, batch: TensorBatch) -> torch.Tensor:
    return strategy.forward(batch, [Output.LOG_PROBS])[Output.LOG_PROBS]


def compare_losses(folder: Path, reference: Path, vocabulary: int) -> None:
    """One line a loss: TRL's, this project's, and how far they are apart."""
    rows = texts(PAIRS, 24, 16, vocabulary)
    batch: TensorBatch = {}
    policy, tied_to = (
        own_strategy(path, "fsdp2_infer", PAIRS, use_prefix_sharing=True) for path in (folder, reference)
    )
    table = Table("loss", "TRL", "roll", "difference")
    sums: PairSums | None = None
    for name in PAIR_LOSSES:
        smoothing = SMOOTHING if name in SMOOTHED else 0.0
        trainer = trl_trainer(
            *("DPO", folder, reference, rows),
            loss_type=[name],
            label_smoothing=smoothing,
            per_device_train_batch_size=PAIRS,
        )
        inputs = next(iter(trainer.get_train_dataloader()))
        with torch.no_grad():
            theirs = float(trainer.compute_loss(trainer.model, dict(inputs)))
        options = PreferenceLossConfig(loss_type=name, beta=BETA, label_smoothing=smoothing)
        batch = as_pairs(inputs)
        known = log_probs(tied_to, batch)
        sums = pair_sums(log_probs(policy, batch), batch["response_mask"], known)
        add(table, name, theirs, float(preference_loss(sums, options).mean()))
    labelled = [
        {"prompt": row["prompt"], "completion": row[SIDES[index % 2]], "label": index % 2 == 0}
        for index, row in enumerate(rows)
    ]
    for name in ("kto", "apo_zero_unpaired"):
        add(table, name, *kto_losses(folder, reference, labelled, name, policy, tied_to))
    console.print(table)


def kto_losses(
    folder: Path,
    reference: Path,
    rows: list[dict[str, Any]],
    name: str,
    policy: ModelStrategy,
    tied_to: ModelStrategy,
) -> tuple[float, float]:
    """TRL's loss and this project's on TRL's own rows, mismatched ones included."""
    trainer = trl_trainer("KTO", folder, reference, rows, loss_type=name, per_device_train_batch_size=len(rows))
    inputs = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        theirs = float(trainer.compute_loss(trainer.model, dict(inputs)))
    ratios = {}
    for prefix in ("", "KL_")[: 2 if name == "kto" else 1]:
        batch = {
            "input_ids": inputs[f"{prefix}input_ids"],
            "attention_mask": inputs[f"{prefix}attention_mask"].bool(),
            "response_mask": inputs[f"{prefix}completion_mask"].bool(),
        }
        ratios[prefix] = (log_probs(policy, batch) - log_probs(tied_to, batch)).sum(1)
    kl = ratios["KL_"].mean().clamp(min=0).expand(len(rows)) if "KL_" in ratios else None
    options = PreferenceLossConfig(loss_type=name, beta=BETA)
    desirable = torch.as_tensor(inputs["label"]).bool()
    return theirs, float(unpaired_loss(ratios[""], desirable, kl, options).mean())


def add(table: Table, name: str, theirs: float, own: float) -> None:
    table.add_row(name, f"{theirs:.7f}", f"{own:.7f}", f"{abs(theirs - own):.1e}")
    assert abs(theirs - own) <= 1e-5 * max(1.0, abs(theirs)), (name, theirs, own)


@dataclass(frozen=True)
class Contestant:
    name: str
    step: Callable[[], object]
    """One optimizer step."""


def own_contestants(folder: Path, reference: Path, batch: TensorBatch, micro: int) -> list[Contestant]:
    found = []
    options = PreferenceLossConfig(beta=BETA)
    pairs = PairLoss(options)
    loss = partial(pairs, totals=pairs.counts(batch))
    for name, keys in (
        ("roll, fsdp2", {}),
        ("roll, fsdp2, packed", {"use_remove_padding": True}),
        ("roll, fsdp2, shared prompts", {"use_prefix_sharing": True}),
    ):
        policy = own_strategy(folder, "fsdp2_train", micro, **keys)
        tied_to = own_strategy(reference, "fsdp2_infer", 2 * micro, **keys)
        known = log_probs(tied_to, batch)

        def step(policy: ModelStrategy = policy, tied_to: ModelStrategy | None = tied_to, known: Any = known) -> None:
            reference_log_probs = known if tied_to is None else log_probs(tied_to, batch)
            policy.train_step(batch | {"ref_log_probs": reference_log_probs}, loss, [Output.LOG_PROBS])

        found += [Contestant(f"{name}, reference", step), Contestant(f"{name}, cached", partial(step, tied_to=None))]
    return found


def trl_contestants(folder: Path, reference: Path, rows: list[dict[str, Any]], micro: int) -> list[Contestant]:
    found = []
    for name, options in (("reference", {}), ("cached", {"precompute_ref_log_probs": True})):
        trainer = trl_trainer(
            *("DPO", folder, reference, rows), loss_type=["sigmoid"], per_device_train_batch_size=micro, **options
        )
        trainer.create_optimizer_and_scheduler(10_000)
        parts = [dict(part) for part in trainer.get_train_dataloader()]

        def step(trainer: Any = trainer, parts: list[dict[str, Any]] = parts) -> None:
            trainer.model.train()
            for part in parts:
                trainer.compute_loss(trainer.model, dict(part)).div(len(parts)).backward()
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

        found.append(Contestant(f"TRL DPOTrainer, {name}", step))
    return found


def compare_speed(folder: Path, reference: Path, args: argparse.Namespace) -> None:
    rows = texts(args.pairs, args.prompt, args.response, SHAPES[args.model]["vocab"])
    trainer = trl_trainer("DPO", folder, reference, rows, loss_type=["sigmoid"], per_device_train_batch_size=args.pairs)
    batch = as_pairs(next(iter(trainer.get_train_dataloader())))
    tokens = int(batch["attention_mask"].sum())
    contestants = trl_contestants(folder, reference, rows, args.micro_batch)
    contestants += own_contestants(folder, reference, batch, args.micro_batch)
    best = {one.name: (float("inf"), float("inf")) for one in contestants}
    for _ in range(args.repeats):
        for one in contestants:
            wall, cpu = time.perf_counter(), time.process_time()
            one.step()
            spent = time.process_time() - cpu, time.perf_counter() - wall
            best[one.name] = min(best[one.name], spent)
    theirs = {name.rpartition(", ")[2]: cpu for name, (cpu, _) in best.items() if name.startswith("TRL")}
    table = Table("", "CPU-s / step", "tokens / CPU-s", "relative to TRL")
    for name, (cpu, _) in best.items():
        ratio = theirs[name.rpartition(", ")[2]] / cpu
        table.add_row(name, f"{cpu:.3f}", f"{tokens / cpu:,.0f}", f"{ratio:.2f}")
    shape = f"{args.pairs} pairs, prompts of {args.prompt} and responses of about {args.response} tokens"
    console.print(f"{args.model}: {tokens} tokens a step ({shape}), micro-batches of {args.micro_batch} pairs")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("losses", "speed"))
    parser.add_argument("--model", choices=sorted(SHAPES), default="10M")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    with tempfile.TemporaryDirectory() as name:
        dist.init_process_group("gloo", init_method=f"file://{name}/store", rank=0, world_size=1)
        folders = Path(name) / "policy", Path(name) / "reference"
        for seed, folder in enumerate(folders):
            write_random(folder, SHAPES[args.model], seed)
        if args.only != "speed":
            compare_losses(*folders, SHAPES[args.model]["vocab"])
        if args.only != "losses":
            compare_speed(*folders, args)
        dist.destroy_process_group()


def write_random(folder: Path, shape: dict[str, int], seed: int) -> None:
    """The model of ``benchmarks.train_step``, with noise by which policy and reference differ."""
    from transformers import AutoModelForCausalLM

    write_model(folder, shape)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=random))
    model.config.eos_token_id, model.config.pad_token_id = 0, 1
    model.save_pretrained(folder)
    write_tokenizer(folder, shape["vocab"])


if __name__ == "__main__":
    main()
