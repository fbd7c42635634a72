"""The Python interface: read a configuration, check it, run it.

    run = roll.run("examples/tiny/rlvr_config.yaml", ["max_steps=3"], callbacks=[MyCallback()])
    pandas.DataFrame(run.metrics)

A configuration is a YAML file, a mapping with the same keys, or what :func:`load_config` has returned. Where it is a
mapping, in the file's place or as overrides, functions and classes may be given themselves instead of their dotted
paths.
"""

from __future__ import annotations

import asyncio
import contextvars
import io
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from roll.config import loader
from roll.config.checks.base import check_output
from roll.config.loader import LoadedConfig
from roll.config.objects import path_of
from roll.config.plan.plan import Plan
from roll.config.plan.render import line, render_plan
from roll.config.reading.compose import hydra_value
from roll.config.reading.errors import ConfigError, Notice, Problem
from roll.distributed.forked_workers import forking
from roll.preflight import check_first_rows, check_parts, check_resumption, ready
from roll.rehearsal.catalog import find_gpu
from roll.rehearsal.formulas import misfits, quick_lines
from roll.report.page import write_report
from roll.report.run_files import REPORT_NAME, read_run
from roll.tracking.callbacks import STOP, Callbacks, sample_rows

logger = logging.getLogger(__name__)

Config = str | os.PathLike[str] | Mapping[str, Any] | LoadedConfig[Any]
Overrides = Sequence[str] | Mapping[str, Any]

NO_FILE = Path("(config)")
"""In place of the file of a configuration that is a mapping."""


def load_config(config: Config, overrides: Overrides = (), *, check_files: bool = True) -> LoadedConfig[Any]:
    """Read a configuration as the command line does: ``defaults``, ``${...}``, overrides, every check of keys.

    Args:
        config: a YAML file, also relative to ``examples/``; a mapping, whose ``defaults`` are relative to the working
            directory; or a configuration that was read before, which is read again.
        overrides: ``key=value``, ``+new.key=value``, ``~key``; or a mapping from dotted keys to values.
        check_files: data files and model folders must exist.

    Raises:
        ConfigError: every mistake, each with its key, value and rule.
    """
    words = (overrides,) if isinstance(overrides, str) else tuple(overrides)
    if isinstance(overrides, Mapping):
        words = tuple(f"{key}={hydra_value(plain(value, key))}" for key, value in overrides.items())
    if isinstance(config, LoadedConfig):
        words = (*config.overrides, *words)
        config = config.source if config.written is None else config.written
    if isinstance(config, Mapping):
        return _load_mapping(plain(config), words, check_files)
    return loader.load_config(None, Path(config), None, words, check_files=check_files)


def _load_mapping(data: dict[str, Any], words: tuple[str, ...], check_files: bool) -> LoadedConfig[Any]:
    """By way of a file, so that hydra composes it like any other."""
    with tempfile.TemporaryDirectory(prefix="roll-config-") as folder:
        file, files = Path(folder) / "run.yaml", data.get("defaults")
        entries = list(files) if isinstance(files, list) else []
        for place, entry in enumerate(entries):
            if isinstance(entry, str) and entry != "_self_" and not entry.startswith("/"):
                # A file is named from the working directory, and looked for from this folder.
                name, at, package = entry.partition("@")
                entries[place] = f"{os.path.relpath(name, folder)}{at}{package}"
        written = {**data, "defaults": entries} if entries else data
        file.write_text(yaml.safe_dump(written, sort_keys=False, allow_unicode=True), encoding="utf-8")
        try:
            loaded: LoadedConfig[Any] = loader.load_config(None, file, None, words, check_files=check_files)
        except ConfigError as error:
            raise ConfigError(
                [replace(one, source="") if file.parent.name in one.source else one for one in error.problems]
            ) from None
    return replace(loaded, source=NO_FILE, written=data)


def plain(value: object, key: str = "") -> Any:
    """The value as YAML has it, with dotted paths for functions and classes.

    Raises:
        ConfigError: a value that is neither data nor callable, or an object that cannot be sent to the workers.
    """
    if isinstance(value, Mapping):
        return {str(name): plain(inner, f"{key}.{name}" if key else str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, f"{key}[{index}]") for index, inner in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not callable(value):
        rule = f"is a {type(value).__name__}: must be a number, a text, a list, a mapping, a function or a class"
        raise ConfigError([Problem(key, value, rule)])
    try:
        return path_of(value, lambda one: bytes(import_module("ray.cloudpickle").dumps(one)))
    except Exception as error:  # whatever its parts raise when they are pickled
        rule = f"cannot be sent to the workers ({type(error).__name__}: {error}): put it into a module, and import it"
        raise ConfigError([Problem(key, repr(value), rule)]) from error


@dataclass(frozen=True)
class Check:
    """Findings of :func:`check`; as text, what ``roll check`` prints."""

    problems: tuple[Problem, ...]
    """Everything that keeps the configuration from running."""
    notes: tuple[Notice, ...] = ()
    """Values that were accepted and that the user should know of."""
    plan: Plan | None = field(default=None, repr=False)
    """None: there are problems."""
    config: LoadedConfig[Any] | None = field(default=None, repr=False)

    def show(self, console: Console) -> None:
        """Print it."""
        if self.config is None:
            console.print(str(ConfigError(self.problems)), markup=False, highlight=False, soft_wrap=True)
            return
        render_plan(self.config, console)
        for role, text in quick_lines(self.config.plan):
            console.print(line("memory      ", "bold", f"{role}: {text}"), soft_wrap=True)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), emoji=False, width=120)
        with console.capture() as captured:
            self.show(console)
        return captured.get()


