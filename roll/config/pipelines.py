"""The definition of a pipeline and its parts: everything that loader, checks, planner and trackers need to know of it.

A pipeline is one folder, ``roll/pipelines/<name>/``, whose ``definition.py`` derives from :class:`PipelineDefinition`.
Such a module imports neither torch nor ray at its top, since ``roll check`` imports it too."""

from __future__ import annotations

import inspect
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pkgutil import resolve_name
from typing import Any, ClassVar, Generic

from typing_extensions import TypeVar

from roll.config.objects import imported
from roll.config.plan.plan import Plan
from roll.config.reading.errors import ConfigError, Problem
from roll.config.rewards import worker_name
from roll.config.roles import DataArguments, WorkerConfig
from roll.config.run import RunConfig
from roll.config.strategies.base import own_weights
from roll.config.strategies.registry import (
    all_scoring_strategies,
    generation_strategies,
    infer_strategies,
    train_strategies,
)

C = TypeVar("C", bound=RunConfig, default=Any)
P = TypeVar("P", bound=Plan, default=Any)
Written = Callable[[str], bool]  # says whether a key path is written, in a file or on the command line


@dataclass(frozen=True)
class Task:
    """Work that a role does with its model, and the strategies that can do it."""

    name: str
    able: Callable[[], tuple[str, ...]]
    """Values of ``strategy_name``; a call, since installed packages add strategies of their own."""


@dataclass(frozen=True)
class Role:
    """A role of a pipeline, which is a section of its files."""

    name: str
    """Key of the section."""
    task: Task
    optional: bool = False
    """A file may leave the section out."""
    has_own_head: bool = False
    """Its model has a head of its own (values, scores) in place of an output matrix."""


@dataclass(frozen=True, slots=True)
class Headline:
    """A number worth a place in the progress line: metric ``key``, shown after ``label`` as ``format`` says."""

    key: str
    label: str
    format: str = "{:.3f}"


@dataclass(frozen=True)
class Panel:
    """One chart of the report."""

    title: str
    keys: tuple[str, ...]  # the metrics drawn, where the log has them; `*` matches one part between slashes
    first_only: bool = False  # draw only the first key that the log has
    unit_range: bool = False  # the axis shows 0 to 1
    smooth: bool = False  # draw a moving average over the raw curve
    # A metric that is 0 in every step says nothing, such as the KL of a run without a reference whose updates are
    # on-policy.
    zero_is_none: bool = False


@dataclass(frozen=True)
class ReadableSet:
    """A set of rows that a run reads, for ``roll inspect-data``."""

    name: str
    data_args: DataArguments
    limit: int
    """Most tokens of a row."""
    read: Callable[[Any], Any]
    """From a tokenizer to the data set."""
    remarks: Callable[[Any], list[str]] = field(default=lambda counts: [])
    """Remarks on the counts of the data set."""


TRAINS = Task("trains", train_strategies)
COMPUTES_LOG_PROBS = Task("computes log-probs", infer_strategies)
TEACHES = Task("computes log-probs as a teacher", all_scoring_strategies)
GENERATES = Task("generates", generation_strategies)
SCORES = Task("scores responses", infer_strategies)

_PLACE = frozenset(
    (
        *("name", "worker_cls", "model_args", "strategy_args", "device_mapping", "num_gpus_per_worker", "world_size"),
        *("backend_timeout", "system_envs", "max_concurrency"),
    )
)
_FORWARD = frozenset(
    (
        *("use_prefix_sharing", "use_remove_padding", "use_sequence_packing", "sequence_packing_args"),
        *("infer_batch_size", "use_dynamic_batching_in_infer"),
        *("max_tokens_per_microbatch_in_infer", "sequence_length_round_in_infer"),
    )
)
_TRAIN = frozenset(
    (
        *("training_args", "use_dynamic_batching_in_train"),
        *("max_tokens_per_microbatch_in_train", "sequence_length_round_in_train"),
    )
)
# Keys of a role that learns from the run's data, beyond those of every trained role.
POLICY_KEYS = frozenset(("data_args",))
# The keys of `WorkerConfig` that a role reads, by its task.
READ_KEYS = {
    TRAINS: _PLACE | _FORWARD | _TRAIN,
    COMPUTES_LOG_PROBS: _PLACE | _FORWARD,
    TEACHES: _PLACE | _FORWARD,
    SCORES: _PLACE | _FORWARD,
    GENERATES: _PLACE | {"generating_args"},
}


