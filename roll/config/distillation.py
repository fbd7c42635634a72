"""Keys of the distillation losses: which divergence, between which distributions, over how much of the vocabulary.

Shared by offline distillation (``pipeline: distill``) and the forms of on-policy distillation that differentiate a
divergence (``opd_form: topk`` and ``full_vocabulary``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from roll.config.reading.fields import setting

KDObjective = Literal[
    "forward_kl",
    "reverse_kl",
    "adaptive_kl",
    "skewed_forward_kl",
    "skewed_reverse_kl",
    "js_divergence",
    "total_variation",
]

KD_OBJECTIVES: tuple[str, ...] = get_args(KDObjective)


@dataclass(frozen=True, kw_only=True)
class DivergenceConfig:
    """Options of a divergence between a teacher p and a student q."""

    kd_objective: KDObjective = "forward_kl"
    """Divergence: ``forward_kl`` KL(p||q), ``reverse_kl`` KL(q||p), ``adaptive_kl``, ``skewed_forward_kl``,
    ``skewed_reverse_kl``, ``js_divergence`` (generalised by ``js_beta``) or ``total_variation``."""
    logits_topk: int = setting(64, ge=0)
    """Tokens of the teacher's distribution that are compared, the most probable ones; 0: the whole vocabulary."""
    topk_tail: Literal["bucket", "renormalised"] = "bucket"
    """The rest of the vocabulary: ``bucket`` compares its mass as one further token; ``renormalised`` ignores it on
    both sides, as ROLL does, and so leaves the student's mass on the compared tokens unconstrained."""
    kd_temperature: float = setting(1.0, gt=0)
    """Divides the logits of both sides before they are compared."""
    teacher_temperature: float = setting(1.0, gt=0)
    """Divides the teacher's logits once more."""
    kd_temperature_squared: bool = True
    """Multiply the divergence by the square of ``kd_temperature``, so that its gradient keeps its size (Hinton et al.);
    false: as in ROLL."""
    adaptive_kl_alpha: float = setting(0.5, ge=0, le=1, read_if={"kd_objective": ("adaptive_kl",)})
    """``adaptive_kl``: the least probable tokens with this much of the teacher's mass are the tail."""
    skew_lambda: float = setting(0.1, ge=0, le=1, read_if={"kd_objective": ("skewed_forward_kl", "skewed_reverse_kl")})
    """Skewed divergences: weight of the first distribution in the mixture that it is compared with."""
    js_beta: float = setting(0.5, gt=0, lt=1, read_if={"kd_objective": ("js_divergence",)})
    """``js_divergence``: weight of the teacher in the mixture (GKD's beta). For b near 0 it is b times the forward KL,
    near 1 it is 1 - b times the reverse KL."""


OPD_FORMS = ("advantage", "topk", "full_vocabulary")


def parse_opd_form(value: Any) -> Any:
    """One of :data:`OPD_FORMS`; sampled estimators as losses are refused with the reason."""
    name = str(value)
    if name.removesuffix("_loss") in ("k1", "kl", "k3", "low_var_kl"):
        expected = "zero" if "3" not in name and "low" not in name else "that of the forward KL, not of the reverse"
        raise ValueError(
            f"must be one of {', '.join(OPD_FORMS)}: {name} differentiated on samples of the student has "
            f"the expected gradient {expected}; as an advantage, without gradient, k1 gives the reverse KL's"
        )
    if name not in OPD_FORMS:
        raise ValueError(f"must be one of {', '.join(OPD_FORMS)}")
    return name
