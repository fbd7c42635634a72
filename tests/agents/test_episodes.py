"""Episodes of scripted policies: rewards on their turns, limits, faults of environments, contexts, many at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from examples.tiny_agentic.games import GuessNumber
from roll.agents.chat_ids import ChatTemplate
from roll.agents.environment_agent import EnvironmentAgent, EnvironmentOptions
from roll.agents.episode import Episode, Limits, Model, Task, run_episode
from roll.pipelines.agentic.metrics import episode_metrics
from roll.rollout.episodes import EpisodeGroup, build_episode_batch
from roll.rollout.groups import FinishedGroup
from tests.agents.playing import Recorded
from tests.support.episodes import ids_of, sampled, trained_ids


def play(
    chat: ChatTemplate, make: Any, choose: Any, limits: Limits | None = None, seed: int = 3, **options: Any
) -> tuple[Episode, Recorded]:
    engine = Recorded(chat, choose)
    limits = limits or Limits()
    model = Model(engine, chat, "hermes", limits)
    agent = EnvironmentAgent("env", make, EnvironmentOptions(**options))
    return asyncio.run(run_episode(Task("env", seed), agent, model, limits)), engine


def bisect(prompt: str) -> str:
    """The binary search of 1 to 20, from the whole conversation."""
    low, high, guess = 1, 20, None
    for line in prompt.split("\n"):
        word = line.removesuffix("<|im_end|>")
        if guess is not None and word == "higher":
            low = guess + 1
        elif guess is not None and word == "lower":
            high = guess - 1
        elif word.isdigit():
            guess = int(word)
    return str((low + high) // 2)


def test_an_episode_is_one_growing_sample(template: ChatTemplate) -> None:
    episode, engine = play(template, GuessNumber, bisect)
    assert (episode.outcome, episode.success, episode.reward) == ("terminated", True, 1.0)
    (branch,) = episode.conversations.branches()
    for prompt in engine.prompts():
        assert ids_of(branch)[: len(prompt)] == prompt
    sampled = sum(len(call.response_ids) for call in episode.calls)
    assert len(trained_ids(branch)) == sampled and branch.is_trained[-1]
    assert [call.reward for call in branch.calls] == [0.0] * (len(branch.calls) - 1) + [1.0]
    assert episode.calls[0].state == "1-20"
    assert episode.seconds.environment > 0 and episode.seconds.model > 0


def test_contexts(template: ChatTemplate) -> None:
    shown = {
        "append": ("Turn {turn_idx}: {observation} ({actions_left} left)", 1),
        "last": ("{observation}", 2),
        "observation": ("{history}\nnow {current_observation}", 3),
    }
    for context, (text, branches) in shown.items():
        said = iter(["alpha", "beta", "gamma"])  # nobody's valid action
        options: dict[str, Any] = {"template": text, "context": context, "history_length": 1}
        episode, engine = play(template, lambda: GuessNumber(max_steps=3), lambda _, said=said: next(said), **options)
        assert len(episode.conversations.branches()) == branches, context
        _, second, last = map(template.decode, engine.prompts())
        assert "alpha" in second and "beta" in last and ("alpha" in last) == (context == "append")
        if context == "append":
            assert "Turn 3: Not a number" in last and "(8 left)" in last
        else:
            assert "Guess a number" not in last and last.count("Not a number") == 2
        assert len(episode.conversations.steps()) == 3
    system, engine = play(template, GuessNumber, bisect, system="You play.")
    assert template.decode(engine.prompts()[0]).startswith("<|im_start|>system\nYou play.<|im_end|>")
    assert system.success


class Reporting(GuessNumber):
    """Tells of itself as ROLL's environments do: all in ``metrics``, of which the last turn has one more."""

    modes: ClassVar[dict[str, Any]] = {"success": "last", "tries": "max", "format_penalty": "sum", "first": "first"}
    value: ClassVar[Any] = 1.0

    def step(self, action: str) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        metrics = {name: float(self._steps) for name in ("tries", "format_penalty", "action_is_valid", "first")}
        metrics |= {"success": info["success"]} | ({"at_end": self.value} if terminated else {})
        return observation, reward, terminated, truncated, {"metrics": metrics, "metrics_agg_mode": self.modes}


