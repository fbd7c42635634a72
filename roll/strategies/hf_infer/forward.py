"""``hf_infer`` for a role that computes log-probs: the whole model on each rank, nothing around it."""

from __future__ import annotations

from collections.abc import Collection

import torch

from roll.config.roles import WorkerConfig
from roll.models.build import DTYPES
from roll.models.layouts import TokenLayout
from roll.strategies.base import ModelHead, StateKind
from roll.strategies.training.data_parallel import DataParallelStrategy


class HfForwardStrategy(DataParallelStrategy):
    """Forward passes of a plain Hugging Face model in the compute dtype; ranks share rows and nothing else."""

    def __init__(self, role: WorkerConfig, head: ModelHead = ModelHead.CAUSAL_LM, seed: int = 42) -> None:
        super().__init__(role, head, seed)
        self.compute_dtype = DTYPES[role.model_args.dtype]

    def initialize(self, num_training_steps: int = 0) -> None:
        """Load the model.

        Raises:
            ValueError: optimizer steps asked of a forward-only strategy; see also :func:`build_model`.
        """
        self._refuse_training(num_training_steps, "fsdp2_train")
        self._load_model(self.compute_dtype)
        self.model.requires_grad_(False)
        self.model.eval()
        self.model.to(self.device)

    def _compute(self, layout: TokenLayout, outputs: Collection[str], temperature: float) -> dict[str, torch.Tensor]:
        return self.model(layout, outputs, temperature)

    def _gather(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors if self.rank == 0 else [tensor.new_empty(0) for tensor in tensors]

    def _device_tensors(self, kind: StateKind) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers()] if kind is StateKind.MODEL_PARAMS else []
