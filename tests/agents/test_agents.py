"""Agents without an environment, with a scripted policy: tools, coroutines, programs; and what is refused of each."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from roll.agents.agent_options import AgentOptionError
from roll.agents.built_in_tools import SearchIndex, ToolSet
from roll.agents.chat_ids import ChatTemplate
from roll.agents.endpoint import AgentEndpoint, Session
from roll.agents.episode import Episode, Limits, Model, Task
from roll.agents.programs import ProgramError, program_environment
from roll.agents.registry import check_agent, make_agent
from roll.agents.tool_calls import ToolCall
from roll.agents.tools import ToolError
from roll.agents.verifiers import RewardVerifier
from roll.pipelines.agentic.metrics import episode_metrics
from roll.pipelines.agentic.players import close_agents
from roll.rollout.episodes import EpisodeGroup
from tests.agents.playing import Recorded, assert_trained_as_sampled, opened, played
from tests.support.processes import have_ended


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def is_right(prompt: str, response: str, ground_truth: Any, **_: Any) -> dict[str, float]:
    """A reward of one's own."""
    return {"score": float(response.strip() == str(ground_truth)), "seen": 1.0}


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADDING = {"tools": ["tests.agents.test_agents.add"], "verifier": {"worker_cls": "tests.agents.test_agents.is_right"}}
ROW = {"question": "2+3", "ground_truth": 5}


def adds_then_answers(prompt: str) -> str:
    results = prompt.split("<|im_start|>tool\n")[1:]
    return results[-1].split("<|im_end|>")[0] if results else called("add", a=2, b=3)


def test_tools_until_there_is_an_answer(template: ChatTemplate) -> None:
    options = ADDING | {"tool_reward": 0.25, "tool_success_reward": 0.5}
    engine = Recorded(template, adds_then_answers)
    (episode,) = played(make_agent("tools", options, system="Use tools."), engine, Task("t", 0, ROW))
    assert (episode.outcome, episode.success, episode.reward) == ("terminated", True, 1.75)
    assert [call.reward for call in episode.calls] == [0.25, 1.5]
    assert episode.metrics == {"seen": 1.0, "tool_calls": 1.0, "failed_tool_calls": 0.0, "unreadable_calls": 0.0}
    assert len(episode.conversations.branches()) == 1
    first = template.decode(engine.turns[0][0])
    assert first.startswith("<|im_start|>system\nUse tools.") and "2+3" in first
    assert_trained_as_sampled(engine, episode.conversations)
    # Calls are means over turns, of an episode without any, too; a verifier's number is that of the episode.
    (answers,) = played(make_agent("tools", ADDING), Recorded(template, lambda _: "5"), Task("t", 0, ROW))
    shown = episode_metrics([EpisodeGroup(0, episode.task, [episode, answers])])
    assert (shown["env/t/tool_calls"].value(), shown["env/t/seen"].value()) == (0.25, 1.0)
    again = Episode.from_state(episode.state_dict(), episode.task, template, "keep")
    assert (again.metrics, again.over_turns) == (episode.metrics, episode.over_turns)


def test_what_a_policy_does_wrong_with_tools_is_told_to_it(template: ChatTemplate) -> None:
    said = iter(["<tool_call>\n{broken\n</tool_call>", called("add", a=2), called("sub"), called("add", a=1, b=1), "5"])
    engine = Recorded(template, lambda _: next(said))
    agent = make_agent("tools", ADDING | {"max_tool_uses": 2})
    (episode,) = played(agent, engine, Task("t", 0, ROW))
    last = template.decode(engine.turns[-1][0])
    for text in ("the tool call cannot be read", "'b' is a required property", "no tool 'sub'", "no more than 2 tool"):
        assert text in last
    assert episode.reward == 1.0 and episode.metrics["failed_tool_calls"] == 3.0


def test_questions_come_from_the_row(template: ChatTemplate) -> None:
    engine = Recorded(template, lambda _: "5")
    agent = make_agent("tools", ADDING, template="What is {question}?")
    (asked,) = played(agent, engine, Task("t", 0, ROW))
    assert asked.calls[0].messages == [{"role": "user", "content": "What is 2+3?"}]
    (bare,) = played(make_agent("tools", ADDING), engine, Task("t", 0, {"ground_truth": 5}))
    assert bare.outcome == "agent_error" and "no column messages, prompt or question" in str(bare.error)


