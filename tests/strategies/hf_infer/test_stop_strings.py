"""Stop strings that begin in one token and end in another."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from roll.strategies.engines.requests import GenerationRequest, SamplingParams, StopStringMatcher
from tests.strategies.hf_infer.helpers import build_engine, build_model, make_tokenizer, random_prompts, run

TOKENIZER = make_tokenizer()


def decode(token_ids: list[int]) -> str:
    return str(TOKENIZER.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def first_match(token_ids: list[int], stops: tuple[str, ...], prompt: list[int]) -> int | None:
    """The obvious way: decode everything so far after each token."""
    matcher = StopStringMatcher(decode, stops, prompt)
    return next((i for i, token in enumerate(token_ids) if matcher.push(token)), None)


def expected_match(token_ids: list[int], stops: tuple[str, ...]) -> int | None:
    texts = (decode(token_ids[: i + 1]) for i in range(len(token_ids)))
    return next((i for i, text in enumerate(texts) if any(stop in text for stop in stops)), None)


def test_the_prompt_does_not_count():
    prompt, tokens = TOKENIZER("the sto")["input_ids"], TOKENIZER("p it, stop")["input_ids"]
    match = first_match(tokens, ("stop",), prompt)
    assert match == len(tokens) - 1


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="abcst op\u20ac\U0001f98a", min_size=1, max_size=40),
    stops=st.lists(st.text(alphabet="abcst op\u20ac\U0001f98a", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_equals_decoding_everything(text, stops):
    tokens = TOKENIZER(text)["input_ids"]
    assert first_match(tokens, tuple(stops), []) == expected_match(tokens, tuple(stops))


def letters(token_ids: list[int]) -> str:
    """A tokenizer of two letters a token, so that any pair of tokens has a string across its border."""
    return "".join(chr(97 + token // 10) + chr(97 + token % 10) for token in token_ids)


def build(max_num_seqs: int = 8) -> Any:
    return build_engine(build_model("qwen2"), max_num_seqs=max_num_seqs, decode_text=letters)


def test_engine_stops_at_the_completing_token_and_keeps_it():
    (prompt,) = random_prompts([5])
    free = run(build(), [GenerationRequest("r", prompt, SamplingParams(20, seed=1))])["r", 0]
    assert len(free.token_ids) > 6, "another seed is needed"
    across = letters(free.token_ids)[7:9]  # second letter of token 3, first letter of token 4
    end = next(i for i in range(1, 7) if across in letters(free.token_ids[:i]))
    params = SamplingParams(20, seed=1, stop_strings=("zzz", across), stop_token_ids=())
    stopped = run(build(), [GenerationRequest("r", prompt, params)])["r", 0]
    assert stopped.token_ids == free.token_ids[:end]
    assert stopped.finish_reason == "stop"
    assert stopped.log_probs == free.log_probs[:end]


def test_engine_does_not_stop_before_min_new_tokens():
    (prompt,) = random_prompts([5])
    every_letter = tuple("abcdefghij")
    params = SamplingParams(20, min_new_tokens=6, stop_strings=every_letter, seed=2)
    outputs = run(build(max_num_seqs=3), [GenerationRequest("r", prompt, params, num_samples=5)])
    assert {len(output.token_ids) for output in outputs.values()} == {6}
