"""verl's distillation has the loss and the gradient of its formula, in every form that is translated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.algorithms.distillation import divergence
from roll.config.loader import LoadedConfig
from roll.methods.distill import TEACHER
from roll.methods.opd import TEACHER_WEIGHTS, TaughtPolicyLoss, clamped_kl
from roll.methods.opd_keys import coefficients, opd_divergence
from roll.strategies.base import Output
from tests.translation.conftest import Translate
from tests.translation.source_formulas import Responses, verl_distilled, verl_topk
from tests.translation.test_algorithms import (
    GRPO,
    LONGEST,
    RESPONSES,
    VERL,
    OurSide,
    Settings,
    assert_equal,
    command,
    name_of,
    translate_whole,
)
from tests.translation.test_translation import refusal

ENABLED: Settings = GRPO | {"distillation.enabled": True, "distillation.teacher_model.model_path": "t"}
SINGLE: Settings = {"actor.ppo_mini_batch_size": 8}
ON_POLICY = replace(RESPONSES, old=RESPONSES.log_probs.detach())
WORDS = 9


def of_loss(**settings: Any) -> Settings:
    return {f"distillation.distillation_loss.{name}": value for name, value in settings.items()}


ALONE, AS_ADVANTAGE = of_loss(use_task_rewards=False), of_loss(use_policy_gradient=True)
TOPK = of_loss(loss_mode="forward_kl_topk", topk=4)


class Taught(OurSide):
    """With the column of a teacher that is an advantage."""

    def _add_columns(self) -> None:
        super()._add_columns()
        if self.config.opd_form == "advantage" and self.config.teacher:
            tensors = self.batch.batch
            of_teacher = self.spread(self._responses.reference)
            (weight,) = coefficients(self.config).values()
            tensors["teacher_kl"] = weight * clamped_kl(tensors["old_log_probs"], of_teacher, self.config) * self.mask
            self.method.credit(self.batch)


def loaded_of(translated: Translate, settings: Settings) -> LoadedConfig[Any]:
    return translate_whole(translated, command(VERL, ENABLED | settings))[1]


@pytest.mark.parametrize(
    "settings",
    [
        of_loss(),
        of_loss(loss_mode="mse", distillation_loss_coef=0.3),
        of_loss(loss_mode="abs") | {"actor.loss_agg_mode": "seq-mean-token-mean", "actor.entropy_coeff": 0.01},
        of_loss(loss_max_clamp=0.05) | {"actor.policy_loss.loss_mode": "gspo"},
        ALONE,
        ALONE | of_loss(loss_mode="k2", distillation_loss_coef=0.3) | {"actor.use_kl_loss": True},
        ALONE | {"actor.entropy_coeff": 0.1, "actor.policy_loss.loss_mode": "gspo"},
    ],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_an_estimate_in_the_loss(settings: Settings, translated: Translate) -> None:
    """The teacher is the reference of a KL loss; any number of updates of a batch."""
    loaded = loaded_of(translated, settings)
    assert loaded.config.reference.model_args.model_name_or_path == "t" and not loaded.config.teacher
    assert_equal(
        Taught(loaded, RESPONSES).actor_loss(), verl_distilled(RESPONSES, settings | GRPO), RESPONSES.log_probs
    )


@pytest.mark.parametrize(
    "settings",
    [
        AS_ADVANTAGE | of_loss(loss_mode="k1"),
        AS_ADVANTAGE | of_loss(loss_mode="k1", distillation_loss_coef=0.3, loss_max_clamp=0.2),
        AS_ADVANTAGE | of_loss(loss_mode="k3") | {"actor.use_kl_loss": True, "actor.entropy_coeff": 0.01},
        AS_ADVANTAGE | of_loss(loss_mode="kl") | {"algorithm.adv_estimator": "rloo"},
        AS_ADVANTAGE | of_loss(loss_mode="k1", clip_ratio_low=0.1) | ALONE,
        AS_ADVANTAGE | of_loss(loss_mode="k2", loss_max_clamp=0.1) | ALONE | {"actor.loss_agg_mode": "token-sum"},
        AS_ADVANTAGE | of_loss(loss_mode="abs") | ALONE | {"actor.policy_loss.loss_mode": "cispo"},
    ],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_an_estimate_as_an_advantage(settings: Settings, translated: Translate) -> None:
    """From the policy before the update, which is the current one."""
    loaded, formula = loaded_of(translated, settings | SINGLE), GRPO | settings
    assert loaded.plan.needs_old_log_probs
    assert_equal(Taught(loaded, ON_POLICY).actor_loss(), verl_distilled(ON_POLICY, formula), RESPONSES.log_probs)


def topk_loss(loaded: LoadedConfig[Any], logits: Tensor, teacher: Tensor, responses: Responses) -> Tensor:
    """As a head gives it: the teacher's tokens and the rest, (tokens, count + 1), of the tokens of the mask."""
    options, there = opd_divergence(loaded.config), responses.mask.bool()
    ids = teacher.topk(options.logits_topk).indices

    def buckets(log_probs: Tensor) -> Tensor:
        listed = log_probs.gather(-1, ids)
        rest = torch.log1p(-listed.exp().sum(-1, keepdim=True))
        return torch.cat([listed, rest], -1)[there]

    values = divergence(buckets(logits.log_softmax(-1)), buckets(teacher), has_tail=True, options=options)
    column = torch.zeros(there.shape, dtype=values.dtype).masked_scatter(there, values)
    ours = Taught(loaded, responses)
    (weight,) = coefficients(loaded.config).values()
    tensors = ours.batch.batch
    loss = replace(ours.method.losses(loaded.plan, 1.0)["actor_train"], names=())
    assert isinstance(loss, TaughtPolicyLoss)
    tensors[TEACHER_WEIGHTS] = torch.full((len(ours.batch),), weight)
    outputs = {
        Output.LOG_PROBS: ours.spread(responses.log_probs),
        Output.ENTROPY: ours.spread(responses.entropy),
        f"{TEACHER}/divergence": ours.spread(column),
    }
    return ours.value(loss, outputs)