def test_a_verifier_that_fails_is_no_verdict(template: ChatTemplate) -> None:
    engine = Recorded(template, lambda _: "5")
    for verifier, text in (
        ({"worker_cls": "tests.agents.test_agents.called"}, "reward: tests.agents.test_agents.called"),
        ({"command": [sys.executable, "-c", "print('?')"]}, "gives no reward"),
        ({"command": [sys.executable, "-c", "print('nan')"]}, "gives no reward"),
        ({"command": [sys.executable, "-c", "raise SystemExit(3)"]}, "exit status 3"),
        ({"command": [sys.executable, "-c", "import time; time.sleep(9)"], "timeout": 0.1}, "more than 0.1 s"),
    ):
        (episode,) = played(make_agent("tools", {"tools": [], "verifier": verifier}), engine, Task("t", 0, ROW))
        assert episode.outcome == "environment_error" and text in str(episode.error), verifier
    program = (
        "import json, sys; given = json.load(sys.stdin); print(float(given['answer']) / given['task']['ground_truth'])"
    )
    (episode,) = played(
        make_agent("tools", {"verifier": {"command": [sys.executable, "-c", program]}}), engine, Task("t", 0, ROW)
    )
    assert episode.reward == 1.0


@pytest.mark.parametrize(
    ("agent", "config"),
    [("tools", {}), ("verl", {"response_length": 8}), ("black_box", {"command": ["ls"], "reward": "verifier"})],
)
def test_agents_close_their_verifier(agent: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[RewardVerifier] = []
    monkeypatch.setattr(RewardVerifier, "close", lambda verifier: closed.append(verifier))
    made: Any = make_agent(agent, config | {"verifier": ADDING["verifier"]})
    asyncio.run(made.close())
    assert len(closed) == 1


@pytest.mark.long
@pytest.mark.asyncio
async def test_the_sandbox_as_a_tool() -> None:
    """No files of this machine, no network."""
    tools = ToolSet([{"python": {"timeout": 1.0}}])
    tools.check_host()
    box = await tools.box()
    asks = "import socket; socket.create_connection(('127.0.0.1', 9), 0.2)"
    reads = f"print(open({__file__!r}).read()[:10])"
    programs = ["print(6 * 7)", "x = 1", "1 / 0", "while True: pass", "open('/etc/passwd2', 'w')", reads, asks]
    results = await box.call_all([ToolCall("python", {"code": one}) for one in programs])
    assert [result.failed for result in results] == [False, False, True, True, True, True, True]
    assert results[0].text == "42\n" and "ZeroDivisionError" in results[2].text
    assert "more than 1 s" in results[3].text and "Error" in results[4].text and "Error" in results[5].text
    assert "ConnectionRefused" not in results[6].text
    await tools.close()


def test_search_ranks_by_bm25(tmp_path: Path) -> None:
    texts = ["the cat sat on the mat", "dogs and cats", "a cat, a cat and a dog", "nothing here", "the mat"]
    index, words = SearchIndex(texts), [text.replace(",", "").split() for text in texts]

    def score(query: str, number: int) -> float:
        mean = sum(map(len, words)) / len(words)
        counts, total = Counter(words[number]), 0.0
        for term in query.split():
            df = sum(term in one for one in words)
            idf = math.log(1 + (len(words) - df + 0.5) / (df + 0.5))
            tf = counts[term]
            total += idf * tf * 2.5 / (tf + 1.5 * (0.25 + 0.75 * len(words[number]) / mean))
        return total

    for query in ("cat", "the mat", "cat dog", "a"):
        found = index.best(query, 5)
        wanted = sorted((n for n in range(5) if score(query, n) > 0), key=lambda n: (-score(query, n), n))
        assert found == wanted
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"title": f"T{n}", "text": text}) + "\n" for n, text in enumerate(texts)))
    (tool,) = ToolSet([{"search": {"path": str(path), "top_k": 1}}])._tools
    assert "5 texts" in tool.description
    path.write_text('{"title": "no text"}\nno JSON\n')  # rows are read one by one: the first wrong one is named
    with pytest.raises(ToolError, match=r"^search: /[^:]*texts.jsonl:1: the row has no text 'text'"):
        ToolSet([{"search": {"path": str(path.parent / "." / "texts.jsonl"), "text_key": "text", "title_key": "x"}}])


async def asks_twice(task: Task, model: Model, bonus: float = 0.0) -> dict[str, Any]:
    """An agent of one's own."""
    first = await model.chat([{"role": "user", "content": "one"}])
    model.reward(0.5, first.call)
    await model.chat([{"role": "user", "content": "one"}, first.message, {"role": "user", "content": "two"}])
    return {"reward": 1.0 + bonus, "success": True, "length": len(first.text)}


