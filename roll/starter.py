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
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from roll.config.data import DataArguments
from roll.config.loader import copy_recipes
from roll.config.model_files import is_installed, model_folder, model_number, require_model
from roll.config.names import RULE_OF_COLUMN
from roll.config.reading.errors import ConfigError, Problem
from roll.datasets.columns import Columns
from roll.datasets.forms import form_of, read_ground_truth
from roll.datasets.preferences import PROMPT_COLUMNS
from roll.datasets.reading import Row, SourceRow, data_files, stream_rows
from roll.datasets.sft import read_demonstration
from roll.datasets.types import DataError

ROWS = 500
"""First rows whose lengths are measured."""
TEMPLATE = 32
"""Tokens that a chat template adds to a prompt."""
SAMPLING = "{temperature: 1.0, top_p: 1.0, top_k: -1}"
GROUP = 8
"""Samples of a prompt, or episodes of a task."""
COLUMN_KEYS = ("prompt", "messages", "response", "ground_truth", "tag", "id")
"""Keys of ``data_args`` that ``--columns`` takes."""
AT_A_TIME = 4
"""Rows of a micro-batch of a policy."""


ENVIRONMENTS = """\
custom_envs:
  lake:                           # or an environment of your own: env_type: my_games.Maze
    env_type: frozen_lake
    env_config: {{size: 4, max_steps: 8}}
    max_steps: 8
    max_tokens_per_step: 64
train_env_manager: {{num_env_groups: {tasks}, group_size: {group}, tags: [lake]}}  # tasks of a step, episodes of each
val_env_manager: {{num_env_groups: 32, group_size: 1, tags: [lake]}}"""