def test_metrics_of_an_environment_are_aggregated_as_it_says(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode, _ = play(template, Reporting, bisect)
    turns = len(episode.calls)
    assert turns == 4
    assert (episode.success, episode.metrics) == (
        True,
        {"tries": 4.0, "format_penalty": 10.0, "action_is_valid": 2.5, "first": 1.0, "at_end": 1.0},
    )
    shown = episode_metrics([EpisodeGroup(0, episode.task, [episode])])
    assert {name: shown[f"env/env/{name}"].value() for name in ("success", "action_is_valid", "at_end")} == {
        "success": 1.0,
        "action_is_valid": 2.5,
        "at_end": 1.0,
    }
    monkeypatch.setattr(Reporting, "modes", {"success": "mean"})
    averaged, _ = play(template, Reporting, bisect)
    assert (averaged.success, averaged.metrics["success"]) == (None, 0.25)
    for name, wrong in (("modes", {"tries": "median"}), ("value", "none")):
        monkeypatch.setattr(Reporting, name, wrong)
        broken, _ = play(template, Reporting, bisect)
        assert broken.outcome == "environment_error" and str(broken.error).count("returned") == 1


@pytest.mark.parametrize("context", ["observation", "last"])
def test_a_history_of_no_turns_is_empty(template: ChatTemplate, context: str) -> None:
    _, engine = play(template, GuessNumber, lambda _: "1", context=context, history_length=0, max_steps=3)
    prompts = [template.decode(ids) for ids in engine.prompts()]
    assert len(prompts) == 3 and prompts[1] == prompts[2] and "Guess a number" not in prompts[1]


class Messages(GuessNumber):
    """Returns whole conversations, as an environment does that manages its context itself."""

    def reset(self, seed: int) -> Any:
        text, info = super().reset(seed)
        return [{"role": "system", "content": "Play."}, {"role": "user", "content": text}], info

    def step(self, action: str) -> Any:
        text, *rest = super().step(action)
        return [{"role": "user", "content": f"You said {action}: {text}"}], *rest


def test_an_environment_that_manages_its_context(template: ChatTemplate) -> None:
    episode, engine = play(template, Messages, lambda _: "1", context="own", max_steps=2, template="ignored")
    first, second = (template.decode(ids) for ids in engine.prompts())
    assert "Play." in first and "Guess a number" in first
    assert second == template.render([{"role": "user", "content": "You said 1: higher"}])
    assert [len(one.calls) for one in episode.conversations.steps()] == [1, 1]


class Busy(GuessNumber):
    """Counts how many of its kind are called at a time."""

    now: ClassVar[int] = 0
    most: ClassVar[int] = 0

    def step(self, action: str) -> Any:
        cls = type(self)
        cls.now += 1
        cls.most = max(cls.most, cls.now)
        time.sleep(0.005)
        cls.now -= 1
        return super().step(action)


@pytest.mark.parametrize("concurrent", [1, None])
def test_calls_at_a_time(template: ChatTemplate, concurrent: int | None) -> None:
    limits = Limits()
    agent = EnvironmentAgent("env", Busy, EnvironmentOptions(concurrent=concurrent, max_steps=2, step_seconds=5.0))

    async def many() -> list[Episode]:
        models = [Model(Recorded(template, lambda _: "1"), template, "hermes", limits) for _ in range(4)]
        return await asyncio.gather(*(run_episode(Task("env", 1), agent, model, limits) for model in models))

    Busy.most = 0
    assert [one.outcome for one in asyncio.run(many())] == ["turn_limit"] * 4
    assert Busy.most == 1 if concurrent else Busy.most > 1


def test_limits_end_any_agent(template: ChatTemplate) -> None:
    turns, _ = play(template, GuessNumber, lambda _: "1", Limits(turns=2))
    assert (turns.outcome, len(turns.calls)) == ("turn_limit", 2)
    short, engine = play(template, GuessNumber, lambda _: "1" * 50, Limits(context=150, new_tokens=20))
    assert short.outcome == "context_limit" and max(map(len, engine.prompts())) < 150
    none, engine = play(template, GuessNumber, bisect, Limits(context=5))
    assert (none.outcome, none.calls, engine.prompts()) == ("context_limit", [], [])

    class Stubborn:
        async def run(self, task: Task, model: Model, episode: Episode) -> float:
            while True:
                with contextlib.suppress(Exception):
                    await model.chat([{"role": "user", "content": "again"}])

    engine = Recorded(template, lambda _: "x")
    limits = Limits(turns=3)
    episode = asyncio.run(run_episode(Task("t", 0), Stubborn(), Model(engine, template, "hermes", limits), limits))
    assert (episode.outcome, len(episode.calls)) == ("turn_limit", 3)


def broken(method: str, act: Callable[[], Any]) -> Callable[[], Any]:
    """Makes environments one of whose methods does something else."""
    return lambda: type("Broken", (GuessNumber,), {method: lambda self, given: act()})()


class FailsOnce(GuessNumber):
    failed: ClassVar[list[int]] = []
    closed: ClassVar[list[Any]] = []

    def close(self) -> None:
        self.closed.append(self)

    def reset(self, seed: int) -> Any:
        if not self.failed:
            self.failed.append(1)
            raise OSError("no connection")
        return super().reset(seed)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (broken("step", lambda: {}["x"]), "env.step: KeyError: 'x'"),
        (broken("step", lambda: time.sleep(60)), "env.step: took more than 0.5 s"),
        (broken("step", lambda: asyncio.sleep(60)), "env.step: took more than 0.5 s"),
        (broken("reset", lambda: time.sleep(60)), "env.reset: took more than 0.5 s"),
        (broken("step", lambda: ("x", None, True, False, {})), "env.step: BrokenContract"),
        (lambda: 1 / 0, "env.reset: ZeroDivisionError"),
    ],
)
def test_faults_of_environments_are_outcomes(template: ChatTemplate, make: Any, error: str) -> None:
    episode, _ = play(template, make, bisect, step_seconds=0.5, reset_seconds=0.5)
    assert episode.outcome == "environment_error" and episode.error is not None and episode.error.startswith(error)


