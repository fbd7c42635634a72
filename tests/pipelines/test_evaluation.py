"""Numbers of validations and evaluations, and samples and configuration of an evaluation, without engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
import yaml

from roll.config.reading.errors import ConfigError
from roll.datasets import DataError
from roll.evaluate import load_evaluation, main
from roll.pipelines.evaluate.config import EvaluatePlan, models_of
from roll.pipelines.evaluate.samples import (
    SampleFile,
    answers_of,
    compare,
    differing,
    missed,
    sample_records,
    sign_flip_p_value,
)
from roll.pipelines.rlvr.accuracy import (
    Answers,
    best_at_k,
    bootstrap,
    chosen_at_k,
    estimate,
    majority_at_k,
    merged_votes,
    overall,
    pass_at_k,
    pass_metrics,
    voted_answer,
)
from tests.config.good import GOOD, changed
from tests.support.sample_groups import make_group


def write(folder: Path, data: Mapping[str, object]) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(dict(data), sort_keys=False), encoding="utf-8")
    return file


def answers(prompt_id: str, scores: list[float], tag: str = "a", ranks: list[float] | None = None) -> Answers:
    values = np.array(scores)
    numbers = values if ranks is None else np.array(ranks)
    flat = np.zeros(len(scores), dtype=bool)
    return Answers(prompt_id, tag, values, numbers, values >= 1.0, ["4"] * len(scores), flat + 3, flat)


def test_the_best_of_k_by_rank_is_the_mean_over_all_choices() -> None:
    """So is that by score; pass@k is the share of subsets with a right answer."""
    correct, scores = np.array([True, False, True, True]), np.array([0.25, 1.0, -0.5, 0.75], dtype=np.float32)

    def one(values: list[float], chosen: tuple[int, ...]) -> float:
        best = max(values[i] for i in chosen)
        return float(np.mean([correct[i] for i in chosen if values[i] == best]))

    for k in (1, 2, 3, 4):
        for ranks in ([0.1, 0.9, 0.5, 0.9], [1.0, 1.0, 1.0, 1.0], [0.3, float("nan"), 0.2, 0.4]):
            values = [-np.inf if np.isnan(rank) else rank for rank in ranks]
            wanted = np.mean([one(values, chosen) for chosen in combinations(range(4), k)])
            assert chosen_at_k(np.array(ranks), correct, k) == pytest.approx(wanted)
        assert best_at_k(scores, k) == pytest.approx(np.mean([max(chosen) for chosen in combinations(scores, k)]))
    assert best_at_k(np.array([np.nan, 1.0, 0.5]), 1) == pytest.approx((0.5 + 1.0 + 0.5) / 3)
    assert best_at_k(np.array([np.nan, np.nan]), 2) == 0
    for n, c, k in ((8, 0, 4), (8, 3, 1), (8, 3, 4), (8, 8, 8), (5, 2, 3), (4, 1, 4)):
        right = np.array([True] * c + [False] * (n - c))
        subsets = list(combinations(right, k))
        assert pass_at_k(right, k) == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


def test_a_harness_asks_no_model_that_is_served_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would ask the engines of this run, and give their answers as the service's. A threshold has a value."""
    monkeypatch.setattr("roll.serving.harness.find_spec", lambda name: True)
    file, keys = str(write(tmp_path, GOOD)), {"against": "http://127.0.0.1:1/v1"}
    loaded = load_evaluation(file, None, [], keys, check_files=False)
    monkeypatch.setattr("roll.cli.ready", lambda load: loaded)
    with pytest.raises(ConfigError, match=r"evaluate\.against.*has no place with --harness"):
        main([file, "--harness", "lm_eval", "--tasks", "x"])
    with pytest.raises(ConfigError, match=r"--at-least = .?fast.?: must be METRIC=VALUE"):
        main([file, "--at-least", "fast"])


def test_metrics_keep_graded_rewards_beside_correctness() -> None:
    found = pass_metrics([answers("p", [0.5, 1.0]), answers("q", [0.0, float("nan")], "b")], "sampled", True)
    assert found["val/sampled/accuracy"] == found["val_correct/all/mean"] == pytest.approx(1 / 4)
    assert found["val/sampled/reward"] == pytest.approx((0.75 + 0.0) / 2)
    assert found["val/sampled/reward_failed"] == pytest.approx(1 / 4)