@dataclass(frozen=True)
class Start:
    """Facts from the command line and the data."""

    kind: str
    model: str
    gpus: int
    """0: the devices are slots of the CPU."""
    data: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Keys of ``data_args`` that name columns."""
    validation: str | None = None
    teacher: str | None = None
    reward: str = ""
    prompt_length: int = 0
    response_length: int = 0

    @property
    def devices(self) -> str:
        return f"list(range(0, {self.gpus}))" if self.gpus > 1 else "[0]"

    @property
    def engine(self) -> str:
        return "vllm" if self.gpus and is_installed("vllm") else "hf_infer"

    def whole(self, count: int) -> int:
        """At least ``count``, and as many for each device."""
        ranks = max(1, self.gpus)
        return -(-count // ranks) * ranks

    def training(self, rate: str, batch: int, most: int) -> str:
        """``training_args`` for optimizer steps of ``batch`` rows, ``most`` of them at a time on a device."""
        accumulated = batch // (most * max(1, self.gpus))
        return (
            f"{{learning_rate: {rate}, per_device_train_batch_size: {most}, "
            f"gradient_accumulation_steps: {accumulated}}}"
        )

    def role(self, name: str, strategy: str, *lines: str) -> str:
        """A section with its strategy and devices."""
        own = [*lines, f"strategy_args: {{strategy_name: {strategy}}}", f"device_mapping: {self.devices}"]
        return "\n".join([f"{name}:", *(f"  {line}" for line in own)])

    def data_section(self, key: str, file: str) -> str:
        columns = (f", {name}: {quoted(column)}" for name, column in self.columns.items())
        return f"{key}: {{file_name: {quoted(file)}{''.join(columns)}}}"

    def held_out(self, *lines: str) -> list[str]:
        """The section of the validation, where there is one."""
        if not self.validation:
            return []
        own = [self.data_section("data_args", self.validation), *lines]
        return ["\n".join(["validation:", *(f"  {line}" for line in own)])]

    def head(self, pipeline: str, *lines: str) -> str:
        """The keys of every pipeline, and ``lines`` of its own."""
        evaluated = ["eval_steps: 20                    # steps between validations"] if self.validation else []
        return "\n".join(
            [
                f"pipeline: {pipeline}",
                f"exp_name: {self.kind}",
                "output_dir: output/${exp_name}",
                f"num_gpus_per_node: {max(1, self.gpus)}"
                + ("" if self.gpus else "              # without GPUs: slots of the CPU"),
                "max_steps: 100",
                "save_steps: 50                    # steps between checkpoints",
                *evaluated,
                *lines,
            ]
        )


def quoted(text: str) -> str:
    """A scalar of YAML, in flow mappings too."""
    plain = re.fullmatch(r"[\w./:@+-]+( [\w./@+-]+)*", text) and yaml.safe_load(text) == text
    return text if plain else json.dumps(text)


def grpo(start: Start) -> str:
    prompts = start.whole(32)
    training = start.training("1.0e-6", prompts * GROUP, AT_A_TIME)
    parts = [
        start.head(
            "rlvr",
            f"pretrain: {quoted(start.model)}",
            f"rollout_batch_size: {prompts}            # prompts of a step",
            f"num_return_sequences_in_group: {GROUP}  # samples of a prompt, compared with one another",
            f"prompt_length: {start.prompt_length}                # tokens; longer prompts are left out",
            f"response_length: {start.response_length}",
            "adv_estimator: grpo",
            "ppo_epochs: 1",
        ),
        start.role(
            "actor_train",
            "fsdp2_train",
            f"training_args: {training}  # one optimizer step a batch",
            start.data_section("data_args", start.data),
        ),
        start.role("actor_infer", start.engine, f"generating_args: {SAMPLING}"),
        f"rewards:\n  {start.reward.rpartition('.')[2]}:\n    worker_cls: {start.reward}",
    ]
    return "\n\n".join([*parts, *start.held_out(f"generating_args: {SAMPLING}")])


def supervised(start: Start, pipeline: str, role: str, *lines: str, rate: str = "1.0e-5", more: str = "") -> str:
    """A method that learns from the rows alone; ``more`` goes into the section of its role."""
    length, batch = start.prompt_length + start.response_length, 2 * start.whole(16)
    learner = start.role(
        role,
        "fsdp2_train",
        *([more] if more else []),
        f"training_args: {start.training(rate, batch, 2)}  # {batch} rows an optimizer step",
        start.data_section("data_args", start.data),
    )
    head = start.head(pipeline, *lines, f"sequence_length: {length}              # tokens; longer rows are left out")
    return "\n\n".join([head, learner, *start.held_out()])


def sft(start: Start) -> str:
    return supervised(start, "sft", "sft_train", f"pretrain: {quoted(start.model)}")


def dpo(start: Start) -> str:
    reference = start.role("reference", "fsdp2_infer")
    lines = (f"pretrain: {quoted(start.model)}", "loss_type: sigmoid", "beta: 0.1")
    return f"{supervised(start, 'dpo', 'actor_train', *lines, rate='5.0e-7')}\n\n{reference}"


def rm(start: Start) -> str:
    lines = (f"pretrain: {quoted(start.model)}", "loss_type: bradley_terry")
    head = "model_args: {model_type: auto_sequence_classification}"
    return supervised(start, "rm", "reward_train", *lines, more=head)


def distill(start: Start) -> str:
    models = (f"student_pretrain: {quoted(start.model)}", f"teacher_pretrain: {quoted(start.teacher or '')}")
    lines = (*models, "kd_objective: forward_kl")
    return f"{supervised(start, 'distill', 'student', *lines)}\n\n{start.role('teacher', 'fsdp2_infer')}"


def agent(start: Start) -> str:
    tasks = start.whole(8)
    training = start.training("1.0e-6", tasks * GROUP, AT_A_TIME)
    parts = [
        start.head(
            "agentic",
            f"pretrain: {quoted(start.model)}",
            f"rollout_batch_size: {tasks * GROUP}            # episodes of a step",
            "val_batch_size: 32",
            "sequence_length: 2048             # tokens of an episode",
            "adv_estimator: grpo",
            "ppo_epochs: 1",
        ),
        ENVIRONMENTS.format(tasks=tasks, group=GROUP),
        start.role("actor_train", "fsdp2_train", f"training_args: {training}"),
        start.role("actor_infer", start.engine, f"generating_args: {SAMPLING}"),
    ]
    return "\n\n".join(parts)


KINDS: dict[str, Callable[[Start], str]] = {
    "grpo": grpo,
    "sft": sft,
    "dpo": dpo,
    "rm": rm,
    "distill": distill,
    "agent": agent,
}


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
    return power_of_two(max(prompts)), power_of_two(max(responses))


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(str(message.get("content", "")) for message in messages)


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def token_counter(model: str) -> Callable[[str], int]:
    """Tokens of a text, by the tokenizer of a model that is on this machine, else as three characters a token.

    Raises:
        ConfigError: no model, or one without a tokenizer that can be read.
    """
    try:
        require_model(model)
        if (folder := model_folder(model)) is None:
            return lambda text: len(text) // 3 + 1
        from roll.pipelines.files import load_tokenizer

        tokenizer = load_tokenizer(str(folder), False)
    except (OSError, ValueError) as error:
        raise ConfigError([Problem("--model", model, str(error))]) from error
    return lambda text: len(tokenizer.encode(text))


def reward_of(row: Row) -> str:
    """The rule that scores such rows; empty: nothing in them says what a right response is."""
    found = next((rule for column, rule in RULE_OF_COLUMN.items() if row.get(column) is not None), None)
    return found or ("" if read_ground_truth(row) is None else "math_rule")


def column_names(words: Sequence[str]) -> dict[str, str]:
    """The words of ``--columns``.

    Raises:
        ConfigError: a word that is written otherwise.
    """
    for word in words:
        if not re.fullmatch(f"({'|'.join(COLUMN_KEYS)})=.+", word):
            rule = f"must be KEY=COLUMN, with a key of {', '.join(COLUMN_KEYS)}"
            raise ConfigError([Problem("--columns", word, rule, "ground_truth='Correct answer'")])
    return dict(word.split("=", 1) for word in words)


def with_data(start: Start, arguments: argparse.Namespace) -> Start:
    """With files, lengths and reward.

    Raises:
        ConfigError: data that do not fit the method.
    """
    kind, file, columns, found = start.kind, arguments.data, column_names(arguments.columns), ""
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
        if kind == "grpo" and not (reward := reward or reward_of(row)):
            raise DataError("its rows have no ground truth, and no reward of your own is named by --reward")
        prompt, response = lengths(kind, rows, token_counter(start.model), names)
    except DataError as error:
        hint = f"; the columns are {found}: say by --columns which is which" if found else ""
        raise ConfigError([Problem("--data", file, f"{error}{hint}")]) from error
    positions = model_number(start.model, "max_position_embeddings")
    if positions is not None and prompt + response > positions:
        prompt = min(prompt, positions // 2)
        response = positions - prompt
    return replace(
        start,
        data=file,
        columns=columns,
        validation=arguments.validation,
        teacher=getattr(arguments, "teacher", None),
        reward=reward,
        prompt_length=prompt,
        response_length=response,
    )


def main(argv: Sequence[str]) -> int:
    """Exit status 0.

    Raises:
        ConfigError: data that do not fit, or a file that is there.
    """
    arguments = build_parser().parse_args(argv)
    if arguments.kind == "recipes":
        for folder in copy_recipes(Path(arguments.folder)):
            sys.stdout.write(f"wrote {folder}\n")
        return 0
    output = Path(arguments.output or f"{arguments.kind}.yaml")
    if output.exists():
        raise ConfigError([Problem("--output", str(output), "is there and is not replaced", f"my_{output.name}")])
    kind = arguments.kind
    start = Start(kind, arguments.model, arguments.gpus)
    if kind != "agent":
        start = with_data(start, arguments)
    subject = f"{kind} of {start.model}" + (f" on {start.data}" if start.data else "")
    title = f"# {subject}: `roll check {output}`, then `roll run {output}`."
    output.write_text(f"{title}\n{KINDS[kind](start)}\n", encoding="utf-8")
    sys.stdout.write(f"wrote {output}: roll check {output}, then roll run {output}\n")
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll init", description="Write a first configuration for a model and a data file, or copy the recipes."
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    texts = {
        "grpo": "reinforcement learning from verifiable rewards",
        "sft": "supervised learning from demonstrations",
        "dpo": "preferences: chosen and rejected responses",
        "rm": "a reward model from chosen and rejected responses",
        "distill": "a student learns its teacher's distributions",
        "agent": "reinforcement learning in an environment",
    }
    for kind, text in texts.items():
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
