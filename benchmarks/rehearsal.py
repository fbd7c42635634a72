"""Peaks that a rehearsal predicts, against those of the runs of :mod:`benchmarks.train_step` on a CPU.

    python -m benchmarks.rehearsal                       # 10M and 100M, all strategies on two ranks
    python -m benchmarks.rehearsal --models 10M --only fsdp2
    python -m benchmarks.rehearsal --models qwen2.5-7B --large --ranks 1 --dtype bf16      # on a GPU
    python -m benchmarks.rehearsal --write               # and put the table into docs/rehearsal.md
    python -m benchmarks.rehearsal --recipes --write     # the table of the recipes of examples/ for real models

Measured is the highest resident memory of a process (``VmHWM``) over loading the model and two training steps, of the
rank with the most.  A process without a model has some already: interpreter, PyTorch, transformers, the strategy's
package.  That is measured with the first strategy of each package and a model of 136 thousand weights; a prediction is
this plus what the rehearsal says, less what it says of the small model.

glibc keeps freed blocks, in pieces that do not fit what is asked for next, and these count as resident.  A rehearsal
counts what is in use, as ``torch.cuda.max_memory_allocated`` does.  So ``measured`` is with blocks of more than 64 KiB
returned to the system as they are freed (``MALLOC_MMAP_THRESHOLD_``); ``--glibc`` leaves it to glibc.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.train_step import CONTENDERS, LARGE, SHAPES, Contender, build_strategy, model_config, write_model
from roll.models.build import DTYPES
from roll.platforms import current_platform

RECIPES = (
    "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config",
    "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config_1gpu",
    "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config_2gpus",
    "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config_sglang",
    "qwen2.5-0.5B-rlvr_deepspeed/rlvr_config",
    "qwen2.5-0.5B-rlvr_megatron/rlvr_config",
    "qwen2.5-0.5B-agentic/agentic_val_sokoban",
    "qwen2.5-0.5B-agentic/agentic_val_sokoban_async",
    "qwen2.5-0.5B-agentic/agentic_val_sokoban_gigpo",
    "gsm8k/rlvr_config",
    "qwen2.5-7B-rlvr_fsdp2/rlvr_config",
    "qwen2.5-7B-rlvr_fsdp2/rlvr_config_2nodes",
    "qwen2.5-7B-rlvr_deepspeed/rlvr_config",
    "qwen2.5-7B-rlvr_deepspeed/rlvr_config_2nodes",
    "qwen2.5-7B-rlvr_megatron/rlvr_config",
    "qwen2.5-7B-rlvr_megatron/rlvr_config_4nodes",
    "qwen3-8B-rlvr_fsdp2/rlvr_config",
    "qwen3-8B-rlvr_fsdp2/rlvr_config_4nodes",
    "qwen3-8B-rlvr_fsdp2/rlvr_config_lora",
    "qwen3_agentic_gem/gem_math_hotpotqa_search",
    "agentic_demo/agent_val_swe",
    "agentic_demo/agent_val_swe_sandbox",
    "qwen2.5-7B-preferences/dpo_config",
    "qwen2.5-7B-preferences/rm_config",
    "qwen3-8B-distill/distill_config",
    "qwen3-8B-distill/opd_config",
)
"""The recipes of ``examples/`` for real models."""
PAGE = Path(__file__).parent.parent / "docs" / "rehearsal.md"
STEPS = 2
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Variables that make glibc return what is freed; read when a process starts."""
MIB = 2**20
CHOSEN = ["fsdp2", "fsdp", *(f"deepspeed ZeRO-{stage}" for stage in range(4))]
CHOSEN += ["megatron DP", "megatron TP2", "megatron PP2"]


@dataclass(frozen=True)
class Row:
    """Bytes."""

    model: str
    strategy: str
    ranks: int
    base: int
    measured: int
    predicted: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def own_error(self) -> float:
        """Of what the model adds to the program."""
        return (self.predicted - self.base) / max(1, self.measured - self.base) - 1


