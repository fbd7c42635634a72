"""Environments of other libraries through their adapters, and classes in gymnasium's form.

The libraries are not installed everywhere: in their place stand modules with the part of their interface that the
adapters use, drawing from the process-wide generators as the games of these libraries do.
"""

from __future__ import annotations

import asyncio
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll.environments.adapters import GymnasiumEnvironment
from roll.environments.base import (
    BrokenContract,
    EnvironmentOptionError,
    check_environment_options,
    make_environment,
    read_reset,
    read_step,
    reset_arguments,
)
from tests.support.environments import check_environment


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """A module, and those that it lies in."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
    for key, value in contents.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)


class Discrete:
    """Numbers from 0."""

    dtype = np.int64

    def __init__(self, n: int) -> None:
        self.n, self.rng = n, np.random.default_rng()

    def seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def sample(self) -> Any:
        return self.rng.integers(self.n)

    def contains(self, value: Any) -> bool:
        whole = isinstance(value, int) or (getattr(value, "shape", None) == () and value.dtype == np.int64)
        return whole and 0 <= int(value) < self.n


class GymEnv:
    """gymnasium's base class."""


class Corridor(GymEnv):
    """Walk to the lamp; observations of numpy's numbers, ``reset`` with keywords alone, as gymnasium has it."""

    def __init__(self, length: int = 6) -> None:
        self.length, self.action_space = length, Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.at, self.lamp = np.random.default_rng(seed).choice(self.length, 2, replace=False)
        return self.seen(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert isinstance(action, int | np.ndarray | np.integer)
        self.at = min(self.length - 1, max(0, self.at + (1 if action else -1)))
        return self.seen(), np.float64(self.at == self.lamp), np.bool_(self.at == self.lamp), False, {}  # type: ignore[return-value]

    def seen(self) -> Any:
        return {"at": np.int64(self.at), "others": (np.array([1, 2]), np.float32(0.5))}


class Box:
    """Numbers of a shape between 0 and 1, as lenient as gymnasium's: whatever NumPy makes numbers of is contained."""

    dtype = np.dtype(np.float32)

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def contains(self, value: Any) -> bool:
        numbers = np.asarray(value, self.dtype)
        return bool(numbers.shape == self.shape and (numbers >= 0).all() and (numbers <= 1).all())


class Many:
    """Spaces by name, or in order."""

    def __init__(self, spaces: Any) -> None:
        self.spaces = spaces

    def contains(self, value: Any) -> bool:
        if isinstance(self.spaces, dict):
            return value.keys() == self.spaces.keys() and all(self.spaces[key].contains(value[key]) for key in value)
        return len(value) == len(self.spaces) and all(map(lambda space, one: space.contains(one), self.spaces, value))


class Performed(GymEnv):
    """Takes what its space says, and looks it up as a tabular environment does."""

    def __init__(self, space: Any) -> None:
        self.action_space = space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return "go", {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert not isinstance(action, str | list)
        if isinstance(self.action_space, Discrete):
            {0: "left", 1: "right"}[action]
        elif isinstance(action, np.ndarray):
            assert action.dtype == self.action_space.dtype
        return "went", 1.0, False, False, {}


SPACES: dict[str, tuple[Any, list[str], list[str]]] = {
    "discrete": (
        Discrete(2),
        ["1", " 0 ", "0x1"],
        [*"2x", "1.0", "2.9", "1.", "True", "-1", "1e400", "10**2", "9" * 40, "9" * 5000, "{[]: 1}", "[1]", "", "None"],
    ),
    "numbers": (Box(2), ["[0, 1]", "(0.25, 1.0)"], ["[0.5]", "[0.5, 2]", "[1e400, 0]", "['0.5', '1']", "[1j, 0]", "0"]),
    "number": (Box(), ["0.5", "1"], ["'0.5'", "nan", "1e400", "[0.5]"]),
    "by name": (
        Many({"move": Discrete(2), "force": Box(1)}),
        ["{'move': 1, 'force': [0.5]}"],
        ["{'move': 1}", "{'move': 1.0, 'force': [0.5]}", "{'move': 1, 'force': 0.5}", "[1, [0.5]]", "1"],
    ),
    "in order": (Many((Discrete(2), Box(1))), ["(1, [0.5])", "[0, [1]]"], ["(1,)", "(1.0, [0.5])", "1", "{}"]),
}


@pytest.mark.usefixtures("gymnasium")
@pytest.mark.parametrize("name", SPACES)
def test_no_text_of_a_policy_is_a_fault_of_an_environment(name: str) -> None:
    space, right, wrong = SPACES[name]
    environment = GymnasiumEnvironment(Performed(space), format_penalty=-0.5)
    begun(environment, 1)
    assert [environment.step(text)[1] for text in right] == [1.0] * len(right)
    answers = {text: environment.step(text) for text in wrong}
    assert answers == {text: ("went", -0.5, False, False, {"valid": False}) for text in wrong}


class Echo(GymEnv):
    """Speaks text and has no action space."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.word = f"w{seed}"
        return f"say {self.word}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(action == self.word), True, False, {}


class Mimic:
    """In gymnasium's form without being its class."""

    reset, step = Echo.reset, Echo.step


class Rowed:
    """Needs the row of a data set."""

    def reset(self, seed: int, task: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.word = task["word"]
        return f"say {self.word}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(action == self.word), True, False, {}


@pytest.fixture
def gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    class Error(Exception):
        pass

    class NamespaceNotFound(Error):
        pass

    def make(name: str, **options: Any) -> Any:
        if name != "own:Corridor-v0":
            raise NamespaceNotFound("Namespace own not found.")
        return Corridor(**options)

    def spec(name: str) -> None:
        if name != "Corridor-v0":
            raise Error(f"Environment {name} does not exist.")

    error = SimpleNamespace(Error=Error, NamespaceNotFound=NamespaceNotFound)
    install(monkeypatch, "gymnasium", Env=GymEnv, make=make, spec=spec, error=error)


def begun(environment: Any, seed: int, task: Any = None) -> Any:
    given, named = reset_arguments(environment, seed, task)
    return environment.reset(*given, **named)


@pytest.mark.usefixtures("gymnasium")
def test_gymnasium_by_id_and_by_class() -> None:
    for name in ("gymnasium:own:Corridor-v0", f"{__name__}.Corridor"):
        report = check_environment(name, {"length": 4}, episodes=4)
        assert report.faults == [] and len(report.returns) == 4, name
        environment = make_environment(name, {"length": 4})
        (first,) = read_reset(name, begun(environment, 3)).observation
        assert first["content"] in [f"{{'at': {at}, 'others': ([1, 2], 0.5)}}" for at in range(4)]
        assert read_step(name, environment.step("2")).info == {"valid": False}
        assert read_step(name, environment.step(" 1 ")).info == {"valid": True}
    instructed = make_environment("gymnasium:own:Corridor-v0", {"instruction": "Walk. ", "format_penalty": -0.5})
    assert begun(instructed, 3)[0].startswith("Walk. {'at'") and instructed.step("x")[1] == -0.5  # type: ignore[index]
    with pytest.raises(EnvironmentOptionError, match="module that registers it: gymnasium:my_package:own/Corridor-v0"):
        make_environment("gymnasium:own/Corridor-v0")
    for name in ("Corridor-v0", "Corrido", f"{__name__}:Corridor-v0", "not_installed:Corrido-v0"):
        check_environment_options(f"gymnasium:{name}", {})
    for name in ("Corrido-v0", f"{__name__}:Corrido-v0"):
        with pytest.raises(EnvironmentOptionError, match="Corrido-v0 does not exist"):
            check_environment_options(f"gymnasium:{name}", {})


@pytest.mark.usefixtures("gymnasium")
@pytest.mark.parametrize("kind", [Echo, Mimic])
def test_a_class_in_gymnasium_s_form_speaks_text(kind: type) -> None:
    name = f"{__name__}.{kind.__name__}"
    environment = make_environment(name)
    assert begun(environment, 7)[0] == "say w7" and environment.step("w7")[1] == 1.0  # type: ignore[index]
    assert check_environment(name, {}, episodes=2).faults == []


def test_an_environment_of_rows_is_checked_on_rows() -> None:
    name = f"{__name__}.Rowed"
    found = check_environment(
        name, {}, episodes=2, actions=["bird"].__getitem__, rows=[{"word": "fish"}, {"word": "bird"}]
    )
    assert found.faults == [] and found.returns == [0.0, 1.0]
    (fault,) = check_environment(name, {}, episodes=2).faults
    assert "TypeError" in fault and "test_adapters.py:" in fault


class Drawing:
    """A game that draws from the generators of the process."""

    def reset(self, num_players: int = 1, seed: int | None = None) -> Any:
        self.number, self.moves = random.randrange(1000) + np.random.randint(1000), 0
        return f"number {self.number}", {"suffix": "\nGo"}

    def sample_random_action(self) -> str:
        return str(random.randrange(1000))


class GemGame(Drawing):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"{random.random()}", 1.0, True, False, {"suffix": "!"}


def _not_implemented(self: Any) -> str:
    raise NotImplementedError


_not_implemented.__module__ = "gem.core"


class GemQuestion(GemGame):
    """Has random actions from GEM's base class alone, which has none."""

    sample_random_action = _not_implemented


class TextGame(Drawing):
    """Two players in turn, two moves each; whoever says ``win`` wins."""

    def reset(self, num_players: int = 1, seed: int | None = None) -> Any:
        assert num_players == 2, f"The number of players has to be 2, received {num_players}"
        return super().reset(num_players, seed)

    def get_observation(self) -> tuple[int, Any]:
        return self.moves % 2, [(-1, f"number {self.number}", "kind"), (0, f"move {self.moves}", "kind")]

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.moves += 1
        self.won = (self.moves - 1) % 2 if action == "win" else None
        return action == "win" or self.moves == 4, {}

    def close(self) -> tuple[dict[int, float], dict[int, Any]]:
        return {player: 0.0 if self.won is None else 1.0 if player == self.won else -1.0 for player in (0, 1)}, {}


def test_gem(monkeypatch: pytest.MonkeyPatch) -> None:
    check_environment_options("gem:unknown", {})  # the library is not installed
    install(monkeypatch, "gem.envs.registration", ENV_REGISTRY={"game:Draw-v0": None, "rg:letters": None})
    install(monkeypatch, "gem", make=lambda name: GemGame() if name == "game:Draw-v0" else GemQuestion())
    report = check_environment("gem:game:Draw-v0", {}, episodes=3)
    assert report.faults == [], "its draws depend on the seed alone"
    environment = make_environment("game:Draw-v0")
    assert begun(environment, 1)[0].endswith("\nGo") and environment.step("1")[0].endswith("!")  # type: ignore[index]
    assert check_environment("rg:letters", {}, episodes=2).faults == []
    assert getattr(make_environment("rg:letters"), "sample_action", None) is None
    check_environment_options("game:Draw-v0", {})
    for use in (make_environment, check_environment_options):
        with pytest.raises(EnvironmentOptionError, match="did you mean 'game:Draw-v0'"):
            use("gem:game:Draw-v1", {})


def _opponent(text: str) -> str:
    assert "move" in text
    return "pass"


def test_textarena(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "textarena", make=lambda name: TextGame())
    options = {"num_players": 2, "opponent": f"{__name__}._opponent"}
    environment: Any = make_environment("textarena:Draw-v0", options)
    seen = [begun(environment, 5)[0] for _ in range(2)]
    assert seen[0] == seen[1] and seen[0].endswith("move 0")
    assert environment.step("pass")[:4] == (seen[0].replace("move 0", "move 2"), 0.0, False, False)
    _, reward, terminated, _, info = environment.step("win")
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    with pytest.raises(EnvironmentOptionError, match="needs `opponent`"):
        make_environment("textarena:Draw-v0", {"num_players": 2})
    install(monkeypatch, "textarena.envs.registration", ENV_REGISTRY={"Draw-v0": None})
    check_environment_options("textarena:Draw-v0", {})
    with pytest.raises(EnvironmentOptionError, match="did you mean 'Draw-v0'"):
        check_environment_options("textarena:Drw-v0", {})
    with pytest.raises(BrokenContract, match=r"has to be 2, received 1(?s:.*)num_players says 1"):
        begun(make_environment("textarena:Draw-v0"), 1)


@pytest.mark.long
def test_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym", reason="package reasoning-gym is not installed")
    name = "reasoning_gym:leg_counting"
    assert check_environment(name, {"max_animals": 3}, episodes=2).faults == []
    environment: Any = make_environment(name, {"max_animals": 3})
    first, second = begun(environment, 1)[0], begun(environment, 2)[0]
    assert first != second and first == begun(environment, 1)[0]
    right = environment._entry["answer"]
    for response in (right, f"I count. <answer>{right}</answer>"):
        begun(environment, 1)
        assert environment.step(response)[1:3] == (1.0, True)
    begun(environment, 1)
    assert environment.step(str(int(right) + 1))[1] < 1.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("leg_countin", {}, "did you mean 'leg_counting'"),
        ("leg_counting", {"max_animal": 3}, "max_animal"),
        ("leg_counting", {"max_animals": 0}, "max_animals"),
        ("leg_counting", {"seed": 3}, "the seed of an episode draws its task"),
    ],
)
def test_mistakes_in_reasoning_gym_are_found_before_the_run(name: str, options: Any, message: str) -> None:
    pytest.importorskip("reasoning_gym", reason="package reasoning-gym is not installed")
    with pytest.raises(EnvironmentOptionError, match=message):
        check_environment_options(f"reasoning_gym:{name}", options)


def test_a_mistyped_prefix() -> None:
    with pytest.raises(EnvironmentOptionError, match="did you mean the prefix 'reasoning_gym'"):
        check_environment_options("reasoning_gim:leg_counting", {})


def test_openenv(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class Client:
        def __init__(self, base_url: str) -> None:
            sent.append(base_url)

        async def connect(self) -> None:
            sent.append("connect")

        async def reset(self, **options: Any) -> Any:
            sent.append(options)
            return SimpleNamespace(observation={"text": "look"})

        async def step(self, action: Any) -> Any:
            sent.append(action)
            return SimpleNamespace(observation={"text": "seen"}, reward=None, done=True)

        async def close(self) -> None:
            sent.append("close")

    install(monkeypatch, "openenv.core.generic_client", GenericEnvClient=Client)
    environment: Any = make_environment(
        "openenv:http://localhost:8000", {"observation_key": "text", "action_key": "move"}
    )

    async def played() -> Any:
        first = await begun(environment, 4, {"level": 2})
        second = await environment.step("left")
        await environment.close()
        return first, second

    assert asyncio.run(played()) == (("look", {}), ("seen", 0.0, True, False, {}))
    assert sent == ["http://localhost:8000", "connect", {"seed": 4, "level": 2}, {"move": "left"}, "close"]
