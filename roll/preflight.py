"""Checks right before a run starts: optional packages, models of the hub, the user's own code, the checkpoint that it
goes on with."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial, reduce
from pathlib import Path
from typing import Any

from roll.checkpoint.contents import STATE_NAME as TRAINER_STATE
from roll.checkpoint.contents import (
    CheckpointMismatchError,
    frozen_mismatches,
    read_contents,
    read_trainer_state,
    strategy_problem,
)
from roll.checkpoint.folders import PIPELINE_FOLDER, STATE_NAME, CheckpointDamagedError
from roll.checkpoint.manager import probable_checkpoint
from roll.checkpoint.store import ObjectStore, is_url, store_problem
from roll.config.checks.base import check_output
from roll.config.checks.roles import family_problem
from roll.config.installation import install_command
from roll.config.loader import LoadedConfig
from roll.config.lora import frozen_by, names_of, uses_lora
from roll.config.model_files import (
    CONFIG,
    dequantised_folder,
    gguf_file,
    is_installed,
    looks_like_folder,
    model_folder,
    read_model_config,
)
from roll.config.pipelines import GENERATES, find_own_modules
from roll.config.reading.errors import ConfigError, Problem
from roll.config.reading.fields import DOTTED_PATH
from roll.config.reading.masking import masked
from roll.config.roles import WorkerConfig
from roll.config.strategies.deepspeed import DeepSpeedStrategyConfig, requested_stage
from roll.config.strategies.registry import BACKENDS, typed_strategy_config
from roll.platforms import current_platform

# By tracker: its package, of the same name at the index.
TRACKERS = {name: name for name in ("wandb", "swanlab", "trackio", "mlflow")} | {"prometheus": "prometheus_client"}


def require_packages(loaded: LoadedConfig[Any]) -> None:
    """Check that what strategies and kernels need is on this host. Raises ``ConfigError``: naming each role whose
    strategy has no package, and the command that installs it; or the key of kernels that cannot be made here."""
    problems = []
    for name, role in loaded.plan.roles.items():
        backend, args = BACKENDS.get(role.strategy_name or ""), role.section.model_args
        if backend is None:
            continue
        package, missing = backend.package, "needs a package that is not installed"
        if package is not None and not is_installed(package.module):
            rule = f"{missing}: {package.install}"
            problems.append(loaded.problem(f"{name}.strategy_args.strategy_name", role.strategy_name, rule))
        if backend.computes is None or loaded.pipeline.task_of(name, role.section) is GENERATES:
            continue
        key, on_cpu = f"{name}.model_args.use_liger_kernel", current_platform().name == "cpu"
        if args.use_liger_kernel and on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
            rule = "needs a GPU: Liger's kernels are written in Triton, which compiles none for CPUs"
            problems.append(loaded.problem(key, True, rule, False))
        elif args.use_liger_kernel and not is_installed("liger_kernel"):
            problems.append(loaded.problem(key, True, f"{missing}: {install_command('liger')}", False))
        compiler = os.environ.get("CXX", "g++")
        if args.compile and on_cpu and shutil.which(compiler) is None:
            rule = f"needs a C++ compiler on a CPU, and there is no {compiler} (CXX names another one)"
            problems.append(loaded.problem(f"{name}.model_args.compile", True, rule, False))
    if problems:
        raise ConfigError(problems)


def require_trackers(loaded: LoadedConfig[Any]) -> None:
    """Check that the packages of the trackers are installed. Raises ``ConfigError``: naming the tracker, and the
    command that installs it."""
    chosen = loaded.config.track_with
    names = [chosen] if isinstance(chosen, str) else chosen
    missing = [name for name in names if not is_installed(TRACKERS.get(name, "sys"))]
    if missing:
        rule = f"needs a package that is not installed: pip install {TRACKERS[missing[0]]}"
        raise ConfigError([loaded.problem("track_with", missing[0], rule, "tensorboard")])


def check_types(loaded: LoadedConfig[Any]) -> None:
    """Check that DeepSpeed computes in fp16 on this host, where a role asks for it. Raises ``ConfigError``: a CPU
    without AVX512-FP16 or AMX-FP16, on which DeepSpeed starts no engine in fp16."""
    names = []
    for name, role in loaded.plan.roles.items():
        # Without a strategy the role has no model, so nothing reads its ``strategy_args``.
        if role.section.model_args.dtype == "fp16" and role.strategy_name is not None:
            options = typed_strategy_config(role.section.strategy_args)
            # DeepSpeed's engine trains, and computes under ZeRO-3.
            if isinstance(options, DeepSpeedStrategyConfig) and (
                role.strategy_name == "deepspeed_train" or requested_stage(options) == 3
            ):
                names.append(name)
    if not names or computes_in_fp16():
        return
    rule = "DeepSpeed computes in it on accelerators, and on CPUs with AVX512-FP16 or AMX-FP16; this host has neither"
    raise ConfigError([loaded.problem(f"{name}.model_args.dtype", "fp16", rule, "bf16") for name in names])


def computes_in_fp16() -> bool:
    """True if DeepSpeed computes in fp16."""
    import torch

    return current_platform().name != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


SECONDS = 20.0  # most time for one model's ``config.json``, retries included
ENDPOINT = "https://huggingface.co"


def find_models(loaded: LoadedConfig[Any], say: Callable[[str], None]) -> bool:
    """Fetch the ``config.json`` of every model that is not on this machine yet, and check it as that of a local one.

    Args:
        say: is given a line before the hub is asked.

    Returns:
        Whether one was fetched: what the plan takes from a model's ``config.json`` is known only now.

    Raises:
        ConfigError: a model that the hub does not have or give, that cannot be reached, or that its role cannot have.
    """
    problems: list[Problem] = []
    answers: dict[str, str | None] = {}
    pipeline = loaded.pipeline
    for name, role in pipeline.models(loaded.config).items():
        key, path = pipeline.model(loaded.config, name, role)
        if path is None or looks_like_folder(path) or (path not in answers and model_folder(path) is not None):
            continue
        if path not in answers:
            say(f"looking for {path} at {os.environ.get('HF_ENDPOINT', ENDPOINT)} ...")
            answers[path] = fetch(path)
        rule = answers[path]
        found = None if rule is not None else read_model_config(path)
        if found is not None:
            rule = family_problem(found, name, role)
            options = typed_strategy_config(role.strategy_args)
            for wrong, value, text, example in options.shape_problems(pipeline.section_key(name), role, found):
                problems.append(loaded.problem(wrong, value, f"{text} ({path})", example))
        if rule is not None and not any(problem.key == key for problem in problems):
            problems.append(loaded.problem(key, path, rule))
    if problems:
        raise ConfigError(problems)
    return bool(answers)


def dequantise_models(loaded: LoadedConfig[Any], say: Callable[[str], None]) -> None:
    """Write the weights of every GGUF file into the cache from which its role loads them, unless they are there.
    ``say``: is given a line before a file is read. Raises ``ConfigError``: a file that transformers cannot read."""
    for key, path in loaded.pipeline.named_models(loaded):
        file = gguf_file(path)
        if file is None:
            continue
        from roll.models.gguf_reading import dequantise, is_dequantised

        try:
            if not is_dequantised(file):
                say(f"dequantising {file} into {dequantised_folder(file)} ...")
            dequantise(file)
        except (OSError, ValueError) as error:
            raise ConfigError([loaded.problem(key, path, str(error))]) from error


def fetch(path: str, seconds: float = SECONDS) -> str | None:
    """Bring a model's ``config.json`` into the cache; None: it is there, else why not."""
    answer: Future[str | None] = Future()
    # A thread of its own: looking up a name, or a server that only trickles, keeps to no timeout of the client.
    threading.Thread(target=_answer, args=(path, answer), daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        return f"no answer from the hub within {seconds:g} seconds: give a folder, or set HF_ENDPOINT to a mirror"


def _answer(path: str, answer: Future[str | None]) -> None:
    try:
        answer.set_result(_download(path))
    except BaseException as error:
        answer.set_exception(error)


def _download(path: str) -> str | None:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of the httpx that it was built on
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
    )

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        HfApi().model_info(path, timeout=SECONDS / 2)
        hf_hub_download(path, CONFIG)
    except GatedRepoError:
        return "is gated: accept its terms at the hub, and set HF_TOKEN"
    except RepositoryNotFoundError:
        return "the hub has no such model, or only for others: see the spelling, or set HF_TOKEN"
    except EntryNotFoundError:
        return f"is no model in Hugging Face's format: the hub has no {CONFIG} of it"
    except HFValidationError as error:
        return str(error).splitlines()[0]
    except (HfHubHTTPError, OSError, HTTPError) as error:
        what = "cannot be fetched from the hub" if isinstance(error, OSError) else "the hub cannot be reached"
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return f"{what} ({reason}): give a folder, or set HF_ENDPOINT to a mirror"
    return None


