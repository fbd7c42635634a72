"""Losses by the SDK's names: those of :mod:`roll.algorithms.policy_losses`, summed over tokens and never averaged.

    cross_entropy         vanilla, with the weights as advantages
    importance_sampling   ppo without clipping
    ppo, cispo            themselves
    dro                   kimi15: dro of the package has the square of a whole response

Every token is a row of its own, since the SDK's losses know tokens only. Clipping bounds are bounds of the ratio
itself, .8 and 1.2 unless the request or the datum gives others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from roll.algorithms import policy_losses
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.policy_losses import LossInputs, PolicyLossFunction
from roll.config.choices import CispoOptions, Kimi15Options, NoOptions, PpoOptions
from roll.training_service.wire import Datum

TARGETS = "target_tokens"
_SAMPLED, _ADVANTAGES, _WEIGHTS = "logprobs", "advantages", "weights"
_LOW, _HIGH, _BETA = "clip_low_threshold", "clip_high_threshold", "beta"
_SAMPLES = (TARGETS, _SAMPLED, _ADVANTAGES)
_CLIPPED = (_SAMPLES, (_LOW, _HIGH), (_LOW, _HIGH))
_DEFAULTS = {_LOW: 0.8, _HIGH: 1.2, _BETA: 0.05}


@dataclass(frozen=True)
class Loss:
    """A policy loss, its options, and what the SDK gives it."""

    function: PolicyLossFunction
    settings: Callable[..., Any]  # from the values of `options`, (N, 1) each, to the options of `function`
    needs: tuple[str, ...] = _SAMPLES  # tensors that each datum must have
    takes: tuple[str, ...] = ()  # tensors that a datum may have, in place of the options of these names
    options: tuple[str, ...] = ()

    def sum(self, log_probs: Sequence[Tensor], data: Sequence[Datum], options: Mapping[str, float]) -> Tensor:
        """The loss of data that :func:`check_datum` has checked, from the log-probs of their targets."""
        own = torch.cat([one.flatten() for one in log_probs])[:, None]

        def column(key: str) -> Tensor:
            default = options.get(key, _DEFAULTS.get(key, 0.0))
            parts = [
                datum.inputs[key].flatten() if key in datum.inputs else torch.full((one.numel(),), default)
                for datum, one in zip(data, log_probs, strict=True)
            ]
            return torch.cat(parts)[:, None].to(own.device)

        inputs = LossInputs(
            log_probs=own,
            advantages=column(_ADVANTAGES if _ADVANTAGES in self.needs else _WEIGHTS),
            mask=torch.ones_like(own, dtype=torch.bool),
            old_log_probs=column(_SAMPLED) if _SAMPLED in self.needs else None,
        )
        return self.function(inputs, self.settings(*map(column, self.options)), MetricBuilder()).sum()


LOSSES = {
    "cross_entropy": Loss(policy_losses.vanilla, NoOptions, (TARGETS, _WEIGHTS)),
    "importance_sampling": Loss(policy_losses.ppo, lambda: PpoOptions(clip=inf)),
    "ppo": Loss(policy_losses.ppo, lambda low, high: PpoOptions(clip_low=1 - low, clip_high=high - 1), *_CLIPPED),
    "cispo": Loss(
        policy_losses.cispo, lambda low, high: CispoOptions(epsilon_low=1 - low, epsilon_high=high - 1), *_CLIPPED
    ),
    "dro": Loss(policy_losses.kimi15, lambda beta: Kimi15Options(tau=beta), options=(_BETA,)),
}
_REFUSED = {
    "gspo": "its clipping bounds and its scale are not published",
    "stable_reinforce": "its definition is not published",
    "custom": "forward_backward_custom computes such a loss in the client, by two passes",
}


def loss_of(name: str, options: Mapping[str, float | str]) -> Loss:
    """The loss of a name; ``ValueError`` for one, or an option, that is not served."""
    if name not in LOSSES:
        why = f" ({_REFUSED[name]})" if name in _REFUSED else ""
        raise ValueError(f"loss_fn: {name!r} is not served{why}; {', '.join(LOSSES)} are")
    loss = LOSSES[name]
    for key, value in options.items():
        if key not in loss.options:
            known = f"its options are {', '.join(loss.options)}" if loss.options else "it has no options"
            raise ValueError(f"loss_fn_config.{key}: {name} does not have it; {known}")
        if not isinstance(value, int | float):
            raise ValueError(f"loss_fn_config.{key}: {value!r} must be a number")
    return loss


MAX_TARGETS = 1024  # targets of a position: the columns of all data of a micro-batch are as many as those of the widest


def check_datum(loss: Loss, name: str, datum: Datum, where: str, vocabulary: int, longest: int) -> None:
    """Raise ``ValueError`` for tensors that are missing, unknown, or of another shape or type, and for tokens that the
    model does not have."""
    length = len(datum.tokens)
    if not 1 <= length <= longest:
        raise ValueError(f"{where}.model_input: {length} tokens; the model takes 1 to {longest}")
    for key in loss.needs:
        if key not in datum.inputs:
            raise ValueError(f"{where}.loss_fn_inputs: {name} needs {key}")
    targets = datum.inputs[TARGETS]
    shape = targets.shape
    if targets.ndim not in (1, 2) or shape[0] != length or (targets.ndim == 2 and name != "cross_entropy"):
        kinds = f"({length},)" + (f" or ({length}, K)" if name == "cross_entropy" else "")
        raise ValueError(f"{where}.{TARGETS}: the shape is {tuple(shape)}, must be {kinds}")
    if targets.ndim == 2 and not 1 <= shape[1] <= MAX_TARGETS:
        raise ValueError(f"{where}.{TARGETS}: {shape[1]} targets a position must be in [1, {MAX_TARGETS}]")
    for key, tensor in datum.inputs.items():
        if key not in (*loss.needs, *loss.takes):
            known = ", ".join((*loss.needs, *loss.takes))
            raise ValueError(f"{where}.loss_fn_inputs: {name} has no use for {key}; it takes {known}")
        if tensor.shape != shape:
            raise ValueError(f"{where}.{key}: the shape is {tuple(tensor.shape)}, that of {TARGETS} {tuple(shape)}")
        if tensor.is_floating_point() == (key == TARGETS):
            raise ValueError(f"{where}.{key}: must be {'int64' if key == TARGETS else 'float32'}")
    for key, tokens in (("model_input", datum.tokens), (TARGETS, targets)):
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise ValueError(f"{where}.{key}: token ids must be in [0, {vocabulary})")
