"""The command line: ``roll run | check | plan | serve | inspect-data | explain | schema | completion``, and
the commands of other modules (:data:`roll.command_line.TOOLS`).

Heavy packages are imported by the command that needs them, so that ``roll check`` answers at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from roll import api, preflight
from roll.command_line import GROUPS, TOOLS, build_parser
from roll.config.loader import LoadedConfig, find_file, load_config
from roll.config.model_files import GGUF, looks_like_folder, model_folder
from roll.config.pipelines import definition_of
from roll.config.plan.render import effective_yaml, render_plan
from roll.config.reading.compose import parse_launcher_args
from roll.config.reading.errors import ConfigError, Problem, did_you_mean
from roll.config.reading.masking import masked_text
from roll.distributed.forked_workers import forking
from roll.preflight import check_parts, dequantise_models, fetch, find_models, require_packages

if TYPE_CHECKING:
    from roll.pipelines.serve import Served

EXIT_CONFIG = 2  # exit status of a configuration that cannot be run
EXIT_FAILED = 1  # exit status of a run that failed


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``roll`` command; the exit status is 0, or 2 for a wrong configuration or command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and (tool := TOOLS.get(words[0])) is not None:
            return int(resolve_name(f"{tool.module}:{tool.function}")(words[1:]) or 0)
        parser = build_parser()
        if not words:
            parser.print_help()
            return 0
        names = [name for group in GROUPS.values() for name in group]
        if not words[0].startswith("-") and words[0] not in names:
            hint = did_you_mean(words[0], names, "did you mean {}?") or "roll alone lists those that there are"
            parser.error(f"there is no command {words[0]}; {hint}")
        arguments, rest = parser.parse_known_args(words)
        # argparse takes overrides between flags for unknown words: only those that look like flags are mistakes.
        unknown = [word for word in rest if word.startswith("-")]
        if unknown:
            parser.error(f"unknown flag {unknown[0]}; overrides are written key=value")
        if rest and not hasattr(arguments, "overrides"):
            parser.error(f"{arguments.command} takes no argument {rest[0]}")
        if rest:
            arguments.overrides = [*arguments.overrides, *rest]
        if arguments.command == "run":
            return run(ready(partial(load_config, None, arguments.config, None, arguments.overrides)))
        other = {"inspect-data": inspect_data, "serve": serve, "explain": explain_key}
        other |= {"schema": print_schema, "completion": print_completion}
        return other.get(arguments.command, check)(arguments)
    except ConfigError as error:
        return refuse(error)


def launch(pipeline: str, default_path: str, default_name: str, argv: Sequence[str] | None = None) -> None:
    """Program of ``examples/start_<pipeline>_pipeline.py``: load, show the plan, run. Exits with the run's status."""
    arguments = parse_launcher_args(argv, default_path, default_name)
    file = arguments.config_path, arguments.config_name, arguments.overrides
    try:
        loaded = ready(partial(load_config, definition_of(pipeline).config_class, *file))
    except ConfigError as error:
        sys.exit(refuse(error))
    sys.exit(run(loaded))


def ready(load: Callable[[], LoadedConfig[Any]]) -> LoadedConfig[Any]:
    """A configuration after all checks that can be made before a start. Raises ``ConfigError``: every mistake."""
    return preflight.ready(load, say)


def run(loaded: LoadedConfig[Any], work: Callable[[], int | None] | None = None) -> int:
    """Show the plan and hand over to the pipeline, or to ``work``; the exit status.

    A run that fails says why and gives ``EXIT_FAILED``; one that a signal ends, 128 plus the signal's number.
    """
    from roll.distributed.restarts import DONE, INTERRUPTED, supervised
    from roll.distributed.signals import Interrupted, ending

    # First: its variables must leave the environment before a worker could inherit them.
    supervised.attach()
    starts_again = loaded.config.max_restarts or loaded.config.on_nonfinite == "rewind"
    if work is None and not supervised.is_attached and starts_again:
        return run_supervised(loaded)
    with ending.handled():
        try:
            render_plan(loaded, Console(emoji=False))
            # Imports and data make a million objects that stay: to look for garbage after every 700 takes a second.
            gc.set_threshold(50_000)
            with forking(loaded):
                status = _perform(loaded, work or partial(loaded.pipeline.run, loaded))
        except Interrupted as interruption:
            supervised.tell(end=INTERRUPTED)
            show_error(interruption)
            return int(interruption.code or 0)
    if status not in (EXIT_FAILED, EXIT_CONFIG):
        supervised.tell(end=DONE)
    return status


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
    from roll.checkpoint.store import is_url, newest_at
    from roll.distributed.restarts import Supervisor

    # The run must find the user's own modules where this process finds them.
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([sys.path[0] or os.getcwd(), *given]))

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
    """The key that clients of a server must send: the value of ``--api-key-env``; empty: none. ``may``: what whoever
    reaches the port may do, in words. Raises ``ConfigError``: no such variable in the environment; another address than
    loopback without a key."""
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
    # The key before the engines: a mistake in the flags is told before a model is loaded.
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
    """Engines of the model, or of the configuration and role, that ``roll serve`` names. Raises ``ConfigError``:
    neither, or arguments that do not go with it."""
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
    """A folder, a GGUF file, or a hub name that is no configuration. Raises ``ConfigError``: neither a configuration
    nor a model."""
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

    from roll.config.json_schema import BASH_END, key_completion

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


if __name__ == "__main__":
    sys.exit(main())
