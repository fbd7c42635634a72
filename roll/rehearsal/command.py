"""``roll rehearse FILE [key=value ...]``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from roll.config.loader import LoadedConfig, load_config
from roll.config.reading.compose import add_config_arguments
from roll.distributed.nodes import WORKER_DEFAULTS
from roll.rehearsal.catalog import BETWEEN, DEFAULT_GPU, DEFAULT_NETWORK, GPUS, HOST, WITHIN, hardware

EXIT_DOES_NOT_FIT = 1


def main(words: Sequence[str]) -> int:
    """0: it fits; 1: it does not; mistakes raise ``ConfigError``."""
    arguments = build_parser().parse_intermixed_args(words)
    # "ROLE=FILE", or "FILE" for all roles.
    parts = [text.partition("=") if "=" in text else ("", "=", text) for text in arguments.model_config]
    given = {role: Path(file) for role, _, file in parts}
    loaded: LoadedConfig[Any] = load_config(None, arguments.config, None, arguments.overrides, check_files=False)
    # No accelerator is needed, or touched. On this host's processor, kernels run as workers run them.
    os.environ["ROLL_PLATFORM"] = "cpu"
    os.environ |= {name: value for name, value in WORKER_DEFAULTS.items() if name not in os.environ}
    devices = loaded.plan.num_devices_per_node
    if arguments.gpu == HOST:
        from roll.rehearsal.host import this_host

        machine = this_host(devices)
    else:
        machine = hardware(arguments.gpu, arguments.network, devices)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from roll.rehearsal.formulas import size
    from roll.rehearsal.recipe import rehearse_recipe
    from roll.rehearsal.report import render, to_json
    from roll.rehearsal.suggestions import suggest

    say = partial(Console(stderr=True, emoji=False).print, markup=False, highlight=False, soft_wrap=True)
    known: dict[Any, Any] = {}
    report = rehearse_recipe(loaded, machine, given, say, known)
    found = [] if report.fits or arguments.no_suggestions else suggest(loaded, report, given, say, known)
    if arguments.json:
        content = to_json(report) | {"suggestions": [asdict(one) for one in found]}
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    else:
        console = Console(emoji=False, width=max(100, Console().width))
        render(report, console)
        for one in found:
            share = f"{size(one.peak)} of {size(machine.gpu.memory)}"
            text = f"fits with {' '.join(one.overrides)}: at most {share}, a step of at least {one.seconds:,.1f} s"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        if not report.fits and not found and not arguments.no_suggestions:
            console.print("no single change that was rehearsed makes it fit", markup=False, highlight=False)
    return 0 if report.fits else EXIT_DOES_NOT_FIT


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll rehearse",
        description="Memory, FLOPs, traffic and a lower bound of the time of a recipe's step at its full size, without "
        "weights and without devices. Exit status 1: it does not fit.",
    )
    add_config_arguments(parser, "changes, as of roll run")
    parser.add_argument(
        "--gpu", default=DEFAULT_GPU, help=f"{', '.join(GPUS)}, or {HOST}: this host's processor (default: %(default)s)"
    )
    parser.add_argument(
        "--network",
        default=DEFAULT_NETWORK,
        help=f"one of {', '.join(WITHIN)}, a plus sign and one of {', '.join(BETWEEN)} (default: %(default)s)",
    )
    parser.add_argument(
        "--model-config",
        action="append",
        default=[],
        metavar="[ROLE=]FILE",
        help="the config.json of a model that is neither on this machine nor a known size; of all roles, or of one",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, FLOPs and seconds")
    parser.add_argument("--no-suggestions", action="store_true", help="do not look for what would fit")
    return parser
