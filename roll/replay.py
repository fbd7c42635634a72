"""Commands that compare numbers which ought to be the same.

``roll replay DUMP FILE [key=value ...]`` repeats the step of a recorded batch and compares its metrics. Under another
strategy or layout than the one that recorded it this finds a difference between the two; under the same one, whether a
step is reproducible at all, or what a change of the code does to it. ``roll bisect-logprobs CONFIG [key=value ...]``
finds in which operation a configuration's engine and trainer part.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from roll.config.loader import LoadedConfig, load_config
from roll.config.reading.compose import add_config_arguments
from roll.config.reading.errors import ConfigError, Problem
from roll.preflight import prepared

if TYPE_CHECKING:
    from roll.pipelines.batches import RecordedBatch
    from roll.pipelines.strict import Pair

# Relative differences within which strategies agree, by what they compute in (docs/backends.md, *Same numbers*).
BOUNDS = {"fp32": 1e-5, "bf16": 1.5e-2, "fp16": 1.5e-2}
# Absolute differences that count as none: a mean of numbers that cancel has no relative precision.
SMALLEST = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}
# Parts of names of metrics that say how the rows lie on the ranks.
LAYOUT = ("tokens_per_micro_batch", "padding_ratio", "global_seqlen/", "memory/")


@dataclass(frozen=True)
class Difference:
    """A metric that was computed again."""

    name: str
    recorded: float
    replayed: float

    @property
    def relative(self) -> float:
        if self.recorded == self.replayed or (math.isnan(self.recorded) and math.isnan(self.replayed)):
            return 0.0
        difference = abs(self.replayed - self.recorded)
        return difference / max(abs(self.recorded), abs(self.replayed)) if math.isfinite(difference) else math.inf


def compare(recorded: Mapping[str, float], replayed: Mapping[str, float]) -> list[Difference]:
    """Every metric that both have, except those of the layout and of times, the largest difference first."""
    names = [name for name in replayed if name in recorded and not name.startswith("time/")]
    found = [Difference(name, recorded[name], replayed[name]) for name in names if not any(p in name for p in LAYOUT)]
    return sorted(found, key=lambda one: (-one.relative, one.name))


def replay(words: Sequence[str]) -> int:
    """The exit status: 0 if all metrics agree, 1 if some do not. Raises ``ConfigError``: a mistake in the
    configuration, or one that the batch was not recorded for."""
    parser = argparse.ArgumentParser(prog="roll replay", description="take the step of a recorded batch again")
    parser.add_argument("dump", type=Path, help="file of the batch: batches/step-000012.safetensors")
    add_config_arguments(parser, "changes, of strategy and layout say")
    parser.add_argument("--bound", type=float, help="relative difference allowed (default: by the dtype)")
    parser.add_argument("--output", type=Path, help="folder of the logs (default: replay next to the dump)")
    arguments = parser.parse_intermixed_args(list(words))
    output = arguments.output or arguments.dump.parent / "replay"
    # A replay writes beside the recorded run, never into it, and neither saves nor starts again.
    own = [f"output_dir={output}", f"logging_dir={output / 'logs'}", "track_with=[jsonl]"]
    own += ["save_steps=0", "eval_steps=0", "max_restarts=0", "on_nonfinite=skip", "dump_batches=0"]
    words = [*own, *arguments.overrides]
    loaded: LoadedConfig[Any] = prepared(partial(load_config, None, arguments.config, None, words), lambda text: None)
    recorded = _recorded(arguments.dump, loaded)
    learner = next(iter(loaded.plan.training))
    dtype = loaded.plan.roles[learner].section.model_args.dtype
    bound = BOUNDS[dtype] if arguments.bound is None else arguments.bound
    from roll.distributed.failures import RemoteError

    try:
        steps, metrics = loaded.pipeline.replay(loaded, recorded)
    except RemoteError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    if steps != recorded.step:
        rule = (
            f"the batch is of step {recorded.step}, and these are the models after {steps} steps: numbers of different "
            f"models; name the checkpoint after {recorded.step} steps"
        )
        raise ConfigError([Problem("resume_from_checkpoint", loaded.config.resume_from_checkpoint, rule)])
    return show(compare(recorded.metrics, metrics), bound, SMALLEST[dtype])


def _recorded(dump: Path, loaded: LoadedConfig[Any]) -> RecordedBatch:
    """The recorded batch, which must belong to the configuration. Raises ``ConfigError``: it does not."""
    from roll.datasets import DataError
    from roll.pipelines.batches import RecordedBatch

    try:
        recorded = RecordedBatch.load(dump)
    except DataError as error:
        raise ConfigError([Problem("DUMP", str(dump), str(error))]) from error
    if recorded.pipeline != loaded.pipeline.name:
        rule = f"the batch is one of the pipeline {recorded.pipeline}"
        raise ConfigError([Problem("pipeline", loaded.pipeline.name, rule)])
    if recorded.step and not loaded.config.resume_from_checkpoint:
        rule = (
            f"the batch is of step {recorded.step}, and its numbers are those of the models after as many steps: "
            f"name that checkpoint, resume_from_checkpoint=.../checkpoint-{recorded.step}"
        )
        raise ConfigError([Problem("resume_from_checkpoint", False, rule)])
    return recorded


def show(differences: Sequence[Difference], bound: float, smallest: float) -> int:
    """Print the metrics that differ; the exit status."""
    console = Console(emoji=False)
    # A difference that is NaN counts: it is not negligible.
    counted = (one for one in differences if not abs(one.replayed - one.recorded) <= smallest)
    beyond = [one for one in counted if one.relative > bound]
    equal = sum(one.relative == 0 for one in differences)
    table = Table("metric", "recorded", "replayed", "relative difference", title=None)
    for one in beyond or differences[:5]:
        table.add_row(one.name, f"{one.recorded:.8g}", f"{one.replayed:.8g}", f"{one.relative:.1e}")
    console.print(table)
    verdict = f"{len(differences)} metrics: {equal} equal to the last bit, {len(beyond)} beyond the bound of {bound:g}"
    console.print(verdict, markup=False, highlight=False, soft_wrap=True)
    return int(bool(beyond) or not differences)


def bisect(words: Sequence[str]) -> int:
    """The exit status: 0 if all log-probs are equal to the last bit, 1 if some are not. Raises ``ConfigError``: a
    mistake in the configuration, or a pair that one process cannot compute."""
    from roll.pipelines.strict import Pair, one_rank

    description = "say where the log-probs of engine and trainer part"
    parser = argparse.ArgumentParser(prog="roll bisect-logprobs", description=description)
    add_config_arguments(parser, "changes of the configuration")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of the data (default: 4)")
    parser.add_argument("--samples", type=int, default=4, help="responses to each (default: 4)")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of a response (default: 64)")
    arguments = parser.parse_intermixed_args(list(words))
    load = partial(load_config, None, arguments.config, None, arguments.overrides)
    loaded: LoadedConfig[Any] = prepared(load, lambda text: None)
    prompts = prompts_of(loaded, arguments.prompts)
    with one_rank():
        pair = Pair(loaded)
        plan: Any = loaded.plan
        return show_parting(pair, prompts, arguments.samples, min(arguments.tokens, plan.max_new_tokens))


def prompts_of(loaded: LoadedConfig[Any], count: int) -> list[list[int]]:
    """The first prompts of the training data. Raises ``ConfigError``: a pipeline that reads no prompts."""
    from roll.datasets import PromptDataset
    from roll.pipelines.files import load_tokenizer
    from roll.pipelines.strict import ENGINE, TRAINER

    sets = loaded.pipeline.readable_sets(loaded)
    args = loaded.plan.roles[TRAINER].section.model_args if TRAINER in loaded.plan.roles else None
    dataset = None
    if args is not None and ENGINE in loaded.plan.roles and "train" in sets:
        dataset = sets["train"].read(load_tokenizer(args.model_name_or_path, args.trust_remote_code))
    if not isinstance(dataset, PromptDataset):
        rule = "needs a pipeline that samples answers to prompts of a file (rlvr)"
        raise ConfigError([Problem("pipeline", loaded.pipeline.name, rule, has_value=True)])
    rows = [row for rows in dataset.by_domain().values() for row in rows[:count]]
    return [list(row.token_ids) for row in rows[:count]]


def show_parting(pair: Pair, prompts: Sequence[list[int]], count: int, max_new_tokens: int) -> int:
    """Print what differs; the exit status."""
    from roll.pipelines.strict import by_layer, parting_in_words

    console = Console(emoji=False, markup=False, highlight=False, soft_wrap=True)
    samples = pair.samples(prompts, count, max_new_tokens)
    pairs = [pair for one in samples for pair in zip(one.engine, one.trainer, strict=True)]
    # Compared exactly: both sides are meant to compute the same numbers, to the last bit.
    off = [abs(engine - trainer) for engine, trainer in pairs]
    unequal = sum(one != 0.0 for one in off)
    console.print(
        f"{len(pairs)} tokens of {len(samples)} samples: {unequal} log-probs differ, by {max(off, default=0.0):.3g} at "
        f"most and {sum(off) / max(1, len(off)):.3g} in the mean"
    )
    chosen = next((one for one in samples if one.first_difference is not None), None)
    if chosen is None:
        return 0
    index = chosen.first_difference or 0
    console.print(
        f"first: token {index} of a response of {len(chosen.response)} tokens to a prompt of {len(chosen.prompt)}: "
        f"{chosen.engine[index]!r} in the engine, {chosen.trainer[index]!r} in the trainer"
    )
    if not pair.has_operations:
        console.print("operations are compared between hf_infer and fsdp2, fsdp or deepspeed only")
        return 1
    trainer, engine = pair.traces(samples, chosen, prompts, count, max_new_tokens)
    console.print(f"they part in {parting_in_words(trainer, engine)}")
    table = Table("", "compared", "different", "largest difference")
    for name, (compared, different, largest) in by_layer(trainer, engine).items():
        table.add_row(name, str(compared), str(different), f"{largest:.3g}")
    console.print(table)
    return 1
