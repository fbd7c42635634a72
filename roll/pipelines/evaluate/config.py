"""Keys, plan and checks of an evaluation: which models answer which sets how often, and where the results go."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.checkpoint.contents import STATE_NAME
from roll.checkpoint.folders import CHECKPOINT_NAME
from roll.config.checks.base import Checks
from roll.config.model_files import CONFIG, gguf_files, looks_like_folder, model_folder, read_model_config
from roll.config.plan.plan import Plan
from roll.config.reading.errors import closest
from roll.config.reading.fields import LOWEST_TEMPERATURE, setting
from roll.config.run import PolicyRunConfig
from roll.config.strategies.engines import EXAMPLE_URL, url_problem
from roll.pipelines.rlvr.checks import SET_NAME
from roll.pipelines.rlvr.config import RLVRConfig, ValidationSet

GREEDY = 0.0  # the temperature at which one answer is all there is


@dataclass(frozen=True)
class EvaluationConfig:
    """``evaluate``: who is asked, how often, and what must come of it."""

    models: dict[str, str] = field(default_factory=dict)
    """Models by name: a Hugging Face folder or hub name, a training checkpoint (``.../checkpoints/checkpoint-200``), or
    a folder of checkpoints, all of which are evaluated. Empty: the model of ``actor_infer``."""
    num_samples: int | None = setting(None, ge=1)
    """Samples of every prompt, or episodes of every task; null: ``num_return_sequences`` of each set, or
    ``group_size``."""
    temperatures: list[float] = field(default_factory=list)
    """Answer every prompt at each of these; 0 is greedy. Empty: as the sets' ``generating_args`` and ``greedy`` say."""
    correct_from: float = 1.0
    """A response with at least this score is correct; an episode, where its environment does not say itself whether it
    succeeded."""
    select_by: str = "score"
    """The number by which ``chosen@k`` chooses the best of k samples: ``score``, or another that the reward returns."""
    baseline: str | None = None
    """The model that the others are compared with, prompt by prompt; null: the first."""
    thresholds: dict[str, float] = field(default_factory=dict)
    """Least values of metrics, such as ``val_correct/all/mean: 0.8``, also of one model (``trained/val_correct/...``).
    Below one the exit status is 3."""
    against: str | None = None
    """A model served elsewhere that answers the same prompts by chats, under the name ``against``: address of an
    OpenAI-compatible service up to and with its version, with the model's name after a ``#`` where it lists several
    (``https://host/v1#model``). The others are compared with it."""
    against_api_key_env: str = setting("", read_if={"against": ()})
    """Environment variable with the token for ``against``."""
    resume: bool = True
    """Samples that an interrupted evaluation of the same models, sets and settings has written are taken up; false:
    begin anew."""


