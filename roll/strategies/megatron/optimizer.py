"""AdamW under Megatron, plain or distributed over data-parallel ranks, and its states by parameter.

With the distributed optimizer a rank holds float32 weights and moments of an interval of each parameter (ZeRO stage 1);
with parameters of 16 bits there are float32 master weights as well.  :class:`MasterStates` hides both: what it hands
out and takes is always a parameter's whole float32 tensor on this tensor- and pipeline-parallel rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, nn

from roll.config.roles import TrainingArguments
from roll.strategies.megatron.cpu_compat import construction

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(
    chunks: list[nn.Module], args: TrainingArguments, dtype: torch.dtype, distributed: bool
) -> MegatronOptimizer:
    """Collective. AdamW (Loshchilov & Hutter, 2019) over the trainable parameters; vectors never decay.

    Raises:
        ValueError: nothing is trainable.
    """
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    trainable = torch.tensor(sum(parameter.requires_grad for parameter in parameters), device=parameters[0].device)
    dist.all_reduce(trainable)  # a stage of its own may well be frozen as a whole
    if not int(trainable):
        raise ValueError("model_args.freeze_module_prefix: every parameter of the model is frozen; freeze fewer")
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_epsilon,
        clip_grad=0.0,  # done by the strategy, which must see the norm first
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        # The strategy scales the loss and divides gradients by it, as under every other backend.
        loss_scale=1.0 if dtype is torch.float16 else None,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    with construction():
        chain = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    (optimizer,) = chain.chained_optimizers
    for group in optimizer.optimizer.param_groups:
        group["weight_decay"] = args.weight_decay * group["wd_mult"]
    return optimizer


class MasterStates:
    """Float32 weights and moments by parameter."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._optimizer = optimizer
        self._adam: torch.optim.Optimizer = optimizer.optimizer
        self._group = parallel_state.get_data_parallel_group(with_context_parallel=True)

    @property
    def step(self) -> int:
        """Updates made so far; 0 before the first."""
        steps = [float(state["step"]) for state in self._adam.state.values() if "step" in state]
        return int(max(steps, default=0.0))

    def get(self, parameter: nn.Parameter, key: str) -> Tensor:
        """Collective over data-parallel ranks. ``key``: ``weight`` or one of :data:`MOMENTS`; float32, whole."""
        whole = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        held = self._held(parameter)
        if held is not None:
            main, interval = held
            part = main if key == "weight" else self._adam.state.get(main, {}).get(key)
            if part is not None:
                whole.view(-1)[interval] = part.detach().flatten()
        if isinstance(self._optimizer, DistributedOptimizer):
            # Intervals of the ranks do not overlap: their sum is exact.
            dist.all_reduce(whole, group=self._group)
        return whole

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, weight: Tensor) -> None:
        """Give the parameter, and its float32 master where there is one, the values of ``weight`` (float32, whole)."""
        parameter.copy_(weight)
        held = self._held(parameter)
        if held is not None:
            main, interval = held
            main.copy_(weight.flatten()[interval].view_as(main))

    @torch.no_grad()
    def set_moments(self, parameter: nn.Parameter, moments: dict[str, Tensor], step: int) -> None:
        """Give AdamW its moments (float32, whole) and the number of updates that they are the result of."""
        held = self._held(parameter)
        if held is None:
            return
        main, interval = held
        state: dict[str, Any] = self._adam.state[main]
        state["step"] = torch.tensor(float(step))
        for key, value in moments.items():
            state[key] = value.flatten()[interval].view_as(main).to(main.device, copy=True)

    def tensors(self) -> list[Tensor]:
        """Master weights that are not the model's own parameters, and moments."""
        groups = self._adam.param_groups
        masters = [main for group in groups for main in group["params"] if main.dtype is torch.float32]
        moments = [value for state in self._adam.state.values() for key, value in state.items() if key in MOMENTS]
        return masters + moments

    def _held(self, parameter: nn.Parameter) -> tuple[Tensor, slice] | None:
        """The float32 tensor that the optimizer updates, and its interval in the flattened parameter."""
        if not parameter.requires_grad:
            return None
        if isinstance(self._optimizer, DistributedOptimizer):
            place = self._optimizer.model_param_group_index_map.get(parameter)
            if place is None:
                return None
            group, order = place
            interval = self._optimizer._get_model_param_range_map(parameter)["param"]
            return self._adam.param_groups[group]["params"][order], slice(interval.start, interval.end)
        return getattr(parameter, "main_param", parameter), slice(0, parameter.numel())
