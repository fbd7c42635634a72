"""The judge: prompts, scores in answers, and a real service that answers well, badly or not at all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from roll.config.rewards import RewardComponentConfig, RewardConfig
from roll.distributed import WorkerContext
from roll.rewards import RewardResult, RewardSample, build_reward, failure_rates, reward_options
from roll.rewards.judge_reading import NoScore, ScoreReader, stated_word
from roll.rewards.registry import concurrent_calls
from roll.rollout.rewarding import RewardWorker
from tests.rewards.http_service import Answer, Service, completion, in_turn, serving
from tests.rewards.stated_cases import rows_of

QUICK: dict[str, Any] = {"backoff": 0.001, "max_backoff": 0.01, "max_retries": 1}
SAMPLE = RewardSample(
    "<user>2+2?<assistant>", "<think>hm</think> It is 4.", "4", row={"messages": [{"role": "user", "content": "2+2?"}]}
)


def judged(
    answer: Any, samples: list[RewardSample] | None = None, **options: Any
) -> tuple[list[RewardResult], Service]:
    with serving(answer) as service:
        judge = build_reward("llm_judge", {"base_url": service.url, "model": "m", **QUICK, **options})
        try:
            return judge(samples or [SAMPLE]), service
        finally:
            judge.close()


def test_what_the_judge_is_asked() -> None:
    (result,), service = judged(in_turn(completion("It agrees.\nYes")), system_prompt="Be strict.", seed=3)
    assert result == RewardResult(1.0, {"raw_score": 1.0, "cached": 0.0, "tries": 1.0})
    (body,) = service.bodies
    assert service.paths == ["/v1/chat/completions"]
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    text = body["messages"][1]["content"]
    assert "2+2?" in text
    assert "It is 4." in text
    assert "hm" not in text, "the thought is not shown"
    assert "<user>" not in text, "the question, not the template around it"
    assert {"model": "m", "temperature": 0.0, "max_tokens": 1024, "seed": 3}.items() <= body.items()


def test_a_question_with_an_image_is_shown_by_its_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = ["Look.", image, {"type": "text", "text": "How many cats?"}]
    sample = RewardSample("<image>", "Two.", "2", row={"messages": [{"role": "user", "content": content}]})
    _, service = judged(in_turn(completion("Yes")), [sample])
    text = service.bodies[0]["messages"][0]["content"]
    assert "Look.\nHow many cats?" in text and "base64" not in text


@pytest.mark.parametrize(("written", "rescale", "score"), [(10, True, 1.0), (1, True, 0.0), (5.5, False, 5.5)])
def test_scores_between_bounds_are_rescaled(written: float, rescale: bool, score: float) -> None:
    reader = ScoreReader(extract="number", min_score=1.0, max_score=10.0, rescale=rescale)
    assert reader.read({"message": {"content": f"Score: {written}"}}) == (score, written)


NINES = "9" * 5000
VERDICTS = [
    *rows_of("judge_cases"),
    *(["stop", "json", {}, f'{{"score": {NINES[:digits]}}}', None] for digits in (400, 5000)),
    ["stop", "number", {}, f"Score: {NINES[:400]}", None],
    ["stop", "json", {}, "{" * 5000, None],
]
"""Finish reason, ``extract``, options, the judge's text, and the score; None: no verdict."""


@pytest.mark.parametrize(("finish_reason", "extract", "options", "text", "score"), VERDICTS)
def test_verdicts(finish_reason: str, extract: Any, options: Any, text: str, score: float | None) -> None:
    reader = ScoreReader(extract=extract, **options)
    choice = {"message": {"content": text}, "finish_reason": finish_reason}
    if score is None:
        with pytest.raises(NoScore):
            reader.read(choice)
    else:
        assert reader.read(choice)[1] == pytest.approx(score)