async def returns_text(task: Task, model: Model, episode: Episode) -> str:
    await model.chat([{"role": "user", "content": "one"}])
    return "good"


class Holding:
    """An agent with a method."""

    def __init__(self, word: str) -> None:
        self.word = word

    async def run(self, task: Task, model: Model) -> None:
        await model.chat([{"role": "user", "content": self.word}])


async def takes_three(task: Task, model: Model, other: str) -> float:
    return 0.0


def test_coroutines(template: ChatTemplate) -> None:
    engine = Recorded(template, lambda _: "said")
    here = "tests.agents.test_agents."
    (episode,) = played(make_agent(f"{here}asks_twice", {"bonus": 1.0}), engine)
    assert (episode.reward, episode.success, episode.metrics) == (2.5, True, {"length": 4.0})
    (wrong,) = played(make_agent(f"{here}returns_text"), engine)
    assert wrong.outcome == "agent_error" and "returned 'good'; a reward is a finite number" in str(wrong.error)
    (held,) = played(make_agent(f"{here}Holding", {"word": "hm"}), engine)
    assert held.outcome == "terminated" and held.calls[0].messages[0]["content"] == "hm"


PROGRAM = """
import json, os, sys, urllib.request, urllib.error
def post(url, body):
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)))
def chat(messages, **more):
    body = {"model": "any", "messages": messages, **more}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]
task = json.load(sys.stdin)
assert task == json.load(open(os.environ["ROLL_TASK_FILE"]))
messages = [{"role": "user", "content": task["question"]}]
def reward(value, **more): post(os.environ["ROLL_REWARD_URL"], {"reward": value, **more})
"""


def program(rest: str, **options: Any) -> Any:
    return make_agent("black_box", {"command": [sys.executable, "-c", PROGRAM + rest], **options})


def test_a_program_as_an_agent(template: ChatTemplate) -> None:
    loop = """
for turn in range(3):
    answer = chat(messages, temperature=0)
    messages += [answer, {"role": "user", "content": "on"}]
reward(float(answer["content"] == "yes " * 3), success=True, metrics={"turns": 3})
print("done")
"""
    engine = Recorded(template, lambda prompt: "yes " * (prompt.count("on<|im_end|>") + 1))
    os.environ["SECRET_OF_OTHERS"] = "x"
    episodes = played(program(loop), engine, Task("t", 7, {"question": "q"}), count=3)
    del os.environ["SECRET_OF_OTHERS"]
    for episode in episodes:
        assert (episode.outcome, episode.success, episode.reward) == ("terminated", True, 0.0), episode.error
        assert episode.metrics == {"turns": 3.0, "overridden_sampling": 3.0, "demanded_calls": 0.0}
        assert [call.parent for call in episode.calls] == [None, 0, 1]
        assert len(episode.conversations.branches()) == 1
    assert len(engine.turns) == 9
    shown = episode_metrics([EpisodeGroup(0, episodes[0].task, episodes)])
    assert (shown["env/t/turns"].value(), shown["env/t/overridden_sampling"].value()) == (3.0, 1.0)


READS_OUT = "import os; print(open(os.environ['ROLL_SCRATCH'] + '/out').read())"
READS = {"reward": "verifier", "verifier": {"command": [sys.executable, "-c", READS_OUT]}}
NO_SCORER = "chat(messages); post(os.environ['ROLL_REWARD_URL'], {'error': 'no scorer'})"
LONGER = "messages[0]['content'] *= 9999; chat(messages)"