def test_a_reset_that_fails_is_tried_again_and_its_environment_closed(template: ChatTemplate) -> None:
    """A place in a process would be taken for ever."""
    episode, _ = play(template, FailsOnce, bisect)
    assert episode.success and len(set(map(id, FailsOnce.closed))) == 2


def test_faults_of_agents_are_outcomes_and_those_of_engines_are_not(template: ChatTemplate) -> None:
    class Faulty:
        async def run(self, task: Task, model: Model, episode: Episode) -> float:
            await model.chat([{"role": "user", "content": "x"}])
            raise KeyError("oops")

    async def lost(*_: Any) -> FinishedGroup:
        raise ConnectionError("no engine")

    limits = Limits()
    model = Model(Recorded(template, lambda _: "x"), template, "hermes", limits)
    episode = asyncio.run(run_episode(Task("t", 0), Faulty(), model, limits))
    assert (episode.outcome, episode.error) == ("agent_error", "KeyError: 'oops'")
    with pytest.raises(ConnectionError, match="no engine"):
        asyncio.run(run_episode(Task("t", 0), Faulty(), Model(lost, template, "hermes", limits), limits))


def test_time_limit(template: ChatTemplate) -> None:
    async def slow(*_: Any) -> FinishedGroup:
        await asyncio.sleep(60)
        raise AssertionError

    limits = Limits(seconds=0.1)
    agent = EnvironmentAgent("env", GuessNumber, EnvironmentOptions())
    episode = asyncio.run(run_episode(Task("t", 0), agent, Model(slow, template, "hermes", limits), limits))
    assert episode.outcome == "time_limit" and episode.calls == []


