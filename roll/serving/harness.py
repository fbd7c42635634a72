"""Programs that evaluate a served model: lm-eval and Inspect, each in a process of its own.

They call the engines over HTTP, in OpenAI's form, with the hubs switched off, so tasks and their data come from local
files.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from roll.config.installation import install_command
from roll.config.reading.errors import ConfigError, Problem
from roll.datasets.types import DataError

if TYPE_CHECKING:
    from roll.serving.server import HttpFront

logger = logging.getLogger(__name__)

KEY = "unused"  # their clients need some API key; the server listens on the loopback address only and needs none
SHOWN_LINES = 15
INSTALL = install_command("harness")


@dataclass(frozen=True)
class HarnessConfig:
    """``validation.harness``: tasks of an evaluation program on the policy, besides the validation prompts."""

    name: Literal["lm_eval", "inspect"] = "lm_eval"
    """The program (``pip install -e '.[harness]'``)."""
    tasks: list[str] = field(default_factory=list)
    """lm-eval: names of tasks; Inspect: task files."""
    arguments: list[str] = field(default_factory=list)
    """Further words of the program's own command line, such as ``--limit=50`` or lm-eval's
    ``--include_path=tasks``."""
    chat: bool = False
    """lm-eval: ask by chat completions, which knows no log-likelihoods."""


def lm_eval_command(options: HarnessConfig, base_url: str, model: str, tokenizer: str, output: Path) -> list[str]:
    """Command that runs ``lm_eval`` on the server: completions with the model's own tokenizer, or chats."""
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
    return [*words, *options.arguments]


def inspect_command(options: HarnessConfig, base_url: str, model: str, tokenizer: str, output: Path) -> list[str]:
    """Command that runs ``inspect eval`` on the server: a provider named ``roll``, its address in the environment."""
    # Inspect takes paths relative to the working directory only; the name of a task in the file follows an @.
    tasks = [os.path.relpath(name) if Path(name.partition("@")[0]).is_file() else name for name in options.tasks]
    words = [sys.executable, "-m", "inspect_ai", "eval", *tasks, "--model", f"openai-api/roll/{model}"]
    return [*words, "--log-format", "json", "--log-dir", str(output), "--display", "plain", *options.arguments]


def environment(base_url: str) -> dict[str, str]:
    """Environment of the program: the address of the server, and no access to hubs."""
    own = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    own |= {"ROLL_BASE_URL": base_url, "ROLL_API_KEY": KEY, "OPENAI_API_KEY": KEY, "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **own}


def lm_eval_metrics(output: Path) -> dict[str, float]:
    """``<task>/<metric>`` of the newest results; standard errors as ``<task>/<metric>_stderr``."""
    files = sorted(output.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise DataError(f"lm_eval has left no results in {output}")
    found: dict[str, float] = {}
    for task, metrics in json.loads(files[-1].read_text(encoding="utf-8"))["results"].items():
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            if isinstance(value, int | float) and not isinstance(value, bool) and "sample" not in metric:
                suffix = f"/{filtered}" if filtered not in ("", "none") else ""
                found[f"{task}/{metric}{suffix}"] = float(value)
    return found


def inspect_metrics(output: Path) -> dict[str, float]:
    """``<task>/<scorer>/<metric>`` of every log; ``DataError`` for a task that did not succeed."""
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


@dataclass(frozen=True)
class Harness:
    """An evaluation program."""

    name: str
    module: str  # the Python package that it is
    # Its command line, for the options, the server's address, the model's name, a tokenizer and an output folder.
    command: Callable[[HarnessConfig, str, str, str, Path], list[str]]
    metrics: Callable[[Path], dict[str, float]]  # reads what it has left in the output folder

    def require(self, key: str, source: str = "") -> None:
        """Raise ``ConfigError`` where it is not installed; ``key`` names it, in ``source`` or on the command line."""
        if find_spec(self.module) is None:
            rule = f"needs a package that is not installed: {INSTALL}"
            raise ConfigError([Problem(key, self.name, rule, source=source)])


HARNESSES = {
    "lm_eval": Harness("lm_eval", "lm_eval", lm_eval_command, lm_eval_metrics),
    "inspect": Harness("inspect", "inspect_ai", inspect_command, inspect_metrics),
}


def run_program(options: HarnessConfig, front: HttpFront, tokenizer: str, output: Path) -> dict[str, float]:
    """The metrics of the model that ``front`` serves under the harness's name; ``DataError`` with the end of what the
    program said where it has failed. ``tokenizer``: folder or hub name; ``output``: a folder for the program's files
    and what it says, ``program.log``."""
    output.mkdir(parents=True, exist_ok=True)
    harness = HARNESSES[options.name]
    command = harness.command(options, front.base_url, options.name, tokenizer, output)
    log = output / "program.log"
    logger.info("%s: %s", options.name, " ".join(command))
    with open(log, "w", encoding="utf-8") as file:
        status = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment(front.base_url), check=False
        ).returncode
    front.check()
    if status:
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:])
        raise DataError(f"{options.name} has ended with status {status} ({log}):\n{end}")
    return harness.metrics(output)
