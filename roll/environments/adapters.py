"""Adapters for environments of other libraries; a library is imported when one of its environments is built.

Libraries that draw from the process-wide generators of Python and NumPy would make an episode depend on whatever else
runs in the process: every call here uses the environment's own generator states, seeded by ``reset`` and saved between
calls.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import random
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import numpy as np

from roll.config.reading.errors import did_you_mean
from roll.environments.base import BrokenContract

_GENERATORS = threading.Lock()


class _Wrapped:
    """Holds an environment of another library in ``inner``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._state: tuple[Any, Any] | None = None

    @contextlib.contextmanager
    def _generators(self, seed: int | None = None) -> Iterator[None]:
        """Within the block Python's and NumPy's process-wide generators have the state of this environment."""
        with _GENERATORS:
            others = random.getstate(), np.random.get_state()
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed % 2**32)  # NumPy takes 32 bits
            elif self._state is not None:
                random.setstate(self._state[0])
                np.random.set_state(self._state[1])
            try:
                yield
            finally:
                self._state = random.getstate(), np.random.get_state()
                random.setstate(others[0])
                np.random.set_state(others[1])

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        with self._generators(seed):
            observation, info = self.inner.reset(seed=seed)
        return self._shown(observation, info), dict(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        with self._generators():
            observation, reward, terminated, truncated, info = self.inner.step(action)
        return self._shown(observation, info), float(reward), bool(terminated), bool(truncated), dict(info)

    def _shown(self, observation: object, info: Mapping[str, Any]) -> Any:
        return f"{observation}{info.get('suffix', '')}"

    def close(self) -> None:
        close = getattr(self.inner, "close", None)
        if close is not None:
            close()


class GymnasiumEnvironment(_Wrapped):
    """A gymnasium environment; observations are shown by ``str`` or as pictures, actions parsed as Python literals.

    An action that is not a literal of the action space costs ``format_penalty`` and is not performed. An environment
    without an action space gets the text.
    """

    def __init__(self, inner: Any, format_penalty: float = 0.0, instruction: str = "", pictures: bool = False) -> None:
        super().__init__(inner)
        self._format_penalty = format_penalty
        self._instruction = instruction
        self._pictures = pictures
        self._last: Any = ""
        if hasattr(inner, "sample_action"):
            self.sample_action = inner.sample_action
        elif hasattr(inner, "action_space"):
            self.sample_action = self._sampled

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        shown, info = super().reset(seed)
        return [self._instruction, *shown] if self._pictures else f"{self._instruction}{shown}", info

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        chosen = self._action(action)
        if chosen is None:
            return self._last, self._format_penalty, False, False, {"valid": False}
        *turn, info = super().step(chosen)
        return (*turn, {"valid": True, **info})

    def _shown(self, observation: object, info: Mapping[str, Any]) -> Any:
        self._last = [self.inner.render()] if self._pictures else str(_plain(observation))
        return self._last

    def _sampled(self, rng: random.Random) -> str:
        space = self.inner.action_space
        space.seed(rng.getrandbits(31))
        return str(_plain(space.sample()))

    def _action(self, text: str) -> Any:
        """The action that the text writes; None: it writes none."""
        space = getattr(self.inner, "action_space", None)
        if space is None:
            return text
        # Whatever a policy writes is no fault of the environment, nor is a space that fails on it.
        with contextlib.suppress(Exception):
            if _kind(space) not in _NUMBERS and space.contains(text):
                return text
        with contextlib.suppress(Exception):
            action = member_of(space, ast.literal_eval(text.strip()))
            return action if space.contains(action) else None
        return None


_NUMBERS = {"b": "biu", "i": "iu", "u": "iu", "f": "fiu"}
"""Kinds of numbers that a literal may be made of, by the kind of the space's own."""


def _kind(space: object) -> str | None:
    dtype = getattr(space, "dtype", None)
    return None if dtype is None else np.dtype(dtype).kind


def member_of(space: Any, literal: Any) -> Any:
    """``literal`` with the types of the space's own samples: arrays where its numbers have a shape, else a number. No
    number is rounded: 1.0 is no whole number.
    """
    parts: Any = getattr(space, "spaces", None)
    kind, shape = _kind(space), getattr(space, "shape", None)
    if isinstance(parts, Mapping):
        return {key: member_of(parts[key], one) for key, one in literal.items()}
    if type(space).__name__ == "OneOf":
        number, one = literal
        return number, member_of(parts[number], one)
    if isinstance(parts, tuple):
        return tuple(member_of(part, one) for part, one in zip(parts, literal, strict=True))
    if kind not in _NUMBERS:
        return literal
    numbers = np.asarray(literal)
    if numbers.dtype.kind not in _NUMBERS[kind] + ("b" if shape else "") or not np.isfinite(numbers).all():
        raise ValueError(f"{literal!r} is not made of the numbers of {space}")
    numbers = np.asarray(literal, space.dtype)
    return numbers if numbers.shape or kind == "f" else numbers.item()


def gymnasium_environment(identifier: str, **config: Any) -> GymnasiumEnvironment:
    """``gymnasium:ID``; ``format_penalty``, ``instruction`` and ``pictures`` (show what ``render`` draws) are ours, the
    rest goes to ``gymnasium.make``."""
    import gymnasium

    own = {key: config.pop(key) for key in ("format_penalty", "instruction", "pictures") if key in config}
    if own.get("pictures"):
        config["render_mode"] = "rgb_array"
    with _known_to_gymnasium(identifier):
        return GymnasiumEnvironment(gymnasium.make(identifier, **config), **own)


@contextlib.contextmanager
def _known_to_gymnasium(identifier: str) -> Iterator[None]:
    import gymnasium

    try:
        yield
    except gymnasium.error.NamespaceNotFound as error:
        hint = f"name the module that registers it: gymnasium:my_package:{identifier}"
        raise ValueError(f"{error} {hint}") from error
    except gymnasium.error.Error as error:
        raise ValueError(str(error)) from error


_REGISTRIES = {
    "gem": ("gem.envs", "gem.envs.registration", "ENV_REGISTRY"),
    "textarena": ("textarena", "textarena.envs.registration", "ENV_REGISTRY"),
    "skyrl": ("skyrl_gym", "skyrl_gym.envs.registration", "registry"),
}
"""Prefix to the module that registers the library's environments, and where their names are."""


def check_name(prefix: str, identifier: str) -> None:
    """Check that the library of ``prefix`` has this environment; nothing where it is not installed. Raises
    ``ValueError``: it does not."""
    with contextlib.suppress(ImportError):
        if prefix == "gymnasium":
            module, _, name = identifier.rpartition(":")
            if module:
                importlib.import_module(module)
            # A name without a version is completed where the environment is made.
            if re.search(r"-v\d+$", name):
                with _known_to_gymnasium(name):
                    importlib.import_module("gymnasium").spec(name)
        elif prefix in _REGISTRIES:
            registering, module, attribute = _REGISTRIES[prefix]
            importlib.import_module(registering)
            check_known(prefix, identifier, getattr(importlib.import_module(module), attribute))


def check_known(library: str, identifier: str, known: Collection[str]) -> None:
    if identifier not in known:
        hint = did_you_mean(identifier, known, "; did you mean {!r}?")
        raise ValueError(f"the installed {library} has no environment {identifier!r}{hint}")


class GemEnvironment(_Wrapped):
    """``gem:ID``, such as ``gem:game:GuessTheNumber-v0``: five-tuples with texts; ``info["suffix"]`` is added
    to the observation."""

    def __init__(self, identifier: str, **config: object) -> None:
        import gem

        check_name("gem", identifier)
        super().__init__(gem.make(identifier, **config))
        # The base class of GEM has the method too, and raises NotImplementedError in it.
        own = getattr(type(getattr(self.inner, "unwrapped", self.inner)), "sample_random_action", None)
        if getattr(own, "__module__", "gem.core") != "gem.core":
            self.sample_action = self._sampled

    def _sampled(self, rng: random.Random) -> str:
        # With separate generators: the game's own draws do not depend on who chooses the actions.
        with _Wrapped(None)._generators(rng.getrandbits(32)):
            return str(self.inner.sample_random_action())


class SkyRLEnvironment(_Wrapped):
    """``skyrl:ID``, an environment of SkyRL-Gym: ``init(prompt)`` and ``step(text)``. Each task gets a new instance,
    which is given every column but ``prompt`` as ``extras`` (``reward_spec``, ``db_id`` ...), as in SkyRL's generator,
    and the option ``extras``; ``env_config`` is its section of SkyRL's ``environment.skyrl_gym``."""

    def __init__(
        self, identifier: str, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None
    ) -> None:
        import skyrl_gym
        from skyrl_gym.envs.registration import registry

        super().__init__(None)
        check_name("skyrl", identifier)
        entry_point = registry[identifier].entry_point
        module = entry_point.partition(":")[0] if isinstance(entry_point, str) else entry_point.__module__
        defaults = {
            field.name: field.default
            # The configuration class in the module of the environment has them.
            for item in vars(importlib.import_module(module)).values()
            if isinstance(item, type) and is_dataclass(item) and item.__name__.endswith("EnvConfig")
            for field in fields(item)
            if field.default is not MISSING
        }
        section = SimpleNamespace(**{**defaults, **(env_config or {})})
        self._make = partial(skyrl_gym.make, identifier, env_config=section)
        self._extras = dict(extras or {})

    def reset(self, seed: int, task: Mapping[str, Any] | None = None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        row = dict(task or {})
        prompt = row.pop("prompt", None)
        if prompt is None:
            raise BrokenContract("skyrl: an environment of SkyRL-Gym needs a data set with a column `prompt`")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        self.close()
        with self._generators(seed):
            self.inner = self._make(extras={**row, **self._extras})
            observation, info = self.inner.init(messages)
        return list(observation), dict(info or {})

    def step(self, action: str) -> tuple[list[dict[str, Any]], float, bool, bool, dict[str, Any]]:
        with self._generators():
            output = self.inner.step(action)
        info = dict(output.get("metadata") or {})
        return list(output["observations"]), float(output["reward"]), bool(output["done"]), False, info


class TextArenaEnvironment(_Wrapped):
    """``textarena:ID``, a game for one policy; its reward of the policy's player is given at the end. ``opponent`` (a
    function from observation to action, or its dotted path) plays the others; ``config`` is of ``textarena.make``."""

    def __init__(
        self, identifier: str, num_players: int = 1, player: int = 0, opponent: Any = None, **config: object
    ) -> None:
        import textarena

        self._make = partial(textarena.make, identifier, **config)
        super().__init__(self._make())
        if isinstance(opponent, str):
            opponent = resolve_name(opponent)
        if num_players > 1 and opponent is None:
            raise ValueError(f"a game of {num_players} players needs `opponent`, the dotted path of a function")
        if not 0 <= player < num_players:
            raise ValueError(f"player must lie in 0..{num_players - 1}, got {player}")
        self._num_players, self._player, self._opponent = num_players, player, opponent

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        with self._generators(seed):
            # The library's wrappers would keep the texts of earlier games.
            self.inner = self._make()
            try:
                self.inner.reset(num_players=self._num_players, seed=seed)
            except AssertionError as error:
                raise BrokenContract(f"textarena: {error}; env_config.num_players says {self._num_players}") from error
            text, _ = self._to_own_turn(False)
        return text, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with self._generators():
            done, _ = self.inner.step(action)
            text, done = self._to_own_turn(bool(done))
            if not done:
                return text, 0.0, False, False, {}
            rewards, details = self.inner.close()
        own = dict((details or {}).get(self._player, {}))
        valid = not own.get("invalid_move", False)
        reward = float((rewards or {}).get(self._player, 0.0))
        return text, reward, True, False, {"success": reward > 0, "valid": valid}

    def _to_own_turn(self, done: bool) -> tuple[str, bool]:
        """Play the others' turns until it is the policy's turn or the game is over."""
        while not done:
            player, observation = self.inner.get_observation()
            # TextArena's observation: a text, or messages as (sender, text, kind).
            text = observation if isinstance(observation, str) else "\n".join(str(entry[1]) for entry in observation)
            if player == self._player:
                return text, False
            done, _ = self.inner.step(self._opponent(text))
        return "", True

    def close(self) -> None:
        """Nothing to close: a game closes itself at its end, and holds nothing before."""


class OpenEnvEnvironment:
    """``openenv:URL``, such as ``openenv:http://localhost:8000``: a session of an OpenEnv server.

    Actions are sent as ``{action_key: text}``, texts read from ``observation_key``. Methods are coroutines: thousands
    of sessions can wait on one event loop.
    """

    def __init__(self, url: str, action_key: str = "message", observation_key: str | None = None) -> None:
        from openenv.core.generic_client import GenericEnvClient

        self._client = GenericEnvClient(base_url=url)
        self._action_key, self._observation_key = action_key, observation_key
        self._connected = False

    async def reset(self, seed: int, task: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        if not self._connected:
            await self._client.connect()
            self._connected = True
        result = await self._client.reset(seed=seed, **(task or {}))
        return self._text(result.observation), {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        result = await self._client.step({self._action_key: action})
        return self._text(result.observation), float(result.reward or 0.0), bool(result.done), False, {}

    async def close(self) -> None:
        await self._client.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._observation_key is not None:
            return str(observation[self._observation_key])
        return str(_plain(dict(observation)))


def _plain(value: object) -> Any:
    """``value`` with Python's numbers and lists for numpy's, whose text depends on numpy's version."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_plain(one) for one in value)
    return value