def test_verdicts_are_found_in_linear_time() -> None:
    pieces = ["Score: ", "7/", "* ", "1,", "1", "Yes or ", "\n>", "not ", "score (", "give it ", ". ", "-"]
    for text in (piece * (40_000 // len(piece)) for piece in pieces):
        for extract in ("number", "yes_no"):
            began = time.process_time()
            with pytest.raises(NoScore):
                ScoreReader(extract=extract).read({"message": {"content": text}})
            assert time.process_time() - began < 2


def test_a_cut_answer_without_a_verdict_is_an_error_and_not_zero() -> None:
    answer = completion("The reference says 5. No", finish_reason="length")
    (result,), _ = judged(in_turn(answer))
    assert result.score is None
    assert "cut off: give it more max_tokens" in (result.error or "")
    assert failure_rates([result])["error_rate"] == 1.0


def test_a_pattern_that_backtracks_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.rewards.judge_reading.PATTERN_SECONDS", 0.02)
    reader = ScoreReader(extract="regex", score_pattern=r"(?P<score>(a|aa)+)$")
    with pytest.raises(NoScore, match="timeout: "):
        reader.read({"message": {"content": "a" * 1000 + "b"}})


def log_probs(**tokens: float) -> dict[str, Any]:
    listed = [{"token": token.replace("_", " "), "logprob": value} for token, value in tokens.items()]
    return {"logprobs": {"content": [{**listed[0], "top_logprobs": listed}]}}


def test_the_chance_of_a_word() -> None:
    reader = ScoreReader(extract="logprob")
    assert reader.read(log_probs(Yes=-1.0, No=-1.0))[0] == pytest.approx(0.5)
    # exp(-1) + exp(-2) against exp(-3); an unrelated token counts for neither.
    expected = (0.36788 + 0.13534) / (0.36788 + 0.13534 + 0.04979)
    assert reader.read(log_probs(Yes=-1.0, _yes=-2.0, No=-3.0, Maybe=-0.1))[0] == pytest.approx(expected, abs=1e-4)
    assert reader.read(log_probs(Hm=-0.1, No=-5.0))[0] == 0.0
    assert reader.read(log_probs(Yes=1e9, No=0.0))[0] == pytest.approx(0.5), "no log-prob is above 0"
    none = (log_probs(Maybe=-0.1), {"message": {"content": "Yes"}}, {"logprobs": {"content": []}})
    for choice in (*none, log_probs(Yes=float("nan"), No=float("nan")), log_probs(Yes=10**400)):
        with pytest.raises(NoScore):
            reader.read(choice)


def test_a_request_for_log_probs() -> None:
    answer = completion("Yes", **log_probs(Yes=-0.1, No=-2.4))
    (result,), service = judged(in_turn(answer), prompt="yes_or_no")
    assert result.score == pytest.approx(0.9089, abs=1e-4)
    expected = {"logprobs": True, "top_logprobs": 20, "max_tokens": 1, "temperature": 1.0}
    assert expected.items() <= service.bodies[0].items()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer({}, 500), "status 500"),
        (Answer({"object": "something else"}), "no chat completion"),
        (Answer(["nonsense"]), "no chat completion"),
        (Answer({"choices": [{"message": {"content": None}}]}), "has no text"),
        (completion("I would rather not say."), "no score (yes_no) in the judge's answer 'I would rather not say.'"),
    ],
)
def test_failures_are_errors_and_never_zero(answer: Answer, words: str) -> None:
    (result,), _ = judged(in_turn(answer))
    assert result.score is None
    assert words in (result.error or "")
    assert failure_rates([result]) == {"error_rate": 1.0, "timeout_rate": 0.0}


def test_a_judge_that_stalls_is_counted_as_a_timeout() -> None:
    (result,), _ = judged(in_turn(Answer(stall=True)), timeout=0.1)
    assert failure_rates([result]) == {"error_rate": 1.0, "timeout_rate": 1.0}


def test_a_thought_that_never_ends_is_not_judged() -> None:
    lost = RewardSample("p", "<think>and on and on", "4")
    results, service = judged(in_turn(completion("Yes")), [SAMPLE, lost], unanswered_score=-1.0)
    assert [result.score for result in results] == [1.0, -1.0]
    assert len(service.bodies) == 1


