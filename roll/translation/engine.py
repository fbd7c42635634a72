"""Translation of a source: its keys one by one through the table of their dialect, then what follows from several."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from roll.config.loader import LoadedConfig
from roll.config.reading.errors import ConfigError, Problem, closest
from roll.config.reading.legacy_keys import FLAT_NAMES
from roll.config.strategies.registry import strategy_keys
from roll.pipelines.rlvr.config import RLVRConfig
from roll.translation.assembly import STEPS, find_roles
from roll.translation.families import find_family, strategy_of
from roll.translation.matching import (
    BLANKS,
    Match,
    Note,
    complete,
    flat_keys,
    idle,
    matched,
    refuse_doubles,
    unknown_key,
    unwritten_defaults,
)
from roll.translation.reading import Source
from roll.translation.rules import ROLES, Dialect, Draft
from roll.translation.sft import SKYRL_SFT, VERL_FSDP_SFT, VERL_SFT
from roll.translation.skyrl import SKYRL, SKYRL_TRAIN
from roll.translation.verl import VERL

DIALECTS = {dialect.name: dialect for dialect in (SKYRL_TRAIN, SKYRL, VERL, VERL_SFT, VERL_FSDP_SFT, SKYRL_SFT)}
NAMES = "SkyRL or verl"
# Variables that stay in the environment: they mean the same to our runs.
KEPT_PREFIXES = ("CUDA_", "NCCL_", "WANDB_", "SWANLAB_", "HF_", "RAY_", "VLLM_", "TOKENIZERS_", "PYTORCH_", "TORCH_")
OF_A_TOOL = ("VERL_", "SKYRL_")
# Folders in which the package `skyrl` keeps its scripts; the older one has them in `examples/`.
NEWER_EXAMPLES = re.compile(r"examples[./]train(?:_integrations)?[./]")
SECTIONS = ("tracker_kwargs", "actor_train", "actor_infer", "reference", "critic", "rewards", "validation")
# Keys that count only where the run has this role.
IDLE_WITHOUT = {
    "reference": ("kl_loss_type", "kl_penalty", "init_kl_coef", "kl_horizon"),
    "critic": ("value_clip", "value_loss_agg_mode", "critic_warmup"),
}


@dataclass(frozen=True)
class Translation:
    """A translated configuration."""

    dialect: Dialect
    whole: bool  # a complete run; else changes to a recipe
    keys: dict[str, Any]  # our dotted keys and their values
    environment: dict[str, str]  # variables that stay in the environment
    notes: tuple[Note, ...]
    passed_over: tuple[str, ...] = ()  # words and commands of the text that say nothing about the run
    unset: tuple[str, ...] = ()  # variables that the text uses and does not set: read where the configuration is loaded
    remarks: tuple[str, ...] = ()  # remarks on how the text was read


def translate(
    source: Source, dialect: Dialect, recipe: LoadedConfig[RLVRConfig], train_rows: int | None = None
) -> Translation:
    """Translate what was read.

    Args:
        recipe: what changes are made to; its batch sizes and devices count where theirs are not written. A whole run
            has nothing from it.
        train_rows: rows of the training data, so that epochs become steps.

    Raises:
        ConfigError: every key that the dialect does not have, with the nearest one it has, and every value that has no
            translation.
    """
    whole = source.from_module or dialect.model_key in source.keys or not dialect.model_key
    draft = Draft(whole=whole)
    if train_rows is not None:
        draft.facts["rows"] = train_rows
    draft.facts |= {**dialect.facts, "launcher_options": source.options}
    draft.defaults = {
        rule.fact: rule.value(value) for key, value in dialect.defaults.items() if (rule := dialect.rules[key]).fact
    }
    # The arithmetic speaks of the policy; what learns in another pipeline has its name at the end.
    draft.roles = {"actor_train", "actor_infer"}
    if not whole:
        draft.facts |= facts_of(recipe)
        draft.roles |= {section for section in ROLES.values() if getattr(recipe.config, section) is not None}
    keys = source.keys if dialect.files is None else dialect.files(source)
    variables = {name: value for name, value in source.environment.items() if name in dialect.rules}
    explicit = flat_keys({**keys, **variables}, dialect)
    changes = complete(explicit, dialect) + idle(explicit, dialect)
    _check_program(source, dialect, draft)
    refuse_doubles(explicit, dialect, draft)
    known = unwritten_defaults(dialect, explicit) if whole else {}
    matches = {key: matched(key, value, dialect, draft) for key, value in {**known, **explicit}.items()}
    draft.explicit = {match.rule.fact for key, match in matches.items() if match and key in explicit} - {""}
    own = [name for name in source.environment if name.startswith(OF_A_TOOL) and name not in dialect.rules]
    for name in own:
        if closest(name, [known for known in dialect.rules if known.isupper()]):
            draft.problems.add(name, source.environment[name], unknown_key(name, dialect))
    if draft.problems.errors:
        raise ConfigError(draft.problems.errors)
    found = {key: match for key, match in matches.items() if match}
    notes = _put_all(draft, dialect, found, {**known, **explicit}, set(explicit))
    if draft.problems.errors:
        raise ConfigError(draft.problems.errors)
    if dialect.learner != "actor_train":
        draft.keys = {
            key.replace("actor_train.", f"{dialect.learner}.", 1): value
            for key, value in draft.keys.items()
            if not key.startswith("actor_infer.")
        }
        notes = [
            replace(note, ours=tuple(re.sub(r"^actor_train\.", f"{dialect.learner}.", word) for word in note.ours))
            for note in notes
        ]
    written = str(draft.keys)
    return Translation(
        dialect,
        whole,
        in_order(draft.keys),
        {name: value for name, value in source.environment.items() if name.startswith(KEPT_PREFIXES)},
        (*changes, *notes),
        tuple(source.left_out),
        tuple(name for name in (*source.unset, *BLANKS.values()) if name in written),
        (*source.remarks, *(f"left out: {name} is no variable that {dialect.title} is known to read" for name in own)),
    )


def dialect_of(source: Source) -> Dialect:
    """Return the dialect of a source: by its launcher, else by its keys. Raises ``ConfigError``: no dialect has any of
    the keys."""
    for dialect in DIALECTS.values():
        if any(re.fullmatch(pattern, source.launcher) for pattern, _ in dialect.programs):
            return dialect
    module = source.launcher.partition(".")[0]
    if source.from_module and module in DIALECTS:
        return DIALECTS[module]
    scores = {name: sum(dialect.find(key) is not None for key in source.keys) for name, dialect in DIALECTS.items()}
    best = max(scores.values(), default=0)
    if best == 0:
        key = next(iter(source.keys), "(command)")
        nearest = next((near for dialect in DIALECTS.values() if (near := dialect.nearest(key))), None)
        hint = f"; the nearest known one is {nearest}" if nearest else ""
        rule = f"is no key of {NAMES}{hint}"
        raise ConfigError([Problem(key, source.keys.get(key), rule, has_value=key in source.keys)])
    found = [name for name, score in scores.items() if score == best]
    if SKYRL.name in found and NEWER_EXAMPLES.match(source.launcher):
        return SKYRL
    return DIALECTS[found[0]]


def facts_of(recipe: LoadedConfig[RLVRConfig]) -> dict[str, Any]:
    """The recipe's own numbers, under the names of facts."""
    config, plan = recipe.config, recipe.plan
    facts: dict[str, Any] = {
        "prompts": config.rollout_batch_size,
        "samples": config.num_return_sequences_in_group,
        "prompt_length": config.prompt_length,
        "response_length": config.response_length or (config.sequence_length or 0) - config.prompt_length,
        "estimator": config.estimator.name,
        "engine": config.actor_infer.strategy_args.strategy_name,
        "loggers": [config.track_with] if isinstance(config.track_with, str) else config.track_with,
        "kl_loss": config.use_kl_loss,
        "kl_in_reward": config.add_token_level_kl,
        "loss": config.loss.name,
        "clip_low": getattr(config.loss.options, "below", 0.2),
        "clip_high": getattr(config.loss.options, "above", 0.2),
        "aggregation": config.loss_agg_mode,
        "entropy_coef": config.entropy_loss_coef,
        "reward_names": list(config.rewards),
    }
    for role, section in ROLES.items():
        worker = getattr(config, section)
        if worker is None:
            continue
        facts[f"gpus.{role}"] = len(worker.device_mapping or ())
        facts[f"strategy.{role}"] = worker.strategy_args.strategy_name.rpartition("_")[0]
        if section in plan.training:
            training = plan.training[section]
            facts[f"mini.{role}"] = Fraction(training.mini_batch_size, config.num_return_sequences_in_group)
            facts[f"micro.{role}"] = training.micro_batch_size
    return facts