@pytest.mark.long
@pytest.mark.parametrize(
    ("rest", "options", "outcome", "reward", "error"),
    [
        ("chat(messages); sys.exit(0)", {"reward": "exit"}, "terminated", 1.0, None),
        ("chat(messages); sys.exit(1)", {"reward": "exit"}, "terminated", 0.0, None),
        ("chat(messages); sys.exit('oh no')", {"reward": "post"}, "agent_error", 0.0, "exit status 1: oh no"),
        ("chat(messages); os.kill(os.getpid(), 9)", {"reward": "exit"}, "agent_error", 0.0, "signal 9"),
        ("pass", {"reward": "exit"}, "agent_error", 0.0, "made no model call"),
        (NO_SCORER, {}, "agent_error", 0.0, "posted no reward (no scorer)"),
        ("while True: chat(messages)", {}, "turn_limit", 0.0, None),
        (LONGER, {"reward": "exit"}, "context_limit", 0.0, None),
        (f"chat(messages); {LONGER}", {}, "context_limit", 0.0, None),
        ("chat(messages); open(os.environ['ROLL_SCRATCH'] + '/out', 'w').write('5')", READS, "terminated", 5.0, None),
    ],
)
def test_ends_of_programs(
    template: ChatTemplate, rest: str, options: dict[str, Any], outcome: str, reward: float, error: str | None
) -> None:
    engine = Recorded(template, lambda _: "yes")
    limits = Limits(turns=3, context=2000)
    (episode,) = played(program(rest, **options), engine, Task("t", 0, {"question": "q"}), limits)
    assert (episode.outcome, episode.reward) == (outcome, reward), episode.error
    assert error is None or error in str(episode.error)


@pytest.mark.long
def test_a_program_dies_with_its_episode(template: ChatTemplate, tmp_path: Path) -> None:
    """With what it has started, and although it ignores the request to end."""
    rest = f"""
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
chat(messages)
open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
print("x" * 10_000_000)
time.sleep(600)
"""
    engine = Recorded(template, lambda _: "yes")
    begin = time.monotonic()
    (episode,) = played(program(rest), engine, Task("t", 0, {"question": "q"}), Limits(seconds=1.5))
    assert episode.outcome == "time_limit" and time.monotonic() - begin < 10
    assert have_ended(map(int, (tmp_path / "pids").read_text().split()))


@pytest.mark.parametrize(
    ("agent", "config", "error"),
    [
        ("tool", {}, "agent: 'tool' is not known; did you mean 'tools'"),
        ("tools", {}, "agent_config.verifier: is needed"),
        ("tools", {"verifier": {"worker_cls": "math_rul"}}, "agent_config.verifier: .*did you mean 'math_rule'"),
        ("tools", {"verifier": {"command": ["x"], "worker_cls": "math_rule"}}, "either worker_cls"),
        ("tools", {**ADDING, "timout": 3}, "agent_config.timout: .* did you mean 'timeout'"),
        ("tools", {**ADDING, "tools": ["no.such"]}, "agent_config.tools: function: 'no.such' cannot be imported"),
        ("tools", {**ADDING, "tools": [{"python": {"x": 1}}]}, "agent_config.tools: python has no option 'x'"),
        ("tools", {**ADDING, "tools": [{"search": {}}]}, "agent_config.tools: search needs the option 'path'"),
        ("tools", {**ADDING, "tools": [{"mcp": {}}]}, "agent_config.tools: an MCP server has either"),
        ("tools", {**ADDING, "tools": ADDING["tools"] * 2}, "agent_config.tools: several tools are called add"),
        ("black_box", {}, "agent_config.command: is needed"),
        ("black_box", {"command": "python x.py"}, "agent_config.command: .*must be a list"),
        ("black_box", {"command": ["no-such-program"]}, "agent_config.command: there is no program"),
        ("black_box", {"api_key_env": "NO_SUCH_VARIABLE"}, "agent_config.api_key_env: there is no variable"),
        ("black_box", {"command": ["ls"], "reward": "verifier"}, "agent_config.verifier: goes with"),
        ("black_box", {"command": ["ls"], "sampling": "client"}, "agent_config.sampling: .*one of run, refuse"),
        ("tests.agents.test_agents.add", {}, "agent: .* must be a coroutine function"),
        ("tests.agents.test_agents.takes_three", {}, "agent: .* must be callable as run"),
        ("tests.agents.test_agents.asks_twice", {"bonux": 1}, "agent: .* unexpected keyword argument 'bonux'"),
        ("tests.agents.test_agents.Holding", {}, "agent: .* cannot be made"),
    ],
)
def test_agents_that_cannot_be(agent: str, config: dict[str, Any], error: str) -> None:
    with pytest.raises(AgentOptionError, match=f"^{error}" if not error.startswith("either") else error):
        check_agent(agent, config)


def test_python_is_the_interpreter_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The virtual environment need not be activated."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    path = program_environment({})["PATH"]
    assert path.split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert program_environment({"PATH": "/opt"})["PATH"] == "/opt"
    check_agent("black_box", {"command": ["python", "x.py", "{question}"], "reward": "exit"})
    check_agent("tests.agents.test_agents.takes_three", {"other": "x"})


