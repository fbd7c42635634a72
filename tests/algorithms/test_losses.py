"""The losses of actor and critic."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.aggregation import (
    denominators_from,
    denominators_of,
)
from roll.algorithms.losses import (
    actor_loss,
    value_loss,
)
from roll.algorithms.policy_losses import LossInputs
from roll.config.algorithm import LOSS_AGG_MODES
from roll.config.choices import POLICY_LOSSES, ClipOptions
from roll.protocol.metrics import merge_metrics, to_floats
from tests.algorithms import reference
from tests.algorithms.reference import Batch, each_batch, inputs_of, make_batch, whole
from tests.support.keys import loss_options
from tests.support.names import POLICY_LOSS_NAMES

# These choose tokens by their rank within the micro-batch: a documented exception.
SPLITTABLE = [name for name in POLICY_LOSS_NAMES if name not in ("clip_cov", "kl_cov", "m2po")]
EVERYTHING = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_loss_coef": 0.01, "rl_loss_coef": 0.5}


def test_terms_may_be_aggregated_by_modes_of_their_own() -> None:
    """Each term is what it is alone under its mode; null is ``loss_agg_mode``."""
    batch = make_batch(5, 6, 7)
    terms = {
        "token-mean": {"rl_loss_coef": 0.5},
        "seq-mean-token-mean": {"rl_loss_coef": 0.0, "use_kl_loss": True, "kl_loss_coef": 0.1},
        "seq-mean-token-sum-norm": {"rl_loss_coef": 0.0, "entropy_loss_coef": 0.2},
    }
    everything = {key: value for term in terms.values() for key, value in term.items()} | {"rl_loss_coef": 0.5}
    own = dict(zip(("loss_agg_mode", "kl_loss_agg_mode", "entropy_loss_agg_mode"), terms, strict=True))
    together = with_gradient(batch, [slice(None)], everything | own)
    alone = [with_gradient(batch, [slice(None)], term | {"loss_agg_mode": mode}) for mode, term in terms.items()]
    assert_close(together[0], torch.stack([loss for loss, _, _ in alone]).sum())
    assert_close(together[1], torch.stack([gradient for _, gradient, _ in alone]).sum(0))
    null = {"kl_loss_agg_mode": None, "entropy_loss_agg_mode": None}
    shared = everything | {"loss_agg_mode": "token-mean"}
    assert_close(with_gradient(batch, [slice(None)], shared | null)[0], with_gradient(batch, [slice(None)], shared)[0])


def with_gradient(
    batch: Batch, splits: list[slice | torch.Tensor], settings: dict[str, object]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    log_probs = batch.log_probs.clone().requires_grad_()
    changed, options = replace(batch, log_probs=log_probs), loss_options(settings)
    parts = [actor_loss(inputs_of(changed, rows), options, whole(batch)) for rows in splits]
    total = torch.stack([part.loss for part in parts]).sum()
    (gradient,) = torch.autograd.grad(total, log_probs)
    return total.detach(), gradient, to_floats(merge_metrics(part.metrics for part in parts))


@pytest.mark.parametrize("variant", SPLITTABLE)
@each_batch(
    share=8,
    cut=st.integers(0, 7),
    mode=st.sampled_from(LOSS_AGG_MODES),
    sides=st.sampled_from([(0, 3), (9, 0)]),
    correction=st.sampled_from(["sequence_mask", "icepop"]),
)
def test_micro_batches_row_order_and_padding_change_nothing(
    variant: str, batch: Batch, cut: int, mode: str, sides: tuple[int, int], correction: str
) -> None:
    """Micro-batches of one rank or of several, padded left or right."""
    settings = {**EVERYTHING, "pg_variant": variant, "loss_agg_mode": mode, "train_infer_correction": correction}
    columns = {f.name: getattr(batch, f.name) for f in fields(batch)}
    pad = partial(torch.nn.functional.pad, pad=sides)
    padded = Batch(**{name: pad(value) if value.dim() == 2 else value for name, value in columns.items()})
    wanted, gradient, metrics = with_gradient(batch, [slice(None)], settings)
    for given, splits, wanted_gradient in (
        (batch, [slice(0, cut), slice(cut, None)], gradient),
        (batch, [torch.randperm(len(batch.mask))], gradient),
        (padded, [slice(None)], pad(gradient)),
    ):
        loss, found, others = with_gradient(given, splits, settings)
        assert_close(loss, wanted, rtol=1e-10, atol=1e-12)
        assert_close(found, wanted_gradient, rtol=1e-10, atol=1e-12)
        assert others == pytest.approx(metrics, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("variant", POLICY_LOSS_NAMES)
def test_an_empty_mask_gives_zero_loss_and_zero_gradient(variant: str) -> None:
    batch = make_batch(0, 3, 5, density=0.0)
    assert not bool(batch.mask.any())
    noise = torch.full_like(batch.log_probs, -1.0)
    batch = replace(batch, log_probs=noise, old_log_probs=noise - 1, advantages=noise, entropy=-noise)
    settings = {**EVERYTHING, "pg_variant": variant, "train_infer_correction": "tis"}
    loss, gradient, metrics = with_gradient(batch, [slice(None)], settings)
    assert loss.item() == 0.0
    assert bool((gradient == 0).all())
    assert all(value == value and abs(value) != float("inf") for value in metrics.values())


@pytest.mark.parametrize("variant", POLICY_LOSS_NAMES)
def test_without_old_log_probs_the_ratio_is_exactly_one(variant: str) -> None:
    batch = make_batch(1, 6, 9)
    log_probs = batch.log_probs.float().requires_grad_()
    inputs = LossInputs(log_probs, batch.advantages.float(), batch.mask)
    metrics = to_floats(actor_loss(inputs, loss_options({"pg_variant": variant}), whole(batch)).metrics)
    for name in ("actor/ratio_mean", "actor/ratio_max", "actor/ratio_min"):
        assert metrics[name] == 1.0
    for name in ("actor/approxkl", "actor/policykl"):
        assert metrics[name] == 0.0


@pytest.mark.parametrize("variant", ["ppo", "vanilla", "tis", "cispo", "topr", "gspo", "gspo_token", "sapo", "gmpo"])
def test_on_policy_every_variant_has_the_policy_gradient(variant: str) -> None:
    """At ratio 1 they differ in how they treat later steps, not in this one: the gradient is -A / (n_i N).

    One advantage a response, so that ratios of responses agree with those of tokens too.
    """
    batch = make_batch(2, 6, 9)
    advantages = torch.where(batch.mask, batch.response_rewards.unsqueeze(-1) - 0.4, 0.0)
    log_probs = batch.log_probs.clone().requires_grad_()
    options = loss_options({"pg_variant": variant})
    loss = actor_loss(LossInputs(log_probs, advantages, batch.mask), options, whole(batch)).loss
    (gradient,) = torch.autograd.grad(loss, log_probs)
    lengths = batch.mask.sum(-1, keepdim=True).clamp(min=1)
    assert_close(gradient, -advantages / (lengths * whole(batch).samples))


@each_batch()
def test_metrics_equal_the_loop(batch: Batch) -> None:
    metrics = to_floats(actor_loss(inputs_of(batch), loss_options({"pg_clip": 0.1}), whole(batch)).metrics)
    log_ratio = (batch.log_probs - batch.old_log_probs)[batch.mask]
    ratio, advantages = log_ratio.exp(), batch.advantages[batch.mask]
    if ratio.numel() == 0:
        assert "actor/ratio_max" not in metrics
        return
    high, low = ratio > 1.1, ratio < 0.9
    expected = {
        "actor/ratio_mean": ratio.mean(),
        "actor/ratio_max": ratio.max(),
        "actor/ratio_min": ratio.min(),
        "actor/approxkl": 0.5 * log_ratio.square().mean(),
        "actor/policykl": log_ratio.mean(),
        "actor/ppo_ratio_high_clipfrac": high.double().mean(),
        "actor/ppo_ratio_low_clipfrac": low.double().mean(),
        "actor/ppo_ratio_clipfrac": (high | low).double().mean(),
        "actor/clipfrac": ((high & (advantages > 0)) | (low & (advantages < 0))).double().mean(),
        "actor/valid_samples": batch.mask.any(-1).sum(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx({k: float(v) for k, v in expected.items()})


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_weights_of_rows_and_the_policy_mask_touch_the_policy_gradient_alone(mode: str) -> None:
    batch = make_batch(14, 6, 9)
    chosen = batch.mask & (torch.rand(6, 9, generator=torch.Generator().manual_seed(1)) < 0.4)
    ratio = (batch.log_probs - batch.old_log_probs).exp()
    surrogate = -torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)

    def expected(loss: torch.Tensor, weights: torch.Tensor = batch.sample_weights) -> float:
        return reference.aggregate(loss, batch.mask, mode, 10.0, weights, batch.group_ids.tolist())

    options, everything = {"loss_agg_mode": mode, "rl_loss_coef": 0.5}, {**EVERYTHING, "loss_agg_mode": mode}
    metrics, everywhere, masked = (
        to_floats(actor_loss(inputs, loss_options(settings), whole(batch)).metrics)
        for inputs, settings in (
            (inputs_of(batch), options),
            (inputs_of(batch), everything),
            (replace(inputs_of(batch), policy_mask=chosen), everything),
        )
    )
    assert metrics["actor/pg_loss"] == pytest.approx(expected(surrogate, torch.ones(6)))
    assert metrics["actor/weighted_pg_loss"] == metrics["actor/total_loss"] == pytest.approx(0.5 * expected(surrogate))
    assert metrics["actor/sample_weights_max"] == pytest.approx(float(batch.sample_weights.max()))
    assert masked["actor/weighted_pg_loss"] == pytest.approx(0.5 * expected(surrogate * chosen))
    for term in ("actor/kl_loss", "actor/entropy"):
        assert masked[term] == everywhere[term]


def test_log_ratio_has_no_gradient_outside_the_mask_and_beyond_its_bound() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -30.0, -0.5]], requires_grad=True)
    old = torch.tensor([[-1.5, -1.0, -0.1, -40.0]])
    mask = torch.tensor([[True, False, True, True]])
    log_ratio = LossInputs(log_probs, torch.zeros(1, 4), mask, old).log_ratio
    assert_close(log_ratio, torch.tensor([[0.5, 0.0, -20.0, 20.0]]))
    (gradient,) = torch.autograd.grad(log_ratio.sum(), log_probs)
    assert gradient.tolist() == [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, "ref_log_probs"),
        ({"entropy_loss_coef": 0.1}, "entropy"),
        ({"train_infer_correction": "tis"}, "rollout_log_probs"),
    ],
)
def test_missing_columns_are_named(changed: dict[str, object], name: str) -> None:
    batch = make_batch(4, 3, 5)
    with pytest.raises(ValueError, match=name):
        actor_loss(LossInputs(batch.log_probs, batch.advantages, batch.mask), loss_options(changed), whole(batch))


@pytest.mark.parametrize("variant", POLICY_LOSS_NAMES)
def test_fault_5_every_option_of_a_variant_reaches_its_loss(variant: str) -> None:
    """Every option of the variant is taken from ``loss``, from ``pg_variant_args`` and under its flat name."""
    own = POLICY_LOSSES[variant].options
    assert own is not None
    values = {"divergence": "kl", "importance_sampling": "seq", "dual_clip": 3.0}
    changed = {
        item.name: values.get(item.name, not item.default if isinstance(item.default, bool) else 0.123)
        for item in fields(own)
    }
    shared = {"clip": "pg_clip", "clip_low": "pg_clip_low", "clip_high": "pg_clip_high", "dual_clip": "dual_clip_coef"}
    shared = {**shared, "importance_sampling": "importance_sampling"} if issubclass(own, ClipOptions) else {}
    flat = {shared.get(name, f"{variant}_{name}"): value for name, value in changed.items()}
    flat |= {"use_pg_clip_range": True, "dual_clip_loss": True} if shared else {}
    for written in (
        {"loss": {"name": variant, **changed}},
        {"pg_variant": variant, "pg_variant_args": changed},
        {"pg_variant": variant, **flat},
    ):
        built = loss_options(written).pg
        assert {name: getattr(built, name) for name in changed} == changed


@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("changes", [{}, {"kl_loss_importance_weighted": True}, {"train_infer_correction": "seq_tis"}])
def test_gradient_of_the_whole_loss(kl: str, changes: dict[str, object]) -> None:
    batch = make_batch(13, 4, 6)
    options = loss_options({**EVERYTHING, "kl_loss_type": kl, **changes})

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return actor_loss(inputs_of(batch, log_probs=log_probs, entropy=entropy), options, whole(batch)).loss

    assert torch.autograd.gradcheck(loss, (batch.log_probs.requires_grad_(), batch.entropy.requires_grad_()))


@each_batch(cut=st.integers(0, 7), clip=st.sampled_from([None, 0.1, 0.5]))
def test_fault_11_the_critics_loss_is_the_loop_with_global_denominators(
    batch: Batch, cut: int, clip: float | None
) -> None:
    """Shares of two ranks add up to the loss, and their gradients to its gradient."""
    denominators = denominators_from(denominators_of(batch.mask))
    values = (batch.values + 0.3 * batch.advantages).requires_grad_()
    total, count = 0.0, int(batch.mask.sum())
    for i, t in batch.mask.nonzero().tolist():
        v, old, target = float(values[i, t].detach()), float(batch.values[i, t]), float(batch.rewards[i, t])
        error = (v - target) ** 2
        if clip is not None:
            error = max(error, (min(max(v, old - clip), old + clip) - target) ** 2)
        total += 0.5 * error / count

    def share(rows: slice) -> tuple[torch.Tensor, dict[str, float]]:
        result = value_loss(values[rows], batch.values[rows], batch.rewards[rows], batch.mask[rows], clip, denominators)
        return result.loss, result.metrics

    whole, whole_metrics = share(slice(None))
    parts = [share(slice(0, cut)), share(slice(cut, None))]
    summed = parts[0][0] + parts[1][0]
    assert_close(float(whole.detach()), total, rtol=1e-9, atol=1e-12)
    assert_close(summed, whole)
    assert_close(torch.autograd.grad(summed, values), torch.autograd.grad(whole, values))
    merged = to_floats(merge_metrics(metrics for _, metrics in parts))
    assert merged == pytest.approx(to_floats(whole_metrics), abs=1e-12)


def test_gradient_of_the_critics_loss() -> None:
    batch = make_batch(2, 3, 5)
    denominators = denominators_from(denominators_of(batch.mask))
    values = (batch.values + 0.3 * batch.advantages).requires_grad_()
    columns = (batch.values, batch.rewards, batch.mask, 0.2, denominators)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, *columns).loss, values)


@pytest.mark.parametrize("variant", POLICY_LOSS_NAMES)
@pytest.mark.parametrize("outside", [torch.nan, torch.inf])
def test_values_outside_the_mask_are_ignored(variant: str, outside: float) -> None:
    """Loss, gradient and metrics; log-ratios inside the mask go beyond their bound of 20."""
    batch = make_batch(30, 9, 31)
    batch = replace(batch, old_log_probs=30 * batch.old_log_probs, rollout_log_probs=30 * batch.rollout_log_probs)
    columns = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropy")
    dirty = {name: getattr(batch, name).masked_fill(~batch.mask, outside) for name in columns}
    settings = {**EVERYTHING, "pg_variant": variant, "train_infer_correction": "tis"}
    results = []
    for columns_given in (batch, replace(batch, **dirty)):
        torch.manual_seed(0)  # clip_cov draws tokens
        results.append(with_gradient(columns_given, [slice(None)], settings))
    (loss, gradient, metrics), (dirty_loss, dirty_gradient, dirty_metrics) = results
    assert_close(dirty_loss, loss)
    assert_close(dirty_gradient, gradient)
    assert dirty_metrics == pytest.approx(metrics)
