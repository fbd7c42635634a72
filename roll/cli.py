"""The command line: ``roll run | check | plan | serve | inspect-data | explain | schema | completion``, and
the commands of other modules (:data:`TOOLS`).

Heavy packages are imported by the command that needs them, so that ``roll check`` answers at once.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from roll import __version__, api, preflight
from roll.config.loader import LoadedConfig, find_file, load_config
from roll.config.model_files import GGUF, looks_like_folder, model_folder
from roll.config.pipelines import NAMES, definition_of
from roll.config.plan.render import effective_yaml, render_plan
from roll.config.reading.compose import parse_launcher_args
from roll.config.reading.errors import ConfigError, Problem, did_you_mean
from roll.config.reading.masking import masked_text
from roll.config.strategies.registry import generation_strategies
from roll.distributed.forked_workers import forking
from roll.preflight import check_parts, dequantise_models, fetch, find_models, require_packages

if TYPE_CHECKING:
    from roll.pipelines.serve import Served

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_CONFIG = 2
"""Exit status of a configuration that cannot be run."""
EXIT_FAILED = 1
"""Exit status of a run that failed."""


@dataclass(frozen=True)
class Tool:
    """A command that reads its own arguments.

    Args:
        module: dotted path; its ``main(words)`` gets what follows the command's name and returns the exit status
            (None: 0). Imported when the command is given.
        text: a line of help.
        keeps_name: ``main`` gets the command's name as well.
    """

    module: str
    text: str
    keeps_name: bool = False

    def main(self, words: Sequence[str]) -> int:
        return int(importlib.import_module(self.module).main(list(words if self.keeps_name else words[1:])) or 0)


TOOLS = {
    "init": Tool("roll.starter", "write a first configuration for a model and a data file, or copy the recipes"),
    "evaluate": Tool("roll.evaluate", "ask models and checkpoints the validation prompts of a file"),
    "sweep": Tool("roll.sweep", "run every combination of several values of keys, and name the best"),
    "serve-training": Tool("roll.training_service.command", "train LoRA adapters for clients of the tinker SDK"),
    "chat": Tool("roll.serving.chat", "talk to a model in the terminal"),
    "doctor": Tool("roll.doctor.command", "see whether runs work on this host, and why not"),
    "rehearse": Tool(
        "roll.rehearsal.command", "say what a recipe's step needs at its full size, without weights and devices"
    ),
    "export": Tool("roll.checkpoint.export", "turn a training checkpoint into a Hugging Face model, adapter or GGUF"),
    "replay": Tool("roll.replay", "take the step of a recorded batch again and compare its metrics"),
    "bisect-logprobs": Tool("roll.bisect", "say where the log-probs of engine and trainer part: layer and operation"),
    "report": Tool("roll.report.command", "write one HTML file of runs: curves, timeline, samples, diagnosis", True),
    "diagnose": Tool("roll.report.command", "name what is wrong with a run, with evidence and remedy", True),
    "translate": Tool("roll.translation.command", "turn a launch of verl or SkyRL into this project's keys"),
}

GROUPS = {
    "first steps": ("init", "check", "plan", "inspect-data", "explain", "translate"),
    "runs": ("run", "sweep", "evaluate", "serve", "serve-training", "chat"),
    "afterwards": ("report", "diagnose", "replay", "bisect-logprobs", "export"),
    "sizes and hosts": ("rehearse", "doctor"),
    "editors and shells": ("schema", "completion"),
}
"""Commands as the overview shows them."""
EXAMPLES = """examples:
  roll init grpo --model Qwen/Qwen2.5-0.5B-Instruct --data train.jsonl
  roll check tiny/rlvr_config              # show what a recipe does, without starting it
  roll run tiny/rlvr_config max_steps=20   # train, with one key changed
  roll explain num_generations             # find the key for a word of another project
