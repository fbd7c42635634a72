"""Every translated algorithm has the loss and the gradient of the project that it comes from.

The project's formula (:mod:`tests.translation.source_formulas`) and the translated configuration, run through the
scoring and the losses of a run, on one batch: ragged responses, groups of several sizes, tokens on either side of every
bound.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.config.loader import LoadedConfig
from roll.methods.base import PolicyLoss, SampledLoss
from roll.methods.policy import PolicyMethod
from roll.protocol import DataProto
from roll.rollout.groups import build_batch
from roll.strategies.base import Output
from roll.translation import skyrl, verl
from roll.translation.engine import Translation
from tests.support.sample_groups import make_group
from tests.translation.conftest import Translate, run_of
from tests.translation.source_formulas import (
    Responses,
    covariance,
    skyrl_actor,
    skyrl_actor_by_weights,
    skyrl_critic,
    verl_actor,
    verl_advantages,
    verl_critic,
)
from tests.translation.test_cases import text_of

PROMPT, LONGEST = 3, 12
LENGTHS = ((5, 12, 3, 7), (9, 1, 6, 4), (12, 8, 2, 10))
Settings = dict[str, Any]
VERL, SKYRL = text_of("$SMALL_VERL "), text_of("$SMALL_SKYRL ")
NEWER = SKYRL.replace("skyrl_train", "skyrl.train")
CISPO: Settings = {"cispo.cispo_eps_clip_low": 1.0, "cispo.cispo_eps_clip_high": 4.0}
"""Defaults of the newer package."""
SECTIONS = {
    "actor": "actor_rollout_ref.actor",
    "overlong": "+reward_model.reward_kwargs.overlong_buffer_cfg",
    "manager": "reward_model.reward_manager",
}


def make_responses() -> Responses:
    """Log-ratios of either sign up to 2 or so: every bound of the cases below binds somewhere."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.tensor([length for group in LENGTHS for length in group])
    mask = (torch.arange(LONGEST)[None, :] < lengths[:, None]).double()

    def column(scale: float) -> Tensor:
        return torch.randn(mask.shape, generator=generator, dtype=torch.float64) * scale * mask

    log_probs = (-column(1.5).abs() - 0.3) * mask
    old = (log_probs + column(0.9)).clamp(max=-0.02) * mask
    return Responses(
        mask=mask,
        group=torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor([len(group) for group in LENGTHS])),
        scores=torch.tensor([0.0, 1.0, 0.25, 1.0, 0.0, 0.0, 1.0, 0.5, 1.0, 0.75, 0.0, 1.0], dtype=torch.float64),
        components=torch.randn(12, 2, generator=torch.Generator().manual_seed(8)).double(),
        log_probs=log_probs.requires_grad_(),
        entropy=column(0.5).abs().requires_grad_(),
        new_values=column(1.0).requires_grad_(),
        old=old,
        old_squares=(old.exp() ** 2 + 0.3 * (1 - old.exp()) ** 2) * mask,
        rollout=(old + column(0.3)).clamp(max=-0.01) * mask,
        reference=(log_probs.detach() + column(0.7)).clamp(max=-0.01) * mask,
        values=(column(1.0) * 64).round() / 64,  # the same in float32
        greedy_scores=torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64).repeat_interleave(4),
        prompt_length=PROMPT,
        response_length=LONGEST,
    )


RESPONSES = make_responses()


