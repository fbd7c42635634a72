"""``roll init``: a first configuration for a model and a data file, or a copy of the recipes.

The file is written from what the data hold: the reward from the ground truth of the first row, the lengths from the
first rows. It sets what a first run has reasons to change, about twenty keys.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from roll.config.data import DataArguments
from roll.config.loader import copy_recipes
from roll.config.model_files import is_installed, model_folder, model_number, require_model
from roll.config.reading.errors import ConfigError, Problem
from roll.config.rewards import RULE_OF_COLUMN
from roll.datasets.columns import Columns
from roll.datasets.forms import form_of, read_ground_truth
from roll.datasets.preferences import PROMPT_COLUMNS
from roll.datasets.reading import SourceRow, data_files, stream_rows
from roll.datasets.sft import read_demonstration
from roll.datasets.types import DataError

ROWS = 500  # first rows whose lengths are measured
TEMPLATE = 32  # tokens that a chat template adds to a prompt
GROUP = 8  # samples of a prompt, or episodes of a task
# Keys of ``data_args`` that ``--columns`` takes.
COLUMN_KEYS = ("prompt", "messages", "response", "ground_truth", "tag", "id")
# Kind of training to what it is.
KINDS = {
    "grpo": "reinforcement learning from verifiable rewards",
    "sft": "supervised learning from demonstrations",
    "dpo": "preferences: chosen and rejected responses",
    "rm": "a reward model from chosen and rejected responses",
    "distill": "a student learns its teacher's distributions",
    "agent": "reinforcement learning in an environment",
}


@dataclass(frozen=True)
class Start:
    """Facts from the command line and the data: variables of the template."""

    kind: str
    model: str
    gpus: int  # 0: the devices are slots of the CPU
    train: str = ""  # file of the rows to learn from
    columns: Mapping[str, str] = field(default_factory=dict)  # keys of ``data_args`` that name columns
    validation: str | None = None
    teacher: str | None = None
    reward: str = ""
    prompt_length: int = 0
    response_length: int = 0

    def written(self) -> str:
        """The configuration, in YAML."""
        environment = Environment(undefined=StrictUndefined)
        environment.filters["scalar"] = scalar
        template = resources.files("roll").joinpath("starter.jinja").read_text(encoding="utf-8")
        ranks = max(1, self.gpus)
        # Rows of a step: at least so many, and as many for each device.
        prompts, rows, tasks = (-(-count // ranks) * ranks for count in (32, 16, 8))
        engine = "vllm" if self.gpus and is_installed("vllm") else "hf_infer"
        sizes = {"ranks": ranks, "prompts": prompts, "rows": 2 * rows, "tasks": tasks, "group": GROUP}
        return environment.from_string(template).render(**vars(self), **sizes, engine=engine)


def scalar(text: str) -> str:
    """A scalar of YAML, in flow mappings too."""
    plain = re.fullmatch(r"[\w./:@+-]+( [\w./@+-]+)*", text) and yaml.safe_load(text) == text
    return text if plain else json.dumps(text)


def lengths(kind: str, rows: Sequence[SourceRow], count: Callable[[str], int], names: DataArguments) -> tuple[int, int]:
    """Tokens of the longest prompt and response of ``rows``, rounded up to powers of two; a policy's own responses may
    be twice as long as those that the data show, or 512 tokens."""
    prompts, responses = [64], [64]
    for source in rows:
        if kind in ("dpo", "rm"):
            # A conversation as a response has its prompt in it.
            sides = [source.row[name] for name in ("chosen", "rejected")]
            prompt = next((source.row[name] for name in PROMPT_COLUMNS if name in source.row), "")
            responses.append(max(count(side if isinstance(side, str) else text_of(side)) for side in sides))
            prompts.append(count(prompt if isinstance(prompt, str) else text_of(prompt)) + TEMPLATE)
            continue
        columns = Columns.of(names, source)
        if kind == "grpo":
            messages, shown = columns.read_messages(source), source.row.get(names.response)
            responses.append(2 * count(shown) if isinstance(shown, str) else 512)
        else:
            messages, text = read_demonstration(columns, source)
            responses.append(count(text))
        prompts.append(count(text_of(messages)) + TEMPLATE)
    longest_prompt, longest_response = (1 << (max(counts) - 1).bit_length() for counts in (prompts, responses))
    return longest_prompt, longest_response


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(str(message.get("content", "")) for message in messages)


def token_counter(model: str) -> Callable[[str], int]:
    """Tokens of a text, by the tokenizer of a model that is on this machine, else as three characters a token. Raises
    ``ConfigError``: no model, or one without a tokenizer that can be read."""
    try:
        require_model(model)
        if (folder := model_folder(model)) is None:
            return lambda text: len(text) // 3 + 1
        from roll.pipelines.files import load_tokenizer

        tokenizer = load_tokenizer(str(folder), False)
    except (OSError, ValueError) as error:
        raise ConfigError([Problem("--model", model, str(error))]) from error
    return lambda text: len(tokenizer.encode(text))


def with_data(start: Start, arguments: argparse.Namespace) -> Start:
    """With files, lengths and reward. Raises ``ConfigError``: data that do not fit the method, or a word of
    ``--columns`` that is written otherwise."""
    for word in arguments.columns:
        if not re.fullmatch(f"({'|'.join(COLUMN_KEYS)})=.+", word):
            rule = f"must be KEY=COLUMN, with a key of {', '.join(COLUMN_KEYS)}"
            raise ConfigError([Problem("--columns", word, rule, "ground_truth='Correct answer'")])
    columns: dict[str, str] = dict(word.split("=", 1) for word in arguments.columns)
    kind, file, found = start.kind, arguments.data, ""
    options: dict[str, Any] = dict(columns)
    names, reward = DataArguments(**options), getattr(arguments, "reward", None) or ""
    try:
        rows = list(islice(stream_rows(data_files(file)[:1]), ROWS))
        found = ", ".join(sorted(rows[0].row))
        form = form_of(names, rows[0])
        rows = [form(row) for row in rows]
        row = rows[0].row
        if kind in ("dpo", "rm") and not {"chosen", "rejected"} <= row.keys():
            raise DataError("its rows need the columns chosen and rejected")
        if kind == "grpo" and not reward:
            found_rule = next((rule for column, rule in RULE_OF_COLUMN.items() if row.get(column) is not None), "")
            reward = found_rule or ("" if read_ground_truth(row) is None else "math_rule")
        if kind == "grpo" and not reward:
            raise DataError("its rows have no ground truth, and no reward of your own is named by --reward")
        prompt, response = lengths(kind, rows, token_counter(start.model), names)
    except DataError as error:
        hint = f"; the columns are {found}: say by --columns which is which" if found else ""
        raise ConfigError([Problem("--data", file, f"{error}{hint}")]) from error
    # Of a model with few positions the prompt gets half at most, so that something is left for the response.
    positions = model_number(start.model, "max_position_embeddings")
    if positions is not None and prompt + response > positions:
        prompt = min(prompt, positions // 2)
        response = positions - prompt
    return replace(
        start,
        train=file,
        columns=columns,
        validation=arguments.validation,
        teacher=getattr(arguments, "teacher", None),
        reward=reward,
        prompt_length=prompt,
        response_length=response,
    )


def main(argv: Sequence[str]) -> int:
    """Exit status 0. Raises ``ConfigError``: data that do not fit, or a file that is there."""
    arguments = build_parser().parse_args(argv)
    if arguments.kind == "recipes":
        for folder in copy_recipes(Path(arguments.folder)):
            sys.stdout.write(f"wrote {folder}\n")
        return 0
    # Looked at before the data are read, which may take a while.
    output = Path(arguments.output or f"{arguments.kind}.yaml")
    if output.exists():
        raise ConfigError([Problem("--output", str(output), "is there and is not replaced", f"my_{output.name}")])
    kind = arguments.kind
    start = Start(kind, arguments.model, arguments.gpus)
    if kind != "agent":
        start = with_data(start, arguments)
    subject = f"{kind} of {start.model}" + (f" on {start.train}" if start.train else "")
    title = f"# {subject}: `roll check {output}`, then `roll run {output}`."
    output.write_text(f"{title}\n{start.written()}\n", encoding="utf-8")
    sys.stdout.write(f"wrote {output}: roll check {output}, then roll run {output}\n")
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll init", description="Write a first configuration for a model and a data file, or copy the recipes."
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, text in KINDS.items():
        command = kinds.add_parser(kind, help=text, description=text)
        command.add_argument("--model", required=True, help="folder, hub name or GGUF file")
        if kind != "agent":
            command.add_argument("--data", required=True, help="file with the rows to learn from")
            command.add_argument(
                "--columns",
                nargs="+",
                default=(),
                metavar="KEY=COLUMN",
                help=f"which column is which, where the file's names do not say it: {', '.join(COLUMN_KEYS)}",
            )
            command.add_argument("--validation", help="file with held-out rows")
        if kind == "distill":
            command.add_argument("--teacher", required=True, help="the model to learn from")
        if kind == "grpo":
            command.add_argument("--reward", help="rule or dotted path of a function (default: by the rows)")
        command.add_argument("--gpus", type=int, default=0, help="GPUs of this host to use (default: 0, the CPU)")
        command.add_argument("--output", help=f"the file to write (default: {kind}.yaml)")
    copied = kinds.add_parser("recipes", help="copy examples/ and configs/", description="Copy examples/ and configs/.")
    copied.add_argument("folder", nargs="?", default=".", help="where to (default: the working directory)")
    return parser
