"""``roll bisect-logprobs CONFIG [key=value ...]``: in which operation a configuration's engine and trainer part."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from roll.config.loader import LoadedConfig, load_config
from roll.config.reading.compose import add_config_arguments
from roll.config.reading.errors import ConfigError, Problem
from roll.pipelines.strict import ENGINE, TRAINER, Pair, by_layer, one_rank, parting_in_words
from roll.preflight import prepared


def main(words: Sequence[str]) -> int:
    """The exit status: 0 if all log-probs are equal to the last bit, 1 if some are not. Raises ``ConfigError``: a
    mistake in the configuration, or a pair that one process cannot compute."""
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
        return show(pair, prompts, arguments.samples, min(arguments.tokens, plan.max_new_tokens))


def prompts_of(loaded: LoadedConfig[Any], count: int) -> list[list[int]]:
    """The first prompts of the training data. Raises ``ConfigError``: a pipeline that reads no prompts."""
    from roll.datasets import PromptDataset
    from roll.pipelines.files import load_tokenizer

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


def show(pair: Pair, prompts: Sequence[list[int]], count: int, max_new_tokens: int) -> int:
    """Print what differs; the exit status."""
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