def check_parts(loaded: LoadedConfig[Any]) -> None:
    """All checks of this module. Raises ``ConfigError``: a reward that cannot be built, a function that is not there,
    or options that they or trackers do not have."""
    require_trackers(loaded)
    check_types(loaded)
    loaded.pipeline.check_parts(loaded)
    check_own_functions(loaded)
    loaded.pipeline.check_host(loaded)
    from roll.tracking.trackers import tracker_options

    kwargs = loaded.config.tracker_kwargs
    try:
        tracker_options(loaded.config.track_with, kwargs)
    except ValueError as error:
        key, value = "tracker_kwargs", masked(kwargs)
        if str(error).startswith("track_with: "):
            key, value = "track_with", loaded.config.track_with
        rule = str(error).removeprefix("track_with: ")
        raise ConfigError([loaded.problem(key, value, rule, has_value=bool(value))]) from error


def check_first_rows(loaded: LoadedConfig[Any]) -> None:
    """Read the first row of each data file as training will: a wrong column ends here and not after the start.

    Files of the hub, and sets whose bad rows are skipped, are left to the run. Raises ``ConfigError``: a row that
    cannot be used.
    """
    from roll.datasets.forms import form_of
    from roll.datasets.reading import data_files, first_row
    from roll.datasets.types import DataError

    problems = []
    for key, data_args, read in loaded.pipeline.first_row_readers(loaded):
        names = [data_args.file_name] if isinstance(data_args.file_name, str) else data_args.file_name or []
        local = [name for name in names if not name.startswith("hub:")]
        # Rows that may be skipped are no mistake of the configuration.
        for name in local if data_args.on_bad_row == "raise" else ():
            try:
                for path in data_files(name):
                    first = first_row(path)
                    read(form_of(data_args, first)(first))
            except DataError as error:
                problems.append(loaded.problem(f"{key}.file_name", name, str(error)))
                break
    if problems:
        raise ConfigError(problems)


