"""Muon for the matrices of hidden layers, AdamW for everything else, on shards.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/; Liu et al., 2025, arXiv:2502.16982) makes the
averaged gradient of a matrix nearly orthogonal, which takes the whole matrix.  Momentum, weight decay and the update
are computed on each rank's elements; the whole matrix is gathered in bfloat16, the type in which PyTorch's
Newton-Schulz iteration computes anyway, one parameter at a time, and every rank takes its elements of the same result.

Under every strategy these elements are a run of the flattened parameter: a shard of it (FSDP, ZeRO-3), or an interval
of a longer tensor that the optimizer updates (ZeRO-1 and 2, Megatron's distributed optimizer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from roll.checkpoint.tensors import MUON_MOMENTS
from roll.models.experts import EXPERTS, SparseLayer
from roll.strategies.training.gather import Pieces
from roll.strategies.training.optimizer import local_tensor

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


@dataclass(frozen=True)
class Matrix:
    """A parameter that Muon updates, matrix or stack of matrices, and this rank's elements of it."""

    main: Tensor | None
    """The float32 tensor that the optimizer updates; None: this rank has no element."""
    pieces: Pieces
    group: ProcessGroup | None
    """The ranks that hold the pieces; None: this one holds them all."""
    begin: int = 0
    """The first of this rank's elements in ``main``, flattened."""

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def run(self, tensor: Tensor) -> Tensor:
        """This rank's elements in ``main``, or in a tensor like it; a view."""
        local, size = local_tensor(tensor.detach()), self.pieces.sizes[self.rank]
        return local if local.numel() == size else local.view(-1)[self.begin : self.begin + size]

    def wholes(self, run: Tensor) -> list[Tensor]:
        """Collective. The matrices, whole, from the ranks' elements."""
        sizes = self.pieces.sizes
        if len(sizes) == 1:
            return [run.reshape(self.pieces.shape)]
        # Of one size: gloo gathers no other.
        longest = max(sizes)
        sent = nn.functional.pad(run.flatten(), (0, longest - run.numel()))
        received = sent.new_empty(len(sizes) * longest)
        dist.all_gather_into_tensor(received, sent, group=self.group)
        runs = [part[:size] for part, size in zip(received.split(longest), sizes, strict=True)]
        return [torch.cat(runs).view(self.pieces.shape)]

    def own(self, wholes: list[Tensor]) -> Tensor:
        """This rank's elements of whole matrices."""
        begin = sum(self.pieces.sizes[: self.rank])
        return wholes[0].flatten()[begin : begin + self.pieces.sizes[self.rank]]


def gathered_sizes(sizes: Sequence[int], group: ProcessGroup) -> list[tuple[int, ...]]:
    """Collective. How many elements of each parameter every rank holds; ``sizes`` are this rank's."""
    of_ranks = [list(sizes)] * group.size()
    dist.all_gather_object(of_ranks, list(sizes), group=group)
    return list(zip(*of_ranks, strict=True))


def muon_groups(groups: list[dict[str, Any]], matrices: set[Tensor]) -> list[dict[str, Any]]:
    """The groups with ``is_muon``: those of ``matrices``, then those of other parameters."""
    split = [
        {**one, "params": [p for p in one["params"] if (p in matrices) == is_muon], "is_muon": is_muon}
        for is_muon in (True, False)
        for one in groups
    ]
    return [one for one in split if one["params"]]


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon on the groups that say so, AdamW on the others; the states of both by parameter.

    A parameter without a gradient counts as one with a gradient of zeros: under FSDP1 a rank that holds no element of a
    parameter has none, and still takes part in gathering it.
    """

    matrices: Sequence[Matrix] = ()
    """Those of all groups of Muon, in an order that is the same on all ranks. DeepSpeed puts tensors of its own into
    the groups, so they are known only after that."""

    def __init__(self, adamw: torch.optim.Optimizer, scaling: str, device: torch.device) -> None:
        """``adamw`` has the groups of both, with ``is_muon``; on ``device`` matrices are gathered and made orthogonal
        (this rank's elements may be in host memory)."""
        # Megatron's shards may be views, which no optimizer takes: all groups and states are those of AdamW.
        super().__init__([{"params": []}], adamw.defaults)
        self.param_groups, self.state = adamw.param_groups, adamw.state
        self._adamw, self._scaling, self._device = adamw, SCALINGS[scaling], device

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Collective over the ranks that hold pieces. Steps the parameters that are in the groups: DeepSpeed leaves
        only some of them there at a time."""
        assert closure is None
        stepped = {parameter: group for group in self.param_groups for parameter in group["params"]}
        for matrix in self.matrices:
            if matrix.main is None or matrix.main in stepped:
                self._step_matrix(matrix, stepped.get(matrix.main, {}))
        self._adamw.param_groups = [group for group in self.param_groups if not group["is_muon"]]
        self._adamw.step()

    def _step_matrix(self, matrix: Matrix, group: dict[str, Any]) -> None:
        main, update = matrix.main, torch.empty(0)
        if main is not None:
            state = self.state[main]
            if MOMENTUM not in state:
                state[MOMENTUM] = torch.zeros_like(main, memory_format=torch.preserve_format)
            average = matrix.run(state[MOMENTUM])
            gradient = torch.zeros_like(average) if main.grad is None else matrix.run(main.grad)
            average.lerp_(gradient, 1 - DECAY)
            update = gradient.lerp(average, DECAY)  # Nesterov's
        wholes = matrix.wholes(update.to(self._device, torch.bfloat16))
        if main is not None and update.numel():
            change = matrix.own([self._change(whole, group["lr"]) for whole in wholes])
            own = matrix.run(main)
            own.mul_(1 - group["lr"] * group["weight_decay"]).add_(change.view(own.shape).to(own.device))

    def _change(self, update: Tensor, learning_rate: float) -> Tensor:
        """The update of PyTorch's Muon, added to the matrix or to each of a stack; float32."""
        change = torch.zeros(update.shape, device=update.device)
        matrices = list(change.view(-1, *change.shape[-2:]).unbind())
        for matrix, gradient in zip(matrices, update.float().view(-1, *update.shape[-2:]).unbind(), strict=True):
            matrix.grad = gradient
        # Momentum and weight decay are those of the shard.
        optimizer = torch.optim.Muon(
            matrices,
            lr=learning_rate,
            weight_decay=0.0,
            momentum=0.0,
            nesterov=False,
            ns_steps=NS_STEPS,
            adjust_lr_fn=self._scaling,
        )
        with bfloat16_products(update.device):
            optimizer.step()
        return change


def bfloat16_products(device: torch.device) -> AbstractContextManager[Any]:
    """The way to compute products of bfloat16 matrices on ``device``."""
    is_slow = device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return Float64Products() if is_slow else nullcontext()


class Float64Products(TorchDispatchMode):
    """Computes products of bfloat16 matrices in float64 and rounds them once: the result does not depend on the order
    of sums, which may differ between processes. On a processor without bfloat16 an update of 576 x 1,536 weights takes
    5.4 seconds by PyTorch's own products, 0.33 by these."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        if is_product and args[0].dtype is torch.bfloat16:
            return func(*(matrix.double() for matrix in args), **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))