class OurSide:
    """The batch as a run has it, and what a configuration makes of it."""

    def __init__(self, loaded: LoadedConfig[Any], responses: Responses) -> None:
        self.config, self.plan, self._responses = loaded.config, loaded.plan, responses
        self.batch = self._build()
        self.mask: Tensor = self.batch.batch["response_mask"]
        self.method = PolicyMethod(self.config, self.plan.norm_types, self.plan.max_new_tokens)
        self._add_columns()

    def _build(self) -> DataProto:
        groups, scores = [], iter(self._responses.scores.tolist())
        for order, lengths in enumerate(LENGTHS):
            texts = [[5] * length for length in lengths]
            groups.append(make_group(order, [1, 2, 3][: 1 + order], texts, [next(scores) for _ in lengths]))
        return build_batch(groups, pad_token_id=0)

    def spread(self, column: Tensor) -> Tensor:
        """From (B, R), responses side by side, to the layout of a run, (B, L)."""
        there = self._responses.mask.bool()
        return torch.zeros(self.mask.shape, dtype=column.dtype).masked_scatter(self.mask, column[there])

    def _add_columns(self) -> None:
        there, tensors = self._responses, self.batch.batch
        tensors["rollout_log_probs"] = self.spread(there.rollout)
        tensors["old_log_probs"] = self.spread(there.rollout if self.plan.engine_log_probs_as_old else there.old)
        if self.plan.needs_sum_of_squares:
            tensors["old_sum_of_squares"] = self.spread(there.old_squares)
        if not (self.plan.needs_old_log_probs or self.plan.engine_log_probs_as_old):
            del tensors["old_log_probs"]
        tensors["ref_log_probs"], tensors["values"] = self.spread(there.reference), self.spread(there.values).float()
        if self.config.estimator.get("weights"):
            tensors["reward_components"] = there.components.float()
        if self.config.max_len_mask:
            self.batch.non_tensor_batch["finish_reason"] = np.where(there.truncated, "length", "stop")
        if self.config.top_entropy_quantile < 1.0:
            tensors["old_entropy"] = self.spread(there.entropy.detach())
        if self.plan.needs_greedy_baseline:
            tensors["baseline_scores"] = there.greedy_scores.float()
            tensors["baseline_lengths"] = torch.ones(len(there.scores), dtype=torch.int64)
        self.method.credit(self.batch)

    def actor_loss(self) -> Tensor:
        loss = self.method.losses(self.plan, 1.0)["actor_train"]
        assert isinstance(loss, PolicyLoss)
        outputs = {Output.LOG_PROBS: self.spread(self._responses.log_probs)}
        if loss.options.entropy_loss_coef:
            outputs[Output.ENTROPY] = self.spread(self._responses.entropy)
        return self.value(loss, outputs)

    def critic_loss(self) -> Tensor:
        outputs = {Output.VALUES: self.spread(self._responses.new_values)}
        return self.value(self.method.losses(self.plan, 1.0)["critic"], outputs)

    def value(self, loss: SampledLoss, outputs: dict[str, Tensor]) -> Tensor:
        loss, rows = replace(loss, num_groups=len(LENGTHS)), self.batch.batch
        return loss(outputs, rows, loss.counts(rows))[0]


def command(base: str, settings: Settings) -> str:
    words = []
    for key, value in settings.items():
        section, _, rest = key.partition(".")
        if base == VERL:
            name = ".".join(filter(None, (SECTIONS.get(section, section), rest)))
        else:
            name = key if section in ("trainer", "generator") else f"trainer.algorithm.{key}"
        words.append(f"{name}={'null' if value is None else value}")
    return base + " ".join(words)


def translate_whole(translated: Translate, text: str) -> tuple[Translation, LoadedConfig[Any]]:
    translation = translated(text)
    assert translation.whole
    return translation, run_of(translation)


def assert_equal(ours: Tensor, theirs: Tensor, leaf: Tensor) -> None:
    """Advantages are float32 in a run: 1e-6 of the largest entry."""
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-7)
    gradients = [torch.autograd.grad(loss, leaf, allow_unused=True)[0] for loss in (ours, theirs)]
    ours_gradient, theirs_gradient = (torch.zeros_like(leaf) if g is None else g for g in gradients)
    assert float(theirs_gradient.abs().max()) > 0
    difference = (ours_gradient - theirs_gradient).abs().max()
    assert float(difference) <= 1e-6 * float(theirs_gradient.abs().max())