@dataclass(frozen=True)
class EvaluateConfig(RLVRConfig):
    """The keys of an evaluation: those of an RLVR file, of which ``actor_infer``, ``rewards`` and ``validation`` are
    read, and ``evaluate``."""

    evaluate: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Which models are asked, how often, and what must come of it."""


AGAINST = "against"  # name of the model of `evaluate.against`
FOLDER = "evaluation"  # under `output_dir` and `logging_dir`: an evaluation leaves the files of a training run alone
# Roles whose weights in a training checkpoint are a policy's.
POLICIES = ("actor_train", "sft_train", "student_train", "student")
# Keys of config.json and tokenizer_config.json in which models may differ and still share an engine.
_IGNORED = {
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures"),
    *("name_or_path", "is_local", "local_files_only", "model_max_length", "padding_side", "truncation_side"),
}
_DESCRIPTIONS = (CONFIG, "tokenizer_config.json")
_TEXTS = ("tokenizer.json", "chat_template.jinja", "vocab.json", "merges.txt")


@dataclass(frozen=True)
class EvaluatedModel:
    """A model that is evaluated."""

    name: str
    path: str  # name as written, or the checkpoint of a folder of them
    base: str  # folder or hub name that has its architecture and tokenizer
    checkpoint: Path | None = None  # folder of the role that holds the weights, in a training checkpoint
    # Address of a model that is served elsewhere; `base` then counts tokens and reads the prompts.
    url: str | None = None


@dataclass(frozen=True)
class Pass:
    """One way of answering the prompts of a set."""

    name: str  # behind the set's name, if it has one; part of the metrics' names
    set_name: str
    temperature: float | None  # None: as the set's `generating_args` say
    num_samples: int
    is_greedy: bool
    is_primary: bool  # the first of its set, whose accuracy is reported as the set's


@dataclass(frozen=True)
class ModelsPlan(Plan):
    """Plan of several models, one after the other. A step is a model."""

    models: tuple[EvaluatedModel, ...]
    passes: tuple[Pass, ...]
    baseline: str  # name of the model that others are compared with

    def groups(self) -> list[list[EvaluatedModel]]:
        """Models that share an engine start, in the order of their first."""
        found: dict[str, list[EvaluatedModel]] = {}
        for model in self.models:
            found.setdefault(model.url or signature(model.base), []).append(model)
        return list(found.values())


@dataclass(frozen=True)
class EvaluatePlan(ModelsPlan):
    validation_sets: tuple[ValidationSet, ...]


def own_folders(output_dir: Path, log_dir: Path, **_: object) -> dict[str, Path]:
    """Those of an evaluation, below those of the file."""
    return {"output_dir": output_dir / FOLDER, "log_dir": log_dir / FOLDER}


def passes_of(config: EvaluateConfig, sets: tuple[ValidationSet, ...]) -> Iterator[Pass]:
    """At every temperature asked for; without any, by sampling and, unless switched off, greedily."""
    keys = config.evaluate
    for one in sets:
        prefix, count_of = f"{one.name}." if one.name else "", keys.num_samples or one.samples_per_prompt
        if not keys.temperatures:
            yield Pass(f"{prefix}sampled", one.name, None, count_of, False, True)
            if one.greedy:
                yield Pass(f"{prefix}greedy", one.name, GREEDY, 1, True, False)
        for number, value in enumerate(dict.fromkeys(keys.temperatures)):
            greedy = value == GREEDY
            name = "greedy" if greedy else f"t{value:g}"
            yield Pass(f"{prefix}{name}", one.name, value, 1 if greedy else count_of, greedy, not number)


def models_of(config: PolicyRunConfig, keys: EvaluationConfig) -> Iterator[EvaluatedModel]:
    """The models that ``evaluate.models`` names, checkpoints of folders one by one; ValueError: see
    :func:`read_entry`."""
    own = config.actor_infer.model_args.model_name_or_path or config.pretrain
    for name, path in (keys.models or {Path(own).name: own}).items():
        yield from read_entry(name, path, own)
    if keys.against is not None:
        yield EvaluatedModel(AGAINST, keys.against, own, url=keys.against)


def read_entry(name: str, path: str, base: str) -> Iterator[EvaluatedModel]:
    """The model or the checkpoints at a path. Raises ``ValueError``: a folder that holds neither a model nor a
    checkpoint."""
    folder = Path(path).expanduser()
    # A folder that is not there, as before an example makes it, is for the check of files to name.
    is_model = os.path.isfile(folder / CONFIG) or gguf_files(path)
    if not looks_like_folder(path) or not os.path.exists(folder) or is_model:
        yield EvaluatedModel(name, path, path)
        return
    inner = folder / "checkpoints"
    inside = (inner if os.path.isdir(inner) else folder).iterdir() if os.path.isdir(folder) else ()
    named = [(CHECKPOINT_NAME.fullmatch(one.name), one) for one in inside]
    # The checkpoints of a run, in the order of their steps; else one checkpoint, or the policy's folder in it.
    several = sorted((int(match[1]), one) for match, one in named if match and os.path.isdir(one))
    for step, one in several or ((None, folder),):
        places = (one, *(one / role for role in POLICIES))
        role = next((place for place in places if os.path.isfile(place / STATE_NAME)), None)
        if role is None:
            raise ValueError(
                f"is neither a model folder ({CONFIG}) nor a training checkpoint ({POLICIES[0]}/{STATE_NAME}) nor a "
                "folder of checkpoints"
            )
        if not base:
            raise ValueError("is a training checkpoint: set pretrain to the model that the training began with")
        yield EvaluatedModel(name if step is None else f"{name}-{step}", str(one), base, role)


def first_model(config: PolicyRunConfig, keys: EvaluationConfig) -> tuple[str, str] | None:
    """Key and folder of the first of ``evaluate.models``, which engines are planned for; of checkpoints, ``pretrain``;
    None where the key names none."""
    if not keys.models:
        return None
    try:
        first = next(models_of(config, keys))
    except ValueError:  # reported where models are checked
        return None
    return "pretrain" if first.checkpoint else f"evaluate.models.{next(iter(keys.models))}", first.base


def signature(base: str) -> str:
    """Equal for models whose weights have the same names and shapes and that read text alike."""
    folder = model_folder(base)
    if folder is None or read_model_config(base) is None:
        return base
    texts: list[Any] = [(folder / name).read_text("utf-8") for name in _TEXTS if os.path.isfile(folder / name)]
    for name in _DESCRIPTIONS:
        found = json.loads((folder / name).read_text("utf-8")) if os.path.isfile(folder / name) else {}
        texts.append({key: value for key, value in found.items() if key not in _IGNORED})
    return json.dumps(texts, sort_keys=True)


# Checks


def check_models(config: PolicyRunConfig, keys: EvaluationConfig, checks: Checks) -> None:
    """Models are there, of a form that can be read, and their names differ; the other keys of ``evaluate``."""
    own = config.actor_infer.model_args.model_name_or_path or config.pretrain
    names: list[str] = []
    for name, path in keys.models.items():
        key = f"evaluate.models.{name}"
        if not SET_NAME.fullmatch(name.replace(".", "_")):
            checks.add(key, name, "a model's name is part of the metrics' names: letters, digits, ., - and _")
        if not checks.check_files:
            names.append(name)
            continue
        try:
            found = list(read_entry(name, path, own))
        except ValueError as error:
            checks.add(key, path, str(error))
            continue
        for model in found:
            place = key if model.checkpoint is None else "pretrain"
            try:
                read_model_config(model.base)
            except ValueError as error:
                checks.add(place, model.base, str(error))
                continue
            folder = model_folder(model.base)
            if looks_like_folder(model.base) and (folder is None or not os.path.isfile(folder / CONFIG)):
                there = folder is not None and os.path.exists(folder)
                checks.add(place, model.base, f"has no {CONFIG}" if there else "does not exist")
        names += [model.name for model in found]
    if keys.against is not None:
        check_against(config, keys, keys.against, checks)
        names += [AGAINST] if names else []
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        checks.add("evaluate.models", doubled, "two models have this name: choose others")
    if keys.baseline is not None and names and keys.baseline not in names:
        rule = f"must be a model of evaluate.models: {', '.join(names)}"
        checks.add("evaluate.baseline", keys.baseline, rule, closest(keys.baseline, names) or names[0])
    for index, value in enumerate(keys.temperatures):
        if value < 0 or 0 < value < LOWEST_TEMPERATURE:
            rule = f"must be 0 (greedy) or at least {LOWEST_TEMPERATURE:g}"
            checks.add(f"evaluate.temperatures.{index}", value, rule, 1.0)


def check_against(config: PolicyRunConfig, keys: EvaluationConfig, url: str, checks: Checks) -> None:
    """The model that is served elsewhere, at ``url``."""
    if (wrong := url_problem(url.partition("#")[0])) is not None:
        checks.add("evaluate.against", url, wrong, EXAMPLE_URL)
    section = getattr(config, "validation", None)
    if section is not None and section.generating_args.stop_token_ids:
        text = "stop_token_ids are of this run's tokenizer, and are not sent: against ends where its own model does"
        checks.note("evaluate.against", text)
    if not (config.actor_infer.model_args.model_name_or_path or config.pretrain):
        checks.missing("pretrain", "is needed with evaluate.against: its tokenizer counts tokens", "my/model")
    if keys.against_api_key_env and not os.environ.get(keys.against_api_key_env):
        checks.add("evaluate.against_api_key_env", keys.against_api_key_env, "no such variable in the environment")
