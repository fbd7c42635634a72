"""``roll sweep CONFIG key=a,b,c ...``: a run for every combination of values, by Ray Tune.

A trial is ``roll run`` in a process and a folder of its own. Tune starts as many at a time as there are devices for
them, reads the metric from their ``metrics.jsonl``, and with ``--scheduler asha`` ends the worse ones early.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from roll.config.loader import LoadedConfig, load_config
from roll.config.reading.compose import add_config_arguments, parse_override
from roll.config.reading.errors import ConfigError, Problem
from roll.platforms import current_platform
from roll.preflight import check_parts
from roll.rewards.sandbox import kernel
from roll.tracking.records import METRICS_NAME, read_metrics

if TYPE_CHECKING:
    from ray.tune import ResultGrid

POLL_SECONDS = 1.0
LOG_NAME = "output.log"
_TAIL = 2000  # characters of a failed trial's output that are shown


@dataclass(frozen=True)
class Sweep:
    """Settings that all trials share."""

    config: str
    fixed: tuple[str, ...]  # overrides with one value
    folder: str
    metric: str

    def words(self, values: Mapping[str, str]) -> list[str]:
        """The overrides of a trial. ``values``: by key, in hydra's spelling."""
        folder = self.trial_folder(values)
        chosen = [f"{key}={value}" for key, value in values.items()]
        return [*self.fixed, *chosen, f"output_dir={folder}", f"logging_dir={folder / 'logs'}"]

    def trial_folder(self, values: Mapping[str, str]) -> Path:
        parts = (f"{key.rpartition('.')[2]}={value}" for key, value in values.items())
        return Path(self.folder) / re.sub(r"[^\w.=,+-]", "_", ",".join(parts))


def main(words: Sequence[str]) -> int:
    """The exit status: 0, or 1 where no trial has the metric. The last line of standard output is JSON. Raises
    ``ConfigError``: a mistake in the configuration of a trial, or no key with several values."""
    arguments = build_parser().parse_intermixed_args(list(words))
    space, fixed = split(arguments.overrides)
    loaded: LoadedConfig[Any] = load_config(
        None, arguments.config, None, [*fixed, *(f"{key}={one[0]}" for key, one in space.items())]
    )
    if arguments.metric is None and not loaded.pipeline.headlines:
        raise ConfigError([Problem("--metric", None, "is needed for this pipeline", "val/all/accuracy")])
    metric = arguments.metric or loaded.pipeline.headlines[0].key
    folder = arguments.output or Path(f"{loaded.plan.output_dir}-sweep")
    sweep = Sweep(arguments.config, tuple(fixed), str(folder.resolve()), metric)
    # Every combination is checked before the first is run: the last may have a mistake that only it has.
    for chosen in itertools.product(*space.values()):
        check_parts(load_config(None, sweep.config, None, sweep.words(dict(zip(space, chosen, strict=True)))))
    mode = arguments.mode or ("min" if metric.endswith("loss") else "max")
    devices = loaded.plan.num_devices_per_node if current_platform().device_type != "cpu" else 0
    results = run_trials(sweep, space, mode, devices, arguments.parallel, arguments.scheduler)
    return show(results, sweep, mode)