"""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``roll`` command; the exit status is 0, or 2 for a wrong configuration or command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    tool = TOOLS.get(words[0]) if words else None
    if tool is not None:
        try:
            return tool.main(words)
        except ConfigError as error:
            return refuse(error)
    parser = build_parser()
    if not words:
        parser.print_help()
        return 0
    names = [name for group in GROUPS.values() for name in group]
    if not words[0].startswith("-") and words[0] not in names:
        hint = did_you_mean(words[0], names, "did you mean {}?") or "roll alone lists those that there are"
        parser.error(f"there is no command {words[0]}; {hint}")
    arguments, rest = parser.parse_known_args(words)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        parser.error(f"unknown flag {unknown[0]}; overrides are written key=value")
    if rest and not hasattr(arguments, "overrides"):
        parser.error(f"{arguments.command} takes no argument {rest[0]}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    try:
        if arguments.command == "run":
            return run(ready(partial(load_config, None, arguments.config, None, arguments.overrides)))
        other = {
            "inspect-data": inspect_data,
            "serve": serve,
            "explain": explain_key,
            "schema": print_schema,
            "completion": print_completion,
        }
        return other.get(arguments.command, check)(arguments)
    except ConfigError as error:
        return refuse(error)


def launch(pipeline: str, default_path: str, default_name: str, argv: Sequence[str] | None = None) -> None:
    """Program of ``examples/start_<pipeline>_pipeline.py``: load, show the plan, run. Exits with the run's status."""
    arguments = parse_launcher_args(argv, default_path, default_name)
    try:
        config_class = definition_of(pipeline).config_class
        loaded = ready(
            partial(load_config, config_class, arguments.config_path, arguments.config_name, arguments.overrides)
        )
    except ConfigError as error:
        sys.exit(refuse(error))
    sys.exit(run(loaded))


def ready(load: Callable[[], LoadedConfig[Any]]) -> LoadedConfig[Any]:
    """A configuration after all checks that can be made before a start.

    Raises:
        ConfigError: every mistake.
    """
    return preflight.ready(load, say)


def run(loaded: LoadedConfig[Any], work: Callable[[], int | None] | None = None) -> int:
    """Show the plan and hand over to the pipeline, or to ``work``; the exit status.

    A run that fails says why and gives ``EXIT_FAILED``; one that a signal ends, 128 plus the signal's number.
    """
    from roll.distributed.restarts import DONE, INTERRUPTED, supervised
    from roll.distributed.signals import Interrupted, ending

    supervised.attach()
    starts_again = loaded.config.max_restarts or loaded.config.on_nonfinite == "rewind"
    if work is None and not supervised.is_attached and starts_again:
        return run_supervised(loaded)
    with ending.handled():
        try:
            status = _run(loaded, work or partial(loaded.pipeline.run, loaded))
        except Interrupted as interruption:
            supervised.tell(end=INTERRUPTED)
            show_error(interruption)
            return int(interruption.code or 0)
    if status not in (EXIT_FAILED, EXIT_CONFIG):
        supervised.tell(end=DONE)
    return status


def _run(loaded: LoadedConfig[Any], work: Callable[[], int | None]) -> int:
    render_plan(loaded, Console(emoji=False))
    # Imports and data make a million objects that stay; to look for garbage after every 700 takes a second more.
    gc.set_threshold(50_000)
    with forking(loaded):
        return _perform(loaded, work)


