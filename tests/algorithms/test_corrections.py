from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.losses import correct_mismatch, mismatch_metrics, rejection_mask, weight_scale
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.policy_losses import LossInputs
from roll.config.algorithm import CORRECTION_PRESETS, CorrectionOptions, CorrectionRule, RuleLevel, correction_options
from roll.protocol.metrics import merge_metrics, to_floats
from tests.algorithms.reference import Batch, each_batch, inputs_of, make_batch, mean


def unit_of(mask: list[bool], t: int, level: str) -> list[int]:
    """Positions that a token's level spans."""
    if level == "token":
        return [t]
    if level != "segment":
        return [s for s, m in enumerate(mask) if m]
    first = last = t
    while first > 0 and mask[first - 1]:
        first -= 1
    while last + 1 < len(mask) and mask[last + 1]:
        last += 1
    return list(range(first, last + 1))


def leveled(per_token: list[float], mask: list[bool], t: int, level: str) -> float:
    values = [per_token[s] for s in unit_of(mask, t, level)]
    return {"sequence": sum, "max": max}.get(level, mean)(values)


def metric_value(rule: CorrectionRule, old: list[float], rollout: list[float], mask: list[bool], t: int) -> float:
    log_ratio = [a - b for a, b in zip(old, rollout, strict=True)]
    per_token = {
        "ratio": log_ratio,
        "log_diff": log_ratio,
        "prob_diff": [math.exp(a) - math.exp(b) for a, b in zip(old, rollout, strict=True)],
        "k1": [-x for x in log_ratio],
        "k2": [x * x / 2 for x in log_ratio],
        "k3": [math.exp(x) - 1 - x for x in log_ratio],
    }[rule.metric]
    value = leveled(per_token, mask, t, rule.level)
    return math.exp(value) if rule.metric == "ratio" else value


def by_loop(batch: Batch, rule: CorrectionRule) -> tuple[torch.Tensor, torch.Tensor]:
    weights, keep = torch.ones_like(batch.log_probs), batch.mask.clone()
    low = -math.inf if rule.low is None else rule.low
    high = math.inf if rule.high is None else rule.high
    for i, t in batch.mask.nonzero().tolist():
        if rule.only_negative and batch.advantages[i, t] >= 0:
            continue
        policy = batch.log_probs if rule.policy == "current" else batch.old_log_probs
        old, rollout = policy[i].tolist(), batch.rollout_log_probs[i].tolist()
        mask = batch.mask[i].tolist()
        ratio = metric_value(replace(rule, metric="ratio"), old, rollout, mask, t)
        if rule.action == "truncate":
            weights[i, t] = min(max(ratio, low), high)
        else:
            keep[i, t] = low <= metric_value(rule, old, rollout, mask, t) <= high
            if rule.action == "both":
                weights[i, t] = ratio
    return weights, keep


rules = st.one_of(
    st.builds(
        CorrectionRule,
        level=st.sampled_from(get_args(RuleLevel)[:-1]),
        action=st.sampled_from(["truncate", "both", "mask"]),
        low=st.sampled_from([None, 0.5, 0.95]),
        high=st.sampled_from([None, 1.05, 2.0]),
        only_negative=st.booleans(),
        policy=st.sampled_from(["old", "current"]),
    ),
    st.builds(
        CorrectionRule,
        level=st.sampled_from(get_args(RuleLevel)),
        action=st.just("mask"),
        metric=st.sampled_from(["ratio", "log_diff", "prob_diff", "k1", "k2", "k3"]),
        low=st.sampled_from([None, -0.05]),
        high=st.sampled_from([None, 0.003, 0.1]),
    ),
)


@each_batch(share=1, rule=rules)
def test_every_rule_equals_the_loop(batch: Batch, rule: CorrectionRule) -> None:
    result = correct_mismatch(inputs_of(batch), CorrectionOptions((rule,)), MetricBuilder())
    weights, keep = by_loop(batch, rule)
    assert torch.equal(result.keep, keep)
    assert_close(result.weights, weights, rtol=1e-9, atol=1e-12)


@each_batch(rule=rules, other=rules)
def test_rejections_equal_the_loop_and_leave_the_loss_to_the_other_rules(
    batch: Batch, rule: CorrectionRule, other: CorrectionRule
) -> None:
    """``reject`` keeps what ``mask`` keeps, before the update; in the loss it does nothing more."""
    rejecting = replace(rule, action="reject", policy="old", only_negative=False)
    options = CorrectionOptions((rejecting, other))
    keep, metrics = rejection_mask(batch.old_log_probs, batch.rollout_log_probs, batch.mask, options, None)
    assert torch.equal(keep, by_loop(batch, replace(rejecting, action="mask"))[1])
    share = float((batch.mask & ~keep).sum()) / max(float(batch.mask.sum()), 1.0)
    assert to_floats(metrics).get("actor/rejected_token_ratio", 0.0) == pytest.approx(share)
    inputs = inputs_of(batch)
    both = correct_mismatch(inputs, options, MetricBuilder())
    alone = correct_mismatch(inputs, CorrectionOptions((other,)), MetricBuilder())
    assert torch.equal(both.weights, alone.weights) and torch.equal(both.keep, alone.keep)


