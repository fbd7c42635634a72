"""The inputs of a check, and the checks of data files, schedules and checkpoints that pipelines call.

A check is silent about keys that were wrong by themselves already, so that one mistake gives one message.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from roll.config.data import TEMPLATE_ENDINGS, name_problem
from roll.config.pipelines import PipelineDefinition, Written
from roll.config.reading.errors import ConfigError, Problem, Problems
from roll.config.reading.yaml_files import shown
from roll.config.roles import DECAY_TYPES, LR_SCHEDULER_OPTIONS, DataArguments, WorkerConfig
from roll.config.run import RunConfig


@dataclass(frozen=True)
class Checks:
    """Inputs of a check."""

    problems: Problems
    written: Written
    check_files: bool
    pipeline: PipelineDefinition  # whose configuration is checked
    # A key is written in the file itself or on the command line, not in a file of its `defaults`, which holds what
    # several files share.
    is_own: Callable[[str], bool] = field(default=lambda key: True)

    def add(self, key: str, value: object, rule: str, example: object = None) -> None:
        """Report a mistake, unless the key has one already."""
        if not self.broken(key):
            self.problems.add(key, value, rule, example)

    def missing(self, key: str, rule: str, example: object = None) -> None:
        if not self.broken(key):
            self.problems.missing(key, rule, example)

    def note(self, key: str, text: str) -> None:
        self.problems.note(key, text)

    def broken(self, *keys: str) -> bool:
        """True when one of the keys, or a section above or a key below it, has a mistake already."""
        return any(
            error.key == key or error.key.startswith(f"{key}.") or key.startswith(f"{error.key}.")
            for error in self.problems.errors
            for key in keys
        )


STREAMED = "sft_train.data_args"  # the section whose rows may be prepared as they are needed


def check_data_files(key: str, arguments: DataArguments, checks: Checks) -> None:
    """At least one data file, each of a known kind and there."""
    names = arguments.file_name
    if arguments.streaming and key != STREAMED:
        checks.add(f"{key}.streaming", True, f"is for {STREAMED}: these rows are all prepared at the start", False)
    if not names:
        checks.missing(f"{key}.file_name", "is needed: the data file or files", "[data/train.jsonl]")
        return
    for name in [names] if isinstance(names, str) else names:
        rule = name_problem(name, checks.check_files)
        if rule is not None:
            example = f"{Path(name).stem or 'train'}.jsonl" if rule.startswith("must be") else None
            checks.add(f"{key}.file_name", name, rule, example)
    if arguments.filter_overlong_prompts and arguments.truncation != "error":
        checks.note(f"{key}.truncation", "has no effect with filter_overlong_prompts: true")
    check_template_file(f"{key}.template", arguments.template, checks)


def check_template_file(key: str, template: str | None, checks: Checks) -> None:
    """A template that is a file is there."""
    if template is None or not template.endswith(TEMPLATE_ENDINGS) or not checks.check_files:
        return
    if not os.path.isfile(Path(template).expanduser()):
        checks.add(key, template, f"no such file (relative names start from {Path.cwd()})")


def check_columns(key: str, arguments: DataArguments, checks: Checks) -> None:
    if arguments.prompt is not None and arguments.messages is not None:
        rule = f"excludes {key}.messages ({arguments.messages}): keep the one that the file has"
        checks.add(f"{key}.prompt", arguments.prompt, rule)


def check_resume(config: RunConfig, checks: Checks) -> None:
    path = config.resume_from_checkpoint
    if not isinstance(path, str) or not checks.check_files or "://" in path:
        return  # a URL is looked up in its store, by roll.preflight.check_resumption
    if not os.path.isdir(Path(path).expanduser()):
        checks.add("resume_from_checkpoint", path, "no such checkpoint folder; true continues from the newest", "true")


def check_output(folder: Path, source: Path) -> None:
    """Check that this user may create files in ``output_dir``, or the folder itself; nothing is created. Raises
    ``ConfigError``: a file is in its way, or the right to write is missing."""
    nearest = folder.absolute()
    while not os.path.exists(nearest):
        nearest = nearest.parent
    if not os.path.isdir(nearest):
        raise unwritable(folder, f"{nearest} is a file", source)
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise unwritable(folder, f"no right to write in {nearest}, or a read-only disk", source)


def unwritable(folder: Path, reason: str | None, source: Path) -> ConfigError:
    """The mistake of an ``output_dir`` that cannot be written."""
    rule = f"cannot be written ({reason}): give the user of the run the right to write there, or name another folder"
    return ConfigError([Problem("output_dir", str(folder), rule, "./output", shown(source))])


def check_schedule(name: str, role: WorkerConfig, total_steps: int | None, checks: Checks) -> None:
    """Warm-up within the run, and options that the schedule has."""
    kind, options = role.training_args.lr_scheduler_type, role.training_args.lr_scheduler_kwargs
    known = LR_SCHEDULER_OPTIONS.get(kind, tuple(options))
    for option, value in options.items():
        path = f"{name}.training_args.lr_scheduler_kwargs.{option}"
        if option not in known:
            checks.add(path, value, f"{kind} has no such option; it has {', '.join(known) or 'none'}")
        elif option == "decay_type" and value not in DECAY_TYPES:
            checks.add(path, value, f"must be one of {', '.join(DECAY_TYPES)}", DECAY_TYPES[0])
        elif option != "decay_type" and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            checks.add(path, value, "must be a number of at least 0", 0.5)
    warmup, key = role.training_args.warmup_steps, f"{name}.training_args.warmup_steps"
    if total_steps is not None and warmup >= total_steps > 0:
        checks.note(
            key, f"{warmup} warm-up steps, but the run makes {total_steps} optimizer steps: full rate is never reached"
        )