def _check_program(source: Source, dialect: Dialect, draft: Draft) -> None:
    """Refuse programs that are not their trainer: their code decides what is trained."""
    if not source.from_module:
        return
    meaning = next((facts for pattern, facts in dialect.programs if re.fullmatch(pattern, source.launcher)), None)
    if meaning is not None:
        draft.facts |= meaning
        return
    rule = f"is a program of its own: what it trains is in its code, not in keys of {dialect.title}"
    if re.search(r"\.main_(?:gen|eval)\w*$", source.launcher):
        rule = "generates or scores responses and trains nothing: roll evaluate does both (docs/evaluation.md)"
    # Its keys are its own too: no word about them.
    raise ConfigError([Problem("(program)", source.launcher, rule)])


def _put_all(
    draft: Draft, dialect: Dialect, matches: Mapping[str, Match], values: Mapping[str, Any], explicit: set[str]
) -> list[Note]:
    if dialect.prepare is not None:
        dialect.prepare(draft)
    find_family(draft)
    find_roles(draft)
    if draft.whole:
        draft.put("pipeline", dialect.pipeline)
    direct: dict[str, list[str]] = {}
    for key, match in matches.items():
        direct[key] = []
        for template in () if match.rule.computed else match.rule.ours:
            name = template.replace("*", match.rest)
            stem, found, rest = name.partition(".engine_args.")
            if found and rest.partition(".")[0] in strategy_keys(str(draft.get("engine"))):
                name = f"{stem}.{rest}"  # an engine's option that has a key of its own here
            if name.startswith(f"{dialect.learner}."):
                name = f"actor_train{name.removeprefix(dialect.learner)}"
            draft.put(name, match.value)
            direct[key] += [name] if name in draft.keys else []
    # Every key that follows from several facts.
    for step in dialect.steps or STEPS:
        step(draft)
    dropped = _drop_idle_keys(draft) if draft.whole else {}
    notes = []
    for key, match in matches.items():
        decided = list(dict.fromkeys([*direct[key], *sorted(draft.reasons.get(match.rule.fact, ()))]))
        ours = tuple(f"{name}={show(draft.keys[name])}" for name in decided if name in draft.keys)
        texts = list(dict.fromkeys(dropped[name] for name in decided if name in dropped and key in explicit))
        texts += draft.remarks.get(match.rule.fact, ())
        if key in explicit and not ours and match.rule.ours and not texts:
            absent = {ours.partition(".")[0] for ours in match.rule.ours} - draft.roles
            missing = " and ".join(section for section in ROLES.values() if section in absent)
            texts.append(f"left out: no {missing} in this run" if missing else "left out: nothing in this run uses it")
        if ours or texts or key in explicit:
            text = "; ".join(filter(None, [match.rule.note_for(values[key]), *texts]))
            notes.append(Note(key, values[key], ours, text, key not in explicit))
    return notes