_ANEW = (
    "Go on with the configuration that wrote it (config.yaml in its output_dir), or start a new run: another "
    "output_dir, or resume_from_checkpoint: false"
)


def check_resumption(loaded: LoadedConfig[Any]) -> None:
    """Check by the description in a checkpoint that this configuration resumes all of it.

    Its tensors are compared with the model when that is built; what the configuration alone shows is refused here.

    Raises:
        ConfigError: no such checkpoint, one that another strategy wrote, or one of which something would be lost.
    """
    config, plan = loaded.config, loaded.plan
    upload = config.checkpoint_config.output_dir
    folders = [plan.checkpoint_dir, *([Path(upload)] if upload and not is_url(upload) else [])]
    store = ObjectStore(upload, config.checkpoint_config.storage_options) if upload and is_url(upload) else None
    wanted = config.resume_from_checkpoint
    problems: list[Problem] = []
    try:
        for key, place in {"checkpoint_config.output_dir": upload, "resume_from_checkpoint": wanted}.items():
            if isinstance(place, str) and is_url(place) and (cannot := store_problem(place)):
                raise ConfigError([loaded.problem(key, place, cannot)])
        checkpoint = probable_checkpoint(wanted, folders, store, (TRAINER_STATE, STATE_NAME))
    except (OSError, CheckpointDamagedError) as error:
        raise ConfigError([loaded.problem("resume_from_checkpoint", wanted, str(error))]) from error
    if checkpoint is None:
        return
    # Roles by what they have written: a role that this run does not train would be lost without a word.
    written = {path.parent.name for path in checkpoint.path.glob(f"*/{TRAINER_STATE}")}
    for role in sorted(written ^ set(plan.training)):
        rule = (
            f"{checkpoint.path} holds a trained {role}, which this run has not; it would be left over"
            if role in written
            else f"{checkpoint.path} holds nothing of {role}; it holds {', '.join(sorted(written)) or 'no model'}"
        )
        problems.append(loaded.problem("resume_from_checkpoint", wanted, f"{rule}. {_ANEW}"))
    for role in sorted(written & set(plan.training)):
        for key, rule in _resumption_problems(checkpoint.role(role), getattr(config, role)):
            path, value = f"{role}.{key}", reduce(getattr, key.split("."), getattr(config, role))
            problems.append(loaded.problem(path, value, f"{rule}. {_ANEW}"))
    state = json.loads((checkpoint.role(PIPELINE_FOLDER) / STATE_NAME).read_text(encoding="utf-8"))
    for key, value, rule in loaded.pipeline.resumption_problems(loaded, str(checkpoint.path), state):
        problems.append(loaded.problem(key, value, f"{rule}. {_ANEW}"))
    if problems:
        raise ConfigError(problems)


