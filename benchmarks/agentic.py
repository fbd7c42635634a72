"""Cost of episodes: the driver's overhead for a turn, hundreds of them at once, engines kept busy, prefixes known.

    python -m benchmarks.agentic             # all of it, some two minutes on two cores
    python -m benchmarks.agentic overhead    # or one part: overhead, engine, latency, ahead, tokens, calls

``overhead``  microseconds of a turn in the driver, on engines that answer at once, against a bare loop over the same
              environments without conversations, requests and groups.
``engine``    turns a second of ``hf_infer`` in this process (136k and 3.5M weights, 8 turns of 29 observation and 3 new
              tokens), with and without its prefix cache, and the share of what it could know that it knew.
``latency``   512 episodes at once whose environments take log-normal times: the share of the time in which engines are
              busy, against a loop that waits for all episodes before each turn. On a simulated clock, and on a real
              one (engines that sleep for as long as they would compute).
``ahead``     steps a second of asynchronous over synchronous rollout with the same engines and trainer, environments
              of log-normal latency, on the same clock, for several ``async_generation_ratio``.
``tokens``    an untrained model at temperature 2 in conversations of 8 turns, for the chat templates of eight families:
              trained tokens that are not those sampled, and those that encoding the responses' texts would change.
``calls``     a call of an MCP server, and of a model behind an endpoint (:mod:`benchmarks.agent_calls`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.simulation.clock import Clock
from roll.agents.conversation import Conversations
from roll.agents.episode import Episode, Limits, Model, Task
from roll.config.plan.plan import RunAhead
from roll.distributed import DriverLoop
from roll.rollout.engines import EngineClient
from roll.rollout.episodes import EpisodeGroup, EpisodeLoop, Player, build_episode_batch, episode_codec
from roll.rollout.flow import GroupFlow, collected
from roll.rollout.groups import EngineCommand, EngineReport, FinishedGroup
from roll.rollout.loops import GroupSettings
from roll.rollout.routing import ConversationAffinityRouter
from roll.rollout.scheduling import AsyncScheduler
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams

EPISODES, GROUP_SIZE, TURNS, OBSERVED, NEW = 512, 8, 8, 29, 3
TOKEN_SECONDS = 0.004
"""Of a simulated engine's step, in which each of its samples gets a token."""
TRAINING_SECONDS = 4.0
"""Of a simulated step, for 512 episodes."""
MEDIAN, SIGMA = 0.2, 1.0
"""Seconds of an environment's step: log-normal."""


class Words:
    """A chat template whose tokens are words: no text is rendered, so that the runtime alone is measured."""

    end_tokens = frozenset({0})
    images = None

    def prompt(self, messages: Any) -> list[int]:
        return list(range(1, OBSERVED + 1))


class Turns(Conversations):
    """A conversation that grows by ``OBSERVED`` tokens a turn."""

    def _grown(self, *asked: Any) -> tuple[int | None, list[int]]:
        return (self.calls[-1].index if self.calls else None), list(range(1, OBSERVED + 1))


@dataclass
class Waiter:
    """An agent whose environment takes a while for every step; 0: none."""

    seconds: Callable[[random.Random], float] = lambda rng: 0.0
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def run(self, task: Task, model: Model, episode: Episode) -> float:
        rng = random.Random(next(self.numbers))
        model.conversations.__class__ = Turns
        for _ in range(TURNS):
            call = model.conversations.ask([])
            sampled = await model._sample(model.conversations.prompt_ids(call), NEW, {})
            versions = [version for version, start, end in sampled.weight_versions[0] for _ in range(start, end)]
            fields = sampled.token_ids.tolist(), sampled.log_probs.tolist(), versions, sampled.finish_reasons[0]
            model.conversations.answer(call, *fields, {"role": "assistant"})
            pause = self.seconds(rng)
            if pause:
                await asyncio.sleep(pause)
        return 1.0


def log_normal(rng: random.Random) -> float:
    return MEDIAN * rng.lognormvariate(0.0, SIGMA)