def run_rank(
    rank: int, ranks: int, contender: Contender, folder: Path, args: argparse.Namespace, to: Connection
) -> None:
    """Send this rank's peak."""
    torch.set_num_threads(1)
    platform = current_platform()
    store = folder / f"peak_{contender.name}_{ranks}".replace(" ", "_")
    dist.init_process_group(platform.process_group_backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    platform.reset_peak_memory()
    step = build_strategy(contender, folder, args)
    for _ in range(STEPS):
        step()
    dist.barrier()
    to.send(platform.memory_stats()["peak"])
    dist.destroy_process_group()


def platform_is_cpu() -> bool:
    return current_platform().device_type == "cpu"


def measure(contender: Contender, ranks: int, args: argparse.Namespace) -> int:
    """The highest peak of all ranks."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, SHAPES[args.model], torch.float32 if platform_is_cpu() else DTYPES[args.dtype])
        links = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            context.Process(target=run_rank, args=(rank, ranks, contender, folder, args, theirs), daemon=True).start()
            theirs.close()
            links.append(ours)
        return max(link.recv() for link in links)


def predict(contender: Contender, ranks: int, args: argparse.Namespace) -> int:
    """The rehearsal's peak of the same step."""
    from roll.config.plan.plan import RolePlan, micro_batching
    from roll.config.reading.errors import Problems
    from roll.config.roles import ModelArguments, StrategyArguments, TrainingArguments, WorkerConfig
    from roll.config.strategies.registry import read_strategy_config
    from roll.rehearsal.roles import rehearse_role
    from roll.rehearsal.simulate import Task

    assert contender.strategy is not None
    config = model_config(SHAPES[args.model])
    config.architectures = ["Qwen2ForCausalLM"]
    section = WorkerConfig(
        name="actor_train",
        model_args=ModelArguments(
            "model", dtype=args.dtype, disable_gradient_checkpointing=not args.recompute, **contender.model
        ),
        training_args=TrainingArguments(learning_rate=1e-5, per_device_train_batch_size=args.micro_batch),
        strategy_args=StrategyArguments(contender.strategy, dict(contender.config)),
        use_sequence_packing=args.packed and not contender.strategy.startswith("megatron"),
        **contender.role,
    )
    options = read_strategy_config(section.strategy_args, "actor_train", Problems())
    replica = 1 if options is None else options.parallel_dims(section, 1).replica
    role = RolePlan(
        name="actor_train",
        key="actor_train",
        section=section,
        strategy_name=contender.strategy,
        device_mapping=tuple(range(ranks)),
        num_gpus_per_worker=1,
        world_size=ranks,
        dp_size=ranks // replica,
        colocated_with=(),
        model_path="model",
        sequence_length=args.prompt + args.response,
        forward_rule=micro_batching(section, trains=False),
    )
    task = Task(
        role=section,
        world_size=ranks,
        dp_size=ranks // replica,
        prompt=args.prompt,
        response=args.response,
        group_size=args.group_size,
        rows_per_update=args.groups * args.group_size // (ranks // replica),
        updates=1,
        on_cpu=platform_is_cpu(),
    )
    run = rehearse_role(role, task, config.to_dict())
    return sum(run.states.values()) + max(sum(work.working.values()) for work in run.works.values())


def rows(args: argparse.Namespace) -> list[Row]:
    found = []
    bases: dict[str, tuple[int, int]] = {}
    standard = [one for one in CONTENDERS if one.name in CHOSEN and not one.one_rank]
    for contender in LARGE if args.large else standard:
        if args.only not in contender.name or (contender.package and not find_spec(contender.package)):
            continue
        small = argparse.Namespace(**{**vars(args), "model": "136k"})
        family = str(contender.strategy).partition("_")[0].rstrip("2")
        if family not in bases:
            bases[family] = measure(contender, args.ranks, small), predict(contender, args.ranks, small)
        base, base_prediction = bases[family]
        for model in args.models:
            own = argparse.Namespace(**{**vars(args), "model": model})
            measured = measure(contender, args.ranks, own)
            added = predict(contender, args.ranks, own) - base_prediction
            found.append(Row(model, contender.name, args.ranks, base, measured, base + added))
            print(_cells(found[-1]), flush=True)
    return found


HEAD = "| model | strategy | ranks | program (MiB) | measured (MiB) | predicted (MiB) | error | of the model alone |"


def _cells(row: Row) -> str:
    cells = [row.model, row.strategy, str(row.ranks)]
    cells += [f"{number / MIB:,.0f}" for number in (row.base, row.measured, row.predicted)]
    return "| " + " | ".join([*cells, f"{row.error:+.1%}", f"{row.own_error:+.0%}"]) + " |"


SUMMARY_HEAD = "| strategy | steps of | measured (MiB) | error | of the model alone |"


def summary(found: Sequence[Row]) -> Iterator[str]:
    """Rows of the page's table: of each strategy the range over its models and ranks."""
    for strategy in dict.fromkeys(row.strategy for row in found):
        own = [row for row in found if row.strategy == strategy]
        steps = ", ".join(f"{row.model} on {row.ranks}" for row in own)
        sizes, errors = [row.measured / MIB for row in own], [row.error for row in own]
        of_model = [row.own_error for row in own]
        ranges = (f"{min(errors):+.1%} to {max(errors):+.1%}", f"{min(of_model):+.0%} to {max(of_model):+.0%}")
        yield f"| {strategy} | {steps} | {min(sizes):,.0f} to {max(sizes):,.0f} | {' | '.join(ranges)} |"


RECIPE_HEAD = "| recipe | weights | devices | peak (GiB) | in the phase | without offload (GiB) | step, at least (s) |"


def recipe_row(recipe: str, known: dict[Any, Any] | None = None) -> str:
    """A line of the table of recipes: on H100s of 80 GB, NVLink within nodes and InfiniBand of 400 Gb/s between."""
    os.environ["ROLL_PLATFORM"] = "cpu"
    from roll.config.loader import load_config
    from roll.rehearsal.catalog import DEFAULT_GPU, DEFAULT_NETWORK, hardware
    from roll.rehearsal.recipe import rehearse_recipe

    loaded: Any = load_config(None, recipe, None, (), check_files=False)
    machine = hardware(DEFAULT_GPU, DEFAULT_NETWORK, loaded.plan.num_devices_per_node)
    report = rehearse_recipe(loaded, machine, {}, known=known)
    use = max(report.devices, key=lambda device: device.peak.total)
    without = max(device.peak_without_offload.total for device in report.devices)
    weights = max(shape.total for shape in report.shapes.values() if shape is not None)
    cells = [f"`{recipe}`", f"{weights / 1e9:.2f}B", str(loaded.plan.num_devices)]
    cells += [f"{use.peak.total / 2**30:.1f}", use.peak.name, f"{without / 2**30:.1f}", f"{report.seconds:,.0f}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["10M", "100M"])
    parser.add_argument("--only", default="", help="strategies whose name contains this")
    parser.add_argument("--large", action="store_true", help="strategies for models that need more than one device has")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--packed", action="store_true", help="use_sequence_packing (not under Megatron)")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    parser.add_argument("--glibc", action="store_true", help="count what glibc keeps of freed memory as well")
    parser.add_argument("--recipes", action="store_true", help="rehearse the recipes for real models instead")
    parser.add_argument("--write", action="store_true", help="put the table into docs/rehearsal.md")
    counts = {"ranks": 2, "groups": 4, "group-size": 8, "prompt": 64, "response": 64, "micro-batch": 16}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.recipes:
        known: dict[Any, Any] = {}
        lines = [RECIPE_HEAD, "|" + "---|" * (RECIPE_HEAD.count("|") - 1)]
        for recipe in RECIPES:
            lines.append(recipe_row(recipe, known))
            print(lines[-1], flush=True)
        if args.write:
            write_between("recipes", "\n".join(lines))
        return
    os.environ |= {} if args.glibc else RETURNING
    print(HEAD + "\n|" + "---|" * (HEAD.count("|") - 1), flush=True)
    found = rows(args)
    if args.write:
        table = [SUMMARY_HEAD, "|" + "---|" * (SUMMARY_HEAD.count("|") - 1), *summary(found)]
        write_between("measured", "\n".join(table))


def write_between(mark: str, table: str) -> None:
    """Replace what stands between the page's two comments of this name."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {mark} -->\n", f"\n<!-- end of {mark} -->"
    assert begin in text and end in text, mark
    PAGE.write_text(re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: begin + table + end, text, flags=re.S))


if __name__ == "__main__":
    main()
