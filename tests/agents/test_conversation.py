"""Token ids of conversations: they only grow, follow the template, and every sampled id is trained once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from roll.agents.chat_ids import BOUNDARIES, ChatTemplate, TemplateError, check_template, probe_boundary
from roll.agents.conversation import Call, Conversations
from roll.config.loader import load_config
from roll.pipelines.agentic.players import build_players
from tests.agents.templates import CHATML, WRITTEN_HERE, Family, published
from tests.agents.tiny import make_tokenizer
from tests.conftest import ROOT
from tests.support.episodes import ids_of, trained_ids

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Calculate.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
]
FAMILIES = [*WRITTEN_HERE, *published()]


def message(role: str, content: str, number: int = 0) -> dict[str, Any]:
    extra = {"name": "calc", "tool_call_id": f"abcdefg{number:02d}"} if role == "tool" else {}
    return {"role": role, "content": content} | extra


def template_of(tokenizer: Any, text: str) -> ChatTemplate:
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer)


def sample(
    conversations: Conversations, call: Call, ids: list[int], text: str, reason: str = "stop", version: int = 0
) -> dict[str, Any]:
    response = {"role": "assistant", "content": text}
    conversations.answer(call, ids, [-0.5] * len(ids), [version] * len(ids), reason, response)
    return response


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_grown_ids_are_the_template_s_own(family: Family) -> None:
    """Where responses are plain text that tokenises back, the ids are those of the whole conversation's rendering. The
    end of a response that was cut is put in."""
    template = family.chat_template()
    conversations = Conversations(template)
    messages = [message("user", "hello 1")]
    for turn in range(3):
        call = conversations.ask(messages)
        asked = conversations.prompt_ids(call)
        if turn == 0:
            assert asked == template.prompt(messages)
        elif family.plain:
            assert asked == template.encode(template.render(messages))
        ids = template.encode(" Left" if family.name == "mistral" else "Left")
        ids, reason = (ids, "length") if turn == 1 else ([*ids, template.encode(family.ends[0])[0]], "stop")
        messages += [sample(conversations, call, ids, "Left", reason), message("user", f"world {turn}")]
    assert conversations.counts.breaks == conversations.counts.foreign_responses == 0
    assert len(conversations.branches()) == 1


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_sampled_id_is_made_by_a_tokenizer(family: Family) -> None:
    """Byte soup, cut responses, foreign end tokens, tool results one and two at a time: prompts begin with the ids of
    the call they go on from, and everything sampled is trained once."""
    rng = random.Random(family.name)
    template = family.chat_template(TOOLS if family.name != "mistral" else None)
    size = len(family.tokenizer())
    ends = [template.encode(end)[0] for end in family.ends]
    for _ in range(20):
        conversations = Conversations(template)
        messages = [message("user", "hello")]
        sampled = 0
        previous: list[int] = []
        for turn in range(4):
            call = conversations.ask(messages)
            asked = conversations.prompt_ids(call)
            assert asked[: len(previous)] == previous
            ids = [rng.randrange(256) for _ in range(rng.randrange(1, 9))] + rng.choice([[], ends[:1], ends[-1:]])
            assert max(ids) < size
            sampled += len(ids)
            previous = asked + ids
            text = f"answer {turn}"  # what a tool parser made of it
            messages.append(sample(conversations, call, ids, text, "stop" if ids[-1] in ends else "length", turn))
            roles = ["user"]
            if family.tools and family.name != "mistral":
                roles = rng.choice([["user"], ["tool"], *([["tool", "tool"]] if family.two_tools else [])])
            messages += [message(role, f"result {turn} {n}", n) for n, role in enumerate(roles)]
        (branch,) = conversations.branches()
        assert len(trained_ids(branch)) == sum(len(call.versions) for call in branch.calls) == sampled
        assert ids_of(branch)[: len(previous)] == previous
        assert conversations.counts.breaks == 0


def test_merges_across_turns_are_not_made_again() -> None:
    """HAV + ING sampled apart stays apart, though the tokenizer would merge the text otherwise."""
    tokenizer = make_tokenizer()
    template = template_of(tokenizer, CHATML)
    whole = template.encode("HAVING")
    split = [i for letter in "HAVING" for i in template.encode(letter)]
    assert split != whole
    conversations = Conversations(template)
    messages = [message("user", "hello")]
    call = conversations.ask(messages)
    messages += [sample(conversations, call, split, "HAVING", "length"), message("user", "2")]
    asked = conversations.prompt_ids(conversations.ask(messages))
    at = len(template.prompt(messages[:1]))
    assert asked[at : at + len(split)] == split
    assert tokenizer.decode(asked) == template.render(messages)


def test_thinking_is_kept_or_begins_a_new_sample() -> None:
    """What is not there breaks nothing."""
    family = next(family for family in WRITTEN_HERE if family.name == "drops thoughts")
    template = family.chat_template()
    end = template.encode("<|im_end|>")
    for thinking, text, branches in (
        ("keep", "<think>1 2</think>Left", 1),
        ("new_sample", "<think>1 2</think>Left", 2),
        ("new_sample", "Left", 1),
    ):
        conversations = Conversations(template, thinking)  # type: ignore[arg-type]
        messages = [message("user", "hello")]
        call = conversations.ask(messages)
        messages += [sample(conversations, call, template.encode(text) + end, text), message("user", "world")]
        second = conversations.ask(messages)
        assert conversations.counts.breaks == branches - 1
        assert branches == 1 or conversations.prompt_ids(second) == template.prompt(messages)
        sample(conversations, second, end, "")
        found = conversations.branches()
        assert len(found) == branches
        assert sum(len(trained_ids(branch)) for branch in found) == len(template.encode(text)) + 2


def test_a_history_that_branches_trains_each_id_once() -> None:
    """Two calls go on from the same response, and a third begins anew: three branches, shared ids trained in one."""
    template = template_of(make_tokenizer(), CHATML)
    conversations = Conversations(template)
    first = conversations.ask([message("user", "hello")])
    history = [message("user", "hello"), sample(conversations, first, [5, 6], "a")]
    left = conversations.ask([*history, message("user", "1")])
    right = conversations.ask([*history, message("user", "2")])
    sample(conversations, right, [7], "b")
    sample(conversations, left, [8, 9], "c")
    sample(conversations, conversations.ask([message("user", "summary")]), [10], "d")
    branches = conversations.branches()
    assert [[call.index for call in branch.calls] for branch in branches] == [[0, 1], [0, 2], [3]]
    assert list(map(trained_ids, branches)) == [[5, 6, 8, 9], [7], [10]]
    steps = conversations.steps()
    assert list(map(trained_ids, steps)) == [[5, 6], [8, 9], [7], [10]]
    for call, step in zip(conversations.calls, steps, strict=True):
        asked = conversations.prompt_ids(call)
        assert ids_of(step) == asked + call.response_ids


def test_what_a_client_library_does_to_messages_is_no_new_conversation() -> None:
    template = template_of(make_tokenizer(), CHATML)
    conversations = Conversations(template)
    first = conversations.ask([message("user", "hello")])
    call = {"id": "call0", "type": "function", "function": {"name": "calc", "arguments": '{"x": 1}'}}
    given = {"role": "assistant", "content": None, "tool_calls": [call]}
    conversations.answer(first, [5], [0.0], [0], "stop", given)
    sent = {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "tool_calls": [call | {"function": {"name": "calc", "arguments": '{"x":1}'}}],
    }
    listed = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
    assert conversations.ask([listed, sent, message("user", "1")]).parent == 0


def test_responses_of_others_are_context() -> None:
    template = template_of(make_tokenizer(), CHATML)
    conversations = Conversations(template)
    sample(conversations, conversations.ask([message("user", "hello")]), [5], "a")
    messages = [message("user", "hello"), message("assistant", "edited"), message("user", "1")]
    call = conversations.ask(messages)
    assert call.parent is None and conversations.prompt_ids(call) == template.prompt(messages)
    assert conversations.counts.foreign_responses == 1
    sample(conversations, call, [6], "b")
    assert list(map(trained_ids, conversations.branches())) == [[5], [6]]


def test_templates_that_move_text_are_refused_by_name() -> None:
    mistral = next(family for family in WRITTEN_HERE if family.name == "mistral").chat_template(TOOLS)
    with pytest.raises(TemplateError, match=r"AVAILABLE_TOOLS.*thinking: new_sample"):
        check_template(mistral, "keep", tools=False)
    check_template(mistral, "new_sample", tools=False)
    plain = template_of(make_tokenizer(), CHATML)
    check_template(plain, "keep", tools=True)
    assert all(probe_boundary(plain, name).moved is None for name in BOUNDARIES)
    forgetful = template_of(make_tokenizer(), CHATML.replace("m.content", "m.content if m.role != 'tool' else ''"))
    with pytest.raises(TemplateError, match="leaves out the message of role tool"):
        check_template(forgetful, "keep", tools=True)
    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate(bare)


@pytest.mark.skipif(not published(), reason="trl, which packages published chat templates, is not installed")
def test_published_templates() -> None:
    """The properties of the published templates that docs/agentic.md lists."""
    moving, dropping, refused = set(), set(), set()
    for family in published():
        for name in BOUNDARIES:
            try:
                bridge = probe_boundary(family.chat_template(TOOLS), name)
            except TemplateError:
                refused.add(family.name)
            else:
                if bridge.only_thoughts:
                    dropping.add(family.name)
                elif bridge.moved is not None:
                    moving.add((family.name, name))
    assert moving == {("deepseekv3", "tool, twice")}
    assert dropping == {"qwen3_5_think", "gptoss"} and refused == {"llama3_1"}
    for family in published():
        check_template(family.chat_template(TOOLS), "keep", tools=family.tools)


@pytest.mark.parametrize("content", ["Zürich\n20 °C", 'a "b"\nc', "東京\n", "plain"])
@pytest.mark.parametrize("family", [one for one in FAMILIES if one.tools], ids=lambda family: family.name)
def test_results_that_a_template_escapes_are_shown(family: Family, content: str) -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "calc", "arguments": {"x": "1"}}}
    history = [message("user", "hello"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "call00000", "name": "calc", "content": content}
    assert family.chat_template().bridge(history, [result]).moved is None


@pytest.mark.parametrize("described", [False, True])
def test_tools_that_the_policy_does_not_see(tmp_path: Path, described: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A template that leaves tools out is said once, unless the system message can describe them."""
    for family in WRITTEN_HERE:
        assert family.chat_template().shows_tools() == ("tools" in family.template), family.name
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    overrides = [f"pretrain={tmp_path}", *([] if described else ["custom_envs.sums.agent_system_template="])]
    found = load_config(None, ROOT / "examples/smollm2/agent_config.yaml", None, overrides, check_files=False)
    players = build_players(found.config, found.plan, found.plan.train, tokenizer, [], {})
    assert list(players) == ["sums"]
    assert ("custom_envs.sums: the chat template shows no tools" in caplog.text) != described
