"""Environments of verifiers, played by the package itself in an interpreter of its own; skipped without one."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll.agents import programs
from roll.agents.chat_ids import ChatTemplate
from roll.agents.episode import Episode, Limits, Task
from roll.agents.programs import TasksetError, number_of_tasks, taskset_options
from roll.agents.registry import make_agent
from tests.agents.playing import Recorded, assert_trained_as_sampled, played
from tests.agents.tasksets import FOLDER, PYTHON, needs_verifiers
from tests.support.processes import have_ended

THREE = Limits(3, context=1000)
PROGRAM = Path(programs.__file__).with_name("taskset_program.py")


def play(
    template: ChatTemplate,
    name: str,
    choose: Callable[[str], Any],
    index: int = 1,
    limits: Limits = THREE,
    **config: Any,
) -> Episode:
    """An episode of a task, whose calls are those that the engine saw and whose responses are trained once."""
    options = taskset_options(f"verifiers:{name}", {"python": str(PYTHON), **config}, limits.turns)
    engine = Recorded(template, choose)
    agent = make_agent("black_box", options | {"env": {"PYTHONPATH": str(FOLDER)}})
    (episode,) = played(agent, engine, Task("t", 0, {"index": index}), limits)
    assert_trained_as_sampled(engine, episode.conversations)
    return episode


def own_metrics(episode: Episode) -> dict[str, float]:
    return {name: value for name, value in episode.metrics.items() if name not in episode.over_turns}


def processes_with(word: str) -> list[int]:
    """Ids of processes whose command has the word."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word in file.read_text().split("\0"):
                found.append(int(file.parent.name))
    return found


@needs_verifiers
def test_a_single_turn(template: ChatTemplate) -> None:
    """The rubric's weighted sum is the reward; its parts are metrics."""
    episode = play(template, "vowels-v1", lambda _: "aeiox")
    assert (episode.outcome, len(episode.calls)) == ("terminated", 1), episode.error
    assert episode.reward == pytest.approx(2 * 4 / 5)
    assert own_metrics(episode) == {"vowels": pytest.approx(4 / 5), "letters": 5.0}


@needs_verifiers
def test_several_turns(template: ChatTemplate) -> None:
    """The task is that of the index, and the user of the environment speaks between the turns."""
    said = {"say 0": "aa", "say 1": "xx", "say 2": "ax"}

    def choose(prompt: str) -> str:
        return next(said[key] for key in reversed(said) if key in prompt)

    episode = play(template, "letters-v1", choose, select={"limit": 8})
    assert (episode.outcome, len(episode.calls)) == ("terminated", 3), episode.error
    assert episode.reward == pytest.approx(0.5)
    assert own_metrics(episode) == {"vowels": pytest.approx(0.5), "answers": 3.0}
    assert len(episode.conversations.branches()) == 1


@needs_verifiers
def test_an_environment_with_tools(template: ChatTemplate) -> None:
    """Calls reach the taskset's server; one that cannot be made is told to the policy."""
    calls = (
        '{"name": "math_calc", "arguments": {"expression": "10+12"}}',
        '{"name": "nothing", "arguments": {}}',
    )

    servers: set[int] = set()

    def choose(prompt: str) -> str:
        servers.update(processes_with("calculator_v1"))
        results = prompt.count("<|im_start|>tool")
        return f"<tool_call>\n{calls[results]}\n</tool_call>" if results < 2 else f"it is {prompt.count('22') * 22}"

    episode = play(template, "calculator-v1", choose, index=2)
    assert (episode.outcome, episode.reward, len(episode.calls)) == ("terminated", 1.0, 3), episode.error
    assert own_metrics(episode) == {"results": 2.0, "right": 1.0}
    assert len(servers) == 1 and have_ended(servers, 5), "one of the taskset, which ends with the program"


@needs_verifiers
def test_the_limits_are_those_of_the_entry(template: ChatTemplate) -> None:
    """What was said until the limit of turns, or of context, is scored."""
    episode = play(template, "letters-v1", lambda _: "a", limits=Limits(2, context=1000), select={"limit": 8})
    assert (episode.reward, own_metrics(episode)["answers"]) == (1.0, 2.0), episode.error
    episode = play(template, "letters-v1", lambda _: "a" * 200, limits=Limits(9, context=120), select={"limit": 8})
    assert (episode.reward, episode.outcome) == (1.0, "context_limit"), episode.error
    assert own_metrics(episode)["answers"] == 1.0