def test_the_same_question_is_asked_once() -> None:
    other = RewardSample("p", "5", "4")
    with serving(lambda number, body: completion("Yes" if "It is 4" in str(body) else "No")) as service:
        judge = build_reward("llm_judge", {"base_url": service.url, "model": "m"})
        for _ in range(2):
            results = judge([SAMPLE, other, SAMPLE])
            assert [result.score for result in results] == [1.0, 0.0, 1.0]
            assert len(service.bodies) == 2
        judge.close()
        assert [result.metrics["cached"] for result in results] == [1.0, 1.0, 1.0]
        judge = build_reward("llm_judge", {"base_url": service.url, "model": "m", "cache": False})
        judge([SAMPLE, SAMPLE])
        judge.close()
        assert len(service.bodies) == 4


def test_the_least_recently_used_answers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.rewards.judge.MAX_ANSWERS", 2)
    with serving(lambda number, body: completion("Yes")) as service:
        judge = build_reward("llm_judge", {"base_url": service.url, "model": "m"})
        cached = [judge([RewardSample("p", text, "4")])[0].metrics["cached"] for text in "abacab"]
        judge.close()
    assert cached == [0.0, 0.0, 1.0, 0.0, 1.0, 0.0]


def test_an_answer_without_a_score_is_asked_for_again_next_time() -> None:
    with serving(in_turn(completion("hm"), completion("Yes"))) as service:
        judge = build_reward("llm_judge", {"base_url": service.url, "model": "m"})
        assert [judge([SAMPLE])[0].score for _ in range(3)] == [None, 1.0, 1.0]
        judge.close()
        assert len(service.bodies) == 2


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ row.level }}|{{ reference }}|{{ response }}|{{ finish_reason }}")
    sample = RewardSample("p", "4", "four", "length", {"level": 3})
    (result,), service = judged(in_turn(completion("2")), [sample], prompt=str(file), extract="number")
    assert result.score == 2.0
    assert service.bodies[0]["messages"][0]["content"] == "3|four|4|length"
    (result,), service = judged(in_turn(completion("2")), prompt="{{ row.absent.deeper }}", extract="number")
    assert "the prompt cannot be made" in (result.error or "")
    assert service.bodies == []


def test_through_the_worker_with_the_keys_of_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_JUDGE_KEY", "top-secret")
    with serving(in_turn(completion("Score: 10"), Answer({}, 400), completion("Score: 1"))) as service:
        section = RewardConfig(
            name="quality",
            worker_cls="roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker",
            judge_prompt="score_1_to_10",
            judge_model_type="api",
            judge_model_name="grader",
            judge_api_url=service.url,
            reward_kwargs={**QUICK, "api_key_env": "MY_JUDGE_KEY", "concurrency": 1},
        )
        worker = RewardWorker(WorkerContext("rewards.quality", section, rank=0, world_size=1))
        worker.initialize()
        samples = [RewardSample("p", text, "4") for text in "abc"]
        results = worker.score(samples)
        worker.close()
    assert [result.score for result in results] == [1.0, None, 0.0]
    assert service.bodies[0]["model"] == "grader"
    assert service.headers[0]["Authorization"] == "Bearer top-secret"
    assert "top-secret" not in repr(worker.reward._reward)
    assert reward_options("quality", section)[1]["timeout"] == 30.0
    assert concurrent_calls("quality", section) == 16
    assert concurrent_calls("math_rule", RewardConfig()) == 1
    assert concurrent_calls("math_rule", RewardConfig(max_concurrency=2)) == 2
    assert concurrent_calls("x", RewardConfig(components={"llm_judge": RewardComponentConfig()})) == 1


@pytest.mark.parametrize("rest", [" or", " or ", "/", " or N", " **or**", " o"])
def test_a_verdict_that_is_cut_before_its_alternative_is_none(rest: str) -> None:
    for text in ("the answer is Yes", "Verdict: Yes"):
        assert stated_word(text + rest, "Yes", "No", is_cut=True) is None
        assert stated_word(f"{text}. It is right", "Yes", "No", is_cut=True) is True
