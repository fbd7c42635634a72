"""Built-in environments: seeded, solvable, exact in their rewards; the contract."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from examples.tiny_agentic.games import Calculator, GuessNumber, calculate
from roll.environments.base import (
    BUILT_IN,
    BrokenContract,
    EnvironmentOptionError,
    make_environment,
    read_reset,
    read_step,
)
from roll.environments.frozen_lake import FrozenLake
from roll.environments.grids import MOVES, ActionPattern, moved
from roll.environments.sokoban import Sokoban
from tests.support.environments import check_environment

WITH_DATA = {"questions", "roll_math", "roll_qa"}  # tested in `tests/agents/test_text_tools.py`


@pytest.mark.parametrize("name", sorted(BUILT_IN.keys() - WITH_DATA))
def test_built_in_environments_pass_their_own_check(name: str) -> None:
    report = check_environment(name, {}, episodes=10)
    assert report.faults == [] and len(report.returns) == 10


def test_lake_is_reachable_and_pays_at_the_goal() -> None:
    for seed in range(200):
        lake = FrozenLake(min_distance=2, max_steps=8)
        lake.reset(seed)
        reward, turns, terminated = 0.0, 0, False
        while not terminated:
            left = lake._distances
            best = [move for move in MOVES if left.get(moved(lake.position, move), 9) < left[lake.position]]
            _, reward, terminated, truncated, info = lake.step(random.Random(turns).choice(best))
            assert not truncated
            turns += 1
        assert reward == 1.0 and info["success"] and 2 <= turns <= 8


def test_lake_shows_where_things_are() -> None:
    lake = FrozenLake(show_instruction=False)
    text, _ = lake.reset(3)
    rows = [line.split(" ")[1:] for line in text.split("\n")]
    assert rows[lake.position[0]][lake.position[1]] == "P"
    assert rows[lake.goal[0]][lake.goal[1]] == "G"
    assert {(r, c) for r in range(4) for c in range(4) if rows[r][c] == "O"} == lake.holes
    before = lake.position
    text, reward, terminated, truncated, info = lake.step("jump")
    assert (lake.position, reward, terminated, truncated, info["valid"]) == (before, 0.0, False, False, False)


def test_slippery_ice_goes_each_way_with_one_third() -> None:
    counts = dict.fromkeys(MOVES, 0)
    lake = FrozenLake(is_slippery=True)
    lake.reset(0)
    for _ in range(3000):
        counts[lake._slid("Left")] += 1
    assert counts["Right"] == 0
    assert all(900 < counts[move] < 1100 for move in ("Left", "Up", "Down"))


def solution(game: Sokoban) -> list[str] | None:
    """A shortest solution by breadth-first search over positions."""
    start = (game.player, game.boxes)
    found: dict[Any, tuple[Any, str] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        position = waiting.popleft()
        if position[1] <= game.targets:
            moves: list[str] = []
            while (back := found[position]) is not None:
                position, move = back
                moves.append(move)
            return moves[::-1]
        for move in MOVES:
            following = game.after(position, move)
            if following not in found:
                found[following] = (position, move)
                waiting.append(following)
    return None


@pytest.mark.parametrize(("room", "boxes"), [((6, 6), 1), ((7, 8), 2)])
def test_sokoban_rooms_have_solutions(room: tuple[int, int], boxes: int) -> None:
    for seed in range(25):
        game = Sokoban(dim_room=room, num_boxes=boxes, max_steps=500, search_depth=200)
        game.reset(seed)
        assert not game.boxes <= game.targets
        moves = solution(game)
        assert moves is not None
        total = 0.0
        for move in moves:
            _, reward, terminated, _, _ = game.step(move)
            total += reward
        assert terminated
        # One per box on its target in the end, less those that were on one at the start.
        assert total == pytest.approx(10 - 0.1 * len(moves) + boxes - _on_target_at_start(seed, room, boxes))


def _on_target_at_start(seed: int, room: tuple[int, int], boxes: int) -> int:
    game = Sokoban(dim_room=room, num_boxes=boxes, max_steps=500, search_depth=200)
    game.reset(seed)
    return len(game.boxes & game.targets)


def test_sokoban_pushes_no_two_boxes_and_no_wall() -> None:
    game = Sokoban()
    game.floor = frozenset({(1, c) for c in range(1, 5)})
    game.targets = frozenset({(1, 4)})
    assert game.after(((1, 1), frozenset({(1, 2), (1, 3)})), "Right") == ((1, 1), frozenset({(1, 2), (1, 3)}))
    assert game.after(((1, 1), frozenset({(1, 2)})), "Right") == ((1, 2), frozenset({(1, 3)}))
    assert game.after(((1, 1), frozenset({(1, 2)})), "Up") == ((1, 1), frozenset({(1, 2)}))


def test_binary_search_finds_the_number() -> None:
    for seed in range(40):
        game = GuessNumber(1, 31, max_steps=5)
        game.reset(seed)
        for _ in range(5):
            _, reward, terminated, _, info = game.step(str((game.low + game.high) // 2))
            if terminated:
                break
        assert info["success"] and reward == 1.0
    game = GuessNumber()
    game.reset(5)
    _, reward, terminated, _, info = game.step("40")
    assert not info["valid"] and not terminated


def test_calculator_answers_and_pays() -> None:
    game = Calculator(format_penalty=-0.1)
    game.reset(1)
    result, reward, terminated, _, info = game.step(f"calc {game.expression}")
    assert (result, reward, terminated, info["valid"]) == (str(game.answer), 0.0, False, True)
    assert game.step(f"#### {game.answer}")[1:3] == (1.0, True)
    game.reset(2)
    assert game.step("calc __import__('os')")[0:2] == ("error", -0.1)
    assert game.step("no idea")[1] == -0.1
    assert game.step("#### 1")[1] == 0.0


@pytest.mark.parametrize("text", ["2**9", "1/2", "len(x)", "1.5", "True", "a", "(" * 70, "9" * 65, ""])
def test_calculator_takes_whole_numbers_only(text: str) -> None:
    with pytest.raises(ValueError):
        calculate(text)


def test_calculator_is_python_s_arithmetic() -> None:
    assert [calculate(text) for text in ("12*(3-4)", "-5+2", "2*3-4*5")] == [-12, -3, -14]


def test_action_patterns() -> None:
    answer = ActionPattern("<answer>(.*?)</answer>")
    assert answer.find("x <answer> Up\n</answer>") == "Up"
    assert answer.find("Up") is None
    assert (
        ActionPattern("<think>(.*?)</think>\\s*<answer>(.*?)</answer>").find("<think>a</think> <answer>b</answer>")
        == "b"
    )
    with pytest.raises(ValueError, match="0 groups"):
        ActionPattern("up|down")


def test_contract() -> None:
    assert read_reset("e", ("text", {})).observation == [{"role": "user", "content": "text"}]
    assert read_step("e", ("t", 1, True, False, {"role": "tool"})).observation[0]["role"] == "tool"
    for answer in (
        ("a", 1.0, True, {}),
        None,
        ("a", "x", True, False, {}),
        ("a", float("nan"), True, False, {}),
        ("a", 10**400, True, False, {}),
    ):
        with pytest.raises(BrokenContract):
            read_step("e", answer)
    for answer in ((1, {}), ("a", None), "a", ([{"content": "x"}], {})):
        with pytest.raises(BrokenContract):
            read_reset("e", answer)
    with pytest.raises(BrokenContract, match="terminated"):
        read_step("e", ("a", 1.0, "yes", False, {}))


def test_wrong_names_and_options() -> None:
    with pytest.raises(EnvironmentOptionError, match="did you mean 'frozen_lake'"):
        make_environment("frozenlake")
    with pytest.raises(EnvironmentOptionError, match=r"env_config.siz: .*did you mean 'size'"):
        make_environment("frozen_lake", {"siz": 4})
    with pytest.raises(EnvironmentOptionError, match="above 0"):
        make_environment("frozen_lake", {"p": 0})
    with pytest.raises(EnvironmentOptionError, match="cannot be imported"):
        make_environment("no_such_package.Env")
    with pytest.raises(EnvironmentOptionError, match="not installed"):
        make_environment("gem:game:GuessTheNumber-v0")


class Drifting:
    """Starts alike, goes on otherwise."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return f"start {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "done", random.random(), True, False, {}


def test_check_finds_faults() -> None:
    assert "another episode from turn [1]" in check_environment(f"{__name__}.Drifting", {}, episodes=1).faults[0]