def test_members_of_a_group_meet_the_same_task_and_many_run_at_once(template: ChatTemplate) -> None:
    engine = Recorded(template, bisect)
    limits = Limits()
    agent = EnvironmentAgent("env", GuessNumber, EnvironmentOptions())

    most, before = [], threading.active_count()

    async def one(number: int) -> Episode:
        model = Model(engine, template, "hermes", limits)
        episode = await run_episode(Task("env", number // 4), agent, model, limits)
        most.append(threading.active_count())
        return episode

    async def all_of_them() -> list[Episode]:
        return await asyncio.gather(*map(one, range(100)))

    episodes = asyncio.run(all_of_them())
    assert all(episode.success for episode in episodes) and max(most) - before < 50
    for first in range(0, 100, 4):
        assert len({tuple(len(call.response_ids) for call in one.calls) for one in episodes[first : first + 4]}) == 1
    longest = max(len(ids_of(episode.conversations.branches()[0])) for episode in episodes)
    batch = build_episode_batch([EpisodeGroup(0, Task("env", 1), episodes)], "trajectory", 0).batch
    assert batch["input_ids"].shape == (100, longest), "rows are no longer than it takes"


class Searching:
    """Tells something after each response; the second ends the episode."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.turns = 0
        return "Find it.", {}

    def step(self, action: str) -> tuple[list[dict[str, Any]], float, bool, bool, dict[str, Any]]:
        self.turns += 1
        told = [{"role": "user", "content": text} for text in ("\n<information>", "a thing</information>\n")]
        return told, float(self.turns), self.turns == 3, False, {}


@pytest.mark.parametrize("ends", [(True, True, True), (False, False, False), (True, False, True), (False, True, False)])
def test_turns_within_one_message(template: ChatTemplate, ends: tuple[bool, ...]) -> None:
    """As SkyRL without ``use_conversation_multi_turn``: observations raw behind a response without its end token, which
    the last response gets, sampled or not; all but the observations is trained."""
    eos = template.eos_token
    said = [[*template.encode(f"<search>{number}</search>"), *[eos] * end] for number, end in enumerate(ends)]
    prompts: list[list[int]] = []

    async def engine(prompt_ids: list[int], most: int, options: Mapping[str, Any]) -> FinishedGroup:
        prompts.append(list(prompt_ids))
        ids = said[len(prompts) - 1]
        return sampled(list(ids), version=len(prompts))

    limits = Limits(context=10_000)
    agent = EnvironmentAgent("env", Searching, EnvironmentOptions(context="response"))
    episode = asyncio.run(run_episode(Task("env", 3), agent, Model(engine, template, "hermes", limits), limits))
    ids, mask, rewards = template.prompt([{"role": "user", "content": "Find it."}]), [], {}
    start, given = len(ids), []
    for turn, response in enumerate(said):
        given.append(list(ids))
        kept = response[:-1] if response[-1] == eos else response
        ids, mask = ids + kept, mask + [1] * len(kept)
        if turn == len(said) - 1:
            ids, mask = [*ids, eos], [*mask, 1]
        rewards[len(ids) - 1] = turn + 1.0
        for text in ("\n<information>", "a thing</information>\n") if turn < len(said) - 1 else ():
            told = template.encode(text)
            ids, mask = ids + told, mask + [0] * len(told)
    (branch,) = episode.conversations.branches()
    assert prompts == given and ids_of(branch) == ids
    columns = build_episode_batch([EpisodeGroup(0, episode.task, [episode])], "trajectory", 0).batch
    assert columns["response_mask"][0].tolist() == [False] * start + [bool(one) for one in mask]
    assert {at: value for at, value in enumerate(columns["turn_rewards"][0].tolist()) if value} == rewards
    assert episode.outcome == "terminated" and episode.reward == 6.0
    short = Limits(context=len(prompts[1]))
    prompts.clear()
    cut = asyncio.run(run_episode(Task("env", 3), agent, Model(engine, template, "hermes", short), short))
    assert cut.outcome == "context_limit" and len(cut.calls) == 1
