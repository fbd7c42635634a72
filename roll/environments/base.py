"""Environments: their contract, which is gymnasium's five-tuple with texts, images or chat messages as observations,
and how ``env_type`` and ``env_config`` name one: built-in names, adapters by prefix, and dotted paths."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsFloat, runtime_checkable

from roll.config.installation import dotted_path, offered
from roll.config.objects import imported
from roll.config.reading.errors import did_you_mean
from roll.config.reading.fields import dotted
from roll.rewards.base import finite_number

Message = dict[str, Any]


AGGREGATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "max": max,
    "min": min,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}
"""Values of ``info["metrics_agg_mode"]``, as ROLL's environments and those of its GEM have it."""


class BrokenContract(RuntimeError):
    """An environment broke its contract; the message names the environment, the method and the rule."""


@runtime_checkable
class Environment(Protocol):
    """An environment of one episode at a time; methods may be coroutines.

    ``reset`` takes ``seed`` and, where its signature has it, ``task`` (the row of a data set; None without one). Equal
    seeds and tasks must give equal episodes for equal actions: members of a group are compared with each other.

    An observation is a text or an image (of PIL, or uint8 pixels of shape (height, width, 3)), which becomes the
    content of a user message; a list of both, in order; or a list of chat messages (``role`` and ``content``), whose
    content may have parts ``{"type": "image", "image": ...}``.

    ``info`` may hold ``success`` (bool), ``state`` (a text that identifies the state, for step-level advantages),
    ``valid`` (bool: the action was understood), ``metrics`` (name to number), ``metrics_agg_mode`` (name to one of
    :data:`AGGREGATIONS`, by which a metric becomes a number of the episode; default ``mean``), ``tools`` (schemas, at
    reset) and ``role`` of a text observation (default ``user``). A class attribute ``instant = True`` declares that the
    methods of this very class never wait and take next to no time, so that they may be called on the event loop. A
    method ``close()`` is called at the end where there is one; ``sample_action(rng)`` returns a random legal action for
    tests.
    """

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]] | Awaitable[tuple[Any, dict[str, Any]]]: ...

    def step(
        self, action: str
    ) -> (
        tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]
        | Awaitable[tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]]
    ): ...