@pytest.mark.parametrize(
    "settings",
    [
        TOPK,
        TOPK | ALONE,
        TOPK | ALONE | of_loss(log_prob_min_clamp=-2.0, loss_max_clamp=0.4) | {"actor.policy_loss.loss_mode": "gspo"},
        TOPK | of_loss(log_prob_min_clamp=-2.0, distillation_loss_coef=0.3) | {"actor.entropy_coeff": 0.01},
    ],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_top_k_without_the_rest(settings: Settings, translated: Translate) -> None:
    generator = torch.Generator().manual_seed(11)
    shape = len(RESPONSES.mask), LONGEST, WORDS
    teacher, noise = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    logits = 2 * teacher + noise
    logits.requires_grad_()
    teacher = (2 * teacher).log_softmax(-1)
    floor = settings.get("distillation.distillation_loss.log_prob_min_clamp")
    each = verl_topk(logits.log_softmax(-1), teacher, 4, floor)
    assert (each == 0).any() and (floor is None or (logits.log_softmax(-1) < floor).any())
    loaded = loaded_of(translated, settings)
    theirs = verl_distilled(RESPONSES, settings | GRPO, each)
    ours = topk_loss(loaded, logits, teacher, RESPONSES)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    with_rewards = settings.get("distillation.distillation_loss.use_task_rewards", True)
    leaves = [logits, *([RESPONSES.log_probs] if with_rewards else [])]
    for own, formula in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        assert float((own - formula).abs().max()) <= 1e-6 * float(formula.abs().max())


def test_the_teacher_has_its_model_and_its_devices(translated: Translate) -> None:
    pool = {"distillation.n_gpus_per_node": 4, "distillation.nnodes": 2}
    for settings, section in ((of_loss(), "reference"), (TOPK, "teacher")):
        keys = translated(command(VERL, ENABLED | settings | pool)).keys
        assert keys[f"{section}.device_mapping"] == "list(range(1,9))"
        assert keys[f"{section}.model_args.model_name_or_path"] == "t"
        assert translated(command(VERL, ENABLED | settings)).keys[f"{section}.device_mapping"] == "list(range(0,1))"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (of_loss(loss_mode="k1"), "is refused by verl too"),
        (AS_ADVANTAGE, "must be data.train_batch_size, 8, with distillation as an advantage"),
        (AS_ADVANTAGE | SINGLE | {"actor.ppo_epochs": 2}, "must be 1 with distillation as an advantage"),
        (AS_ADVANTAGE | SINGLE | {"actor.policy_loss.loss_mode": "cispo"}, "here both advantages go into one loss"),
        (AS_ADVANTAGE | SINGLE | {"algorithm.adv_estimator": "reinforce_plus_plus"}, "whitens its advantages there"),
        (AS_ADVANTAGE | TOPK, "a divergence of top-k tokens has no equal"),
        (of_loss() | {"actor.use_kl_loss": True}, "has a reference of its own"),
        (TOPK | {"actor.policy_loss.loss_mode": "gspo"}, "takes the mean over responses, distillation that"),
        (of_loss(loss_mode="abs", loss_max_clamp=1.0), "here a KL loss is bounded with k3 only"),
        (of_loss() | {"actor_rollout_ref.rollout.temperature": 0.7}, "must be 1 with distillation"),
        (of_loss(loss_mode="jsd"), "has no translation; known"),
        ({"distillation.teacher_models.code.model_path": "u"}, "several teachers have no translation"),
        ({"distillation.teacher_model.weight": 1}, "is no key of a teacher"),
        ({"distillation.teacher_model.model_path": None}, "is needed with distillation"),
    ],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_what_cannot_be_kept_is_refused(settings: Settings, message: str, translated: Translate) -> None:
    assert message in refusal(translated, command(VERL, ENABLED | settings))


def test_without_distillation_its_keys_are_left_out(translated: Translate) -> None:
    off = {"distillation.enabled": False, "distillation.teacher_model.model_path": "t"}
    translation = translated(command(VERL, GRPO | off | of_loss(topk=8)))
    assert translation.keys == translated(command(VERL, GRPO)).keys
    assert sum("nothing in this run uses it" in note.text for note in translation.notes) == 2
