"""The commands of ``roll``, in groups, and the parser of its command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from roll import __version__
from roll.config.pipelines import NAMES
from roll.config.strategies.registry import generation_strategies

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


@dataclass(frozen=True)
class Tool:
    """A command that reads its own arguments."""

    module: str  # dotted path, imported when the command is given
    text: str  # a line of help
    function: str = "main"
    """Of the module: gets the words behind the command's name, and returns the exit status (None: 0)."""


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
    "replay": Tool("roll.replay", "take the step of a recorded batch again and compare its metrics", "replay"),
    "bisect-logprobs": Tool(
        "roll.replay", "say where the log-probs of engine and trainer part: layer and operation", "bisect"
    ),
    "report": Tool("roll.report.page", "write one HTML file of runs: curves, timeline, samples, diagnosis", "report"),
    "diagnose": Tool("roll.report.page", "name what is wrong with a run, with evidence and remedy", "diagnosis"),
    "translate": Tool("roll.translation.command", "turn a launch of verl or SkyRL into this project's keys"),
}

# Commands as the overview shows them.
GROUPS = {
    "first steps": ("init", "check", "plan", "inspect-data", "explain", "translate"),
    "runs": ("run", "sweep", "evaluate", "serve", "serve-training", "chat"),
    "afterwards": ("report", "diagnose", "replay", "bisect-logprobs", "export"),
    "sizes and hosts": ("rehearse", "doctor"),
    "editors and shells": ("schema", "completion"),
}
EXAMPLES = """examples:
  roll init grpo --model Qwen/Qwen2.5-0.5B-Instruct --data train.jsonl
  roll check tiny/rlvr_config              # show what a recipe does, without starting it
  roll run tiny/rlvr_config max_steps=20   # train, with one key changed
  roll explain num_generations             # find the key for a word of another project
"""


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
