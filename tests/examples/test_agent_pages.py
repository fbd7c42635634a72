"""docs/tools.md and docs/black-box.md as they stand there, and the examples that they name, trained for a step."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.agents.agent_options import AgentOptionError, BlackBoxOptions, ToolWrapperArguments
from roll.agents.black_box import BlackBoxAgent
from roll.agents.episode import Limits, Model, Task, run_episode
from roll.agents.registry import check_agent
from roll.agents.text_tools import text_tool
from roll.pipelines.agentic.config import CustomEnvConfig, agent_of
from tests.agents.playing import Recorded
from tests.agents.templates import WRITTEN_HERE
from tests.examples.pages import ROOT, blocks, named_files

PAGES = [ROOT / "docs" / name for name in ("tools.md", "black-box.md")]
ENTRIES = [
    pytest.param(entry, id=f"{page.stem}: {tag}")
    for page in PAGES
    for language, text in blocks(page)
    if language == "yaml"
    for tag, entry in yaml.safe_load(text)["custom_envs"].items()
]


@pytest.fixture
def page_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages' files, where they can be imported, and a collection to search."""
    for page in PAGES:
        for name, text in named_files(page).items():
            (tmp_path / name).write_text(text)
    (tmp_path / "wiki.jsonl").write_text(json.dumps({"title": "Paris", "text": "The capital of France."}) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKER_KEY", "secret")


@pytest.mark.parametrize("entry", ENTRIES)
def test_entries_of_the_pages(entry: dict[str, Any], page_files: None) -> None:
    """Each is what the configuration and the agent take."""
    names = CustomEnvConfig.__dataclass_fields__
    assert not entry.keys() - names.keys()
    plain = {name: value for name, value in entry.items() if name not in ("data_args", "tool_wrapper")}
    agent, options = agent_of(CustomEnvConfig(**plain))
    if agent == "verl":
        # Its file and the package that builds what it names are the reader's own.
        with pytest.raises(AgentOptionError, match="tool_config_path: "):
            check_agent(agent, options)
        check_agent(agent, options | {"tool_config_path": None})
    elif agent is not None:
        check_agent(agent, options)
    else:
        for one in entry["tool_wrapper"]["tool_configs"]:
            text_tool(one["tool_id"], one["tool_args"])
        assert not entry["tool_wrapper"]["wrapper_args"].keys() - ToolWrapperArguments.__dataclass_fields__.keys()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_as_an_agent_from_elsewhere(page_files: None) -> None:
    """The three commands of docs/black-box.md play an episode; keys of others open nothing."""
    text = next(text for _, text in blocks(PAGES[1]) if text.startswith("curl"))
    take, chat, reward = text.replace("\\\n", " ").strip().splitlines()
    engine = Recorded(WRITTEN_HERE[0].chat_template(), lambda _: "hi")
    agent = BlackBoxAgent(BlackBoxOptions(api_key_env="WORKER_KEY"))

    async def curl(command: str, **variables: str) -> Any:
        shell = partial(subprocess.run, capture_output=True, text=True, env=os.environ | variables, timeout=60)
        done = await asyncio.to_thread(shell, ["sh", "-c", command])
        return json.loads(done.stdout) if done.stdout else None

    async def play() -> None:
        limits = Limits(context=10_000)
        model = Model(engine, engine.template, "hermes", limits)
        episode = asyncio.create_task(run_episode(Task("t", 3, {"question": "q"}), agent, model, limits))
        await asyncio.sleep(0.1)
        wrong = await curl(take, URL=agent.url, WORKER_KEY="other")
        assert wrong["error"]["type"] == "authentication_error"
        given = await curl(take, URL=agent.url)
        assert given["task"] == {"tag": "t", "seed": 3, "question": "q"} and given["base_url"] == agent.url
        assert await curl(take.replace("wait=30", "wait=0"), URL=agent.url) is None
        answer = await curl(chat, URL=agent.url, KEY=given["key"])
        assert answer["choices"][0]["message"]["content"] == "hi"
        assert (await curl(chat, URL=agent.url, KEY=given["key"][:-1]))["error"]["code"] == "invalid_api_key"
        assert await curl(reward, URL=agent.url, KEY=given["key"]) == {"ok": True}
        ended = await episode
        assert (ended.outcome, ended.reward) == ("terminated", 1.0)
        assert (await curl(chat, URL=agent.url, KEY=given["key"]))["error"]["code"] == "episode_over"
        await agent.close()

    asyncio.run(play())


@pytest.mark.e2e
@pytest.mark.long
def test_the_examples_train(tiny_model: Path, tmp_path: Path) -> None:
    """In one run, untrained: a program around OpenAI's client, the tools of an MCP server, verl's loop (of whose rows
    one is too long), and a game whose turns are one message."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "".join(json.dumps({"question": f"What is {n}+1 ?", "ground_truth": str(n + 1)}) + "\n" for n in range(8))
    )
    entry = yaml.safe_load((ROOT / "examples/agent_tools_mcp/tools_config.yaml").read_text())["custom_envs"][
        "questions"
    ]
    entry["data_args"]["file_name"] = [str(questions)]
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}+1?"}], "reward_model": {"ground_truth": "3"}} for n in range(4)
    ]
    rows.append({"prompt": [{"role": "user", "content": "9" * 500}], "reward_model": {"ground_truth": "3"}})
    loop_rows = tmp_path / "loop.jsonl"
    loop_rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loop = {
        "agent": "verl",
        "agent_config": {"response_length": 30, "prompt_length": 100, "filter_overlong_prompts": True},
        "verifier": {"worker_cls": "gsm8k_rule"},
        "data_args": {"file_name": [str(loop_rows)]},
        "max_tokens_per_step": 30,
    }
    game = {
        "env_type": "examples.tiny_agentic.games.GuessNumber",
        "context": "response",
        "max_steps": 2,
        "max_tokens_per_step": 12,
    }
    both = {
        "defaults": [os.path.relpath(ROOT / "examples/agent_black_box/agent_config", tmp_path) + "@_here_"],
        "pretrain": str(tiny_model),
        "output_dir": str(tmp_path / "out"),
        "max_steps": 2,
        "eval_steps": 0,
        "track_with": ["jsonl"],
        "rollout_batch_size": 16,
        "sequence_length": 256,
        "custom_envs": {"questions": entry, "loop": loop, "game": game},
        "train_env_manager": {"num_env_groups": 4, "group_size": 4, "tags": ["player", "questions", "loop", "game"]},
        "actor_train": {"training_args": {"per_device_train_batch_size": 8}},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(both))
    command = [sys.executable, "-m", "roll.cli", "run", str(config)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = (tmp_path / "out").rglob("metrics.jsonl")
    steps = [row for row in map(json.loads, path.read_text().splitlines()) if "episode/player/turns" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["episode/player/turns"] >= 1 and row["episode/questions/turns"] >= 1
        assert row["episode/loop/turns"] == 1 and row["episode/game/turns"] == 2
        assert row["agent/trained_once_violations"] == row["agent/retokenized_tokens"] == 0
        assert row["agent/breaks"] == row["agent/foreign_responses"] == 0
        assert not any("agent_error" in name or "environment_error" in name for name in row)