def test_bootstrap_intervals_hold_the_truth_as_often_as_they_say() -> None:
    random = np.random.default_rng(0)
    found = [bootstrap(random.normal(0.3, 1.0, size=80).tolist()) for _ in range(100)]
    assert 88 <= sum(one.low <= 0.3 <= one.high for one in found) <= 99
    assert bootstrap([0.5] * 20) == bootstrap([0.5] * 20)


def test_a_comparison_is_by_prompt() -> None:
    first = [answers("p", [1.0, 1.0]), answers("q", [1.0, 0.0]), answers("r", [0.0, 0.0]), answers("s", [1.0, 0.0])]
    second = [answers("r", [0.0, 1.0]), answers("q", [1.0, 0.0]), answers("p", [0.0, 0.0])]
    found = compare(first, second)
    assert (found["wins"], found["losses"], found["ties"]) == (1, 1, 1)
    assert found["difference"] == pytest.approx((1.0 + 0.0 - 0.5) / 3)
    assert compare(first[3:], second) == {}
    differences = np.array([1.0, 0.5, 0.0, -0.25, 0.75])
    signs = [abs(np.dot(s, differences)) >= differences.sum() - 1e-12 for s in product((1, -1), repeat=5)]
    assert sign_flip_p_value(differences) == pytest.approx(np.mean(signs))
    assert sign_flip_p_value(np.zeros(3)) == 1.0
    many = np.random.default_rng(1).normal(0.0, 1.0, size=60)
    assert 0.05 < sign_flip_p_value(many) < 1 and sign_flip_p_value(many + 1.0) < 1e-3


def test_thresholds_are_of_one_model_or_of_all() -> None:
    results = {"a": {"val_correct/all/mean": 0.4}, "b": {"val_correct/all/mean": 0.6}}
    assert list(missed({"val_correct/all/mean": 0.3, "b/val_correct/all/mean": 0.5}, results)) == []
    assert list(missed({"val_correct/all/mean": 0.5}, results)) == ["a: val_correct/all/mean is 0.4000, below 0.5"]
    assert list(missed({"val/typo": 0.5}, results)) == ["val/typo: there is no such metric"]
    assert list(missed({"val_correct/all/mean": 0.0}, {"a": {"val_correct/all/mean": float("nan")}}))


@pytest.mark.long
def test_samples_are_taken_up_by_whole_prompts(tmp_path: Path) -> None:
    settings = {"seed": 1}
    file = SampleFile(tmp_path, settings, resume=True)
    for order in (2, 0):
        group = make_group(order, [1], [[1], [2, 2]], [1.0, 0.5])
        file.write("m", "sampled", order, list(sample_records(group, {"model": "m", "pass": "sampled"})))
    before = file.records("m", "sampled")
    file.close()
    text = file.path.read_text()
    third = text.replace('"order": 2', '"order": 5').splitlines()[0]
    file.path.write_text(f"{text}{third}\n" + '{"model": "m", "pa')  # killed while it wrote
    again = SampleFile(tmp_path, settings, resume=True)
    assert again.answered("m", "sampled") == {0, 2}
    assert again.records("m", "sampled") == before
    assert file.path.read_text() == text
    again.close()
    first, *others = text.splitlines(keepends=True)
    file.path.write_text(first[:20] + "\n" + "".join(others))
    assert SampleFile(tmp_path, settings, resume=True).answered("m", "sampled") == {0}, "a damaged line: asked again"
    file.path.write_text(text)
    assert differing(tmp_path, {"seed": 2}) == ["seed"]
    (one, _) = answers_of(before, correct_from=0.5, select_by="score")
    assert one.correct.tolist() == [True, True] and one.lengths.tolist() == [1, 2]
    with pytest.raises(DataError, match="no reward returns taste; there is score"):
        answers_of(before, 1.0, "taste")
    assert SampleFile(tmp_path, settings, resume=False).answered("m", "sampled") == set()
    assert (tmp_path / "samples.jsonl.previous").read_text() == text


