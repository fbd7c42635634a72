"""The losses of actor and critic."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.aggregation import (
    AGGREGATION_MODES,
    denominators_from,
    denominators_of,
)
from roll.algorithms.losses import (
    LossOutputs,
    actor_loss,
    register_policy_loss,
    value_loss,
)
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.policy_losses import POLICY_LOSS_NAMES, LossInputs
from roll.config.policy_losses import POLICY_LOSSES, ClipOptions
from roll.protocol.metrics import merge_metrics, to_floats
from tests.algorithms import reference
from tests.algorithms.reference import Batch, batches, inputs_of, make_batch, whole
from tests.support.keys import loss_options

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
    parts: list[LossOutputs] = []
    for rows in splits:
        parts.append(
            actor_loss(inputs_of(replace(batch, log_probs=log_probs), rows), loss_options(settings), whole(batch))
        )
    total = torch.stack([part.loss for part in parts]).sum()
    (gradient,) = torch.autograd.grad(total, log_probs)
    return total.detach(), gradient, to_floats(merge_metrics(part.metrics for part in parts))


@pytest.mark.parametrize("variant", SPLITTABLE)
@settings(max_examples=25)
@given(batch=batches, cut=st.integers(0, 7), mode=st.sampled_from(AGGREGATION_MODES))
def test_micro_batches_ranks_and_row_order_change_nothing(variant: str, batch: Batch, cut: int, mode: str) -> None:
    settings = {
        **EVERYTHING, "pg_variant": variant, "loss_agg_mode": mode, "train_infer_correction": "sequence_mask"
    }  # fmt: skip
    expected = with_gradient(batch, [slice(None)], settings)
    split = with_gradient(batch, [slice(0, cut), slice(cut, None)], settings)
    shuffled = with_gradient(batch, [torch.randperm(len(batch.mask))], settings)
    for loss, gradient, metrics in (split, shuffled):
        assert_close(loss, expected[0], rtol=1e-10, atol=1e-12)
        assert_close(gradient, expected[1], rtol=1e-10, atol=1e-12)
        assert metrics == pytest.approx(expected[2], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("variant", SPLITTABLE)
@settings(max_examples=25)
@given(batch=batches, padding=st.integers(1, 9), left=st.booleans())
def test_padding_changes_nothing(variant: str, batch: Batch, padding: int, left: bool) -> None:
    settings = {**EVERYTHING, "pg_variant": variant, "train_infer_correction": "icepop"}
    sides = (padding, 0) if left else (0, padding)
    padded = Batch(
        **{
            f.name: torch.nn.functional.pad(value, sides) if (value := getattr(batch, f.name)).dim() == 2 else value
            for f in fields(batch)
        }
    )
    loss, gradient, _ = with_gradient(batch, [slice(None)], settings)
    padded_loss, padded_gradient, _ = with_gradient(padded, [slice(None)], settings)
    assert_close(padded_loss, loss, rtol=1e-10, atol=1e-12)
    assert_close(padded_gradient, torch.nn.functional.pad(gradient, sides), rtol=1e-10, atol=1e-12)


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


@given(batch=batches)
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


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_sample_weights_multiply_the_policy_gradient_of_their_row(mode: str) -> None:
    batch = make_batch(14, 6, 9)
    options = loss_options({"loss_agg_mode": mode, "rl_loss_coef": 0.5})
    metrics = to_floats(actor_loss(inputs_of(batch), options, whole(batch)).metrics)
    ratio = (batch.log_probs - batch.old_log_probs).exp()
    surrogate = -torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
    weighted = reference.aggregate(surrogate, batch.mask, mode, 10.0, batch.sample_weights, batch.group_ids.tolist())
    plain = reference.aggregate(surrogate, batch.mask, mode, 10.0, torch.ones(6), batch.group_ids.tolist())
    assert metrics["actor/pg_loss"] == pytest.approx(plain)
    assert metrics["actor/weighted_pg_loss"] == metrics["actor/total_loss"] == pytest.approx(0.5 * weighted)
    assert metrics["actor/sample_weights_max"] == pytest.approx(float(batch.sample_weights.max()))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_the_policy_mask_zeroes_tokens_of_the_policy_gradient_alone(mode: str) -> None:
    batch = make_batch(15, 6, 9)
    chosen = batch.mask & (torch.rand(6, 9, generator=torch.Generator().manual_seed(1)) < 0.4)
    inputs = replace(inputs_of(batch), policy_mask=chosen)
    settings = {**EVERYTHING, "loss_agg_mode": mode}
    metrics = to_floats(actor_loss(inputs, loss_options(settings), whole(batch)).metrics)
    everywhere = to_floats(actor_loss(inputs_of(batch), loss_options(settings), whole(batch)).metrics)
    ratio = (batch.log_probs - batch.old_log_probs).exp()
    surrogate = -torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
    expected = reference.aggregate(
        surrogate * chosen, batch.mask, mode, 10.0, batch.sample_weights, batch.group_ids.tolist()
    )
    assert metrics["actor/weighted_pg_loss"] == pytest.approx(0.5 * expected)
    for term in ("actor/kl_loss", "actor/entropy"):
        assert metrics[term] == everywhere[term]


def test_log_ratio_has_no_gradient_outside_the_mask_and_beyond_its_bound() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -30.0, -0.5]], requires_grad=True)
    old = torch.tensor([[-1.5, -1.0, -0.1, -40.0]])
    mask = torch.tensor([[True, False, True, True]])
    log_ratio = LossInputs(log_probs, torch.zeros(1, 4), mask, old).log_ratio
    assert_close(log_ratio, torch.tensor([[0.5, 0.0, -20.0, 20.0]]))
    (gradient,) = torch.autograd.grad(log_ratio.sum(), log_probs)
    assert gradient.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_missing_columns_are_named() -> None:
    batch = make_batch(4, 3, 5)
    bare = LossInputs(batch.log_probs, batch.advantages, batch.mask)
    for changed, name in (
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, "ref_log_probs"),
        ({"entropy_loss_coef": 0.1}, "entropy"),
        ({"train_infer_correction": "tis"}, "rollout_log_probs"),
    ):
        with pytest.raises(ValueError, match=name):
            actor_loss(bare, loss_options(changed), whole(batch))


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


def asymmetric(inputs: LossInputs, options: ClipOptions, metrics: MetricBuilder) -> torch.Tensor:
    metrics.mean("actor/mine", inputs.num_tokens, inputs.num_tokens)
    return -inputs.advantages * inputs.log_probs * options.clip


@pytest.mark.usefixtures("own_registrations")
def test_a_users_own_loss_enters_by_dotted_path_and_by_decorator() -> None:
    batch = make_batch(10, 3, 5)
    by_path = loss_options({"pg_variant": f"{__name__}.asymmetric", "pg_clip": 0.5})
    result = actor_loss(inputs_of(batch), by_path, whole(batch))
    assert to_floats(result.metrics)["actor/mine"] == 1.0
    register_policy_loss("asymmetric")(asymmetric)
    by_name = actor_loss(inputs_of(batch), loss_options({"pg_variant": "asymmetric", "pg_clip": 0.5}), whole(batch))
    assert_close(by_name.loss, result.loss)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("changes", [{}, {"kl_loss_importance_weighted": True}, {"train_infer_correction": "seq_tis"}])
def test_gradient_of_the_whole_loss(kl: str, changes: dict[str, object]) -> None:
    batch = make_batch(13, 4, 6)
    options = loss_options({**EVERYTHING, "kl_loss_type": kl, **changes})

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return actor_loss(inputs_of(batch, log_probs=log_probs, entropy=entropy), options, whole(batch)).loss

    assert torch.autograd.gradcheck(loss, (batch.log_probs.requires_grad_(), batch.entropy.requires_grad_()))


@given(batch=batches, clip=st.sampled_from([None, 0.1, 0.5]))
def test_equals_the_loop(batch: Batch, clip: float | None) -> None:
    values = batch.values + 0.3 * batch.advantages
    total, count = 0.0, int(batch.mask.sum())
    for i, t in batch.mask.nonzero().tolist():
        v, old, target = float(values[i, t]), float(batch.values[i, t]), float(batch.rewards[i, t])
        error = (v - target) ** 2
        if clip is not None:
            error = max(error, (min(max(v, old - clip), old + clip) - target) ** 2)
        total += 0.5 * error / count
    denominators = denominators_from(denominators_of(batch.mask))
    result = value_loss(values, batch.values, batch.rewards, batch.mask, clip, denominators)
    assert_close(float(result.loss), total, rtol=1e-9, atol=1e-12)


@given(cut=st.integers(0, 6), seed=st.integers(0, 1000))
def test_fault_11_the_loss_uses_global_denominators(cut: int, seed: int) -> None:
    """Shares of two ranks add up to the loss, and their gradients to its gradient."""
    batch = make_batch(seed, 6, 8)
    denominators = denominators_from(denominators_of(batch.mask))
    values = (batch.values + 0.3 * batch.advantages).requires_grad_()

    def share(rows: slice) -> tuple[torch.Tensor, dict[str, float]]:
        result = value_loss(values[rows], batch.values[rows], batch.rewards[rows], batch.mask[rows], 0.2, denominators)
        return result.loss, result.metrics

    whole, whole_metrics = share(slice(None))
    parts = [share(slice(0, cut)), share(slice(cut, None))]
    summed = parts[0][0] + parts[1][0]
    assert_close(summed, whole)
    assert_close(torch.autograd.grad(summed, values), torch.autograd.grad(whole, values))
    merged = to_floats(merge_metrics(metrics for _, metrics in parts))
    assert merged == pytest.approx(to_floats(whole_metrics), abs=1e-12)


def test_gradient() -> None:
    batch = make_batch(2, 3, 5)
    denominators = denominators_from(denominators_of(batch.mask))
    values = (batch.values + 0.3 * batch.advantages).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, batch.values, batch.rewards, batch.mask, 0.2, denominators).loss, values
    )


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