def check(config: Config, overrides: Overrides = (), *, check_files: bool = True, gpu: str | None = None) -> Check:
    """Check a configuration without starting anything: keys, files, the user's own code, the checkpoint to resume.

    Args:
        check_files: data files and model folders must exist.
        gpu: the accelerator on which all roles must fit, a name as of ``roll rehearse``.
    """
    try:
        loaded = load_config(config, overrides, check_files=check_files)
        check_parts(loaded)
        if check_files:
            check_output(loaded.plan.output_dir, loaded.source)
            check_first_rows(loaded)
            check_resumption(loaded)
        if gpu is not None and (problems := misfits(loaded.plan, find_gpu(gpu))):
            raise ConfigError(problems)
    except ConfigError as error:
        return Check(error.problems)
    return Check((), loaded.warnings, loaded.plan, loaded)


@dataclass(frozen=True)
class Run:
    """A run that has ended; its files are read when they are asked for."""

    config: LoadedConfig[Any]

    @property
    def output_dir(self) -> Path:
        return self.config.plan.output_dir

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row a step, as ``pandas.DataFrame`` takes them; rows of evaluations are merged into those of steps."""
        return read_run(self.output_dir).metrics

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Rows of :func:`roll.tracking.callbacks.sample_rows`, in the order of the record (``sample_log``)."""
        blocks, decode = read_run(self.output_dir).blocks(), lambda ids: str(self._tokenizer.decode(list(ids)))
        return [row for block in blocks for row in sample_rows(block, decode)]

    @property
    def model_path(self) -> Path | None:
        """Folder of the trained model in Hugging Face format; None without ``training_args.save_hf_model``."""
        path, began = self.output_dir / "model", read_run(self.output_dir).about["began"]
        return path if path.is_dir() and path.stat().st_mtime >= began else None

    @property
    def report(self) -> Path:
        """The page of ``roll report``, which is written unless the run has written it."""
        path = self.output_dir / REPORT_NAME
        if not path.is_file():
            write_report(self.output_dir)
        return path

    @cached_property
    def _tokenizer(self) -> Any:
        from roll.pipelines.files import load_tokenizer

        role = self.config.plan.roles[self.config.pipeline.reading_role()]
        return load_tokenizer(role.model_path, role.section.model_args.trust_remote_code)

    def __repr__(self) -> str:
        return f"<run {self.config.plan.exp_name}: {self.output_dir}>"


class _OnInterrupt:
    """Ends the run after the step in flight, when the thread that waits for it is interrupted."""

    requested = False

    def on_step(self, step: int, metrics: Mapping[str, float]) -> Any:
        return STOP if self.requested else None


def run(config: Config, overrides: Overrides = (), callbacks: Sequence[Any] = ()) -> Run:
    """Run the pipeline of a configuration to its end.

    Ray is started for the run, unless this process is connected to one (``ray.init()``), which is used and left as it
    is. Where an event loop runs in this thread (Jupyter), the run has a thread of its own, and a ``KeyboardInterrupt``
    ends it after the step in flight, as :data:`roll.STOP` does; elsewhere Ctrl-C saves a checkpoint first.

    Args:
        config: see :func:`load_config`.
        callbacks: objects as of :class:`roll.Callback`, called in this process.

    Raises:
        ConfigError: a configuration that cannot run; nothing has started.
        TypeError: an object that is no callback; nothing has started.
        KeyboardInterrupt: Ctrl-C. As any other error of the run, it has an account of how to go on as a note.
    """
    interrupt = _OnInterrupt()
    own = Callbacks((*callbacks, interrupt))
    loaded = ready(partial(load_config, config, overrides), logger.warning)
    refuse_restarts(loaded)
    loaded = replace(loaded, callbacks=(*callbacks, interrupt))
    finished = Run(loaded)

    def work() -> None:
        with obeying_signals(loaded), forking(loaded):
            loaded.pipeline.run(loaded)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        work()
    else:
        _in_thread(work, interrupt)
    own.call("on_end", finished)
    return finished


def refuse_restarts(loaded: LoadedConfig[Any]) -> None:
    """Raise ``ConfigError`` for a run that is to be started again where it fails."""
    if loaded.config.max_restarts or loaded.config.on_nonfinite == "rewind":
        rule = "a run is started again in a process of its own, which `roll run` does: from Python it is not"
        key, example = ("max_restarts", 0) if loaded.config.max_restarts else ("on_nonfinite", "stop")
        raise ConfigError([Problem(key, getattr(loaded.config, key), rule, example)])


@contextmanager
def obeying_signals(loaded: LoadedConfig[Any]) -> Iterator[None]:
    """Obey the signals that ask a run to end; Ctrl-C is a ``KeyboardInterrupt`` when the block has ended."""
    from roll.distributed.failures import needing_room
    from roll.distributed.signals import Interrupted, ending

    try:
        with ending.handled(), needing_room(loaded.plan.output_dir):
            yield
    except Interrupted as interruption:
        if interruption.signal is not signal.SIGINT:
            raise
        error = KeyboardInterrupt(str(interruption))
        for note in getattr(interruption, "__notes__", ()):
            error.add_note(note)
        raise error from None


def _in_thread(work: Callable[[], None], interrupt: _OnInterrupt) -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="roll-run") as pool:
        call = pool.submit(contextvars.copy_context().run, work)
        while not call.done():
            try:
                call.exception()
            except KeyboardInterrupt:
                interrupt.requested = True
                logger.warning("interrupted: the run ends after the step in flight")
        call.result()