class PipelineDefinition(ABC, Generic[C, P]):
    """A pipeline as the rest of the package sees it.

    A definition derives from this class, says its ``name``, ``config_class`` and ``roles``, and has at least
    :meth:`check`, :meth:`plan`, and ``pipeline_class`` or :meth:`run`. All other methods have defaults. ``checks`` is a
    :class:`roll.config.checks.base.Checks`, ``loaded`` a :class:`roll.config.loader.LoadedConfig` of ``config_class``.
    """

    name: ClassVar[str]
    config_class: ClassVar[type]
    """A dataclass on top of :class:`roll.config.run.RunConfig`."""
    roles: ClassVar[tuple[Role, ...]]
    """The roles that hold a model."""
    headlines: ClassVar[tuple[Headline, ...]] = ()
    """The numbers of the progress line."""
    panels: ClassVar[tuple[Panel, ...]] = ()
    """Plots of a run, besides the time of its phases."""
    pipeline_class: ClassVar[str] = ""
    """Dotted path of the class that :meth:`run` makes of a loaded configuration and runs; one that records batches has
    ``replay(recorded)``. It is imported late, since it needs torch."""
    compares_log_probs: ClassVar[bool] = False
    """A trained role's log-probs or values are compared with those of an earlier pass."""
    published_workers: ClassVar[tuple[str, ...]] = ()
    """Worker classes of ROLL's published files that stand for a role's own worker."""
    reference: ClassVar[tuple[tuple[str, type, tuple[type, ...]], ...]] = ()
    """Tables of the configuration reference: heading, class, and the classes whose fields stand elsewhere."""
    section_tables: ClassVar[tuple[tuple[str, type, tuple[type, ...]], ...]] = ()
    """Further tables, of the sections that only files of this pipeline have."""

    section_aliases: ClassVar[Mapping[str, str]] = {}
    """Other names of sections at the top of a file, such as those of ROLL."""

    # What every pipeline must have

    @abstractmethod
    def check(self, config: C, checks: Any) -> None:
        """Check across keys; mistakes and notes go to ``checks``. :func:`~roll.config.checks.roles.check_roles`
        does most."""

    @abstractmethod
    def plan(self, config: C, exp_name: str, written: Written) -> P:
        """The plan of a configuration without mistakes, on top of :func:`roll.config.plan.planning.shared_plan`."""

    # Runs

    def run(self, loaded: Any) -> int | None:
        """Run to the end; the exit status, None: 0. Heavy packages are imported here."""
        status: int | None = resolve_name(self.pipeline_class)(loaded).run()
        return status

    def replay(self, loaded: Any, recorded: Any) -> tuple[int, dict[str, float]]:
        """Take the step of a recorded batch (:class:`roll.pipelines.batches.RecordedBatch`) again.

        Returns:
            The steps that the models had done before, and the metrics of the step.

        Raises:
            ConfigError: this pipeline records no batches.
        """
        runs: Any = resolve_name(self.pipeline_class) if self.pipeline_class else None
        if not hasattr(runs, "replay"):
            raise ConfigError([Problem("pipeline", self.name, "records no batches that could be replayed")])
        replayed: tuple[int, dict[str, float]] = runs(loaded).replay(recorded)
        return replayed

    # Roles

    def models(self, config: C) -> dict[str, WorkerConfig]:
        """The sections of the roles that hold a model and that this run starts, by role."""
        sections = {role.name: getattr(config, role.name) for role in self.roles}
        return {name: section for name, section in sections.items() if section is not None}

    def started(self, config: C) -> dict[str, WorkerConfig]:
        """The sections of every role whose workers this run starts."""
        return self.models(config)

    def task_of(self, key: str, section: WorkerConfig) -> Task:
        """Task of the role whose section is at ``key``."""
        return next(role.task for role in self.roles if role.name == key)

    def section_key(self, role: str) -> str:
        """The key of the section that describes a role."""
        return role

    def default_model(self, config: C, role: str) -> tuple[str, str | None]:
        """Key and model of a role whose section names none."""
        return "pretrain", getattr(config, "pretrain", "") or None

    def model(self, config: C, role: str, section: WorkerConfig) -> tuple[str, str | None]:
        """Folder, GGUF file or hub name of the model that a role loads, after the key that names it; None: no key
        does."""
        own = section.model_args.model_name_or_path
        if own is not None:
            return f"{self.section_key(role)}.model_args.model_name_or_path", own
        return self.default_model(config, role)

    def named_models(self, loaded: Any) -> Iterator[tuple[str, str]]:
        """Key and folder, file or hub name of every model that a run loads."""
        for name, section in self.models(loaded.config).items():
            key, path = self.model(loaded.config, name, section)
            if path is not None:
                yield key, path

    def longest_row(self, config: Any) -> int:
        """Tokens of the longest row that a model computes."""
        return int(config.sequence_length)

    def worker_name(self, role: str, section: WorkerConfig) -> str | None:
        """Dotted path of the user's own worker class; None: the role's own. Published class paths become short names,
        or None for the classes that stand for a role's own worker."""
        return worker_name(section.worker_cls, self.published_workers)

    def distributions(self, config: C, role: str) -> tuple[int | None, int | None]:
        """Tokens of each distribution that a role is compared with in training, and that it gives; 0: all, None:
        none."""
        return None, None

    # Notes on keys without effect

    def is_role(self, key: str) -> bool:
        """Return true for the section of a role that holds a model."""
        return any(role.name == key for role in self.roles)

    def reads(self, key: str, section: WorkerConfig, config: C) -> frozenset[str]:
        """The keys of :class:`WorkerConfig` that the section at ``key`` is read for."""
        if not self.is_role(key):
            return frozenset(("data_args",))
        task = self.task_of(key, section)
        return READ_KEYS[task] | (POLICY_KEYS if task is TRAINS else frozenset())

    def effective(self, config: C) -> dict[str, Any]:
        """Keys whose effective value is not the one that is written at the top."""
        return {}

    # What a terminal shows

    def batch_facts(self, plan: P) -> list[tuple[str, str]]:
        """Label and sentence of the batch arithmetic."""
        only = len(plan.training) == 1
        return [("batch" if only else name, training.sentence()) for name, training in plan.training.items()]

    def facts(self, plan: P) -> list[tuple[str, str]]:
        """Label and sentence of what only this pipeline has."""
        return []

    def validation_words(self, plan: P) -> str:
        """Further words on validations in the sentence on steps."""
        return ""

    # Before a run, and instead of one

    def check_parts(self, loaded: Any) -> None:
        """Problems that only the parts themselves can find, before anything starts.

        Raises:
            ConfigError: every mistake.
        """

    def check_services(self, loaded: Any) -> None:
        """Problems with what the run needs from elsewhere, asked right before it starts: services, tokenizers of a hub.

        Raises:
            ConfigError: every mistake.
        """

    def check_host(self, loaded: Any) -> None:
        """Requirements of the run on this host.

        Raises:
            ConfigError: a requirement that is not met.
        """

    def own_functions(self, loaded: Any) -> Iterator[tuple[str, Any, Callable[[], object]]]:
        """(key, value, look-up) of what a user may have written a function for; nothing is imported for the known
        names. A look-up raises ``ValueError``."""
        yield from ()

    def filtered_sections(self, config: C) -> dict[str, Any]:
        """Sections with ``data_args`` whose ``dataset_filter`` may be a user's own function, by key."""
        names = (*(role.name for role in self.roles if role.task is TRAINS), "validation")
        sections = {name: getattr(config, name, None) for name in names}
        return {name: section for name, section in sections.items() if section is not None}

    def resumption_problems(
        self, loaded: Any, checkpoint: str, state: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any, str]]:
        """Key, value and rule of what keeps a run from taking up all of the ``state`` in the folder ``checkpoint``."""
        yield from ()

    def first_row_readers(self, loaded: Any) -> Iterator[tuple[str, DataArguments, Callable[[Any], object]]]:
        """Data sections by key, with what reads a row as training will, as far as that needs no tokenizer. It is given
        a :class:`roll.datasets.reading.SourceRow` and raises ``DataError``."""
        yield from ()

    def readable_sets(self, loaded: Any) -> dict[str, ReadableSet]:
        """The sets that a run reads, by name."""
        return {}

    def reading_role(self) -> str:
        """The role whose tokenizer reads these sets: the first that trains, else the first."""
        return next((role.name for role in self.roles if role.task is TRAINS), self.roles[0].name)

    def served_section(self, loaded: Any, role: str) -> WorkerConfig:
        """The section of a generating role as ``roll serve`` starts its engines."""
        return own_weights(loaded.plan.roles[role].section)

    def running_requests(self, config: C) -> int:
        """Prompts that an engine works on at a time."""
        return 128


