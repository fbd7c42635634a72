"""The last layer of the last stage: log-probs and entropies, or values, of the response tokens only."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from roll.strategies.megatron.vocab_parallel import vocab_parallel_log_probs


class LogProbHead(ColumnParallelLinear):
    """An output matrix cut over the vocabulary that never gathers logits."""

    def __init__(self, config: TransformerConfig, padded_vocab_size: int, vocab_size: int, tied: bool) -> None:
        super().__init__(
            config.hidden_size,
            padded_vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_weight_param_allocation=tied,
        )
        self.vocab_size = vocab_size

    def forward(
        self,
        hidden: Tensor,
        predictors: Tensor,
        targets: Tensor,
        outputs: Collection[str],
        temperature: float,
        weight: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """
        Args:
            hidden: (s, b, H), or this rank's part of it along s with sequence parallelism.
            predictors: int64 (N,), indices into the flattened (s * b) hidden states.
            targets: int64 (N,), the tokens that they predict.
            weight: the embeddings' matrix, where it is the output matrix too.
        """
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
            hidden = hidden.flatten(0, 1).index_select(0, predictors)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden.flatten(0, 1).index_select(0, predictors))
        computed = vocab_parallel_log_probs(
            hidden,
            self.weight if weight is None else weight,
            targets,
            group=parallel_state.get_tensor_model_parallel_group(),
            vocab_size=self.vocab_size,
            temperature=temperature,
        )
        named = zip(("log_probs", "entropy", "sum_of_squares"), computed, strict=True)
        return {name: values for name, values in named if name in outputs}


class ValueHead(nn.Module):
    """A scalar for each predicting hidden state; every tensor-parallel rank computes all of it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        device = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda")
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))

    def forward(self, hidden: Tensor, predictors: Tensor, *_: Any, **__: Any) -> dict[str, Tensor]:
        """Arguments as of :class:`LogProbHead`."""
        if self.sequence_parallel:
            # All ranks compute the same from here on, so a rank's own part of the gradient is already whole.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        hidden = hidden.flatten(0, 1).index_select(0, predictors)
        return {"values": nn.functional.linear(hidden, self.weight, self.bias)[:, 0].float()}
