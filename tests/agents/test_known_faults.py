"""Faults of other agentic pipelines, each with a test that it is none here."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from examples.tiny_agentic.games import GuessNumber
from roll.agents.built_in_tools import PythonTool
from roll.agents.chat_ids import ChatTemplate
from roll.agents.conversation import Conversations
from roll.agents.environment_agent import EnvironmentAgent, EnvironmentOptions
from roll.agents.episode import Episode, Limits, Model, Task, run_episode
from roll.agents.tool_calls import parse_response
from roll.agents.tools import ToolError
from roll.algorithms.advantages import AdvantageInputs, estimate_advantages
from roll.methods.episodes import EpisodeMethod
from roll.pipelines.agentic.config import AgenticConfig
from roll.pipelines.agentic.plan import AgenticPlan
from roll.pipelines.agentic.players import TaskSource
from roll.pipelines.model_calls import even_mini_batches
from roll.protocol import DataProto
from roll.rollout.episode_batch import build_episode_batch
from roll.rollout.episodes import EpisodeGroup
from tests.agents.playing import Recorded, byte_soup, opened
from tests.config.good import LAKE, changed, load, mistakes
from tests.support.episodes import ids_of, make_episode, random_groups, said
from tests.support.keys import algorithm, config_of

ROOT = Path(__file__).parents[2]


class Plays:
    """Says in which of its methods to fail, and how."""

    def __init__(self, fails: str = "", hangs: str = "", observation: str = "look") -> None:
        self.fails, self.hangs, self.observation = fails, hangs, observation
        self.steps = 0

    async def _may_fail(self, method: str) -> None:
        if self.fails == method:
            raise RuntimeError("broken")
        if self.hangs == method:
            await asyncio.sleep(60)

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        await self._may_fail("reset")
        return self.observation, {"state": "start"}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await self._may_fail("step")
        self.steps += 1
        return f"seen {self.steps}", 1.0, self.steps == 3, False, {"state": f"s{self.steps}"}


def play(engine: Recorded, make: Any, limits: Limits | None = None, **options: Any) -> Episode:
    limits = limits or Limits(context=10_000)
    agent = EnvironmentAgent("env", make, EnvironmentOptions(**{"reset_seconds": 0.2, "step_seconds": 0.2} | options))
    model = Model(engine, engine.template, "hermes", limits)
    return asyncio.run(run_episode(Task("env", 3), agent, model, limits))


def grouped(*episodes: Episode) -> list[EpisodeGroup]:
    return [EpisodeGroup(0, Task("env", 1), list(episodes))]


def learned(batch: DataProto, norm: Any = ("auto", "auto"), **keys: Any) -> torch.Tensor:
    EpisodeMethod(config_of(AgenticConfig, **{"gamma": 1.0} | keys), norm, 100).credit(batch)
    advantages: torch.Tensor = batch.batch["advantages"]
    return advantages


def test_fault_01_a_first_prompt_that_is_too_long_ends_the_run(template: ChatTemplate) -> None:
    """It ends the episode, which is counted, has no score and trains nothing."""
    engine = Recorded(template, lambda _: "left")
    long = play(engine, lambda: Plays(observation="word " * 500), Limits(context=64))
    assert (long.outcome, long.calls) == ("context_limit", [])
    batch = build_episode_batch(grouped(long, play(engine, Plays)), "trajectory", 0)
    assert batch.batch["scores"].isnan().tolist() == [True, False] and not batch.batch["response_mask"][0].any()
    assert not learned(batch, adv_estimator="loop")[0].any()


@pytest.mark.parametrize("fault", [{"fails": "reset"}, {"fails": "step"}, {"hangs": "reset"}, {"hangs": "step"}])
def test_fault_02_an_environment_that_raises_or_hangs_ends_the_run(template: ChatTemplate, fault: Any) -> None:
    episode = play(Recorded(template, lambda _: "left"), lambda: Plays(**fault), retries=0)
    assert episode.outcome == "environment_error" and episode.failed and episode.error is not None
    assert f"env.{next(iter(fault.values()))}" in episode.error


def test_fault_03_the_history_forgets_valid_actions_and_its_last_turn(template: ChatTemplate) -> None:
    answers = iter(["alpha", "beta", "gamma"])
    engine = Recorded(template, lambda _: next(answers))
    options = {"context": "observation", "history_length": 2, "template": "{history}|{current_observation}"}
    play(engine, Plays, **options)
    asked = [template.decode(prompt) for prompt, _ in engine.turns]
    assert "alpha" in asked[1] and "look" in asked[1]
    assert "alpha" in asked[2] and "beta" in asked[2] and "seen 1" in asked[2], "two turns, whatever was said in them"


def test_fault_04_equal_states_of_different_tasks_are_compared() -> None:
    def group(order: int, *rewards: float) -> EpisodeGroup:
        episodes = [make_episode(said([1], [2], reward=r, state="start"), seed=order) for r in rewards]
        return EpisodeGroup(order, Task("env", order), episodes)

    batch = build_episode_batch([group(0, 0.0, 1.0), group(1, 10.0, 30.0)], "step", 0)
    advantages = learned(batch, ("group", None), adv_estimator="gigpo", episode_reward_weight=0.0)
    assert advantages[:, 1].tolist() == [-0.5, 0.5, -10.0, 10.0]


def test_fault_05_step_returns_are_not_normalised_with_the_newer_keys() -> None:
    """One setting for both parts of GiGPO, wherever it is written."""
    episodes = [make_episode(said([1], [2], reward=r, state="start")) for r in (0.0, 4.0)]
    for norm, expected in ((("group", None), 2.0), (("group", "group"), 0.5**0.5)):
        for weights in ({"episode_reward_weight": 0.0}, {"step_reward_weight": 0.0}):
            batch = build_episode_batch(grouped(*episodes), "step", 0)
            advantages = learned(batch, norm, adv_estimator="gigpo", **weights)
            assert advantages[:, 1].tolist() == pytest.approx([-expected, expected], abs=1e-5)


def test_fault_06_the_return_of_a_call_never_reaches_earlier_calls() -> None:
    """Calls behind an endpoint, one row each: one trajectory, whose reward came with the last."""
    episode = make_episode(said([1], [2], state="a"), said([3], [4], state="b"), said([5], [6], state="c", reward=1.0))
    batch = build_episode_batch(grouped(episode), "step", 0)
    assert batch.batch["trajectory_ids"].tolist() == [0, 0, 0] and batch.batch["step_index"].tolist() == [0, 1, 2]
    assert batch.batch["scores"].tolist() == [1.0] * 3, "one score of one episode"
    assert len(set(batch.batch["state_ids"][:, 1].tolist())) == 3, "states are no step numbers"
    advantages = learned(batch, (None, None), adv_estimator="step_reinforce", step_reward_gamma=0.5)
    assert advantages[:, 1].tolist() == [0.25, 0.5, 1.0]
    assert batch.batch["sequence_tokens"].tolist() == [3, 3, 3]


@pytest.mark.parametrize("rule", ["trajectory", "step"])
def test_fault_07_what_is_trained_was_tokenised_again(template: ChatTemplate, rule: Any) -> None:
    """Byte soup as responses: every row begins with a prompt that the engine saw and trains what it gave."""
    engine = Recorded(template, byte_soup(template, 4))
    episode = play(engine, Plays)
    batch = build_episode_batch(grouped(episode), rule, 0).batch
    rows = [ids[: int(m.sum())].tolist() for ids, m in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    for prompt, response in engine.turns:
        assert any(row[: len(prompt) + len(response)] == prompt + response for row in rows)
    trained = sorted(batch["input_ids"][batch["response_mask"]].tolist())
    assert trained == sorted(token for _, response in engine.turns for token in response)


@pytest.mark.parametrize("ended", [True, False])
def test_fault_08_every_turn_gets_an_end_token_and_loses_its_newline(template: ChatTemplate, ended: bool) -> None:
    """The end token is put in where the response has none, the newline stays: the ids of the template itself."""
    conversations, messages = Conversations(template), [{"role": "user", "content": "hello"}]
    call = conversations.ask(messages)
    ids = template.encode("left") + ([min(template.end_tokens)] if ended else [])
    answer = {"role": "assistant", "content": "left"}
    conversations.answer(call, ids, [0.0] * len(ids), [0] * len(ids), "stop" if ended else "length", answer)
    messages += [answer, {"role": "user", "content": "again"}]
    later = conversations.ask(messages)
    assert conversations.prompt_ids(later) == template.encode(template.render(messages))
    assert later.parent == 0


def test_fault_09_rows_are_duplicated_to_make_them_divide() -> None:
    groups = random_groups(np.random.default_rng(0), groups=2, episodes=4)
    batch = build_episode_batch(groups, "trajectory", 0)
    learned(batch, adv_estimator="grpo")
    batch.non_tensor_batch["images"] = np.array([{"pixels": row} for row in range(len(batch))], dtype=object)
    assert len(batch) % 3, "a number that does not divide"
    even = even_mini_batches(batch, 2, 3)
    assert len(even) % 6 == 0
    for name in ("response_mask", "loss_mask"):
        assert int(even.batch[name].sum()) == int(batch.batch[name].sum()), name
    sampled = even.batch["response_mask"].any(-1)
    assert not sampled.all(), "rows that fill up"
    for name, column in even.batch.items():
        first = column[~sampled].flatten(1)[:, 1:] if name == "attention_mask" else column[~sampled]
        assert not (column.dtype == torch.bool or column.is_floating_point()) or not first.any(), name
    for name, objects in even.non_tensor_batch.items():
        assert all(one is None or isinstance(one, str | int | float) for one in objects[~sampled.numpy()]), name
    assert sorted(even.non_tensor_batch["sample_id"][sampled.numpy()]) == sorted(batch.non_tensor_batch["sample_id"])


def test_fault_10_a_turn_in_flight_is_thrown_away_at_an_update() -> None:
    """A turn that two versions of the weights sampled is trained, each token with the version that it came from."""
    episode = make_episode(said([1], [2, 3, 4]), said([5], [6], parent=0))
    episode.calls[0].versions, episode.calls[1].versions = [3, 3, 4], [4]
    columns = build_episode_batch(grouped(episode), "trajectory", 0).batch
    assert columns["weight_versions"][columns["response_mask"]].tolist() == [3, 3, 4, 4]


def test_fault_11_advantages_run_through_observations_and_padding() -> None:
    """The value of a token that the policy did not sample changes nothing."""
    rewards, mask = torch.tensor([[0.0, 0, 0, 0, 1, 0]]), torch.tensor([[True, True, False, False, True, False]])
    values = torch.tensor([[0.5, 0.25, 7.0, -7.0, 0.75, 9.0]])
    options = algorithm(adv_estimator="gae", gamma=0.9, lambd=0.8)

    def advantages(keep: torch.Tensor) -> list[float]:
        inputs = AdvantageInputs(rewards[:, keep], mask[:, keep], torch.zeros(1).long(), values=values[:, keep])
        found: list[float] = estimate_advantages(inputs, options).advantages[mask[:, keep]].tolist()
        return found

    assert advantages(torch.ones(6).bool()) == pytest.approx(advantages(mask[0]))


def test_fault_12_only_the_sum_of_rewards_reaches_the_tokens() -> None:
    episode = make_episode(said([1], [2, 3], reward=0.5), said([4], [5], parent=0, reward=2.0))
    batch = build_episode_batch(grouped(episode), "trajectory", 0)
    advantages = learned(batch, (None, None), adv_estimator="reinforce", gamma=0.5)
    assert batch.batch["token_level_rewards"].tolist() == [[0, 0, 0.5, 0, 2.0]]
    assert advantages.tolist() == [[0, 0.75, 1.5, 0, 2.0]]


def test_fault_13_truncated_is_not_told_from_terminated() -> None:
    calls = said([1], [2], reward=1.0)
    episodes = make_episode(calls), make_episode(calls, outcome="turn_limit")
    batch = build_episode_batch(grouped(*episodes), "trajectory", 0, bootstrap=True)
    columns = batch.batch
    assert columns["terminated"].tolist() == [True, False] and columns["truncated"].tolist() == [False, True]
    columns["values"] = torch.full(columns["input_ids"].shape, 0.5)
    advantages = learned(batch, (None, None), adv_estimator="gae", lambd=1.0)
    assert advantages[:, 1].tolist() == [0.5, 1.0], "the second goes on with the value of where it was left"
    learned(batch, (None, None), adv_estimator="reinforce", max_len_mask=True)
    assert batch.batch["loss_mask"].sum(-1).tolist() == [1, 0]


@pytest.fixture
def lake_plan(tmp_path: Path) -> AgenticPlan:
    sampling = {
        "val_env_manager.generating_args": {"temperature": 0.25},
        "actor_infer.generating_args.temperature": 0.75,
    }
    plan = load(tmp_path, changed(sampling, LAKE)).plan
    assert isinstance(plan, AgenticPlan)
    return plan


def test_fault_14_every_validation_plays_other_tasks(lake_plan: AgenticPlan) -> None:
    """Those of training come again in another run of the same seed, and in it by their number."""
    assert lake_plan.validation is not None
    first, second = (TaskSource(lake_plan.validation, "validation", {}) for _ in range(2))
    assert [first.task(number) for number in range(8)] == second.draw(8)
    train = TaskSource(lake_plan.train, "train/7", {})
    train.draw(3)
    assert train.draw(2) == [TaskSource(lake_plan.train, "train/7", {}).task(number) for number in (3, 4)]
    assert TaskSource(lake_plan.train, "train/8", {}).draw(2) != TaskSource(lake_plan.train, "train/7", {}).draw(2)


def test_fault_15_keys_that_nothing_reads(tmp_path: Path) -> None:
    """An unknown key is a mistake; one of published files that does nothing is said to."""
    (problem,) = mistakes(tmp_path, changed({"train_env_manager.group_sizes": 8}, LAKE))
    assert problem.key == "train_env_manager.group_sizes" and "group_size" in str(problem)
    dead = {"render_save_dir": "x", "train_env_manager.format_penalty": -0.1, "dirty_data_mask": True}
    said_of = {notice.key: notice.text for notice in load(tmp_path, changed(dead, LAKE)).warnings}
    assert all(said_of[key] for key in dead)


def test_fault_16_code_of_the_model_runs_in_a_plain_process() -> None:
    """The tool is the sandbox: no files of this machine, no network; without it the tool does not run at all."""
    tool = PythonTool()
    try:
        tool.check_host()
    except ToolError as error:
        pytest.skip(str(error))
    looks = f"print(open({str(Path(__file__))!r}).read()[:10])"
    asks = "import socket; socket.create_connection(('127.0.0.1', 9), 0.2)"
    results = [asyncio.run(tool(code)) for code in (looks, asks, "print(6 * 7)")]
    assert [result.failed for result in results] == [True, True, False]
    assert results[2].text.strip() == "42" and "ConnectionRefused" not in results[1].text


def test_fault_17_an_endpoint_without_a_secret_that_serves_late_requests(template: ChatTemplate) -> None:
    async def scenario() -> None:
        async with opened(Recorded(template, lambda _: "left")) as (endpoint, session):
            assert httpx.URL(endpoint.url).host == "127.0.0.1"
            body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}

            async def status(key: str) -> int:
                async with httpx.AsyncClient() as client:
                    headers = {"Authorization": f"Bearer {key}"}
                    answer = await client.post(f"{endpoint.url}/v1/chat/completions", json=body, headers=headers)
                    return answer.status_code

            key = session.key
            assert len(key) > 40 and await status(key) == 200
            assert [await status(other) for other in ("0", "sk-wrong", key[:-1])] == [401] * 3
            endpoint.retire(session)
            assert await status(key) == 410

    asyncio.run(scenario())


def test_fault_18_optional_packages_are_imported_with_the_pipeline() -> None:
    """And engines with the configuration."""
    packages = ("sglang", "vllm", "gem", "imageio", "textarena", "mcp", "openai", "torch", "ray")
    modules = ("agents.episode", "agents.environment_agent", "pipelines.agentic.definition", "environments.registry")
    imports = ", ".join(f"roll.{name}" for name in modules)
    code = f"import sys, {imports}; print([name for name in {packages} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_fault_19_a_thread_an_episode_and_rows_as_long_as_the_limit(template: ChatTemplate) -> None:
    engine = Recorded(template, lambda _: "left")
    most = []

    async def all_of_them() -> list[Episode]:
        limits = Limits(context=10_000)
        agent = EnvironmentAgent("env", Plays, EnvironmentOptions())

        async def one(seed: int) -> Episode:
            episode = await run_episode(Task("env", seed), agent, Model(engine, template, "hermes", limits), limits)
            most.append(threading.active_count())
            return episode

        return await asyncio.gather(*(one(seed) for seed in range(100)))

    before = threading.active_count()
    episodes = asyncio.run(all_of_them())
    assert max(most) - before < 50
    longest = max(len(ids_of(episode.conversations.branches()[0])) for episode in episodes)
    assert build_episode_batch(grouped(*episodes), "trajectory", 0).batch["input_ids"].shape == (100, longest)


def test_fault_20_members_of_a_group_get_different_maps() -> None:
    """In processes with hashes of their own."""
    code = "from roll.environments.frozen_lake import FrozenLake; print(FrozenLake().reset(5)[0])"
    maps = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={"PYTHONHASHSEED": salt}
        ).stdout
        for salt in ("1", "2")
    ]
    assert maps[0] == maps[1] != ""


def test_fault_21_validation_samples_as_training_does(lake_plan: AgenticPlan) -> None:
    """Its own section counts, also where ``actor_infer`` has one."""
    assert lake_plan.validation is not None
    found = (lake_plan.train.generating_args.temperature, lake_plan.validation.generating_args.temperature)
    assert found == (0.75, 0.25)


def test_fault_22_text_is_changed_before_its_tool_calls_are_read(template: ChatTemplate) -> None:
    """The ids that are trained are those that were sampled, whatever a parser makes of their text."""
    text = 'so<tool_call>{"name":"calc","arguments":{"x":"1"}}</tool_call>'
    assert parse_response(text, "hermes").calls[0].arguments == {"x": "1"}
    engine = Recorded(template, lambda _: text)
    episode = play(engine, GuessNumber)
    batch = build_episode_batch(grouped(episode), "trajectory", 0).batch
    sampled = batch["input_ids"][batch["response_mask"]].tolist()
    assert sampled == [token for _, response in engine.turns for token in response]
    assert template.decode(engine.turns[0][1]).startswith(text)