@needs_verifiers
def test_a_reward_that_fails_is_no_zero(template: ChatTemplate) -> None:
    episode = play(template, "vowels-v1", lambda _: "a", taskset={"split": "broken"})
    assert (episode.outcome, episode.failed) == ("agent_error", True)
    assert "the scorer is away" in str(episode.error)


@needs_verifiers
def test_what_cannot_be_played_is_said_with_its_key() -> None:
    client = {"type": "eval", "base_url": "http://localhost:1/v1", "api_key_var": "KEY"}
    user = {"id": "user-sim", "user": {"client": client}}
    docker = {"agent": {"harness": {"id": "codex"}, "runtime": {"type": "subprocess"}}}
    wrong = {"taskset": {"cuont": 3, "count": "many"}}
    cases: list[tuple[str, dict[str, Any], dict[str, Any], list[tuple[str, str]]]] = [
        ("vowels-v1", {}, {}, []),
        ("vowels-v1", {"limit": 3}, {"taskset": {"count": 5}, "agent": {"max_turns": 2}}, []),
        ("vowels-v1", {}, user, []),
        ("nowhere-v1", {}, {}, [("", "no module nowhere_v1")]),
        ("json", {}, {}, [("", "no taskset of verifiers 0.4")]),
        ("needy-v1", {}, {}, [("python", "package_that_is_nowhere")]),
        ("letters-v1", {}, {}, [("select.limit", "has no end; 1000")]),
        ("vowels-v1", {"limit": 0}, {}, [("select.limit", "greater than or equal to 1")]),
        ("vowels-v1", {"include": {"idx": ["16:20"]}}, {}, [("select", "leaves no task")]),
        ("vowels-v1", {}, wrong, [("taskset.count", "integer"), ("taskset.cuont", "not permitted")]),
        ("vowels-v1", {}, {"id": "nowhere"}, [("id", "no module nowhere")]),
        ("vowels-v1", {}, {"id": "user-sim"}, [("user.client", "assistant, user")]),
        ("vowels-v1", {}, {"agent": {"harness": {"id": "nowhere"}}}, [("agent.harness.id", "no module nowhere")]),
        ("vowels-v1", {}, docker, [("agent.runtime.type", "docker")]),
    ]
    options = [{"id": name, "turns": 3, "select": select, "env": env} for name, select, env, _ in cases]
    done = subprocess.run(
        [PYTHON, "-P", FOLDER / "rejected.py", PROGRAM],
        input=json.dumps(options),
        capture_output=True,
        text=True,
        cwd=FOLDER,
    )
    assert done.returncode == 0, done.stderr
    for case, found in zip(cases, json.loads(done.stdout), strict=True):
        assert len(found) == len(case[3]), (case, found)
        for (key, rule), (its_key, its_rule) in zip(case[3], found, strict=True):
            assert its_key == key and rule in its_rule, (case, found)


@needs_verifiers
def test_tasks_are_counted_in_the_interpreter_of_the_entry(tmp_path: Path) -> None:
    options = taskset_options("verifiers:vowels-v1", {"python": str(PYTHON), "select": {"limit": 3}}, 2)
    with pytest.raises(TasksetError, match="env_type: there is no module vowels_v1"):
        number_of_tasks(options | {"folder": str(tmp_path)})
    assert number_of_tasks(options | {"folder": str(FOLDER)}) == 3


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"python": "/no/such/python"}, "env_config.python: there is no program /no/such/python"),
        ({"python": sys.executable}, "env_config.python: is needed: an interpreter with the package verifiers"),
        ({"python": "/bin/false"}, "env_config.python: /bin/false fails"),
    ],
)
def test_an_interpreter_without_the_package_is_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(TasksetError) as error:
        number_of_tasks(taskset_options("verifiers:any", config, 2))
    assert str(error.value).startswith(problem)
