"""From ``env_type`` and ``env_config`` to an environment: built-in names, adapters by prefix, and dotted paths."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from roll.config.installation import dotted_path, offered
from roll.config.reading.errors import did_you_mean
from roll.config.reading.fields import dotted
from roll.environments.base import Environment
from roll.environments.off_loop import says_instant

BUILT_IN: dict[str, tuple[str, str]] = {
    "frozen_lake": ("roll.environments.frozen_lake", "FrozenLake"),
    "sokoban": ("roll.environments.sokoban", "Sokoban"),
    "questions": ("roll.environments.questions", "Questions"),
    "roll_math": ("roll.environments.questions", "math_questions"),
    "roll_qa": ("roll.environments.questions", "text_questions"),
}
"""Name to module and class, imported when chosen."""

_ADAPTERS: dict[str, tuple[str, str]] = {
    "gymnasium": ("roll.environments.adapters", "gymnasium_environment"),
    "gem": ("roll.environments.adapters", "GemEnvironment"),
    "textarena": ("roll.environments.adapters", "TextArenaEnvironment"),
    "reasoning_gym": ("roll.environments.questions", "ReasoningGymEnvironment"),
    "skyrl": ("roll.environments.adapters", "SkyRLEnvironment"),
    "openenv": ("roll.environments.adapters", "OpenEnvEnvironment"),
}
"""Prefix of ``PREFIX:ID`` to what wraps an environment of another library: ``(id, **config)``."""

_GEM_PREFIXES = ("game", "math", "code", "qa", "logic", "rg", "eval")
"""ROLL's files name GEM's environments without ``gem:``."""


class EnvironmentOptionError(ValueError):
    """An environment that does not exist, or an option that it does not have or cannot use; ``option``: the wrong key
    of ``env_config``, where it is known."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


def make_environment(env_type: str, env_config: Mapping[str, Any] | None = None) -> Environment:
    """Build one environment. ``env_type``: a built-in name, ``gymnasium:ID``, ``gem:ID``, ``textarena:ID``,
    ``reasoning_gym:NAME``, ``skyrl:ID``, ``openenv:URL``, or the dotted path of your own class or function. Raises
    ``EnvironmentOptionError``: no such environment or option; the message names what would work."""
    config = dict(env_config or {})
    prefix, identifier = _library_of(env_type)
    if prefix:
        target = _load(*_ADAPTERS[prefix])
        return _build(env_type, lambda: target(identifier, **config))
    target = load_environment_class(env_type)
    _check_options(env_type, target, config)
    environment = _build(env_type, lambda: target(**config))
    gymnasium = sys.modules.get("gymnasium")  # which the module of a user's class has imported, if it is one of its
    if gymnasium is None or not isinstance(environment, gymnasium.Env):
        return environment
    return _load("roll.environments.adapters", "GymnasiumEnvironment")(environment)


def _library_of(env_type: str) -> tuple[str, str]:
    """The prefix of another library's environment and its name there; two empty texts for any other."""
    prefix, colon, identifier = env_type.partition(":")
    if colon and prefix in _GEM_PREFIXES:
        return "gem", env_type
    return (prefix, identifier) if colon and prefix in _ADAPTERS else ("", "")


def check_environment_options(env_type: str, env_config: Mapping[str, Any]) -> None:
    """Check that an environment and its options exist, and the values of options of built-in ones and of Reasoning
    Gym's; needs no services or data. Of other libraries' only names are checked, where they are installed. Raises
    ``EnvironmentOptionError``: one does not exist, or has an impossible value."""
    prefix, identifier = _library_of(env_type)
    if prefix:
        if getattr(_load(*_ADAPTERS[prefix]), "built_to_check", False):
            make_environment(env_type, env_config)
        check_name = _load("roll.environments.adapters", "check_name")
        _build(env_type, lambda: check_name(prefix, identifier))
        return
    target = load_environment_class(env_type)
    _check_options(env_type, target, env_config)
    if env_type in BUILT_IN:
        _build(env_type, lambda: target(**env_config))


def is_instant(env_type: str) -> bool:
    """True if the class declares ``instant = True``: its methods may be called on the event loop."""
    if ":" in env_type:
        return False
    found = load_environment_class(env_type)
    return isinstance(found, type) and all(says_instant(found, method) for method in ("reset", "step"))


def load_environment_class(env_type: str) -> Callable[..., Environment]:
    """The class or function of a name or dotted path. Raises ``EnvironmentOptionError``: there is none."""
    if env_type in BUILT_IN:
        return _load(*BUILT_IN[env_type])
    module, _, attribute = dotted_path("environments", env_type).replace(":", ".").rpartition(".")
    if not module:
        known = sorted((*BUILT_IN, *offered("environments")))
        hint = did_you_mean(env_type, known)
        raise EnvironmentOptionError(
            f"env_type {env_type!r} is not known; {hint}known: {', '.join(known)}; {', '.join(_ADAPTERS)}, verifiers "
            "with an id, as in gymnasium:CartPole-v1; or the dotted path of your own class"
        )
    if "/" in env_type.partition(":")[0]:
        raise EnvironmentOptionError(f"env_type {env_type!r} must be a dotted path, such as {dotted(env_type)}")
    try:
        return _load(module, attribute)
    except (ImportError, AttributeError) as error:
        prefix, colon, _ = env_type.partition(":")
        hint = did_you_mean(prefix, _ADAPTERS, "; did you mean the prefix {!r}?") if colon else ""
        raise EnvironmentOptionError(f"env_type {env_type!r} cannot be imported: {error}{hint}") from error


def _load(module: str, attribute: str) -> Callable[..., Environment]:
    target: Callable[..., Environment] = getattr(importlib.import_module(module), attribute)
    return target


def _check_options(env_type: str, target: Callable[..., Environment], config: Mapping[str, Any]) -> None:
    parameters = inspect.signature(target).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    for key in config:
        if key not in parameters:
            hint = did_you_mean(key, parameters, "; did you mean {!r}?")
            raise EnvironmentOptionError(
                f"env_config.{key}: {env_type} has no such option{hint} (it has {', '.join(parameters) or 'none'})", key
            )


def _build(env_type: str, make: Callable[[], Environment]) -> Environment:
    try:
        return make()
    except ModuleNotFoundError as error:
        raise EnvironmentOptionError(f"env_type {env_type!r} needs a package that is not installed: {error}") from error
    except (TypeError, ValueError) as error:
        raise EnvironmentOptionError(f"env_type {env_type!r}: {error}") from error
