"""One reader of responses: rewards, maj@k and agents find the same thought and the same answer."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from roll.agents.tool_calls import parse_response
from roll.pipelines.rlvr.accuracy import voted_answer
from roll.rewards.answers import after_thought
from roll.rewards.thoughts import decode_responses

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


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("begin", "end"), [("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"), ("[A]", "[/A]")])
def test_marks_of_thoughts_that_are_special_tokens_reach_rewards(begin: str, end: str, named: bool) -> None:
    made = Tokenizer(models.WordLevel({"8": 0, "7": 1, "</s>": 2, "?": 3}, unk_token="?"))
    made.decoder = decoders.Fuse()
    made.add_special_tokens([begin, end, "</s>"])
    extra = {"additional_special_tokens": [begin, end]} if named else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", **extra)
    ids = tokenizer.convert_tokens_to_ids([begin, "8", end, "7", "</s>"])
    (text,) = decode_responses(tokenizer, [ids])
    assert text.replace(" ", "") == ("87" if begin == "[A]" else f"{begin}8{end}7")
