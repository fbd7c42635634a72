"""Muon for the matrices of hidden layers, AdamW for everything else, on shards.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/; Liu et al., 2025, arXiv:2502.16982) makes the
averaged gradient of a matrix nearly orthogonal, which takes the whole matrix.  Momentum, weight decay and the update
are computed on each rank's shard; the whole matrix is gathered in bfloat16, the type in which PyTorch's Newton-Schulz
iteration computes anyway, one parameter at a time, and every rank takes its shard of the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll.checkpoint.tensors import MUON_MOMENTS
from roll.config.roles import TrainingArguments
from roll.models.experts import EXPERTS, SparseLayer
from roll.strategies.training.gather import Pieces
from roll.strategies.training.optimizer import adamw, local_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCALINGS = {"match_adamw_rms": "match_rms_adamw", "original": "original"}
"""PyTorch's names of ``optimizer.scaling``."""
NS_STEPS = 5
"""Newton-Schulz iterations: those that the coefficients of Muon's authors are made for, also PyTorch's default."""
(MOMENTUM,) = MUON_MOMENTS
DECAY = 0.95
"""Of the averaged gradient, as in Muon's own implementation."""


def hidden_matrices(
    language_model: PreTrainedModel, sparse_layers: Iterable[SparseLayer], num_dims: Callable[[Tensor], int]
) -> set[Tensor]:
    """The parameters that Muon updates: matrices of the model's body without embeddings, convolutions and heads, and
    stacks (E, A, B) of experts' matrices; of adapters A and B, except those on fused experts, which are neither."""
    found, others = set[Tensor](), set[Tensor]()
    experts = [getattr(layer.block, EXPERTS) for layer in sparse_layers if layer.is_fused]
    stacked = {parameter for module in experts for parameter in module.parameters()}
    embeddings = language_model.get_input_embeddings()
    for module in language_model.base_model.modules():
        if module is embeddings or isinstance(module, nn.Embedding | nn.modules.conv._ConvNd):
            others.update(module.parameters())
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if not name.endswith("bias") and num_dims(parameter) == (3 if parameter in stacked else 2):
                found.add(parameter)
    head = language_model.get_output_embeddings()
    return found - others - set(() if head is None else head.parameters())


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon on ``matrices``, AdamW on the other parameters of ``groups``; the states of both by parameter.

    A parameter without a gradient counts as one with a gradient of zeros: under FSDP1 a rank that holds no element of a
    parameter has none, and still takes part in gathering it.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        matrices: set[Tensor],
        args: TrainingArguments,
        sharded: Callable[[Tensor], tuple[Tensor, Pieces] | None],
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        """``groups`` have their weight decay; ``sharded`` gives the pieces of a parameter over ``group`` (None: every
        rank has all of it); on ``device`` matrices are gathered and made orthogonal (shards may be in host memory)."""
        split = [
            {**one, "params": [p for p in one["params"] if (p in matrices) == is_matrix], "is_muon": is_matrix}
            for one in groups
            for is_matrix in (True, False)
        ]
        split = [one for one in split if one["params"]]
        super().__init__(split, {"lr": args.learning_rate})
        self._options, self._group, self._device = args.optimizer, group, device
        self._pieces: dict[Tensor, Pieces] = {}
        for parameter in matrices:
            if (shard := sharded(parameter)) is not None:
                self._pieces[parameter] = shard[1]
        self._adamw = None
        if others := [one for one in self.param_groups if not one["is_muon"]]:
            self._adamw = adamw(others, args)
            # One set of groups and states: learning rates and moments are set and read through this object.
            self._adamw.state = self.state
            self.param_groups = [one for one in self.param_groups if one["is_muon"]] + self._adamw.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Collective over the ranks that hold shards."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"] if group["is_muon"] else ():
                self._step_matrix(parameter, group["lr"], group["weight_decay"])
        if self._adamw is not None:
            self._adamw.step()

    def _step_matrix(self, parameter: Tensor, learning_rate: float, weight_decay: float) -> None:
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        own, average = local_tensor(parameter.detach()), local_tensor(state[MOMENTUM])
        gradient = torch.zeros_like(own) if parameter.grad is None else local_tensor(parameter.grad)
        average.lerp_(gradient, 1 - DECAY)
        update = gradient.lerp(average, DECAY)  # Nesterov's
        pieces = self._pieces.get(parameter)
        update = update.to(self._device, torch.bfloat16)
        change = self._change(update if pieces is None else self._whole(update, pieces), learning_rate)
        if pieces is not None:
            rank = dist.get_rank(self._group)
            begin = sum(pieces.sizes[:rank])
            change = change.view(-1)[begin : begin + pieces.sizes[rank]].view(own.shape)
        own.mul_(1 - learning_rate * weight_decay).add_(change.to(own.device))

    def _whole(self, part: Tensor, pieces: Pieces) -> Tensor:
        # Of one size: gloo gathers no other.
        longest = max(pieces.sizes)
        sent = nn.functional.pad(part.flatten(), (0, longest - part.numel()))
        received = sent.new_empty(len(pieces.sizes) * longest)
        dist.all_gather_into_tensor(received, sent, group=self._group)
        starts = range(0, len(received), longest)
        runs = [received[start : start + size] for start, size in zip(starts, pieces.sizes, strict=True)]
        return torch.cat(runs).view(pieces.shape)

    def _change(self, update: Tensor, learning_rate: float) -> Tensor:
        """The update of PyTorch's Muon, added to the matrix or to each of a stack; float32."""
        change = torch.zeros(update.shape, device=update.device)
        matrices = list(change.view(-1, *change.shape[-2:]).unbind())
        for matrix, gradient in zip(matrices, update.float().view(-1, *update.shape[-2:]).unbind(), strict=True):
            matrix.grad = gradient
        # Momentum and weight decay are those of the shard.
        torch.optim.Muon(
            matrices,
            lr=learning_rate,
            weight_decay=0.0,
            momentum=0.0,
            nesterov=False,
            ns_steps=NS_STEPS,
            adjust_lr_fn=SCALINGS[self._options.scaling],
        ).step()
        return change