def test_an_rlvr_file_is_an_evaluation(tmp_path: Path) -> None:
    keys = {"num_samples": 4, "temperatures": [0.7, 0], "thresholds": {"val_correct/all/mean": 0.5}}
    file = write(tmp_path, changed({"pipeline": "rlvr"}))
    with pytest.raises(ConfigError, match="no such file"):
        load_evaluation(str(file), None, [], keys)
    loaded = load_evaluation(str(file), None, ["seed=3"], keys, check_files=False)
    assert loaded.config.seed == 3
    plan = loaded.plan
    assert isinstance(plan, EvaluatePlan)
    assert list(plan.roles) == ["actor_infer", "rewards.math", "rewards.choice"], "nothing learns"
    assert [(one.name, one.num_samples, one.is_primary) for one in plan.passes] == [
        ("t0.7", 4, True),
        ("greedy", 1, False),
    ]
    assert plan.output_dir.name == "evaluation"
    assert plan.roles["actor_infer"].section.strategy_args.strategy_config["load_format"] == "auto"
    assert [one.name for one in models_of(loaded.config, loaded.config.evaluate)] == ["model"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate.temperatures": [-1.0]}, "evaluate.temperatures.0 = -1.0: must be 0 .greedy. or at least"),
        ({"evaluate.models": {"a": "./nowhere"}}, "evaluate.models.a = '?./nowhere'?: does not exist"),
        ({"evaluate.models": {"a": "/usr/lib"}}, "evaluate.models.a = '?/usr/lib'?: is neither a model folder"),
        ({"evaluate.models": {"a b": "owner/model"}}, "a model's name is part of the metrics' names"),
        ({"evaluate.models": {"a": "x/y"}, "evaluate.baseline": "b"}, "evaluate.baseline = .?b.?: must be a model of"),
        ({"validation": None}, "validation: is needed: the prompts"),
        ({"rewards": {}}, "rewards: is needed"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    (tmp_path / "val.jsonl").write_text("{}\n")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    own = {"pretrain": str(tmp_path), "validation.data_args.file_name": str(tmp_path / "val.jsonl")}
    data = changed({**own, **changes})
    with pytest.raises(ConfigError, match=message):
        load_evaluation(str(write(tmp_path, data)), None, [], {})


def test_accuracy_counts_only_full_scores_and_weighs_samples_alike():
    groups = [
        make_group(0, [1], [[1], [2]], [1.0, 0.5], tag="a"),
        make_group(1, [1], [[1, 1], [2]], [1.0, 1.5], tag="b"),  # with a bonus
        make_group(2, [1], [[1], [2]], [None, 0.0], tag="b"),
    ]
    metrics = pass_metrics([Answers.of(group) for group in groups], "sampled", is_primary=True, in_training=True)
    assert metrics["val/sampled/accuracy"] == pytest.approx(3 / 6)
    assert metrics["val_correct/all/mean"] == pytest.approx(3 / 6)
    assert metrics["val_correct/a/mean"] == pytest.approx(1 / 2)
    assert metrics["val/sampled/b/accuracy"] == pytest.approx(2 / 4)
    assert metrics["val/sampled/response_length"] == pytest.approx(7 / 6)
    assert metrics["val/sampled/pass@1"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert metrics["val/sampled/pass@2"] == pytest.approx(2 / 3)
    assert "val/sampled/pass@4" not in metrics
    assert metrics["val/sampled/best@2"] == pytest.approx((1 + 1.5 + 0) / 3)
    assert metrics["val/sampled/a/pass@2"] == 1
    assert metrics["val/sampled/accuracy_low"] < 0.5 < metrics["val/sampled/accuracy_high"]


def test_a_validation_in_training_reports_rewards_and_powers_of_two_alone():
    """And further numbers of a reward."""
    group = make_group(0, [1], [[1], [2], [3]], [1.0, 0.5, None], tag="a")
    for one, lines in zip(group.members[:2], (1.0, 4.0), strict=True):
        one.reward = replace(one.reward, metrics={"lines": lines})
    metrics = pass_metrics([Answers.of(group)], "sampled", is_primary=True, in_training=True)
    assert metrics["val/sampled/reward/lines"] == 2.5
    assert metrics["val/sampled/reward"] == metrics["val/sampled/a/reward"] == 0.75
    assert metrics["val/sampled/reward_failed"] == pytest.approx(1 / 3)
    assert not any("chosen@" in name for name in metrics)
    assert {name.rpartition("/")[2] for name in metrics if "best@" in name} == {"best@1", "best@2"}


def test_a_graded_reward_has_no_accuracy():
    scores = np.linspace(0.1, 0.9, 12)
    groups = [make_group(place, [1], [[1], [2]], list(pair)) for place, pair in enumerate(scores.reshape(6, 2))]
    answers = [Answers.of(group) for group in groups]
    metrics = pass_metrics(answers, "sampled", is_primary=True, in_training=True)
    assert metrics["val/sampled/reward"] == pytest.approx(0.5)
    assert metrics["val/sampled/reward_low"] < 0.5 < metrics["val/sampled/reward_high"]
    assert "val/sampled/best@2" in metrics
    assert not any(word in name for name in metrics for word in ("accuracy", "correct", "pass@", "maj@"))
    assert overall({"": answers}) == {}


def test_majorities_of_blocks():
    votes = ["4", "4", "5", None, "7", "7", "4", "5"]
    right = np.array([True, True, False, False, False, False, True, False])
    assert majority_at_k(votes, right, 8) == 1.0
    assert majority_at_k(votes, right, 4) == pytest.approx((1 + 0) / 2)
    assert majority_at_k(votes, right, 2) == pytest.approx((1 + 0 + 0 + 0.5) / 4)
    assert majority_at_k(votes, right, 1) == pytest.approx(right.mean())
    assert majority_at_k([None, None], np.array([True, True]), 2) == 0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{ 1/2 } #### 9", "1/2"),
        ("It is 0.50", "1/2"),
        ("#### 1,234.", "1234"),
        ("<answer> X + 1 </answer>", "X + 1"),
        ("<think>it is 3</think> the answer is $72", "72"),
        ("<think>it is 3", None),
        (r"\boxed{50\%}", "50\\%"),
        ("no idea", None),
    ],
)
def test_votes(response, answer):
    assert voted_answer(response) == answer


def test_votes_for_the_same_value_are_one():
    """Whatever their spelling, and only within a verdict: where the reward tells two answers apart, they are two."""
    votes = [r"\frac{1}{2}", "1/2", None, "x+1", "1 + x", "½", r"\{1,2\}", r"\{2,1\}", "B", "C", "1+x", "2", "1/2"]
    correct = np.array([True, True, False, False, False, True, False, False, False, False, True, False, False])
    half, sum_, both = r"\frac{1}{2}", "x+1", r"\{1,2\}"
    expected = [half, half, None, sum_, sum_, half, both, both, "B", "C", "1+x", "2", "1/2"]
    assert merged_votes(votes, correct) == expected
    right = np.array([True, True, True, False, False])
    scattered = [r"\sqrt{12}", r"2\sqrt{3}", r"2\sqrt3", "3", "3"]
    assert majority_at_k(scattered, right, 5) == 0 and majority_at_k(merged_votes(scattered, right), right, 5) == 1


def test_intervals_are_those_of_wilson_and_narrow_with_more_samples():
    """Reference values: Wilson's interval without continuity correction (Newcombe, 1998, table I: 81/263, 15/148)."""
    for right, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        found = estimate([1.0] * right + [0.0] * (n - right))
        assert (found.mean, found.low, found.high) == pytest.approx((right / n, low, high), abs=1e-4)
    whole = estimate([1.0, 0.0] * 20)
    fractions = estimate([0.75, 0.25] * 20)
    assert whole.mean == fractions.mean == 0.5
    assert fractions.high - fractions.low < 0.6 * (whole.high - whole.low)
    assert estimate([1.0] * 5).low < 0.6 < estimate([1.0] * 5).high == 1.0
    for n in range(1, 200):  # no rounding puts the mean outside of its interval
        nothing, everything = estimate([0.0] * n), estimate([1.0] * n)
        assert nothing.low == nothing.mean == 0.0 < nothing.high
        assert everything.low < everything.mean == everything.high == 1.0


def test_intervals_hold_the_truth_as_often_as_they_say():
    random = np.random.default_rng(0)
    found = [estimate(random.binomial(4, random.beta(2, 3, size=60)) / 4) for _ in range(400)]
    assert 0.92 <= sum(one.low <= 0.4 <= one.high for one in found) / 400 <= 0.98


def test_several_sets_are_pooled_by_question():
    sets = {
        "": [make_group(0, [1], [[1], [2]], [1.0, 1.0], tag="a")],
        "hard": [make_group(0, [1], [[1]], [0.0], tag="a"), make_group(1, [1], [[1]], [1.0], tag="b")],
    }
    found = {name: [Answers.of(group) for group in groups] for name, groups in sets.items()}
    assert overall(found) == pytest.approx(
        {
            "val_correct/a/mean": 1 / 2,
            "val_correct/b/mean": 1,
            "val_correct/hard/mean": 1 / 2,
            "val_correct/all/mean": 2 / 3,
        }
    )