def _resumption_problems(folder: Path, section: WorkerConfig) -> Iterator[tuple[str, str]]:
    """Keys of a role's section that do not go with the checkpoint in ``folder``, and why."""
    args, strategy = section.model_args, section.strategy_args.strategy_name
    try:
        state = read_trainer_state(folder)
        written = read_contents(state, folder)
    except CheckpointMismatchError as error:
        yield "strategy_args.strategy_name", str(error)
        return
    problem = strategy_problem(written, strategy)
    if problem is not None:
        yield "strategy_args.strategy_name", f"{folder} {problem}"
        return
    had_adapters = any(".lora_" in name for name in written.trained)
    if had_adapters != uses_lora(args):
        has = "holds adapters, and this role has none" if had_adapters else "holds a model without adapters"
        yield "model_args.lora_target", f"{folder} {has}"
    elif not had_adapters:
        names = {*written.trained, *written.frozen}
        trained = names.difference(*(frozen_by(prefix, names) for prefix in names_of(args.freeze_module_prefix)))
        for problem in frozen_mismatches(written, trained):
            yield "model_args.freeze_module_prefix", f"{folder}: {problem}"
    elif args.adapter_name_or_path is None:
        ranks = {shape[0] for name, shape in written.trained.items() if ".lora_A." in name}
        scalings, own = set(written.scalings.values()), (args.lora_alpha or 2 * args.lora_rank) / args.lora_rank
        if ranks != {args.lora_rank}:
            yield "model_args.lora_rank", f"{folder} holds adapters of rank {', '.join(map(str, sorted(ranks)))}"
        elif scalings != {own}:
            alphas = ", ".join(f"{scaling * args.lora_rank:g}" for scaling in sorted(scalings))
            what = f"holds adapters whose alpha is {alphas}, here {own * args.lora_rank:g}"
            yield "model_args.lora_alpha", f"{folder} {what}"


def prepared(load: Callable[[], LoadedConfig[Any]], say: Callable[[str], None]) -> LoadedConfig[Any]:
    """A configuration after :func:`~roll.config.checks.base.check_output`, :func:`check_parts`,
    :func:`check_first_rows`, :func:`check_resumption`, :func:`require_packages`, :func:`dequantise_models` and
    :func:`find_models`.

    Args:
        load: loads it; once more where the hub has given a model's ``config.json``, which the plan depends on.
        say: is given a line before the hub is asked.

    Raises:
        ConfigError: every mistake.
    """
    # In the order of their cost: the hub is asked last, when nothing else can be wrong.
    loaded = load()
    check_output(loaded.plan.output_dir, loaded.source)
    check_parts(loaded)
    check_first_rows(loaded)
    check_resumption(loaded)
    require_packages(loaded)
    dequantise_models(loaded, say)
    return load() if find_models(loaded, say) else loaded


def ready(load: Callable[[], LoadedConfig[Any]], say: Callable[[str], None]) -> LoadedConfig[Any]:
    """Like :func:`prepared`, with what the run needs from elsewhere asked as well. Raises ``ConfigError``: every
    mistake."""
    loaded = prepared(load, say)
    loaded.pipeline.check_services(loaded)
    return loaded


def check_own_functions(loaded: LoadedConfig[Any]) -> None:
    """Import every function and class that the configuration names by its path, and see that it takes its options.
    Raises ``ConfigError``: a function that is not there, or options that it does not have."""
    from roll.algorithms.registry import Registry
    from roll.datasets.columns import build_filter

    checks: list[tuple[str, Any, Callable[[], object]]] = list(loaded.pipeline.own_functions(loaded))
    for name, role in loaded.plan.roles.items():
        if role.worker_cls and DOTTED_PATH.fullmatch(role.worker_cls):
            key = f"{loaded.pipeline.section_key(name)}.worker_cls"
            checks.append((key, role.worker_cls, partial(Registry(key).resolve, role.worker_cls)))
    for name, section in loaded.pipeline.filtered_sections(loaded.config).items():
        chosen = section.data_args.dataset_filter
        if isinstance(chosen, str):
            checks.append((f"{name}.data_args.dataset_filter", chosen, partial(build_filter, chosen)))
    problems = []
    for key, value, look_up in checks:
        try:
            find_own_modules()
            look_up()
        except ValueError as error:
            problems.append(loaded.problem(key, value, str(error)))
    if problems:
        raise ConfigError(problems)