SERVING = """
import json, os, sys, urllib.request
def post(url, key, body=None):
    head = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    data = json.dumps(body or {}).encode()
    answer = urllib.request.urlopen(urllib.request.Request(url, data, head))
    return json.load(answer) if answer.status == 200 else None
while True:
    taken = post(os.environ["ROLL_EPISODES_URL"] + "?wait=30", os.environ["ROLL_WORKER_KEY"])
    if taken is None:
        continue
    body = {"model": "any", "messages": [{"role": "user", "content": "number %d" % taken["task"]["seed"]}]}
    if taken["task"]["seed"] == 2:
        sys.exit("I do not like 2")
    said = post(taken["base_url"] + "/v1/chat/completions", taken["key"], body)["choices"][0]["message"]["content"]
    post(taken["base_url"] + "/reward", taken["key"], {"reward": float(said == "you said %d" % taken["task"]["seed"])})
"""


@pytest.mark.long
def test_programs_that_serve_the_whole_run(template: ChatTemplate) -> None:
    """One that ends is started again, and only the episode that it had is lost."""
    engine = Recorded(template, lambda prompt: f"you said {prompt.split('number ')[1][0]}")
    agent = make_agent("black_box", {"command": [sys.executable, "-c", SERVING], "processes": 1})
    episodes = played(agent, engine, count=6, limits=Limits(context=2000, seconds=60))
    assert [episode.outcome for episode in episodes] == ["terminated"] * 2 + ["agent_error"] + ["terminated"] * 3
    assert "made no model call (exit status 1: I do not like 2)" in str(episodes[2].error)
    assert [episode.reward for episode in episodes] == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]


TAKES_ONE = """
import os, urllib.request
head = {"Authorization": "Bearer " + os.environ["ROLL_WORKER_KEY"], "Content-Type": "application/json"}
post = urllib.request.Request(os.environ["ROLL_EPISODES_URL"] + "?wait=30", b"{}", head)
key = urllib.request.urlopen(post).read().decode().split('"')[3]
head["Authorization"] = "Bearer " + key
urllib.request.urlopen(urllib.request.Request(os.environ["ROLL_URL"] + "/reward", b'{"reward": 1}', head))
"""


def test_programs_may_end_after_every_episode(template: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.agents.black_box._MOST_FAILURES", 2)
    agent = make_agent("black_box", {"command": [sys.executable, "-c", TAKES_ONE], "processes": 1})
    episodes = played(agent, Recorded(template, lambda _: "x"), count=4, limits=Limits(context=2000, seconds=60))
    assert [episode.outcome for episode in episodes] == ["agent_error"] * 4  # no model call was made
    assert all(str(episode.error).endswith("made no model call") for episode in episodes)


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_dismissed_program_takes_no_episode(template: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by a request that it had made before."""
    asked = threading.Event()

    def take(endpoint: AgentEndpoint, worker: str) -> Session | None:
        asked.set()
        return was(endpoint, worker)

    was = AgentEndpoint._take
    monkeypatch.setattr(AgentEndpoint, "_take", take)
    async with opened(Recorded(template, lambda _: "x")) as (endpoint, session), httpx.AsyncClient() as client:
        key = endpoint.admit_worker()
        headers = {"Authorization": f"Bearer {key}"}
        waiting = asyncio.create_task(client.post(f"{endpoint.url}/episodes?wait=2", headers=headers))
        assert await asyncio.to_thread(asked.wait, 30)
        endpoint.dismiss_worker(key)
        endpoint.offer(session)
        assert (await waiting).status_code == 204
        assert endpoint.waiting == [session]


@pytest.mark.long
def test_programs_that_cannot_serve_end_the_run(template: ChatTemplate) -> None:
    agent = make_agent("black_box", {"command": [sys.executable, "-c", "raise SystemExit('no')"], "processes": 1})
    with pytest.raises(ProgramError, match=r"ends again and again: exit status 1: no"):
        played(agent, Recorded(template, lambda _: "x"), limits=Limits(seconds=60))


class Closing:
    """An agent that has something to end."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.is_closed = error, False

    async def close(self) -> None:
        self.is_closed = True
        if self.error is not None:
            raise self.error


@pytest.mark.asyncio
async def test_all_agents_are_closed_whichever_raises() -> None:
    agents = [Closing(OSError("gone")), object(), Closing(OSError("gone")), Closing()]
    with pytest.raises(OSError, match="gone"):
        await close_agents(agents)
    assert all(agent.is_closed for agent in agents if isinstance(agent, Closing))