@each_batch(
    level=st.sampled_from(["token", "geometric", "sequence"]),
    action=st.sampled_from(["truncate", "both"]),
    high=st.sampled_from([None, 1.0, 1.1]),
)
def test_the_scale_gives_weights_a_mean_of_one(batch: Batch, level: Any, action: Any, high: float | None) -> None:
    """Over tokens, or over the responses that have any; the loss's own weights stay as they are."""
    rule = CorrectionRule(level, action, high=high, normalize=True)
    options = CorrectionOptions((rule,))
    scale, metrics = weight_scale(batch.old_log_probs, batch.rollout_log_probs, batch.mask, options, None)
    weights, keep = by_loop(batch, rule)
    counted = []
    for row, mask, kept in zip(weights.tolist(), batch.mask.tolist(), keep.tolist(), strict=True):
        entries = [w if k else 0.0 for w, m, k in zip(row, mask, kept, strict=True) if m]
        counted += entries if rule.level == "token" else entries[:1]
    mean = sum(counted) / len(counted) if counted else 0.0
    assert float(scale) == pytest.approx(1 / mean if mean > 0 else 1.0)
    assert to_floats(metrics)["actor/is_weight_batch_mean"] == pytest.approx(mean or 1.0)
    plain = correct_mismatch(inputs_of(batch), CorrectionOptions((replace(rule, normalize=False),)), MetricBuilder())
    assert torch.equal(correct_mismatch(inputs_of(batch), options, MetricBuilder()).weights, plain.weights)


@each_batch(first=rules, second=rules)
def test_rules_multiply_weights_and_intersect_masks(
    batch: Batch, first: CorrectionRule, second: CorrectionRule
) -> None:
    both = correct_mismatch(inputs_of(batch), CorrectionOptions((first, second)), MetricBuilder())
    parts = [
        correct_mismatch(inputs_of(batch), CorrectionOptions((rule,)), MetricBuilder()) for rule in (first, second)
    ]
    assert_close(both.weights, parts[0].weights * parts[1].weights)
    assert torch.equal(both.keep, parts[0].keep & parts[1].keep)


def test_without_mismatch_no_preset_does_anything() -> None:
    batch = make_batch(1, 6, 9)
    batch = replace(batch, rollout_log_probs=batch.old_log_probs, log_probs=batch.old_log_probs)
    for options in CORRECTION_PRESETS.values():
        result = correct_mismatch(inputs_of(batch), options, MetricBuilder())
        assert bool((result.weights == 1).all())
        assert torch.equal(result.keep, batch.mask)


def test_seq_mask_tis_filters_by_the_geometric_mean_and_weighs_tokens() -> None:
    """A response stays while the geometric mean of its ratios lies in [0.5, 5]; each token weighs min(ratio, 5)."""
    ratios = [[9.0, 1.0, 0.2], [9.0, 9.0, 4.0], [0.4, 0.4, 0.7], [0.6, 0.5, 1.5]]
    log_ratio = torch.tensor(ratios, dtype=torch.float64).log()
    rollout = torch.full_like(log_ratio, -8.0)
    inputs = LossInputs(rollout, torch.ones_like(rollout), torch.ones(4, 3).bool(), rollout + log_ratio, rollout)
    result = correct_mismatch(inputs, correction_options("seq_mask_tis"), MetricBuilder())
    for i, row in enumerate(ratios):
        geometric = math.exp(mean([math.log(ratio) for ratio in row]))
        assert result.keep[i].tolist() == [0.5 <= geometric <= 5.0] * 3
        assert_close(result.weights[i].tolist(), [min(ratio, 5.0) for ratio in row])
    assert result.keep[:, 0].tolist() == [True, False, False, True]


def test_gradient_enters_the_weights_only_when_asked_and_on_policy() -> None:
    batch = make_batch(2, 4, 6)
    log_probs = batch.log_probs.clone().requires_grad_()
    inputs = LossInputs(log_probs, batch.advantages, batch.mask, rollout_log_probs=batch.rollout_log_probs)
    options = CORRECTION_PRESETS["tis"]
    assert not correct_mismatch(inputs, options, MetricBuilder()).weights.requires_grad
    assert correct_mismatch(inputs, replace(options, detach=False), MetricBuilder()).weights.requires_grad


