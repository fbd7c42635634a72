import subprocess
import sys

import pytest

from roll.config.rewards import REWARDS, RewardConfig
from roll.rewards import (
    RewardError,
    RewardOptionError,
    RewardResult,
    RewardSample,
    apply_on_error,
    build_reward,
    failure_rates,
    resolve_name,
    reward_options,
)
from roll.rewards.base import GuardedReward
from tests.rewards.stated_cases import rows_of

OWN = "tests.rewards.own_rewards"
NEEDED = {
    "length_penalty": {"limit": 10},
    "http_reward": {"url": "http://127.0.0.1:9", "max_retries": 0},
    "llm_judge": {"base_url": "http://127.0.0.1:9/v1", "model": "absent", "max_retries": 0},
}
"""Options without a default."""
CHOICES = ("multiple_choice", "crossthinkqa")
PUBLISHED = "roll.pipeline.rlvr.rewards"


def test_published_class_paths_and_short_names() -> None:
    assert resolve_name(f"{PUBLISHED}.math_rule_reward_worker.MathRuleRewardWorker") == "math_rule"
    path = f"{PUBLISHED}.multiple_choice_boxed_rule_reward_worker.MultipleChoiceBoxedRuleRewardWorker"
    assert resolve_name(path) == "multiple_choice"
    assert resolve_name("gsm8k_rule") == "gsm8k_rule"
    for name in sorted(REWARDS):
        build_reward(name, NEEDED.get(name)).close()
    assert build_reward("gsm8k_rule", {"score": 2})([RewardSample("", "#### 1", "1")])[0].score == 2.0, "for a float"


@pytest.mark.parametrize(("name", "options", "message"), rows_of("refused_options"))
def test_options_that_cannot_work_say_why(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(RewardOptionError) as caught:
        build_reward(name, options)
    assert message in str(caught.value)


def test_a_plain_function_gets_what_it_asks_for() -> None:
    short = build_reward(f"{OWN}.shortness", {"limit": 3})
    assert [r.score for r in short([RewardSample("", "abc"), RewardSample("", "abcd")])] == [1.0, 0.0]
    everything = build_reward(f"{OWN}.everything")
    row = {"difficulty": 4, "prompt": "the column, not the rendered text", "tag": "t"}
    (result,) = everything([RewardSample("p", "yes", "yes", row=row)])
    assert result == RewardResult(1.0, {"columns": 3.0, "difficulty": 4.0})


def test_what_a_function_raises_is_that_samples_error(caplog: pytest.LogCaptureFixture) -> None:
    reward = build_reward(f"{OWN}.everything")
    samples = [RewardSample("", text, "ok") for text in ("boom", "ok", "boom")]
    results = reward(samples)
    assert [r.score for r in results] == [None, 1.0, None]
    assert "AssertionError: the response went boom" in (results[0].error or "")
    assert sum(record.exc_info is not None for record in caplog.records) == 1


def test_what_is_no_score_is_an_error() -> None:
    errors = {
        "nan": "must be finite",
        "huge": "must be finite",
        "none": "must return numbers",
        "text": "must return numbers",
        "dict": "no 'score'",
    }
    reward = build_reward(f"{OWN}.returns")
    for result, error in zip(reward([RewardSample("", name) for name in errors]), errors.values(), strict=True):
        assert result.score is None and error in (result.error or "")
    assert reward([RewardSample("", "true")])[0].score == 1.0
    (guarded,) = GuardedReward("x", build_reward(f"{OWN}.Constant", {"value": 1e300}))([RewardSample("", "")])
    assert guarded.score is None and "no finite number of float32" in (guarded.error or "")


def test_a_rule_class_by_dotted_path() -> None:
    assert build_reward(f"{OWN}.Constant", {"value": 3})([RewardSample("", "")])[0].score == 3.0


FAILED = [RewardResult(1.0), RewardResult(None, {}, "x: timeout: slow"), RewardResult(None, {}, "broken")]


def test_failures_are_masked_valued_or_raised_and_always_counted() -> None:
    assert [r.score for r in apply_on_error(FAILED, "mask")] == [1.0, None, None]
    valued = apply_on_error(FAILED, "value", -1.0)
    assert [r.score for r in valued] == [1.0, -1.0, -1.0]
    with pytest.raises(RewardError, match="2 of 3 samples failed, the first with: x: timeout"):
        apply_on_error(FAILED, "raise")
    assert apply_on_error(FAILED[:1], "raise") == FAILED[:1]
    assert failure_rates(FAILED) == failure_rates(valued) == {"error_rate": 2 / 3, "timeout_rate": 1 / 3}
    assert failure_rates([]) == {}


def test_a_section_names_its_reward_and_options() -> None:
    config = RewardConfig(worker_cls="gsm8k_rule", reward_kwargs={"method": "flexible"}, timeout=7)
    assert reward_options("gsm", config) == ("gsm8k_rule", {"method": "flexible"})
    assert reward_options("math_rule", RewardConfig(timeout=7)) == ("math_rule", {"timeout": 7})
    config = RewardConfig(format_pattern="a+", timeout=7, reward_kwargs={"timeout": 2})
    assert reward_options("format", config) == ("format", {"pattern": "a+", "timeout": 2})
    assert reward_options("own", RewardConfig(worker_cls=f"{OWN}.shortness"))[1] == {}
    for name in sorted(REWARDS):
        config = RewardConfig(format_pattern="a", reward_kwargs=NEEDED.get(name, {}))
        build_reward(*reward_options(name, config)).close()


def test_rewards_load_without_the_heavy_packages() -> None:
    program = (
        "import sys; from roll.rewards import build_reward; build_reward('gsm8k_rule'); build_reward('math_rule');"
        "print([m for m in ('torch', 'numpy', 'transformers', 'ray', 'sympy') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_a_rule_returns_the_numbers_that_it_tells_of(name: str) -> None:
    rule = build_reward(name, NEEDED.get(name))
    for response in ("#### 7", "\\boxed{A}", "seven", ""):
        (result,) = rule([RewardSample("question", response, "A" if name in CHOICES else "7")])
        assert tuple(result.metrics) == rule.numbers or result.error is not None
    rule.close()
