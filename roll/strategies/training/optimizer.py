"""Learning-rate schedules, dynamic loss scaling, parameter groups, and clipping by the global gradient norm.

Schedules have Hugging Face's names: pure functions of the step, with nothing to save.  After the warm-up they equal
those of ``transformers.get_scheduler``.  The warm-up is ``(step + 1) / warmup_steps``: no optimizer step is wasted on a
learning rate of 0.

The norm and the clipping work on local shards: one collective, no DTensor dispatch per parameter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce
from torch.distributed.tensor import DTensor

from roll.config.roles import TrainingArguments
from roll.protocol.metrics import Mean, Metrics, Sum

logger = logging.getLogger(__name__)

INVERSE_SQRT_TIMESCALE = 10_000
"""Steps of ``inverse_sqrt`` without a warm-up."""
POLYNOMIAL_LR_END = 1e-7


class LearningRateSchedule:
    """A linear warm-up to ``learning_rate`` over ``warmup_steps`` steps, or ``warmup_ratio`` of ``total_steps``, then
    the decay of ``lr_scheduler_type`` down to ``min_lr_ratio`` of it at ``total_steps``, and that from there on."""

    def __init__(self, args: TrainingArguments, total_steps: int) -> None:
        self.kind, self.peak, self.min_ratio = args.lr_scheduler_type, args.learning_rate, args.min_lr_ratio
        # Rounded up as transformers.TrainingArguments.get_warmup_steps does.
        self.warmup_steps = args.warmup_steps or math.ceil(args.warmup_ratio * total_steps)
        self.total_steps, self.options = total_steps, args.lr_scheduler_kwargs

    def __call__(self, step: int) -> float:
        """The learning rate of optimizer step ``step``, counted from 0. The first step's is never 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        step -= self.warmup_steps
        options, low = self.options, self.min_ratio
        progress = min(1.0, step / max(1, self.total_steps - self.warmup_steps))
        match self.kind:
            case "constant" | "constant_with_warmup":
                return self.peak
            case "inverse_sqrt":
                timescale = float(options.get("timescale") or self.warmup_steps or INVERSE_SQRT_TIMESCALE)
                return self.peak * max(low, math.sqrt(timescale / (step + timescale)))
            case "linear":
                shape = 1.0 - progress
            case "cosine" | "cosine_with_min_lr":
                low, waves = self._minimum(), float(options.get("num_cycles", 0.5))
                shape = 0.5 * (1.0 + math.cos(math.pi * 2.0 * waves * progress))
            case "cosine_with_restarts":
                cycles = float(options.get("num_cycles", 1))
                shape = 0.5 * (1.0 + math.cos(math.pi * (cycles * progress % 1.0))) if progress < 1.0 else 0.0
            case "polynomial":
                end = float(options.get("lr_end", low * self.peak or POLYNOMIAL_LR_END))
                low = end / self.peak if self.peak else 0.0
                shape = (1.0 - progress) ** float(options.get("power", 1.0))
            case _:
                # warmup_stable_decay: the last `num_decay_steps`, by default a tenth of all, fall to the minimum.
                decay_steps = int(options.get("num_decay_steps", max(1, self.total_steps // 10)))
                stable = options.get("num_stable_steps", self.total_steps - self.warmup_steps - decay_steps)
                progress = min(1.0, max(0.0, (step - int(stable)) / max(1, decay_steps)))
                low, waves = self._minimum(), float(options.get("num_cycles", 0.5))
                shape = {
                    "linear": 1.0 - progress,
                    "cosine": 0.5 * (1.0 + math.cos(math.pi * 2.0 * waves * progress)) if progress < 1.0 else 0.0,
                    "1-sqrt": 1.0 - math.sqrt(progress),
                }[options.get("decay_type", "cosine")]
        return self.peak * (low + (1.0 - low) * shape)

    def _minimum(self) -> float:
        if "min_lr" in self.options:
            return float(self.options["min_lr"]) / self.peak if self.peak else 0.0
        return float(self.options.get("min_lr_rate", self.options.get("min_lr_ratio", self.min_ratio)))


INITIAL_SCALE = 2.0**16
"""This and the growth interval of 2000 are the defaults of ``torch.amp.GradScaler``."""


@dataclass
class DynamicLossScale:
    """The largest power of two by which a loss can be multiplied without its gradients leaving fp16's range.

    Gradients below 6e-8 are 0 in fp16.  So the loss is multiplied by ``value``, and the gradients divided by it in
    float32.  A gradient that is not finite halves the scale and its update is left out; ``growth_interval`` good
    updates in a row double it (Micikevicius et al., 2018, Mixed Precision Training, arXiv:1710.03740, section 3.2).

    Every rank sees the same gradient norm, so all keep the same scale without communication.
    """

    value: float = INITIAL_SCALE
    growth_interval: int = 2000
    good_updates: int = 0

    def adapt(self, finite: bool) -> None:
        """After an update: ``finite`` if it was made."""
        if not finite:
            # A scale below 1 would not help: the loss itself overflows.
            self.value, self.good_updates = max(1.0, self.value / 2), 0
            return
        self.good_updates += 1
        if self.good_updates == self.growth_interval:
            self.value, self.good_updates = self.value * 2, 0


def decay_groups(
    model: torch.nn.Module, weight_decay: float, num_dims: Callable[[torch.Tensor], int] = torch.Tensor.dim
) -> list[dict[str, Any]]:
    """The trainable parameters as optimizer groups: matrices decay; biases and vectors (norm weights) never do, nor do
    those of experts, which a layer holds stacked: (E, out) for a bias next to (E, in, out). ``num_dims``: the number of
    dimensions of a whole parameter, of which the model may hold a flat part. Raises ValueError: nothing is trainable.
    """
    matrices: list[torch.Tensor] = []
    vectors: list[torch.Tensor] = []
    seen: set[torch.Tensor] = set()
    for module in model.modules():
        # A tied parameter belongs to several modules, and twice in an optimizer it would be stepped twice.
        own = {name: one for name, one in module.named_parameters(recurse=False) if one not in seen}
        seen.update(own.values())
        is_stack = any(num_dims(parameter) >= 3 for parameter in own.values())
        for name, parameter in own.items():
            is_vector = name.endswith("bias") or num_dims(parameter) < 2 + is_stack
            if parameter.requires_grad:
                (vectors if is_vector else matrices).append(parameter)
    if not matrices and not vectors:
        raise ValueError("model_args.freeze_module_prefix: every parameter of the model is frozen; freeze fewer")
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The moments and step counts that the optimizer holds."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (the same memory)."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def global_norm(gradients: list[Tensor], shard_group: ProcessGroup | None, device: torch.device) -> Tensor:
    """float32 scalar: the 2-norm of the whole gradient, of which ``gradients`` are this rank's shards, perhaps in host
    memory; the collective over ``shard_group``, which holds the others, runs on ``device``."""
    if gradients:
        norms = torch._foreach_norm(gradients)
        # float32 before squaring: an fp16 norm of 256 squared is already infinite.
        squared = torch.stack([norm.float() for norm in norms]).square().sum().to(device)
    else:  # a rank may hold no element of anything trained, and still takes part in the collective
        squared = torch.zeros((), device=device)
    if shard_group is not None:
        all_reduce(squared, group=shard_group)
    return squared.sqrt()


def clip_(gradients: list[Tensor], scale: float, norm: float, max_norm: float | None) -> None:
    """Divide the gradients by ``scale``, after which their global norm is ``norm``, and bring that to at most
    ``max_norm``, with the epsilon of ``torch.nn.utils.clip_grad_norm_``; in place."""
    factor = (max_norm / (norm + 1e-6) if max_norm is not None and norm > max_norm else 1.0) / scale
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)


class TrainingProgress:
    """Optimizer steps of a run: their number, the learning rate of each and, in fp16, the loss scale."""

    def __init__(self, args: TrainingArguments, num_training_steps: int, compute_dtype: torch.dtype) -> None:
        self.schedule = LearningRateSchedule(args, num_training_steps)
        self.loss_scale = DynamicLossScale() if compute_dtype is torch.float16 else None
        self.step = 0

    @property
    def learning_rate(self) -> float:
        return self.schedule(self.step)

    @property
    def scale(self) -> float:
        """Factor of the loss, and so of the gradients; 1 except in fp16."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def finish_step(self, norm: float, dp_size: int) -> Metrics:
        """Count a step whose unscaled gradient had this norm. If it was not finite the update was skipped: the schedule
        advances, the weights are unchanged."""
        metrics: Metrics = {"grad_norm": Mean(norm), "lr": Mean(self.learning_rate)}
        finite = math.isfinite(norm)
        if not finite:
            logger.warning("optimizer step %d: gradient norm is %s; the update is skipped", self.step, norm)
            metrics["skipped_updates"] = Sum(1.0 / dp_size)  # summed over replicas, which all report it
        if self.loss_scale is not None:
            metrics["loss_scale"] = Mean(self.loss_scale.value)
            self.loss_scale.adapt(finite)
        self.step += 1
        return metrics

    def state(self) -> dict[str, Any]:
        """JSON values."""
        found: dict[str, Any] = {"step": self.step}
        if (scale := self.loss_scale) is not None:
            found["loss_scale"] = {"value": scale.value, "good_updates": scale.good_updates}
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self.step = int(state["step"])
        if self.loss_scale is not None and "loss_scale" in state:
            held = state["loss_scale"]
            self.loss_scale.value, self.loss_scale.good_updates = float(held["value"]), int(held["good_updates"])