def _perform(loaded: LoadedConfig[Any], work: Callable[[], int | None]) -> int:
    from roll.datasets.types import DataError
    from roll.distributed.failures import NodeError, NotFinite, OutputRefused, RayLost, RemoteError, needing_room
    from roll.distributed.restarts import FAILED, REWIND, WRONG, supervised
    from roll.pipelines.strict import LogProbsDiffer
    from roll.rollout.flow import RolloutExhausted, RolloutStalled

    try:
        with needing_room(loaded.plan.output_dir):
            return int(work() or 0)
    except NotFinite as error:
        supervised.tell(end=REWIND if error.rewinds else WRONG, cause=str(error))
        show_error(error)
    except ConfigError as error:  # of the environment, or of what this host gives
        supervised.tell(end=WRONG)
        return refuse(error)
    except (DataError, RolloutExhausted, OutputRefused, LogProbsDiffer) as error:  # These alone a restart would repeat.
        supervised.tell(end=WRONG)
        show_error(error)
    except (RayLost, NodeError, RemoteError, RolloutStalled) as error:
        supervised.tell(end=FAILED, cause=str(error))
        show_error(error)
        if isinstance(error, RayLost):
            leave(EXIT_FAILED)
    except Exception as error:
        supervised.tell(end=FAILED, cause=f"{type(error).__name__}: {error}")
        sys.stderr.write(masked_text(traceback.format_exc()))
    return EXIT_FAILED


def run_supervised(loaded: LoadedConfig[Any]) -> int:
    """Run in a process of its own, which is restarted when it dies; its exit status."""
    from roll.checkpoint.folders import CheckpointDamagedError, verify_folder
    from roll.checkpoint.manager import newest_at
    from roll.checkpoint.store import is_url
    from roll.distributed.restarts import Supervisor, python_path

    os.environ["PYTHONPATH"] = python_path()

    def command(checkpoint: str | None) -> list[str]:
        words = list(loaded.overrides)
        if checkpoint is not None:
            words = [word for word in words if not word.lstrip("+").startswith("resume_from_checkpoint=")]
            words.append(f"resume_from_checkpoint={checkpoint}")
        return [sys.executable, "-m", "roll.cli", "run", str(loaded.source), *words]

    def is_whole(checkpoint: str) -> bool:
        try:
            if is_url(checkpoint):
                newest_at(checkpoint, loaded.config.checkpoint_config.storage_options)
            else:
                verify_folder(Path(checkpoint))
        except (CheckpointDamagedError, OSError):
            return False
        return True

    return Supervisor(command, loaded.config, loaded.plan.log_dir, is_whole, say).run()


def server_key(host: str, variable: str | None, may: str) -> str:
    """The key that clients of a server must send: the value of ``--api-key-env``; empty: none.

    Args:
        may: what whoever reaches the port may do, in words.

    Raises:
        ConfigError: no such variable in the environment; another address than loopback without a key.
    """
    key = os.environ.get(variable or "", "")
    if variable and not key:
        raise ConfigError([Problem("--api-key-env", variable, "no such variable in the environment")])
    if host not in LOOPBACK and not key:
        rule = f"who reaches this port may {may}: name the variable that holds a token by --api-key-env"
        raise ConfigError([Problem("--host", host, rule)])
    return key


def serve(arguments: argparse.Namespace) -> int:
    """Serve a model, or the engines of a file's role, over HTTP until interrupted."""
    key = server_key(arguments.host, arguments.api_key_env, "use the engines")
    served = served_by(arguments)
    from roll.distributed.failures import RayLost, RemoteError
    from roll.distributed.signals import Interrupted
    from roll.pipelines.serve import serve as answer
    from roll.serving.server import FrontOptions, HttpFront

    model = arguments.model_name or Path(served.model).name.removesuffix(GGUF)
    options = FrontOptions(model, key, served.running_requests, arguments.max_open_requests)
    try:
        answer(served, HttpFront(options, arguments.host, arguments.port))
    except (RayLost, RemoteError, OSError) as error:
        show_error(error)
        if isinstance(error, RayLost):
            leave(EXIT_FAILED)
        return EXIT_FAILED
    except (KeyboardInterrupt, Interrupted):
        pass
    return 0