@dataclass(frozen=True)
class PipelineEntry:
    """A line of the registry."""

    name: str
    start_keys: tuple[str, ...]
    """A file that sets one of these is for this pipeline; the first line with one that is set counts."""
    definition: str
    """Dotted path of its :class:`PipelineDefinition`."""


PIPELINES = (
    PipelineEntry("sft", ("sft_train",), "roll.methods.sft_keys.SFT"),
    PipelineEntry(
        "agentic", ("train_env_manager", "val_env_manager", "custom_envs"), "roll.pipelines.agentic.definition.Agentic"
    ),
    PipelineEntry("rm", ("reward_train",), "roll.methods.reward_model_keys.RewardModel"),
    PipelineEntry("evaluate", ("evaluate",), "roll.pipelines.evaluate.definition.Evaluate"),
    PipelineEntry("agentic_rollout", (), "roll.pipelines.evaluate.definition.AgenticRollout"),
    PipelineEntry("dpo", ("chosen_key", "rejected_key", "ipo", "loss_type"), "roll.methods.preferences_keys.DPO"),
    PipelineEntry(
        "distill", ("student", "distill_loss_weight", "student_pretrain"), "roll.methods.distill_keys.Distill"
    ),
    PipelineEntry(
        "opd",
        ("student_train", "student_infer", "is_pure_opd", "pure_opd_pipeline_type"),
        "roll.pipelines.rlvr.definition.OPD",
    ),
    PipelineEntry("rlvr", ("rewards", "actor_infer", "rollout_batch_size"), "roll.pipelines.rlvr.definition.RLVR"),
)
NAMES = tuple(sorted(entry.name for entry in PIPELINES))