@dataclass(frozen=True)
class Turn:
    """A checked return value of ``reset`` (reward 0, not done) or ``step``."""

    observation: list[Message]
    reward: float = 0.0
    terminated: bool = False  # the task has ended by its own rules
    truncated: bool = False  # the environment stopped at a limit of its own before the task had ended
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated

    @property
    def state(self) -> str:
        """Identifies the state: ``info["state"]``, else a digest of the observation."""
        if (state := self.info.get("state")) is not None:
            return str(state)
        text = json.dumps(self.observation, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


async def resolved(value: object) -> Any:
    """``value``, awaited where it is an awaitable."""
    return await value if inspect.isawaitable(value) else value


def says_instant(kind: type, method: str) -> bool:
    """True if the class and the one that defines ``method`` declare ``instant = True``: a subclass that overrides a
    method has to declare it again."""
    definer = next((one for one in kind.__mro__ if method in vars(one)), None)
    return bool(getattr(kind, "instant", False)) and definer is not None and bool(vars(definer).get("instant", False))


def reset_arguments(
    environment: Environment, seed: int, task: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of ``reset``: ``seed`` by name where the signature allows it (gymnasium's takes
    it only so), ``task`` where there is a parameter for it."""
    parameters = inspect.signature(environment.reset).parameters
    keywords: dict[str, Any] = {}
    if "task" in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        keywords["task"] = task
    named = "seed" in parameters and parameters["seed"].kind is not inspect.Parameter.POSITIONAL_ONLY
    return ((), {"seed": seed, **keywords}) if named else ((seed,), keywords)


def read_reset(name: str, answer: object) -> Turn:
    """Check what ``reset`` returned. Raises ``BrokenContract``: not a pair of an observation and a mapping."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise BrokenContract(f"{name}: reset must return (observation, info), got {_shape(answer)}")
    observation, info = answer
    _check_info(name, "reset", info)
    return Turn(_messages(name, "reset", observation, info), info=dict(info))


def read_step(name: str, answer: object) -> Turn:
    """Check what ``step`` returned. Raises ``BrokenContract``: not gymnasium's five-tuple, or a reward that is not a
    finite number."""
    if not isinstance(answer, tuple) or len(answer) != 5:
        raise BrokenContract(
            f"{name}: step must return (observation, reward, terminated, truncated, info), got {_shape(answer)}"
        )
    observation, reward, terminated, truncated, info = answer
    number = finite_number(reward)
    if number is None:
        raise BrokenContract(
            f"{name}: step returned the reward {reward!r:.100}, which is not a number that is finite in float32"
        )
    _check_info(name, "step", info)
    messages = _messages(name, "step", observation, info)
    flags = []
    for which, value in (("terminated", terminated), ("truncated", truncated)):
        # numpy's bool is no bool, but its item() is.
        flags.append(value.item() if hasattr(value, "item") else value)
        if not isinstance(flags[-1], bool):
            raise BrokenContract(f"{name}: step returned {which} = {value!r}; it must be true or false")
    return Turn(messages, number, flags[0], flags[1], dict(info))


def _check_info(name: str, method: str, info: object) -> None:
    if not isinstance(info, Mapping):
        raise BrokenContract(f"{name}: info of {method} must be a mapping, got {_shape(info)}")
    if method == "reset":
        return
    for metric, value in dict(info.get("metrics") or {}).items():
        try:
            float(value)
        except (TypeError, ValueError):
            raise BrokenContract(
                f"{name}: step returned the metric {metric!r} = {value!r}, which is no number"
            ) from None
    for metric, mode in dict(info.get("metrics_agg_mode") or {}).items():
        if mode not in AGGREGATIONS:
            rule = f"must be one of {', '.join(AGGREGATIONS)}"
            raise BrokenContract(f"{name}: step returned metrics_agg_mode.{metric} = {mode!r}; it {rule}")


def _messages(name: str, method: str, observation: object, info: Mapping[str, Any]) -> list[Message]:
    role = str(info.get("role", "user"))
    if isinstance(observation, str):
        return [{"role": role, "content": observation}]
    if isinstance(observation, Sequence) and all(
        isinstance(one, Mapping) and isinstance(one.get("role"), str) and "content" in one for one in observation
    ):
        return [_with_images(name, method, dict(one)) for one in observation]
    parts = list(observation) if isinstance(observation, Sequence) else [observation]
    # Images are known by what PIL's and arrays have: neither library is imported for an environment of texts.
    marks = (("save", "mode"), ("dtype", "shape"))
    if parts and all(
        isinstance(one, str) or any(hasattr(one, a) and hasattr(one, b) for a, b in marks) for one in parts
    ):
        content = [one if isinstance(one, str) else {"type": "image", "image": one} for one in parts]
        return [_with_images(name, method, {"role": role, "content": content})]
    raise BrokenContract(
        f"{name}: the observation of {method} must be a text, an image, a list of both, or a list of messages with "
        f"role and content, got {_shape(observation)}"
    )


def _with_images(name: str, method: str, message: Message) -> Message:
    """The message with its images as ``EncodedImage``; BrokenContract for a part that would not be shown."""
    content = message["content"]
    if not isinstance(content, list | tuple):
        return message
    parts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") == "image":
            from roll.protocol.images import ImageError, encoded_image

            try:
                part = {"type": "image", "image": encoded_image(part.get("image"))}
            except ImageError as error:
                raise BrokenContract(f"{name}: an image in the observation of {method}: {error}") from error
        elif isinstance(part, Mapping) and "text" not in part and part.get("type") != "image_url":
            raise BrokenContract(
                f"{name}: the observation of {method} has a part of type {part.get('type')!r}; texts and images are "
                "shown (a video: its frames as images)"
            )
        parts.append(part)
    return {**message, "content": parts}


def _shape(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: ({', '.join(type(one).__name__ for one in value)})"
    return f"{type(value).__name__} {value!r}"[:200]


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
    path = dotted_path("environments", env_type).replace(":", ".")
    if "." not in path:
        known = sorted((*BUILT_IN, *offered("environments")))
        hint = did_you_mean(env_type, known)
        raise EnvironmentOptionError(
            f"env_type {env_type!r} is not known; {hint}known: {', '.join(known)}; {', '.join(_ADAPTERS)}, verifiers "
            "with an id, as in gymnasium:CartPole-v1; or the dotted path of your own class"
        )
    if "/" in env_type.partition(":")[0]:
        raise EnvironmentOptionError(f"env_type {env_type!r} must be a dotted path, such as {dotted(env_type)}")
    try:
        return imported(path)
    except ImportError as error:
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