def compare(translated: Translate, base: str, settings: Settings) -> LoadedConfig[Any]:
    """Loss and gradient of the actor, and of the critic where there is one."""
    _, loaded = translate_whole(translated, command(base, settings))
    ours = OurSide(loaded, RESPONSES)
    actor, critic = (verl_actor, verl_critic) if base == VERL else (skyrl_actor, skyrl_critic)
    if base == NEWER and settings.get("policy_loss_type") in skyrl.COVARIANCE_LOSSES:
        actor = skyrl_actor_by_weights
    formula = (CISPO if base == NEWER else {}) | {key: value for key, value in settings.items() if value is not None}
    torch.manual_seed(3)
    own = ours.actor_loss()
    torch.manual_seed(3)
    theirs = actor(RESPONSES, formula)
    assert_equal(own, theirs, RESPONSES.log_probs)
    if loaded.config.entropy_loss_coef > 0:
        assert_equal(ours.actor_loss(), actor(RESPONSES, formula), RESPONSES.entropy)
    if loaded.plan.needs_critic:
        assert_equal(ours.critic_loss(), critic(RESPONSES, formula), RESPONSES.new_values)
    return loaded


GRPO: Settings = {"algorithm.adv_estimator": "grpo"}
TOKEN_BASELINE: Settings = {"algorithm.adv_estimator": "optimal_token_baseline"}
IN_REWARD: Settings = {"algorithm.use_kl_in_reward": True}
IN_LOSS: Settings = {"actor.use_kl_loss": True}
ADVANTAGES: list[Settings] = [
    {},
    {"algorithm.gamma": 0.9, "algorithm.lam": 0.8, **IN_REWARD, "algorithm.kl_ctrl.kl_coef": 0.1},
    GRPO,
    GRPO | {"algorithm.norm_adv_by_std_in_grpo": False},
    GRPO | {"algorithm.gamma": 0.9},
    *(
        {"algorithm.adv_estimator": name, **IN_REWARD, "algorithm.kl_penalty": kind, "algorithm.gamma": 0.9}
        for name, kind in (
            *(("rloo", "kl"), ("remax", "abs"), ("opo", "low_var_kl"), ("reinforce_plus_plus", "mse")),
            *(("rloo", "kl+"), ("opo", "abs+"), ("remax", "low_var_kl+")),
        )
    ),
    *(
        {"algorithm.adv_estimator": name, **IN_REWARD, "algorithm.kl_ctrl.kl_coef": 0.3}
        for name in ("rloo", "remax", "opo", "reinforce_plus_plus")
    ),
    *({"algorithm.adv_estimator": f"{name}optimal_token_baseline"} for name in ("", "tir_")),
    {
        "algorithm.adv_estimator": "optimal_token_baseline",
        **IN_REWARD,
        "algorithm.kl_ctrl.kl_coef": 0.3,
        "actor.calculate_sum_pi_squared": True,
    },
    {"algorithm.adv_estimator": "reinforce_plus_plus_baseline", "algorithm.norm_adv_by_std_in_grpo": True},
    {"algorithm.adv_estimator": "rloo", "algorithm.norm_adv_by_std_in_grpo": True},
    *({"algorithm.adv_estimator": name} | kl for name in ("gpg", "grpo_passk") for kl in ({}, IN_REWARD)),
    {"algorithm.adv_estimator": "grpo_passk", "algorithm.norm_adv_by_std_in_grpo": False},
    {
        "algorithm.adv_estimator": "gdpo",
        "algorithm.gdpo_reward_keys": "[accuracy,format]",
        "algorithm.gdpo_reward_weights": "[1.0,0.25]",
    },
]
LOSSES: list[Settings] = [
    *({"actor.policy_loss.loss_mode": name} for name in ("vanilla", "gspo", "sapo", "geo_mean", "cispo", "gpg")),
    *({"actor.policy_loss.loss_mode": name} for name in ("clip_cov", "kl_cov", "dppo_tv", "dppo_kl")),
    *(
        {"actor.policy_loss.loss_mode": name, "actor.clip_ratio_low": low, "actor.clip_ratio_high": high}
        for name, low, high in (
            ("vanilla", 0.1, 0.3),
            ("vanilla", 10, 0.2),
            ("gspo", 0.003, 0.004),
            ("geo_mean", 0.4, 0.3),
            ("cispo", 10, 0.2),
            ("clip_cov", 0.1, 0.4),
            ("dppo_tv", 0.1, 0.1),
            ("dppo_kl", 0.05, 0.05),
        )
    ),
    {"actor.clip_ratio_c": 1.5},
    {"actor.policy_loss.loss_mode": "dppo_tv", "actor.clip_ratio_c": 1.5},
    {"actor.policy_loss.loss_mode": "sapo", "actor.tau_pos": 2.0, "actor.tau_neg": 3.0},
    {
        "actor.policy_loss.loss_mode": "clip_cov",
        "actor.policy_loss.clip_cov_ratio": 0.1,
        "actor.policy_loss.clip_cov_lb": 0.2,
        "actor.policy_loss.clip_cov_ub": 3.0,
    },
    {
        "actor.policy_loss.loss_mode": "kl_cov",
        "actor.policy_loss.kl_cov_ratio": 0.2,
        "actor.policy_loss.ppo_kl_coef": 0.7,
    },
]
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")
EVERY_TERM = GRPO | IN_LOSS | {"actor.kl_loss_coef": 0.2, "actor.entropy_coeff": 0.1}
AGGREGATIONS: list[Settings] = [
    *(EVERY_TERM | {"actor.loss_agg_mode": mode} for mode in MODES),
    *(
        EVERY_TERM | {"actor.policy_loss.loss_mode": name, "actor.loss_agg_mode": mode}
        for name in ("gspo", "sapo", "geo_mean")
        for mode in ("token-mean", "seq-mean-token-sum-norm")
    ),
    EVERY_TERM | {"actor.loss_agg_mode": "seq-mean-token-sum-norm", "actor.loss_scale_factor": 30},
    *({"actor.loss_agg_mode": mode} for mode in MODES),
    {"actor.loss_agg_mode": "seq-mean-token-mean", "critic.loss_agg_mode": "token-mean", "critic.cliprange_value": 0.1},
]
KL_KINDS = ("kl", "mse", "abs", "k3", "kl+", "k2+", "abs+", "low_var_kl+")
IN_THE_LOSS: list[Settings] = [
    GRPO | IN_LOSS,
    *(GRPO | IN_LOSS | {"actor.kl_loss_type": kind, "actor.kl_loss_coef": 0.3} for kind in KL_KINDS),
]
IS, BOUND = "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold"
NORMALIZE = "algorithm.rollout_correction.rollout_is_batch_normalize"
RS, RS_BOUND = "algorithm.rollout_correction.rollout_rs", "algorithm.rollout_correction.rollout_rs_threshold"
BYPASS: Settings = {"algorithm.rollout_correction.bypass_mode": True}
LOSS_TYPE = "algorithm.rollout_correction.loss_type"
CORRECTIONS: list[Settings] = [
    GRPO | {IS: "token"},
    GRPO | {IS: "sequence", BOUND: 1.1},
    GRPO | {IS: "token", BOUND: "0.8_1.2"},
    GRPO | {IS: "sequence", BOUND: "0.5_1.5", "actor.policy_loss.loss_mode": "cispo"},
    GRPO | {"actor.tis_imp_ratio_cap": 1.1},
    GRPO | {IS: None, BOUND: 3.0},
    *(GRPO | {IS: name, BOUND: 1.1, NORMALIZE: True} for name in ("token", "sequence")),
    *(GRPO | {IS: name, BOUND: "0.8_1.2", NORMALIZE: True} for name in ("token", "sequence")),
    GRPO | IN_LOSS | {IS: "token", BOUND: 1.1, NORMALIZE: True, RS: "token_k1", RS_BOUND: "0.7_1.3"},
    GRPO | BYPASS,
    GRPO | BYPASS | {IS: "token", BOUND: 1.2},
    *(GRPO | BYPASS | {LOSS_TYPE: "reinforce", IS: level, BOUND: 1.2} for level in (None, "token", "sequence")),
]
MULTIPLE: Settings = {RS: "\"'token_k1,seq_max_k2'\"", RS_BOUND: "\"'0.6_1.6,0.2'\""}
WITH_TERMS: Settings = GRPO | IN_LOSS | {"actor.entropy_coeff": 0.1}
REJECTIONS: list[Settings] = [
    *(
        WITH_TERMS | {RS: name, RS_BOUND: bound}
        for name, bound in (
            ("token_k1", "0.7_1.3"),
            ("token_k2", 0.05),
            ("token_k3", 0.04),
            ("seq_sum_k1", 2.0),
            ("seq_sum_k2", 0.3),
            ("seq_sum_k3", 0.3),
            ("seq_mean_k1", "0.9_1.1"),
            ("seq_mean_k2", 0.05),
            ("seq_mean_k3", 0.05),
            ("seq_max_k2", 0.15),
            ("seq_max_k3", 0.15),
            ("geometric", 1.1),
        )
    ),
    WITH_TERMS | MULTIPLE | {IS: "token", BOUND: 1.1},
    GRPO | {RS: "seq_mean_k1", RS_BOUND: 1.1, IS: "sequence", BOUND: 1.1},
    GRPO | {RS: "seq_mean_k2", RS_BOUND: 0.05, "actor.policy_loss.loss_mode": "gspo"},
    *(
        {"algorithm.adv_estimator": "rloo", RS: "token_k1", RS_BOUND: 1.3, "actor.loss_agg_mode": mode}
        for mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")
    ),
    WITH_TERMS | BYPASS | MULTIPLE | {IS: "token"},
    *(
        WITH_TERMS
        | BYPASS
        | {LOSS_TYPE: "reinforce", IS: level, RS: "seq_mean_k3", RS_BOUND: 0.5, "actor.loss_agg_mode": mode}
        for level, mode in (("token", "seq-mean-token-mean"), ("sequence", "token-mean"))
    ),
    {**BYPASS, RS: "token_k2", RS_BOUND: 0.3},
]
OVERLONG: list[Settings] = [
    GRPO | {"manager": "dapo", "overlong.enable": True, "overlong.len": 6, "overlong.penalty_factor": 0.5},
    GRPO | {"manager": "dapo", "overlong.enable": True, "overlong.len": 4},
]