def served_by(arguments: argparse.Namespace) -> Served:
    """Engines of the model, or of the configuration and role, that ``roll serve`` names.

    Raises:
        ConfigError: neither, or arguments that do not go with it.
    """
    named, words, strategy = arguments.config, arguments.overrides, arguments.strategy
    if is_model_path(named):
        if words:
            raise ConfigError([Problem(words[0], named, "changes a YAML file; this is a model")])
        from roll.pipelines.serve import of_model

        return of_model(named, strategy)
    if strategy:
        key = f"{arguments.role}.strategy_args.strategy_name"
        raise ConfigError([Problem("--strategy", strategy, f"goes with a model; change this file: {key}={strategy}")])
    loaded: LoadedConfig[Any] = load_config(None, named, None, words, check_files=False)
    require_packages(loaded)
    dequantise_models(loaded, say)
    from roll.pipelines.serve import of_file

    return of_file(loaded, arguments.role)


def is_model_path(word: str) -> bool:
    """A folder, a GGUF file, or a hub name that is no configuration.

    Raises:
        ConfigError: neither a configuration nor a model.
    """
    if os.path.isdir(word) or word.endswith(GGUF):
        return True
    try:
        find_file(Path(word), None)
    except ConfigError as error:
        if looks_like_folder(word) or "/" not in word:
            raise
        if model_folder(word) is None:
            say(f"looking for {word} at the hub ...")
            if reason := fetch(word):
                error.add_note(f"As a model of the hub: {reason}")
                raise
        return True
    return False


def check(arguments: argparse.Namespace) -> int:
    """Print the plan, or with ``--resolved`` the effective YAML, without starting anything."""
    found = api.check(arguments.config, arguments.overrides, check_files=not arguments.skip_files, gpu=arguments.gpu)
    if found.config is None:
        raise ConfigError(found.problems)
    if arguments.resolved:
        sys.stdout.write(effective_yaml(found.config))
    else:
        found.show(Console(emoji=False))
    return 0


def inspect_data(arguments: argparse.Namespace) -> int:
    """Show the rows of a configuration as the model will see them; nothing else is started."""
    loaded: LoadedConfig[Any] = load_config(None, arguments.config, None, arguments.overrides)
    check_parts(loaded)
    find_models(loaded, say)
    from roll.datasets.types import DataError
    from roll.pipelines.inspect_data import inspect_data as show

    try:
        show(loaded, Console(emoji=False), arguments.rows, arguments.set, arguments.id)
    except DataError as error:
        show_error(error)
        return EXIT_FAILED
    return 0


def explain_key(arguments: argparse.Namespace) -> int:
    """Type, default and meaning of a key in every section that has it, or of those that a word stands for."""
    from roll.config.reference import explain

    console = Console(emoji=False, markup=False, highlight=False, soft_wrap=True)
    about = ""
    for found in explain(arguments.key):
        if found.about not in ("", about):
            console.print(found.about)
        about = found.about
        console.print(f"{found.key}  in {found.section}", style="bold")
        console.print(f"  {found.type}{f', default {found.default}' if found.default else ''}")
        console.print(f"  {found.text.replace('`', '')}")
    return 0


def print_schema(arguments: argparse.Namespace) -> int:
    """The JSON schema of a pipeline's file, for editors."""
    from roll.config.json_schema import json_schema

    schema = json_schema(definition_of(arguments.pipeline).config_class, f"roll: {arguments.pipeline} pipeline")
    sys.stdout.write(json.dumps(schema, indent=1) + "\n")
    return 0


def print_completion(arguments: argparse.Namespace) -> int:
    """The completion script of a shell: commands, files and keys."""
    import shtab

    from roll.config.completion import BASH_END, key_completion

    parser = build_parser(key_completion())
    end = BASH_END if arguments.shell == "bash" else ""
    sys.stdout.write(f"{shtab.complete(parser, arguments.shell)}\n{end}")
    return 0


def say(text: str) -> None:
    """Print a line of progress to stderr."""
    Console(stderr=True, emoji=False).print(text, markup=False, highlight=False, soft_wrap=True)


def refuse(error: ConfigError) -> int:
    show_error(error)
    return EXIT_CONFIG