@dataclass
class Engines:
    """A cluster whose engines sample ``NEW`` tokens of every request in a turn of ``NEW`` steps."""

    world_size: int
    seconds: float = 0.0
    slots: int = 128
    busy: float = 0.0
    version: int = 0
    held: list[dict[str, GenerationRequest]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held = [{} for _ in range(self.world_size)]

    def submit(self, rank: int, method: Any, command: EngineCommand) -> _Call:
        return _Call(self, rank, command)

    def leave_out(self, rank: int) -> None:
        raise AssertionError("no engine is lost here")

    async def advance(self, rank: int, command: EngineCommand) -> EngineReport:
        held = self.held[rank]
        for request_id in command.abort:
            held.pop(request_id, None)
        recalled = [held.pop(one) for one in command.recall if one in held]
        held.update((request.request_id, request) for request in command.add)
        if not command.work or not held:
            return EngineReport(recalled=recalled)
        taken = list(held)[: self.slots]
        if self.seconds:
            self.busy += self.seconds * NEW
            await asyncio.sleep(self.seconds * NEW)
        return EngineReport([self._finished(held.pop(one)) for one in taken], recalled, busy_seconds=self.seconds * NEW)

    def _finished(self, request: GenerationRequest) -> FinishedGroup:
        spans = [(self.version, 0, NEW)]
        output = GenerationOutput(request.request_id, 0, [7] * NEW, [-1.0] * NEW, "stop", spans)
        return FinishedGroup.from_samples([output], [""])


@dataclass
class _Call:
    engines: Engines
    rank: int
    command: EngineCommand

    def within(self, seconds: float | None) -> _Call:
        return self

    def __await__(self) -> Any:
        return self.engines.advance(self.rank, self.command).__await__()


def make_flow(engines: Any, agent: Any, groups: int) -> tuple[GroupFlow, dict[str, Player]]:
    client = EngineClient(engines, EPISODES, router=ConversationAffinityRouter())
    limits = Limits(TURNS, NEW, 1 << 20)
    words: Any = Words()
    players = {"wait": Player(agent, words, limits, SamplingParams(NEW))}
    numbers = iter(range(1 << 30))
    draw = lambda count: [Task("wait", next(numbers)) for _ in range(count)]  # noqa: E731
    loop = EpisodeLoop(players, "0/", max_groups=groups)
    return GroupFlow(client, None, draw, GroupSettings(GROUP_SIZE), loop=loop), players


def overhead() -> None:
    """Microseconds of a turn, beyond the engine and the environment."""
    driver = DriverLoop()
    try:
        flow, _ = make_flow(Engines(2), Waiter(), EPISODES // GROUP_SIZE)
        begin = time.process_time()
        driver.run(collected(flow, EPISODES // GROUP_SIZE, 0, 1e9))
        ours = (time.process_time() - begin) / (EPISODES * TURNS)
        begin = time.process_time()
        driver.run(_bare(Engines(2)))
        bare = (time.process_time() - begin) / (EPISODES * TURNS)
    finally:
        driver.close()
    print(f"overhead: {ours * 1e6:.0f} us a turn for {EPISODES} episodes at once; a bare loop {bare * 1e6:.0f} us")


async def _bare(engines: Engines) -> None:
    """The same turns, one episode after the other, straight to the engines."""
    for number in range(EPISODES):
        prompt: list[int] = []
        for turn in range(TURNS):
            prompt = prompt + list(range(1, OBSERVED + 1))
            request = GenerationRequest(f"{number}.{turn}", prompt, SamplingParams(NEW))
            report = await engines.advance(number % 2, EngineCommand(add=(request,)))
            prompt = prompt + report.groups[0].token_ids.tolist()


def latency() -> None:
    """Busy share of the engines."""
    shares = {}
    runs = (
        ("each for itself", _free, True),
        ("waiting for all before a turn", _barrier, True),
        ("each for itself, in real time", _free, False),
    )
    for name, run, simulated in runs:
        driver = DriverLoop(Clock() if simulated else None)
        engines = Engines(2, TOKEN_SECONDS)
        try:
            seconds = driver.run(run(engines))
        finally:
            driver.close()
        shares[name] = engines.busy / (2 * seconds), seconds
    shown = "; ".join(f"{name}: {share:.1%} busy, {seconds:.1f} s" for name, (share, seconds) in shares.items())
    print(f"latency ({EPISODES} episodes, median {MEDIAN} s, sigma {SIGMA}): {shown}")


async def _free(engines: Engines) -> float:
    flow, _ = make_flow(engines, Waiter(log_normal), EPISODES // GROUP_SIZE)
    begin = asyncio.get_running_loop().time()
    await collected(flow, EPISODES // GROUP_SIZE, 0, 1e9)
    return asyncio.get_running_loop().time() - begin


async def _barrier(engines: Engines) -> float:
    client = EngineClient(engines, EPISODES)
    rng, begin = random.Random(0), asyncio.get_running_loop().time()
    for turn in range(TURNS):
        requests = [GenerationRequest(f"{turn}.{i}", [1] * OBSERVED, SamplingParams(NEW)) for i in range(EPISODES)]
        await asyncio.gather(*(client.submit(request) for request in requests))
        await asyncio.sleep(max(log_normal(rng) for _ in range(EPISODES)))
    return asyncio.get_running_loop().time() - begin


def ahead(steps: int = 12) -> None:
    """Asynchronous over synchronous steps a second, by ``async_generation_ratio``; at best a step takes as long as the
    engines compute for it, or as training does."""
    seconds, busy = {}, 0.0
    for ratio in (0.0, 1.0, 2.0, 4.0):
        driver, engines = DriverLoop(Clock()), Engines(2, TOKEN_SECONDS)
        try:
            seconds[ratio] = driver.run(_steps(engines, ratio, steps))
        finally:
            driver.close()
        busy = engines.busy / engines.world_size / (steps + bool(ratio))
    least = max(busy, TRAINING_SECONDS)
    times = ", ".join(
        f"{ratio:g}: {seconds[ratio]:.1f} s ({seconds[0] / seconds[ratio]:.2f} times)" for ratio in seconds
    )
    print(
        f"ahead (simulated, {EPISODES} episodes and {TRAINING_SECONDS:g} s of training a step), by ratio: {times}; "
        f"engines compute {busy:.1f} s a step, so at best {seconds[0] / least:.2f} times"
    )


async def _steps(engines: Engines, ratio: float, steps: int) -> float:
    groups, loop = EPISODES // GROUP_SIZE, asyncio.get_running_loop()
    flow, players = make_flow(engines, Waiter(log_normal), 4 * groups)
    begin = loop.time()
    if not ratio:
        for _ in range(steps):
            await collected(flow, groups, 0, 1e9)
            await asyncio.sleep(TRAINING_SECONDS)
        return (loop.time() - begin) / steps
    scheduler = AsyncScheduler(flow, RunAhead.of(ratio, groups, 0), episode_codec(players), 1 << 20, 1e9)
    going = asyncio.create_task(scheduler.keep_going())
    for step in range(steps + 1):
        if step == 1:
            begin = loop.time()  # the first step has nothing ahead of it
        await scheduler.pause()
        scheduler.exchanged(step)
        engines.version = step
        await scheduler.collect(step)
        await asyncio.sleep(TRAINING_SECONDS)
    going.cancel()
    await flow.abort()
    return (loop.time() - begin) / steps


def engine() -> None:
    """Both sizes: in the small one a turn's bookkeeping is as much as its arithmetic."""
    engine_of(EPISODES, 64, 2)
    engine_of(48, 256, 4)


def engine_of(conversations: int, hidden: int, layers: int) -> None:
    """Turns a CPU-second of ``hf_infer``, and what its prefix cache knew of what it could."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    from roll.strategies.hf_infer.engine import GenerationEngine
    from roll.strategies.hf_infer.strategy import create_decoder

    torch.set_num_threads(1)
    config = Qwen2Config(
        vocab_size=448,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=3 * hidden,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.08,
    )
    longest = TURNS * (OBSERVED + NEW) + 8
    rates = {}
    for capacity in (0, conversations * longest):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        decoder = create_decoder(model, longest)
        one = GenerationEngine(decoder, str, (447,), conversations, longest, prefix_cache_tokens=capacity)
        generator = torch.Generator().manual_seed(1)
        prompts = {str(i): _words(generator, OBSERVED) for i in range(conversations)}
        params, could, begin = SamplingParams(NEW, min_new_tokens=NEW, seed=1), 0, time.process_time()
        for turn in range(TURNS):
            one.add_requests(GenerationRequest(name, prompt, params) for name, prompt in prompts.items())
            could += sum(len(prompt) - OBSERVED - 1 for prompt in prompts.values()) if turn else 0
            while one.num_unfinished:
                for output in one.step():
                    prompts[output.request_id] += output.token_ids
            prompts = {name: prompt + _words(generator, OBSERVED) for name, prompt in prompts.items()}
        rates[capacity] = conversations * TURNS / (time.process_time() - begin)
    plain, cached = rates.values()
    print(
        f"engine ({conversations} conversations, {model.num_parameters():,} weights): {plain:,.0f} turns a CPU-second "
        f"without a prefix cache, "
        f"{cached:,.0f} with one ({cached / plain:.1f} times); {one._prefixes.num_reused / could:.1%} "
        "of the tokens of earlier turns were known"
    )


@dataclass
class Talk:
    """An environment that says a line a turn."""

    instant = True
    turn: int = 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return f"hello {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return f"world {self.turn}", 1.0, self.turn == TURNS, False, {}


def tokens(episodes: int = 32) -> None:
    """Ids that are trained against those sampled, hot: ``hf_infer``, an untrained model, a tokenizer of bytes."""
    from tests.agents.templates import WRITTEN_HERE, published

    families = ("qwen2_5", "qwen3", "llama3", "llama3_1", "deepseekv3", "gptoss")
    chosen = [one for one in WRITTEN_HERE if one.name in ("chatml", "mistral")]
    chosen += [one for one in published() if one.name in families]
    total: dict[str, float] = {}
    for family in chosen:
        for name, value in asyncio.run(_hot(family.chat_template(), episodes)).items():
            total[name] = total.get(name, 0) + value
    print(
        f"tokens ({len(chosen)} templates, {TURNS} turns, temperature 2): {total['trained']:,.0f} tokens of "
        f"{total['responses']:,.0f} responses trained, {total['retokenized']:.0f} of them with other ids, "
        f"{total['violations']:.0f} not exactly once; encoding the text would have changed "
        f"{total['changed'] / total['responses']:.0%} of the responses"
    )


async def _hot(template: Any, episodes: int) -> dict[str, float]:
    """Counts over conversations with an untrained model at temperature 2."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    from roll.agents.environment_agent import EnvironmentAgent, EnvironmentOptions
    from roll.agents.episode import run_episode
    from roll.pipelines.agentic.metrics import token_checks
    from roll.strategies.hf_infer.engine import GenerationEngine
    from roll.strategies.hf_infer.strategy import create_decoder

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vocabulary = len(template._tokenizer)
    config = Qwen2Config(vocab_size=vocabulary, num_key_value_heads=2, max_position_embeddings=2048, **sizes)
    decoder = create_decoder(AutoModelForCausalLM.from_config(config, dtype=torch.float32), 2048)
    one = GenerationEngine(decoder, str, tuple(template.end_tokens), episodes, 2048)
    waiting: dict[str, asyncio.Future[GenerationOutput]] = {}
    numbers = itertools.count()

    async def sample(prompt_ids: list[int], max_new_tokens: int, options: Any) -> FinishedGroup:
        name = str(next(numbers))
        waiting[name] = asyncio.get_running_loop().create_future()
        params = SamplingParams(max_new_tokens, temperature=2.0, seed=int(name))
        one.add_requests([GenerationRequest(name, prompt_ids, params)])
        output = await waiting[name]
        return FinishedGroup.from_samples([output], [""])

    limits = Limits(TURNS, 12, 2048)
    agent = EnvironmentAgent("talk", Talk, EnvironmentOptions(max_steps=TURNS))
    tasks = [Task("talk", number) for number in range(episodes)]
    going = [
        asyncio.ensure_future(run_episode(task, agent, Model(sample, template, "hermes", limits), limits))
        for task in tasks
    ]
    while not all(run.done() for run in going):
        for output in one.step() if one.num_unfinished else ():
            waiting.pop(output.request_id).set_result(output)
        await asyncio.sleep(0)
    groups = [EpisodeGroup(task.seed, task, [run.result()]) for task, run in zip(tasks, going, strict=True)]
    batch = build_episode_batch(groups, "trajectory", 0)
    checks = token_checks(batch, groups)
    responses = [call.response_ids for group in groups for call in group.members[0].calls]
    return {
        "trained": float(batch.batch["response_mask"].sum()),
        "responses": float(len(responses)),
        "retokenized": checks["agent/retokenized_tokens"].value(),
        "violations": checks["agent/trained_once_violations"].value(),
        "changed": float(sum(template.encode(template.decode(ids)) != ids for ids in responses)),
    }


def calls() -> None:
    """A call over MCP, and of a model over HTTP."""
    from benchmarks import agent_calls

    agent_calls.main()


def _words(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(2, 440, (count,), generator=generator).tolist()


PARTS: dict[str, Callable[[], None]] = {
    "overhead": overhead,
    "engine": engine,
    "latency": latency,
    "ahead": ahead,
    "tokens": tokens,
    "calls": calls,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="which parts; none: all")
    for name in parser.parse_args(argv).parts or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main()
