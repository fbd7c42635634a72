"""Tasks of lm-eval and Inspect on models of ours: their programs ask the engines over HTTP, in OpenAI's form.

The programs run in processes of their own with the network's hubs switched off, so tasks and their data come from local
files. Engines are started once; between two models of one architecture weights are exchanged.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.config.loader import LoadedConfig
from roll.config.reading.errors import ConfigError, Problem
from roll.datasets.types import DataError
from roll.distributed import DriverLoop
from roll.pipelines.evaluate.config import EvaluateConfig, EvaluatedModel, EvaluatePlan, Pass
from roll.pipelines.evaluate.models import EXIT_BELOW, Engines, ModelRun
from roll.pipelines.evaluate.samples import RESULTS
from roll.pipelines.evaluate.statistics import missed
from roll.pipelines.files import load_tokenizer
from roll.pipelines.residency import Residency, moves_states
from roll.serving.server import FrontOptions, HttpFront

logger = logging.getLogger(__name__)

KEY = "unused"
"""Their clients want some API key; the server listens on the loopback address only and asks for none."""
SHOWN_LINES = 15


@dataclass(frozen=True)
class Harness:
    """An evaluation program."""

    module: str
    """Of its package."""
    install: str

    def require(self) -> None:
        """
        Raises:
            ConfigError: it is not installed.
        """
        if find_spec(self.module) is None:
            name = next(name for name, one in HARNESSES.items() if one is self)
            raise ConfigError([Problem("--harness", name, f"needs a package that is not installed: {self.install}")])


HARNESSES = {
    "lm_eval": Harness("lm_eval", "pip install 'roll-rl[harness]'"),
    "inspect": Harness("inspect_ai", "pip install 'roll-rl[harness]'"),
}


@dataclass(frozen=True)
class HarnessOptions:
    """The command line of ``roll evaluate --harness``."""

    name: str
    """Of :data:`HARNESSES`."""
    tasks: tuple[str, ...]
    """lm-eval: names, with ``include``; Inspect: task files."""
    include: str | None = None
    """lm-eval: a folder of task files."""
    arguments: tuple[str, ...] = ()
    """Further words of the program's own command line."""
    chat: bool = False
    """lm-eval: ask by chat completions, which knows no log-likelihoods."""


def lm_eval_command(options: HarnessOptions, base_url: str, model: str, tokenizer: str, output: Path) -> list[str]:
    """``lm_eval`` on the server: completions with the model's own tokenizer, or chats."""
    kind, path = (
        ("local-chat-completions", "chat/completions") if options.chat else ("local-completions", "completions")
    )
    arguments = {
        "base_url": f"{base_url}/{path}",
        "model": model,
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": str(not options.chat),
        "num_concurrent": "16",
        "max_retries": "1",
    }
    words = [sys.executable, "-m", "lm_eval", "--model", kind, "--tasks", ",".join(options.tasks)]
    words += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
    words += ["--output_path", str(output), "--log_samples", "--batch_size", "1"]
    words += ["--apply_chat_template"] if options.chat else []
    return words + (["--include_path", options.include] if options.include else []) + list(options.arguments)


def inspect_command(options: HarnessOptions, base_url: str, model: str, tokenizer: str, output: Path) -> list[str]:
    """``inspect eval`` on the server, as a provider named ``roll``; its address comes with the environment."""
    # It takes patterns that start from the working directory only; behind an @ stands the name of a task in the file.
    tasks = [os.path.relpath(name) if Path(name.partition("@")[0]).is_file() else name for name in options.tasks]
    words = [sys.executable, "-m", "inspect_ai", "eval", *tasks, "--model", f"openai-api/roll/{model}"]
    return [*words, "--log-format", "json", "--log-dir", str(output), "--display", "plain", *options.arguments]


COMMANDS = {"lm_eval": lm_eval_command, "inspect": inspect_command}