def show_error(error: BaseException) -> None:
    """Print the message of an error and its notes, without the driver's traceback."""
    text = masked_text("\n".join([str(error), *getattr(error, "__notes__", ())]))
    Console(stderr=True, emoji=False).print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def leave(status: int) -> NoReturn:
    """Exit without cleaning up: what is left of Ray's client in the process would crash on the usual way out."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class OverviewFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves the commands to the description, which has them in groups."""

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest != "command":
            super().add_argument(action)


def build_parser(keys: object = None) -> argparse.ArgumentParser:
    """The parser of the command line; ``keys``: what a shell completes in overrides."""
    parser = argparse.ArgumentParser(prog="roll", formatter_class=OverviewFormatter)
    parser.add_argument("--version", action="version", version=f"roll {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_config = partial(add_config_command, commands, keys)
    add_config("run", "run the pipeline of a configuration")
    for name, text in (("check", "check a configuration and print its plan"), ("plan", "the same as check")):
        command = add_config(name, text)
        command.add_argument(
            "--resolved",
            action="store_true",
            help="print the effective YAML, with planned values and defaults in force as comments; secrets masked",
        )
        command.add_argument("--skip-files", action="store_true", help="do not ask whether data and models exist")
        command.add_argument("--gpu", help="refuse what cannot fit on this accelerator, a name as of roll rehearse")
    command = add_config("inspect-data", "show the data of a configuration as the model will see it")
    command.add_argument("--rows", type=int, default=2, help="rows of each domain (2)")
    command.add_argument("--set", help="one set: train, validation, or the name of a validation set")
    command.add_argument("--id", help="the row with this id")
    served = add_config(
        "serve",
        "answer OpenAI's HTTP interface with a model, or with the engines of a file's role",
        "a model folder, GGUF file or hub name, or a YAML file",
    )
    served.add_argument(
        "--strategy",
        choices=generation_strategies(),
        help="engine of a model (default: vllm on a GPU where it is installed, else hf_infer)",
    )
    served.add_argument("--role", default="actor_infer", help="whose engines (default: %(default)s)")
    served.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    served.add_argument("--port", type=int, default=8000, help="port; 0: a free one (default: %(default)s)")
    served.add_argument("--model-name", help="name that clients give (default: the last part of the model's path)")
    served.add_argument("--api-key-env", help="environment variable with the token that clients must send")
    served.add_argument("--max-open-requests", type=int, default=1024, help="more are turned away (default: 1024)")
    for name, tool in TOOLS.items():
        add_command(commands, name, tool.text, add_help=False)
    explained = add_command(commands, "explain", "say what a key does, or which key a word of another project is here")
    explained.add_argument("key", help="a key, also with its section; a word of another project")
    schema = add_command(commands, "schema", "print the JSON schema of a configuration, for editors")
    schema.add_argument("pipeline", nargs="?", default="rlvr", choices=NAMES, help="(default: %(default)s)")
    completion = add_command(commands, "completion", "print a completion script for a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    lines = ["Train language models by reinforcement."]
    for title, names in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<17}{commands.choices[name].description}" for name in names)]
    parser.description, parser.epilog = "\n".join(lines), EXAMPLES
    return parser


def add_command(commands: Commands, name: str, text: str, *, add_help: bool = True) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, description=text, add_help=add_help)


def add_config_command(
    commands: Commands, keys: object, name: str, text: str, config_text: str = "YAML file, also relative to examples/"
) -> argparse.ArgumentParser:
    command = add_command(commands, name, text)
    config = command.add_argument("config", help=config_text)
    config.complete = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}  # type: ignore[attr-defined]
    overrides = command.add_argument(
        "overrides", nargs="*", default=(), metavar="key=value", help="changes: key=value, +new.key=value, '~key'"
    )
    overrides.complete = keys  # type: ignore[attr-defined]
    return command


if __name__ == "__main__":
    sys.exit(main())