@cache
def definition_of(name: str) -> PipelineDefinition:
    """The definition of one of :data:`NAMES`."""
    return load_definition(next(entry.definition for entry in PIPELINES if entry.name == name))


def definitions() -> tuple[PipelineDefinition, ...]:
    return tuple(definition_of(name) for name in NAMES)


def load_definition(path: str) -> PipelineDefinition:
    """The definition at a dotted path, such as ``my_module.MyPipeline``. Raises ``ValueError``: there is nothing at the
    path, or no complete subclass of :class:`PipelineDefinition`."""
    try:
        found = imported(path)
    except ImportError as error:
        raise ValueError(f"cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, PipelineDefinition)):
        raise ValueError("must be a subclass of roll.config.pipelines.PipelineDefinition")
    cannot_run = not found.pipeline_class and found.run is PipelineDefinition.run
    lacking = sorted([*found.__abstractmethods__, *(["run"] if cannot_run else [])])
    lacking += [name for name in ("name", "config_class", "roles") if not hasattr(found, name)]
    if inspect.isabstract(found) or lacking:
        raise ValueError(f"is not complete: it has no {', '.join(lacking)}")
    return found()


def find_own_modules() -> None:
    """Put the working directory on the module path, as Ray's workers and ``python -m`` do; an installed command and a
    script start with their own folder there instead."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
