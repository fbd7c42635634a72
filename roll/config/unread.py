"""Notes on keys that are written and that nothing reads under the other keys, found from what the fields declare.

Two declarations: a field's ``read_if`` (:class:`roll.config.fields.FieldRules`) for keys that hang on other keys, and
:meth:`roll.config.definition.PipelineDefinition.reads` for keys of a role's section that
this role has no use for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from roll.config.fields import DOTTED_PATH
from roll.config.roles import WorkerConfig
from roll.config.run import RunConfig
from roll.config.schema import rules_of
from roll.config.strategy import StrategyConfig

if TYPE_CHECKING:
    from roll.config.checks import Checks

_ELSEWHERE = frozenset(("opd_kl_coef", "tag_included", "mtp_training_mode", "router_replay"))
"""Keys that other tables speak of, by name."""
_TRAINING_MODEL = (
    "disable_gradient_checkpointing",
    "gradient_checkpointing_use_reentrant",
    "freeze_module_prefix",
)
TRAINS = "only roles that train have use for it"
_WHY = {
    "data_args": "only roles that read data have use for it",
    "generating_args": "only roles that generate have use for it",
    "training_args": TRAINS,
    "model_args": "only roles that hold a model have use for it",
    "strategy_args": "only roles that hold a model have use for it",
}


def note_unread(config: RunConfig, options: Mapping[str, StrategyConfig], checks: Checks) -> None:
    """A note for every written key that nothing reads.

    Args:
        options: the typed options of each role's strategy, by the role's section.
    """
    facts = checks.pipeline.effective(config)
    strategies = ((f"{name}.strategy_args.strategy_config", one) for name, one in options.items())
    for path, section in (*sections_of(config, ""), *strategies):
        for item in fields(section):
            key = f"{path}.{item.name}" if path else item.name
            if is_written(key, item, checks) and checks.is_own(key):
                reason = why_unread(item, section, config, facts)
                if reason is not None and not is_noted(key, checks):
                    checks.note(key, f"has no effect {reason}")
    grouped: dict[str, list[str]] = defaultdict(list)
    for name, role in roles_of(config):
        for key, reason in unread_of_role(name, role, config, checks):
            grouped[reason].append(key)
    for reason, keys in grouped.items():
        checks.note(", ".join(keys), f"{'has' if len(keys) == 1 else 'have'} no effect: {reason}")


def sections_of(section: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every dataclass of a loaded configuration, with its path."""
    yield path, section
    for item in fields(section):
        value, inner = getattr(section, item.name), f"{path}.{item.name}" if path else item.name
        if is_dataclass(value):
            yield from sections_of(value, inner)
        elif isinstance(value, dict):
            for name, one in value.items():
                if is_dataclass(one):
                    yield from sections_of(one, f"{inner}.{name}")


def is_written(key: str, item: Field[Any], checks: Checks) -> bool:
    prefix = key.removesuffix(item.name)
    return any(checks.written(prefix + name) for name in (item.name, *rules_of(item).aliases))


def is_noted(key: str, checks: Checks) -> bool:
    return any(notice.key == key for notice in checks.problems.notices)


def why_unread(item: Field[Any], section: Any, config: Any, facts: Mapping[str, Any]) -> str | None:
    """``with pg_variant: cispo``, or None for a key that is read, or that says no."""
    written = getattr(section, item.name)
    if written is None or (written is False and item.default is not True):
        return None
    for other, wanted in rules_of(item).read_if:
        value = facts[other] if other in facts else getattr(section, other, getattr(config, other, None))
        if isinstance(value, str) and DOTTED_PATH.fullmatch(value) and "." in value:
            return None
        if not wanted and value in (None, False, 0, "", [], {}):
            return f"without {other}"
        if wanted and value not in wanted:
            if wanted == (True,):
                return f"without {other}: true"
            readers = ", ".join("null" if one is None else str(one).lower() for one in wanted)
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
            return f"with {other}: {shown} (read with {readers})"
    return None


def roles_of(config: RunConfig) -> Iterator[tuple[str, WorkerConfig]]:
    """Every section that is built like a role's."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    yield from ((name, value) for name, value in values.items() if isinstance(value, WorkerConfig))
    for name, value in values.items():
        for inner, section in value.items() if isinstance(value, dict) else ():
            if isinstance(section, WorkerConfig):
                yield f"{name}.{inner}", section


def unread_of_role(name: str, role: WorkerConfig, config: RunConfig, checks: Checks) -> Iterator[tuple[str, str]]:
    """Keys of a role's section that it has no use for, with the reason."""
    reads = checks.pipeline.reads(name, role, config)
    for item in fields(WorkerConfig):
        key, value = f"{name}.{item.name}", getattr(role, item.name)
        if item.name in reads or item.name in _ELSEWHERE or rules_of(item).inert is not None:
            continue
        is_set = checks.written(key) and checks.is_own(key) and value != default_of(item)
        if is_set and not is_noted(key, checks):
            yield key, _WHY.get(item.name, "only roles that compute log-probs or train have use for it")
    if "training_args" in reads or "model_args" not in reads:
        return
    for short in _TRAINING_MODEL:
        key = f"{name}.model_args.{short}"
        is_set = checks.written(key) and checks.is_own(key)
        if is_set and getattr(role.model_args, short) not in (None, False):
            yield key, TRAINS


def default_of(item: Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default
