"""One reader of responses: rewards, maj@k, judges and agents find the same thought and the same answer."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from roll.agents.tool_calls import parse_response
from roll.pipelines.rlvr.accuracy import voted_answer
from roll.rewards.answers import after_thought
from roll.rewards.base import RewardSample
from roll.rewards.code_sandbox import find_program
from roll.rewards.judge_reading import NoScore
from roll.rewards.judge_reading import answer_text as judged_text
from roll.rewards.registry import build_reward
from roll.rewards.thoughts import opened_thought, response_decoder, said_by, split_thought
from tests.rewards.stated_cases import rows_of

WRITTEN = {
    "<think>": "<think>{}</think>{}",
    "[THINK]": "[THINK]{}[/THINK]{}",
    "<seed:think>": "<seed:think>{}</seed:think>{}",
    "◁think▷": "◁think▷{}◁/think▷{}",
    "": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}",
}


@pytest.mark.parametrize("mark", WRITTEN)
def test_the_answer_is_read_after_the_thought(mark: str) -> None:
    thought, answer = "It may be \\boxed{8}.", "The answer is 7."
    text = WRITTEN[mark].format(thought, answer)
    parsed = parse_response(text, "hermes" if mark else "gpt_oss")
    assert (parsed.reasoning, parsed.content) == (thought, answer)
    assert after_thought(text) == answer
    assert voted_answer(text) == "7"
    cut = text.partition(thought)[0] + thought
    assert after_thought(cut) is None and voted_answer(cut) is None
    if mark:
        opened = text.removeprefix(mark)
        assert after_thought(opened, f"question {mark}\n") == answer
        assert after_thought(thought, f"question {mark}\n") is None


ANALYSIS = "<|channel|>analysis<|message|>"


@pytest.mark.parametrize(("response", "opened", "thought", "answer"), rows_of("thoughts"))
def test_every_reader_finds_the_same(response: str, opened: str, thought: str | None, answer: str | None) -> None:
    prompt = f"question\n{opened}\n"
    assert opened_thought(prompt) == opened
    assert split_thought(response, opened) == (thought, answer)
    assert after_thought(response, prompt) == answer
    for tool_format in ("hermes", "gpt_oss"):
        parsed = parse_response(response, tool_format, opened=opened)
        assert parsed.reasoning == (thought or "")
        assert (not parsed.calls) or (answer is not None and "<tool_call>" in answer)
        if not parsed.calls:
            assert parsed.content == (answer or "").strip()
    assert said_by(response, opened) == (answer or "") or "<|channel|>" in opened + response
    assert find_program(RewardSample(prompt, response), ["python"]) == (None if answer is None else answer.strip())
    if not opened and answer is None:
        with pytest.raises(NoScore, match="never ended"):
            judged_text({"text": response})
    elif not opened:
        assert judged_text({"text": response}) == answer


@pytest.mark.parametrize("mark", WRITTEN)
def test_the_format_rule_reads_thoughts_of_every_family(mark: str) -> None:
    rule = build_reward("format", {})
    text = WRITTEN[mark].format("a", "<answer>7</answer>")
    opened = mark or ANALYSIS
    samples = [
        RewardSample("q", text),
        RewardSample(f"q{opened}", text.removeprefix(opened)),
        RewardSample("q", text.removeprefix(opened).partition("<answer>")[1]),
        RewardSample("q", WRITTEN[mark].format("a", "7")),
        RewardSample(f"q{opened}", "<answer>7</answer>"),
    ]
    assert [result.score for result in rule(samples)] == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("begin", "end"), [("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"), ("[A]", "[/A]")])
def test_marks_of_thoughts_that_are_special_tokens_reach_rewards(begin: str, end: str, named: bool) -> None:
    made = Tokenizer(models.WordLevel({"8": 0, "7": 1, "</s>": 2, "?": 3}, unk_token="?"))
    made.decoder = decoders.Fuse()
    made.add_special_tokens([begin, end, "</s>"])
    extra = {"additional_special_tokens": [begin, end]} if named else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", **extra)
    ids = tokenizer.convert_tokens_to_ids([begin, "8", end, "7", "</s>"])
    (text,) = response_decoder(tokenizer)([ids])
    assert text.replace(" ", "") == ("87" if begin == "[A]" else f"{begin}8{end}7")