def split(overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Keys with several values, and the other overrides as they are. Raises ``ConfigError``: no key has several
    values."""
    space: dict[str, list[str]] = {}
    fixed = []
    for word in overrides:
        override = parse_override(word)
        if override is not None and override.is_sweep_override():
            space[override.key_or_group] = list(map(str, override.sweep_string_iterator()))
        else:
            fixed.append(word)
    if not space:
        example = "actor_train.training_args.learning_rate=1e-6,3e-6"
        raise ConfigError([Problem("key=a,b,c", None, "no key has several values", example)])
    return space, fixed


def run_trials(
    sweep: Sweep, space: Mapping[str, Sequence[str]], mode: str, devices: int, parallel: int, scheduler: str
) -> ResultGrid:
    """Tune's ``ResultGrid``. ``devices``: accelerators of a trial; 0: ``parallel`` trials at a time share the CPU."""
    import ray
    from ray import tune

    at_once = parallel if not devices else max(1, current_platform().device_count() // devices)
    ray.init("local", num_cpus=at_once, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        asha = tune.schedulers.ASHAScheduler() if scheduler == "asha" else None
        trainable = tune.with_resources(partial(trial, sweep), {"cpu": 1, "gpu": devices})
        return tune.Tuner(
            trainable,
            param_space={key: tune.grid_search(list(values)) for key, values in space.items()},
            tune_config=tune.TuneConfig(
                metric=sweep.metric, mode=mode, scheduler=asha, trial_dirname_creator=lambda one: str(one.trial_id)
            ),
            run_config=tune.RunConfig(name="tune", storage_path=sweep.folder, verbose=0),
        ).fit()
    finally:
        ray.shutdown()


def trial(sweep: Sweep, values: dict[str, str]) -> None:
    """Run a trial and report its metric to Tune, step by step. Raises ``RuntimeError``: the run failed."""
    from ray import tune

    folder = sweep.trial_folder(values)
    folder.mkdir(parents=True, exist_ok=True)
    # A run has a Ray of its own: nothing of Tune's may reach it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "roll.cli", "run", sweep.config, *sweep.words(values)]
    # Tune changes the working directory; relative paths of the file start from that of the command.
    begun = os.environ.get("TUNE_ORIG_WORKING_DIR") or None
    # The kernel ends the process, as SIGTERM does, when Tune's worker is gone.
    end_with_parent = partial(kernel.prctl, kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    with open(folder / LOG_NAME, "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, cwd=begun, env=environment, stdout=log, stderr=subprocess.STDOUT, preexec_fn=end_with_parent
        )
        seen = -1
        try:
            while process.poll() is None:
                try:
                    process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    seen = report(tune.report, sweep, folder, seen)
        finally:
            # Tune ends a trial by an exception in this thread.
            process.terminate()
            process.wait()
    if process.returncode:
        text = (folder / LOG_NAME).read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"exit status {process.returncode}: {text[-_TAIL:]}")
    report(tune.report, sweep, folder, seen)


def report(to: Callable[[dict[str, Any]], object], sweep: Sweep, folder: Path, seen: int) -> int:
    """Report the steps after ``seen`` that have the metric; returns the last of them."""
    path = folder / "logs" / METRICS_NAME
    for row in read_metrics(path) if path.is_file() else ():
        if row["step"] > seen and sweep.metric in row:
            seen = row["step"]
            to({sweep.metric: row[sweep.metric], "step": seen})
    return seen


def show(results: Any, sweep: Sweep, mode: str) -> int:
    """Print a table of the trials, the best one first, and a line of JSON with the best."""
    whole = [one for one in results if not one.error and sweep.metric in (one.metrics or {})]
    whole.sort(key=lambda one: one.metrics[sweep.metric], reverse=mode == "max")
    failed = [one for one in results if one not in whole]
    table = Table("trial", sweep.metric)
    for one in (*whole, *failed):
        says = f"{one.metrics[sweep.metric]:.6g}" if one in whole else "failed" if one.error else "no such metric"
        table.add_row(" ".join(f"{key}={value}" for key, value in one.config.items()), says)
    Console(stderr=True, emoji=False).print(table)
    best = None
    if whole:
        value, folder = whole[0].metrics[sweep.metric], str(sweep.trial_folder(whole[0].config))
        best = {"overrides": whole[0].config, "metric": sweep.metric, "value": value, "output_dir": folder}
    sys.stdout.write(json.dumps({"best": best, "trials": len(results), "failed": len(failed)}) + "\n")
    return int(best is None)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="roll sweep", description=__doc__.split("\n\n")[0])
    add_config_arguments(parser, "changes; a key with several values: key=a,b")
    parser.add_argument("--metric", help="decides by its last value (default: the first of the progress line)")
    parser.add_argument("--mode", choices=("max", "min"), help="default: min for a loss, else max")
    parser.add_argument("--parallel", type=int, default=1, help="trials at a time without an accelerator (default: 1)")
    parser.add_argument("--scheduler", choices=("none", "asha"), default="none", help="asha: end worse trials early")
    parser.add_argument("--output", type=Path, help="folder of the trials (default: output_dir with -sweep)")
    return parser
