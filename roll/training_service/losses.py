"""Losses by the SDK's names: sums over the tokens of a datum, never means.

    ratio = exp(log_prob - sampled log_prob)

    cross_entropy         -sum(weights * log_prob)
    importance_sampling   -sum(ratio * advantage)
    ppo                   -sum(min(ratio * advantage, clip(ratio) * advantage))      Schulman et al., arXiv:1707.06347
    cispo                 -sum(clip(ratio), without gradient, * log_prob * advantage)             arXiv:2506.13585
    dro                   -sum(log_prob * advantage - beta / 2 * (log_prob - sampled log_prob)^2) arXiv:2405.19107

Clipping bounds are bounds of the ratio itself, .8 and 1.2 unless the request or the datum gives others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.training_service.wire import Datum

TARGETS = "target_tokens"
_SAMPLED, _ADVANTAGES, _WEIGHTS = "logprobs", "advantages", "weights"
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"


def loss_sum(name: str, log_probs: Tensor, inputs: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
    """The loss of one datum, whose tensors :func:`check_datum` has checked."""
    if name == "cross_entropy":
        return -(log_probs * inputs[_WEIGHTS]).sum()
    advantages, distance = inputs[_ADVANTAGES], log_probs - inputs[_SAMPLED]
    if name == "dro":
        return -(log_probs * advantages - options.get("beta", 0.05) / 2 * distance.square()).sum()
    ratio = distance.exp()
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    low = inputs.get(_LOW, torch.full_like(ratio, options.get(_LOW, 0.8)))
    high = inputs.get(_HIGH, torch.full_like(ratio, options.get(_HIGH, 1.2)))
    clipped = torch.minimum(torch.maximum(ratio, low), high)
    if name == "ppo":
        return -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return -(clipped.detach() * log_probs * advantages).sum()  # cispo


@dataclass(frozen=True)
class Loss:
    """The tensors that each datum must or may have, and the options of a loss."""

    needs: tuple[str, ...] = (TARGETS, _SAMPLED, _ADVANTAGES)
    takes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


LOSSES = {
    "cross_entropy": Loss((TARGETS, _WEIGHTS)),
    "importance_sampling": Loss(),
    "ppo": Loss(takes=(_LOW, _HIGH), options=(_LOW, _HIGH)),
    "cispo": Loss(takes=(_LOW, _HIGH), options=(_LOW, _HIGH)),
    "dro": Loss(options=("beta",)),
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


MAX_TARGETS = 1024
"""Targets of a position: the columns of all data of a micro-batch are as many as those of the widest."""


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
