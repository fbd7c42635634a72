"""verl's tool agent: its loop with tools and interactions of verl's form."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll.agents.agent_options import AgentOptionError, VerlOptions
from roll.agents.chat_ids import ChatTemplate
from roll.agents.episode import Limits, Task
from roll.agents.registry import check_agent, make_agent, make_verifier
from roll.agents.verl_agent import VerlAgent
from tests.agents.playing import Recorded, assert_trained_as_sampled, played
from tests.agents.test_agents import called

SEEN: list[dict[str, Any]] = []
TURNS = {"messages": [{"role": "user", "content": "2+3?"}], "reward_model": {"ground_truth": "5"}}


def score(response: str, ground_truth: Any, extra_info: dict[str, Any], **_: Any) -> float:
    """A reward that notes what verl's reward managers would hand to a function."""
    SEEN.append({"response": response, **extra_info})
    return float(ground_truth in response.rpartition("####")[2])


class Schema:
    """The two things of verl's pydantic schema that are asked for."""

    def __init__(self, name: str) -> None:
        parameters = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
        self._schema = {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return self._schema


class Check:
    """A tool of verl's form: says whether an answer is that of ``create_kwargs``."""

    name, tool_schema = "check", Schema("check")

    def __init__(self) -> None:
        self.open: dict[str, str] = {}
        self.made = 0

    async def create(self, create_kwargs: dict[str, Any]) -> tuple[str, Any]:
        self.made += 1
        self.open[f"i{self.made}"] = create_kwargs["ground_truth"]
        return f"i{self.made}", None

    async def execute(self, instance: str, parameters: dict[str, Any], agent_data: Any) -> tuple[Any, float, dict]:
        if parameters["answer"] == "fail":
            raise RuntimeError("no such answer")
        right = parameters["answer"] == self.open[instance]
        said = "x" * 400 if parameters["answer"] == "long" else f"right={right}"
        return SimpleNamespace(text=said, image=None), float(right), {}

    async def release(self, instance: str) -> None:
        del self.open[instance]


class Doubt:
    """An interaction of verl's form: doubts once, then is content."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def start_interaction(self, instance: str, **kwargs: Any) -> None:
        assert kwargs["name"] == "doubt"

    async def generate_response(self, instance: str, messages: list[dict[str, Any]], **_: Any) -> tuple:
        self.asked.append(messages[-1]["content"])
        return len(self.asked) > 1, "Are you sure?", 0.5, {}


def row(**extra: Any) -> dict[str, Any]:
    kwargs = {"check": {"create_kwargs": {"ground_truth": "5"}}, "other": None}
    return {
        "prompt": TURNS["messages"],
        "reward_model": TURNS["reward_model"],
        "agent_name": "tool_agent",
        "extra_info": {"tools_kwargs": kwargs, "interaction_kwargs": {"name": "doubt"}},
        **extra,
    }


def agent(tool: Check | None = None, doubt: Doubt | None = None, **options: Any) -> VerlAgent:
    given = VerlOptions(**{"response_length": 4000, **options})
    verifier = make_verifier({"worker_cls": "tests.agents.test_verl_agent.score", "scores": "solution"})
    return VerlAgent(given, verifier, [tool] if tool else [], {"doubt": doubt} if doubt else {})


def play(template: ChatTemplate, said: list[str], one: VerlAgent, task: dict[str, Any] | None = None) -> Any:
    texts = iter(said)
    engine = Recorded(template, lambda _: next(texts))
    limits = Limits(turns=100, new_tokens=4000, context=100_000)
    (episode,) = played(one, engine, Task("t", 0, task or row()), limits)
    assert_trained_as_sampled(engine, episode.conversations)
    return episode


def test_calls_until_a_response_has_none(template: ChatTemplate) -> None:
    tool = Check()
    episode = play(template, [called("check", answer="4"), called("check", answer="5"), "#### 5"], agent(tool))
    assert (episode.outcome, episode.reward, episode.success) == ("terminated", 1.0, True)
    assert [call.reward for call in episode.calls] == [0.0, 0.0, 1.0] and tool.open == {} and tool.made == 2
    seen = SEEN[-1]
    assert (seen["num_turns"], seen["tool_rewards"], seen["turn_scores"]) == (6, [0.0, 1.0], [])
    # All tokens behind the prompt, results included, special ones left out: verl's solution_str.
    assert seen["response"].index("right=False") < seen["response"].index("right=True") < seen["response"].index("####")
    assert "<|im_end|>" not in seen["response"] and "2+3?" not in seen["response"]


@pytest.mark.parametrize(
    ("options", "said", "responses"),
    [
        ({"max_assistant_turns": 2}, 3, 2),
        ({"max_user_turns": 1}, 3, 2),
        ({"max_assistant_turns": 1, "max_user_turns": 5}, 3, 1),
        ({}, 3, 4),
    ],
)
def test_turns_end_as_theirs(template: ChatTemplate, options: dict[str, Any], said: int, responses: int) -> None:
    episode = play(template, [called("check", answer="4")] * said + ["#### 5"], agent(Check(), **options))
    assert len(episode.calls) == responses and episode.outcome == "terminated"


def test_a_result_without_room_ends_the_episode(template: ChatTemplate) -> None:
    """verl: ``len(response_mask) + len(response_ids) >= response_length`` ends it; what was said is scored."""
    first = len(template.encode(called("check", answer="4"))) + 1
    bridge = len(template.encode("right=False"))
    episode = play(template, [called("check", answer="4"), "#### 5"], agent(Check(), response_length=first + bridge))
    assert len(episode.calls) == 1 and episode.outcome == "context_limit" and not SEEN[-1]["response"].count("right=")
    cut = play(template, ["#### 5" * 100], agent(Check(), response_length=30))
    assert len(cut.calls[0].response_ids) == 30 and cut.outcome == "terminated"
    both = play(template, [called("check", answer="4"), "#### 5" * 100], agent(Check(), response_length=first + 60))
    assert len(both.conversations.ids_behind_prompt(both.calls[-1])) == first + 60


def test_results_errors_and_further_calls(template: ChatTemplate) -> None:
    said = [called("check", answer="fail"), called("none"), called("check", answer="long") * 2, "<tool_call>{", "x"]
    episode = play(template, said, agent(Check(), max_tool_response_length=20))
    last = template.decode(episode.conversations.prompt_ids(episode.calls[-1]))
    assert "Error when executing tool: no such answer" in last and "Error when executing tool: 'none'" in last
    assert last.count("x" * 10 + "...(truncated)..." + "x" * 10) == 1
    assert episode.metrics["tool_calls"] == 3 and episode.metrics["failed_tool_calls"] == 2
    assert len(episode.calls) == 4  # a call that cannot be read is none
    for side, text in (("left", "x" * 20 + "...(truncated)"), ("right", "(truncated)..." + "x" * 20)):
        one = agent(Check(), max_tool_response_length=20, tool_response_truncate_side=side)
        play(template, [called("check", answer="long"), "5"], one)
        assert text in SEEN[-1]["response"]


def test_an_interaction_answers_where_no_tool_is_called(template: ChatTemplate) -> None:
    doubt = Doubt()
    episode = play(template, ["#### 4", called("check", answer="5"), "#### 5"], agent(Check(), doubt))
    assert doubt.asked == ["#### 4", "#### 5"] and episode.reward == 1.0
    assert SEEN[-1]["turn_scores"] == [0.5, 0.5] and SEEN[-1]["num_turns"] == 7
    other = row(extra_info={"interaction_kwargs": {"name": "trust"}})
    assert "'trust': there are doubt" in str(play(template, ["5"], agent(Check(), Doubt()), other).error)


def test_rows_name_their_loop(template: ChatTemplate) -> None:
    said = [called("check", answer="5"), "#### 5"]
    alone = row()
    del alone["agent_name"]
    assert len(play(template, said, agent(Check()), alone).calls) == 1  # verl's default
    assert len(play(template, said, agent(Check(), default_agent_loop="tool_agent"), alone).calls) == 2
    assert "react" in str(play(template, said, agent(Check()), row(agent_name="react")).error)
    assert "'a.png' does not exist" in str(play(template, said, agent(Check()), row(images=["a.png"])).error)
    chosen = row(extra_info={"tool_selection": ["nothing"]})
    assert "'check'" in template.decode(play(template, said, agent(Check()), chosen).calls[-1].new_ids)


def test_long_prompts_are_left_out(template: ChatTemplate) -> None:
    one = agent(Check(), prompt_length=200, filter_overlong_prompts=True)
    assert one.fits(row(), template) and not one.fits(row(prompt=[{"role": "user", "content": "2" * 300}]), template)
    assert agent(Check(), prompt_length=2).fits(row(), template)


def test_what_cannot_be_built_is_said() -> None:
    verifier = {"worker_cls": "gsm8k_rule"}
    for options, text in (
        ({"response_length": 8}, "verifier: is needed"),
        ({"verifier": verifier}, "response_length: is needed"),
        ({"verifier": verifier, "response_length": 8, "tool_config_path": "no/tools.yaml"}, "tool_config_path"),
    ):
        with pytest.raises(AgentOptionError, match=text):
            check_agent("verl", options)
    check_agent("verl", {"verifier": verifier, "response_length": 8})


def test_tools_and_interactions_of_files(
    template: ChatTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's registries build them from the files; stand-ins take their place here."""
    for name, function, made in (
        ("verl.tools.utils.tool_registry", "initialize_tools_from_config", [Check()]),
        ("verl.interactions.utils.interaction_registry", "initialize_interactions_from_config", {"doubt": Doubt()}),
    ):
        module = module_from_spec(ModuleSpec(name, None))
        setattr(module, function, lambda path, made=made: made if Path(path).exists() else None)
        monkeypatch.setitem(sys.modules, name, module)
    options: dict[str, Any] = {"response_length": 4000, "verifier": {"worker_cls": "gsm8k_rule"}}
    for key in ("tool_config_path", "interaction_config_path"):
        options[key] = str(tmp_path / key)
        (tmp_path / key).touch()
    built = make_agent("verl", options)
    assert isinstance(built, VerlAgent)
    episode = play(template, [called("check", answer="4"), "#### 4", "#### 5"], built)
    text = template.decode(episode.conversations.prompt_ids(episode.calls[-1]))
    assert "right=False" in text and "Are you sure?" in text
    assert episode.reward == 1.0 and len(episode.calls) == 3
    assert json.loads(json.dumps(episode.calls[0].tools))[0]["function"]["name"] == "check"