def name_of(settings: Settings) -> str:
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items()) or "defaults"


@pytest.mark.parametrize(
    "settings", [*ADVANTAGES, *LOSSES, *AGGREGATIONS, *IN_THE_LOSS, *CORRECTIONS, *REJECTIONS, *OVERLONG], ids=name_of
)
def test_verl(settings: Settings, translated: Translate) -> None:
    compare(translated, VERL, settings)


NO_KL: Settings = {"use_kl_loss": False}
SKYRL_CASES: list[Settings] = [
    {},
    {"advantage_estimator": "gae", "gamma": 0.9, "lambd": 0.8},
    {"advantage_estimator": "gae", "value_clip": 0.5, "loss_reduction": "sequence_mean"},
    {"grpo_norm_by_std": False, "gamma": 0.9},
    {"advantage_estimator": "maxrl"},
    NO_KL,
    {"kl_loss_coef": 0.3, "kl_estimator_type": "k2", "use_entropy_loss": True},
    *(
        {
            "advantage_estimator": name,
            **NO_KL,
            "use_kl_in_reward": True,
            "kl_loss_coef": weight,
            "kl_estimator_type": kind,
        }
        for name, weight, kind in (
            ("rloo", 0.001, "k3"),
            ("rloo", 0.2, "k1"),
            ("reinforce++", 0.3, "k2"),
            ("gae", 0.2, "abs"),
        )
    ),
    {"advantage_estimator": "rloo", **NO_KL, "use_kl_in_reward": True},
    {"advantage_estimator": "reinforce++", **NO_KL, "use_kl_in_reward": True, "gamma": 0.9},
    *({"policy_loss_type": name} for name in ("dual_clip", "gspo", "cispo", "sapo", "clip_cov", "kl_cov")),
    {"policy_loss_type": "dual_clip", "clip_ratio_c": 1.5, "eps_clip_low": 0.1, "eps_clip_high": 0.4},
    {"policy_loss_type": "gspo", "eps_clip_low": 0.003, "eps_clip_high": 0.004, "loss_reduction": "sequence_mean"},
    {"policy_loss_type": "cispo", "cispo.cispo_eps_clip_low": 0.1, "cispo.cispo_eps_clip_high": 0.2},
    {"policy_loss_type": "sapo", "sapo.tau_pos": 2.0, "sapo.tau_neg": 3.0, "loss_reduction": "sequence_mean"},
    {"policy_loss_type": "clip_cov", "clip_cov.clip_ratio": 0.1, "clip_cov.clip_cov_lb": 0.2, "eps_clip_low": 0.1},
    {"policy_loss_type": "kl_cov", "kl_cov.kl_cov_frac": 0.1, "kl_cov.ppo_kl_coef": 0.5},
    {"policy_loss_type": "kl_cov", "off_policy_correction.tis_ratio_type": "token"},
    *(
        {"loss_reduction": mode, "use_entropy_loss": True, "entropy_loss_coef": 0.2, "kl_loss_coef": 0.2}
        for mode in ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
    ),
    {"loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 40},
    {"generator.apply_overlong_filtering": True, **NO_KL, "use_entropy_loss": True},
    {"generator.apply_overlong_filtering": True, **NO_KL, "loss_reduction": "token_mean_legacy"},
    {"generator.apply_overlong_filtering": True, "loss_reduction": "sequence_mean", "kl_loss_coef": 0.2},
    {"generator.apply_overlong_filtering": True, "kl_loss_coef": 0.2},
    {"use_tis": True, "tis_imp_ratio_cap": 1.1},
    {"off_policy_correction.tis_ratio_type": "token"},
    {"off_policy_correction.tis_ratio_type": "sequence", "off_policy_correction.sequence_tis_ratio_clip_high": 1.2},
]
ENGINE_LOSSES: list[Settings] = [
    {"policy_loss_type": "rollout_is"},
    {"policy_loss_type": "rollout_is", "eps_clip_low": 0.4, "eps_clip_high": 1.5, "loss_reduction": "sequence_mean"},
    {"policy_loss_type": "rollout_is", "off_policy_correction.tis_ratio_type": "token"},
    {"policy_loss_type": "dppo"},
    {"policy_loss_type": "dppo", "dppo.delta_low": 0.05, "dppo.delta_high": 0.3, "loss_reduction": "prompt_mean"},
    {"policy_loss_type": "dppo", "dppo.dppo_type": "binary_kl", "dppo.delta_low": 0.1, "dppo.delta_high": 0.05},
]
"""Of the package ``skyrl`` alone."""
MASKS: list[Settings] = [
    {"off_policy_correction.sequence_mask_metric": "product"},
    {
        "off_policy_correction.sequence_mask_metric": "geometric",
        "off_policy_correction.geo_mask_low": 0.9,
        "off_policy_correction.geo_mask_high": 1.1,
        "off_policy_correction.tis_ratio_type": "token",
    },
    {
        "off_policy_correction.tis_ratio_type": "token",
        "off_policy_correction.token_mask_is_threshold_low": 0.8,
    },
    {
        "off_policy_correction.tis_ratio_type": "sequence",
        "off_policy_correction.outlier_token_is_threshold_low": 0.55,
        "off_policy_correction.outlier_token_is_threshold_high": 2.2,
    },
]


@pytest.mark.default_rows("defaults", "*clip_cov*", "*kl_cov*", "*cispo*", "*mask*", "*overlong*", "*seq_mean*")
@pytest.mark.parametrize(
    "settings",
    [*SKYRL_CASES, *(case | {"loss_reduction": "sequence_mean"} for case in (*MASKS[:2], MASKS[3]))],
    ids=name_of,
)
def test_skyrl_train(settings: Settings, translated: Translate) -> None:
    compare(translated, SKYRL, settings)


@pytest.mark.parametrize(
    "settings",
    [
        *SKYRL_CASES,
        *ENGINE_LOSSES,
        *(
            {"policy_loss_type": name, "loss_reduction": mode, "eps_clip_low": 0.1, **settings}
            for mode in ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
            for name, settings in (
                ("clip_cov", {"clip_cov.clip_ratio": 0.1, "clip_cov.clip_cov_lb": 1e-3, "clip_cov.clip_cov_ub": 0.1}),
                ("kl_cov", {"kl_cov.kl_cov_frac": 0.1, "kl_cov.ppo_kl_coef": 0.5}),
            )
        ),
        *MASKS,
        *(case | {"loss_reduction": "sequence_mean"} for case in MASKS),
    ],
    ids=name_of,
)
def test_skyrl(settings: Settings, translated: Translate) -> None:
    compare(translated, NEWER, settings)


@pytest.mark.parametrize(
    "settings",
    [{}, LOSSES[1], GRPO | {IS: "token", BOUND: 1.2}, GRPO | IN_LOSS, GRPO | BYPASS, GRPO | BYPASS | MULTIPLE],
    ids=name_of,
)
def test_a_single_update_of_a_batch(settings: Settings, translated: Translate) -> None:
    """The policy before the update is the current one, or the engine's: no pass computes it here."""
    single = {"actor.ppo_mini_batch_size": 8, "critic.ppo_mini_batch_size": 8}
    _, loaded = translate_whole(translated, command(VERL, settings | single))
    assert not loaded.plan.needs_old_log_probs
    there = replace(RESPONSES, old=RESPONSES.log_probs.detach())
    assert loaded.plan.engine_log_probs_as_old == ("algorithm.rollout_correction.bypass_mode" in settings)
    assert_equal(OurSide(loaded, there).actor_loss(), verl_actor(there, settings), RESPONSES.log_probs)


def test_the_batch_reaches_every_bound() -> None:
    """Else the comparisons above could not see a bound that is missing."""
    there = RESPONSES
    valid, log_ratio = there.mask.bool(), (there.log_probs - there.old).detach()
    advantages = (there.scores - there.scores.mean())[:, None].expand_as(log_ratio)
    for bound in (0.9, 0.8, 1.2, 1.4):
        beyond = (log_ratio.exp() > bound) if bound > 1 else (log_ratio.exp() < bound)
        assert (beyond & valid & (advantages > 0)).any() and (beyond & valid & (advantages < 0)).any()
    assert (valid & (log_ratio.exp() > 3.0) & (advantages < 0)).any()
    candidates = covariance(there, verl_advantages(there, GRPO)[0])[valid]
    assert int(((candidates > 1) & (candidates < 5)).sum()) > 3 and (candidates > 0.2).sum() > 10
    weighted = candidates / there.mask.sum()
    engine = (there.log_probs.detach() - there.rollout).exp()
    moved = there.log_probs.detach().exp() - there.rollout.exp()
    for side in (1, -1):
        assert ((advantages * side > 0) & valid & (moved * side > 0.3)).any()
        assert ((advantages * side > 0) & valid & (moved * side > 0) & (moved * side < 0.05)).any()
    assert ((engine > 2.5) & valid).any() and ((engine < 0.6) & valid).any()
    assert int(((weighted > 1e-3) & (weighted < 0.1)).sum()) > 3 and weighted.max() < 1
    mismatch = (there.old - there.rollout)[valid].exp()
    assert (mismatch > 2.0).any() and (mismatch < 0.8).any()
    smallest = (there.old - there.rollout).masked_fill(~valid, 0.0).min(-1).values.exp()
    assert (smallest < 0.55).any() and (smallest > 0.55).any()
    products = ((there.old - there.rollout) * there.mask).sum(-1).exp()
    assert (products > 2.0).any() and (products < 0.5).any() and ((products > 0.5) & (products < 2.0)).any()


ADAPTIVE: Settings = {"algorithm.adv_estimator": "rloo", "algorithm.kl_ctrl.type": "adaptive", **IN_REWARD}
ADAPTIVE |= {"algorithm.kl_ctrl.horizon": 50, "algorithm.kl_ctrl.target_kl": 0.3, "algorithm.kl_ctrl.kl_coef": 0.2}
SKYRL_ADAPTIVE: Settings = {"advantage_estimator": "rloo", **NO_KL, "use_kl_in_reward": True, "kl_loss_coef": 0.2}
SKYRL_ADAPTIVE |= {"kl_ctrl.type": "adaptive", "kl_ctrl.horizon": 50, "kl_ctrl.kl_target": 0.3}


@pytest.mark.parametrize(
    ("base", "settings"),
    [(VERL, ADAPTIVE), (SKYRL, SKYRL_ADAPTIVE | {"kl_estimator_type": "k1"})],
    ids=["verl", "skyrl"],
)
def test_an_adaptive_weight_follows_the_mean_over_responses(
    base: str, settings: Settings, translated: Translate
) -> None:
    """``masked_mean`` of each response, then their mean; the reward has the weight of before."""
    assert_follows(OurSide(compare(translated, base, settings), RESPONSES).method, 0.2, 0.3, 50)


def assert_follows(scoring: PolicyMethod, weight: float, target: float, horizon: int) -> None:
    """The weight after one batch, of k1."""
    current = float(((RESPONSES.old - RESPONSES.reference).sum(-1) / RESPONSES.mask.sum(-1)).mean())
    expected = weight * (1 + min(max(current / target - 1, -0.2), 0.2) * len(RESPONSES.scores) / horizon)
    assert scoring.state_dict()["kl"]["value"] == pytest.approx(expected, rel=1e-6)


def test_every_name_of_an_algorithm_has_a_comparison() -> None:
    """Every translated name of a vocabulary has a row above: its own, or that of another which becomes the same."""
    rows = [*ADVANTAGES, *LOSSES, *AGGREGATIONS, *IN_THE_LOSS, *CORRECTIONS, *REJECTIONS]
    vocabularies: list[tuple[list[Settings], str, dict[str, str], str]] = [
        (rows, "algorithm.adv_estimator", verl.ESTIMATORS, "gae"),
        (rows, "actor.policy_loss.loss_mode", verl.LOSSES, "vanilla"),
        (rows, "actor.kl_loss_type", verl.KL_TYPES, "low_var_kl"),
        (rows, "algorithm.kl_penalty", verl.KL_TYPES, "kl"),
        (SKYRL_CASES, "advantage_estimator", skyrl.ESTIMATORS, "grpo"),
        (SKYRL_CASES, "policy_loss_type", skyrl.LOSSES | skyrl.COVARIANCE_LOSSES, "regular"),
        (SKYRL_CASES, "policy_loss_type", skyrl.LOSSES | skyrl.SUMMED_LOSSES, "regular"),
        (ENGINE_LOSSES, "policy_loss_type", skyrl.ENGINE_LOSSES, "regular"),
        (SKYRL_CASES, "loss_reduction", skyrl.REDUCTIONS, "token_mean"),
    ]
    for cases, key, names, default in vocabularies:
        compared = {names[case.get(key, default)] for case in cases}
        assert set(names.values()) - compared == set(), key


def test_scores_of_minus_one_and_one(translated: Translate) -> None:
    """DAPO's data: -1 and 1 there, 0 and 1 here, so that half of the punishment weighs as much."""
    settings = GRPO | {"manager": "dapo", "overlong.enable": True, "overlong.len": 6, "overlong.penalty_factor": 0.5}
    text = command(VERL, settings).replace("gsm8k.parquet", "dapo-math-17k.parquet")
    translation, loaded = translate_whole(translated, text)
    assert translation.keys["overlong_penalty_factor"] == 0.25
    right_or_wrong = (RESPONSES.scores > 0.5).double()
    here, there = replace(RESPONSES, scores=right_or_wrong), replace(RESPONSES, scores=2 * right_or_wrong - 1)
    ours, theirs = OurSide(loaded, here).actor_loss(), verl_actor(there, settings)
    # The 1e-6 that is added to a spread counts twice as much in scores half as far apart.
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    gradients = [torch.autograd.grad(loss, RESPONSES.log_probs)[0] for loss in (ours, theirs)]
    assert float((gradients[0] - gradients[1]).abs().max()) < 1e-5 * float(gradients[1].abs().max())