def environment(base_url: str) -> dict[str, str]:
    """Of the program: the address of the server, and no hub."""
    own = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    own |= {"ROLL_BASE_URL": base_url, "ROLL_API_KEY": KEY, "OPENAI_API_KEY": KEY, "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **own}


def lm_eval_metrics(output: Path) -> dict[str, float]:
    """``<task>/<metric>`` of the newest results; standard errors as ``<task>/<metric>_stderr``."""
    files = sorted(output.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise DataError(f"lm_eval has left no results in {output}")
    results = json.loads(files[-1].read_text(encoding="utf-8"))["results"]
    return dict(_flat(results))


def _flat(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    for task, metrics in results.items():
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            if isinstance(value, int | float) and not isinstance(value, bool) and "sample" not in metric:
                yield f"{task}/{metric}" + (f"/{filtered}" if filtered not in ("", "none") else ""), float(value)


def inspect_metrics(output: Path) -> dict[str, float]:
    """``<task>/<scorer>/<metric>`` of every log.

    Raises:
        DataError: a task that did not succeed.
    """
    metrics: dict[str, float] = {}
    for file in sorted(output.glob("*.json"), key=lambda file: file.stat().st_mtime):
        log = json.loads(file.read_text(encoding="utf-8"))
        if log.get("status") != "success":
            error = (log.get("error") or {}).get("message", log.get("status"))
            raise DataError(f"inspect: {log['eval']['task']} has not succeeded ({file}): {error}")
        for score in log["results"]["scores"]:
            for name, metric in score["metrics"].items():
                metrics[f"{log['eval']['task']}/{score['name']}/{name}"] = float(metric["value"])
    if not metrics:
        raise DataError(f"inspect has left no results in {output}")
    return metrics


READERS = {"lm_eval": lm_eval_metrics, "inspect": inspect_metrics}


class HarnessRun(ModelRun[EvaluateConfig, EvaluatePlan]):
    """Every model works on the tasks of a harness."""

    def __init__(self, loaded: LoadedConfig[EvaluateConfig], options: HarnessOptions) -> None:
        assert isinstance(loaded.plan, EvaluatePlan)
        super().__init__(loaded, loaded.plan, loaded.config.evaluate)
        self._options = options
        self.metrics: dict[str, dict[str, float]] = {}

    def settings(self) -> dict[str, Any]:
        return {}

    def read(self, tokenizer: Any, role: Any) -> None:
        """The harness reads its own data."""

    def num_asked(self, way: Pass) -> int:
        return 0

    async def answer(self, model: EvaluatedModel, way: Pass, numbers: Sequence[int], client: Any) -> None:
        """The harness asks over HTTP."""

    def run(self) -> int:
        with self.context.running() as resources:
            self.driver = DriverLoop()
            self.context.at_end(self.close)
            self.residency = Residency(self.plan, moves_states(self.config.is_offload_states))
            self.resources = resources
            for group in self.plan.groups():
                self.evaluate_group(group)
        return EXIT_BELOW if self.finish() else 0

    def evaluate_group(self, models: Sequence[EvaluatedModel]) -> None:
        base = self.role_of(models[0])
        engines: Engines | None = None
        front = HttpFront(FrontOptions(self._options.name, max_running_requests=self.config.max_running_requests))
        self.context.at_end(front.close)
        is_open = False
        for model in models:
            with self.context.interruptible():
                engines = self.load(model, base, engines, is_last=False)
                if not is_open:
                    tokenizer = load_tokenizer(base.model_path, base.section.model_args.trust_remote_code)
                    front.open(engines.cluster, tokenizer)
                    is_open = True
                self.metrics[model.name] = self.work(model, front)
            self.context.record_validation(
                {f"{self._options.name}/{name}": value for name, value in self.metrics[model.name].items()},
                self.plan.models.index(model),
            )
        front.close()
        if engines is not None:
            engines.close(self.residency)

    def work(self, model: EvaluatedModel, front: HttpFront) -> dict[str, float]:
        """The metrics of one model.

        Raises:
            DataError: the program has failed; with the end of what it said.
        """
        output = self.plan.output_dir / self._options.name / model.name
        output.mkdir(parents=True, exist_ok=True)
        make = COMMANDS[self._options.name]
        command = make(self._options, front.base_url, self._options.name, model.base, output)
        log = output / "program.log"
        logger.info("%s: %s", model.description, " ".join(command))
        with open(log, "w", encoding="utf-8") as file:
            status = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment(front.base_url), check=False
            ).returncode
        front.check()
        if status:
            end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:])
            raise DataError(f"{self._options.name} has ended with status {status} ({log}):\n{end}")
        return READERS[self._options.name](output)

    def finish(self) -> list[str]:
        """Write ``results.json`` and print the table; a sentence for every threshold that was missed."""
        failed = list(missed(self.keys.thresholds, self.metrics))
        file = self.plan.output_dir / self._options.name / RESULTS
        content = {"harness": self._options.name, "metrics": self.metrics, "below_threshold": failed}
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("metric", *self.metrics):
            table.add_column(heading, no_wrap=True)
        for name in dict.fromkeys(name for found in self.metrics.values() for name in found):
            if not name.endswith("_stderr"):
                cells = [f"{found[name]:.4f}" if name in found else "" for found in self.metrics.values()]
                table.add_row(*map(Text, (name, *cells)))
        console = Console(emoji=False)
        console.print(table)
        console.print(Text(f"results   {file}"), soft_wrap=True)
        for sentence in failed:
            console.print(Text(f"below its threshold: {sentence}", style="red"), soft_wrap=True)
        return failed