def test_rolls_spelling_maps_onto_the_vocabulary() -> None:
    filters = [
        {"enabled": True, "agg_type": "sequence", "ratio_enabled": True, "ratio_high": 1.3},
        {"enabled": False, "agg_type": "token", "ratio_enabled": True},
        {"agg_type": "geometric", "diff_enabled": True, "diff_low": -0.1, "diff_high": 0.1},
    ]
    weight = {"enabled": True, "weight_type": "segment", "upper_bound": 1.5, "detach": False}
    rules = (
        CorrectionRule("segment", "truncate", high=1.5),
        CorrectionRule("sequence", "mask", "ratio", 0.8, 1.3),
        CorrectionRule("geometric", "mask", "prob_diff", -0.1, 0.1),
    )
    assert correction_options({"is_weight": weight, "filters": filters}) == CorrectionOptions(rules, detach=False)


def test_presets_rules_and_nothing() -> None:
    assert correction_options(None) == CorrectionOptions()
    assert correction_options({"is_weight": {"enabled": False}}) == CorrectionOptions()
    assert correction_options("icepop") is CORRECTION_PRESETS["icepop"]
    rule = {"level": "sequence", "action": "mask", "metric": "k3", "high": 0.1}
    assert correction_options([rule]) == CorrectionOptions((CorrectionRule("sequence", "mask", "k3", high=0.1),))
    assert correction_options([{"normalize": True, "high": 2.0}]).normalized


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tsi", "presets .*nearest: tis"),
        ({"is_wieght": {}}, "is_wieght"),
        ({"is_weight": {"upper": 2}}, "is_weight.upper"),
        ({"filters": [{"agg": "token"}]}, "agg"),
        ([{"level": "word"}], "word"),
        ([{"level": "max"}], "has no weight there"),
        ([{"policy": "new"}], "new"),
        ([{"levle": "token"}], "levle"),
        ([{"action": "truncate", "metric": "k3"}], "k3"),
        ([{"low": 2.0, "high": 1.0}], "must not be greater than high"),
        (["tis"], "must be a section of keys"),
        ([{"normalize": True, "action": "mask"}], "mask has no weights"),
        ([{"normalize": True, "policy": "current"}], "is not known before the update"),
        ([{"normalize": True, "only_negative": True}], "which is before the advantages"),
    ],
)
def test_mistakes_are_named(setting: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        correction_options(setting)


@each_batch(cut=st.integers(0, 7))
def test_mismatch_metrics_equal_the_loop_however_split(batch: Batch, cut: int) -> None:
    parts = []
    for rows in (slice(0, cut), slice(cut, None)):
        metrics = MetricBuilder()
        mismatch_metrics(inputs_of(batch, rows), metrics, with_segments=True)
        parts.append(metrics.build())
    result = to_floats(merge_metrics(parts))
    if not bool(batch.mask.any()):
        return
    old, rollout = batch.old_log_probs[batch.mask], batch.rollout_log_probs[batch.mask]
    log_ratio = old - rollout
    difference = batch.old_log_probs - batch.rollout_log_probs
    rows = [row[mask] for row, mask in zip(difference, batch.mask, strict=True) if bool(mask.any())]
    segments = [
        math.exp(leveled(difference[i].tolist(), batch.mask[i].tolist(), t, "segment"))
        for i, t in batch.mask.nonzero().tolist()
    ]
    expected = {
        "log_diff_abs_mean": log_ratio.abs().mean(),
        "log_diff_abs_max": log_ratio.abs().max(),
        "kl_k1": -log_ratio.mean(),
        "kl_k3": (log_ratio.exp() - 1 - log_ratio).mean(),
        "diff_token_mean": (old.exp() - rollout.exp()).mean(),
        "ratio_token_mean": log_ratio.exp().mean(),
        "ratio_geometric_mean": torch.stack([row.mean().exp() for row in rows]).mean(),
        "ratio_sequence_mean": torch.stack([row.sum().exp() for row in rows]).mean(),
        "ratio_segment_mean": mean(segments),
    }
    probabilities = torch.stack([old.exp(), rollout.exp()]).double()
    spread = float(probabilities.std(1, correction=0).min())
    if spread == 0.0:
        expected["pearson"] = torch.ones(())  # by definition, where one side does not vary
    elif spread > 1e-5:  # below, rounding of the moments is all that is left of it
        expected["pearson"] = torch.corrcoef(probabilities)[0, 1]
    for name, value in expected.items():
        assert result[f"actor/train_infer_{name}"] == pytest.approx(float(value), rel=1e-6, abs=1e-8), name