def _drop_idle_keys(draft: Draft) -> dict[str, str]:
    """Take out what changes nothing in a whole run; the reasons by key."""
    idle = {
        key: f"left out: no {role} in this run"
        for role in IDLE_WITHOUT
        if role not in draft.roles
        for key in IDLE_WITHOUT[role]
    }
    if draft.facts.get("distill_form") == "advantage":
        idle.pop("kl_penalty", None)  # which distillation reads
    for role, section in [*ROLES.items(), ("engine", "actor_infer")]:
        prefix = f"{section}.strategy_args.strategy_config."
        kind = "infer" if role == "reference" else "train"
        name = str(draft.get("engine")) if role == "engine" else f"{strategy_of(draft, role)}_{kind}"
        for key in draft.keys:
            if key.startswith(prefix) and key.removeprefix(prefix).partition(".")[0] not in strategy_keys(name):
                idle[key] = f"left out: has no effect under {name}"
    if "validation.data_args.file_name" not in draft.keys:
        idle |= {key: "left out: no validation data" for key in draft.keys if key.startswith("validation.")}
    return {key: reason for key, reason in idle.items() if draft.keys.pop(key, idle) is not idle}


def in_order(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the run first, then those of each section together; a choice without options is its name alone."""
    for choice in FLAT_NAMES:
        if [key for key in keys if key.startswith(f"{choice}.")] == [f"{choice}.name"]:
            keys = {choice if key == f"{choice}.name" else key: value for key, value in keys.items()}
    sections = list(dict.fromkeys(key.partition(".")[0] for key in keys if "." in key))
    ranked = [name for name in SECTIONS if name in sections] + [name for name in sections if name not in SECTIONS]
    return dict(
        sorted(keys.items(), key=lambda item: ranked.index(item[0].partition(".")[0]) if "." in item[0] else -1)
    )


def show(value: object) -> str:
    """A value as it is written on the command line, without the shell's quotes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(show(entry) for entry in value)}]"
    return str(value)
