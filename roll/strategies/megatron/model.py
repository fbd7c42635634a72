r"""A Megatron ``GPTModel`` that computes log-probs, entropies or values of response tokens, and nothing else.

Its layers are those of :mod:`roll.strategies.megatron.layers`.  Its last layer computes log-probs from an output matrix
sharded over its rows without gathering logits:

Each of n tensor-parallel ranks holds V / n rows of the output matrix, so V / n logits z_j of a token.  With
m = max_j z_j, s = sum_j exp(z_j - m), u = sum_j exp(z_j - m) z_j and q = sum_j exp(z_j - m)^2, all over all ranks,

    log p(y)  = z_y - m - log s
    entropy   = m + log s - u / s
    sum_j p_j^2 = q / s^2                       (without gradient)

so ranks exchange five numbers a token, never logits.  The gradients of :mod:`roll.models.log_probs` need the local
logits and these numbers only.  Tokens are taken in chunks, computed again in the backward pass.

For what :mod:`roll.models.distributions` computes of whole distributions, ranks sum normalisers, the listed tokens'
log-probs (0 except on the rank that has the token) and the mass of the rest; from there on all compute the same. In the
backward pass the normaliser's gradient is summed over ranks, since each uses it for its own tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from roll.models.distributions import Vocabulary, chunked, compared, top_tokens
from roll.models.invariant import linear
from roll.models.layouts import TargetDistributions, TopTokens
from roll.models.log_probs import EXCLUDED_LOGIT, HeadMemory, token_log_probs
from roll.strategies.base import ModelHead
from roll.strategies.megatron.layers import RotaryAngles, RoutedLayer, Router, block
from roll.strategies.megatron.micro_batches import MicroBatch
from roll.strategies.megatron.parallel import sparse_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ResponseGPT(GPTModel):
    """One chunk of the model: a pipeline stage, or one of a stage's chunks with virtual stages.

    Chunks but the last return hidden states; the last returns float32 (N,) tensors by output name.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hf: PretrainedConfig,
        *,
        head: ModelHead,
        inverse_frequencies: Tensor,
        virtual_stage: int | None,
    ) -> None:
        ranks, vocab_size, tied = config.tensor_model_parallel_size, hf.vocab_size, hf.tie_word_embeddings
        padded = -(-vocab_size // ranks) * ranks
        self._head, self._vocab_size, self._padded_vocab_size = head, vocab_size, padded
        stage = {"ignore_virtual": virtual_stage is None, "vp_stage": virtual_stage}
        super().__init__(
            config=config,
            transformer_layer_spec=block(config, hf, virtual_stage),
            vocab_size=padded,
            max_sequence_length=0,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=tied and head is ModelHead.CAUSAL_LM,
            position_embedding_type="rope",
            vp_stage=virtual_stage,
        )
        self.rotary_pos_emb = RotaryAngles(inverse_frequencies)
        self.routers: list[Router] = []
        sparse = sparse_layers(hf)
        for layer in self.decoder.layers:
            if isinstance(layer, RoutedLayer):
                layer.mlp.router.index = sum(sparse[: layer.layer_number - 1])
                self.routers.append(layer.mlp.router)
        if self.pre_process:
            self.embedding.register_forward_hook(_start_of_gradients)

    def setup_embeddings_and_output_layer(self) -> None:
        """Called by Megatron when the layers exist: put our head in the place of the output layer, then tie it."""
        if self.post_process:
            tied = self.pre_process and self.share_embeddings_and_output_weights
            if self._head is ModelHead.VALUE:
                self.output_layer = ValueHead(self.config)
            else:
                self.output_layer = LogProbHead(self.config, self._padded_vocab_size, self._vocab_size, tied)
        super().setup_embeddings_and_output_layer()

    def forward(self, part: MicroBatch, outputs: Collection[str], temperature: float) -> Tensor | dict[str, Tensor]:
        own = part.own
        # Contiguous: a chunk's columns are some of the whole's.
        ids = own.input_ids.contiguous()
        hidden = super().forward(ids, position_ids=None, attention_mask=None, packed_seq_params=part.arrangement)
        if not self.post_process:
            return hidden
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(
            hidden, part.predictors, own.targets, outputs, temperature, own.top_tokens, own.comparisons, weight
        )

    def _postprocess(self, hidden_states: Tensor, **_: object) -> Tensor:
        return hidden_states


def _start_of_gradients(module: nn.Module, inputs: tuple[Any, ...], hidden: Tensor) -> Tensor:
    # Also to frozen embeddings: Megatron gives a recomputed layer no gradient, and a pipeline stage no backward pass,
    # unless its input requires one.
    return hidden.requires_grad_() if torch.is_grad_enabled() and not hidden.requires_grad else hidden


class OwnTokens(Vocabulary):
    """The tokens of one rank: ids from ``start`` on, ``count`` of them, rows of its matrix; further rows are
    padding."""

    def __init__(self, weight: Tensor, group: ProcessGroup, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.group, self.start = group, group.rank() * weight.shape[0]
        self.count = max(0, min(weight.shape[0], vocab_size - self.start))

    def logits(self, hidden: Tensor, weight: Tensor, _: Tensor | None = None) -> Tensor:
        """Return float32 (n, rows); padding gets a finite logit that makes its probability 0 (``-inf`` gives NaNs)."""
        logits = torch.nn.functional.linear(hidden, weight).float()
        logits[:, self.count :] = EXCLUDED_LOGIT
        return logits

    def table(self, logits: Tensor, temperature: float) -> Tensor:
        """(n, rows) log-probs of the own tokens, with gradient."""
        logits = logits / temperature
        peak = logits.detach().amax(1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self.group)
        normaliser = peak + self.summed((logits - peak[:, None]).exp().sum(1)).log()
        return logits - copy_to_tensor_model_parallel_region(normaliser, group=self.group)[:, None]

    def summed(self, part: Tensor) -> Tensor:
        """Sum over ranks. Backward is the identity: all ranks compute the same from the sum."""
        whole: Tensor = reduce_from_tensor_model_parallel_region(part.clone(), group=self.group)
        return whole

    def at(self, table: Tensor, ids: Tensor) -> Tensor:
        """(n, k) log-probs of tokens (n, k) from all ranks."""
        mine, places = self.places(ids)
        return self.summed(table.gather(1, places) * mine)

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which ids are this rank's, and indices that are valid in any case."""
        own = ids.long() - self.start
        mine = (own >= 0) & (own < self.count)
        return mine, torch.where(mine, own, 0)

    def best(self, table: Tensor, count: int, limit: int) -> tuple[Tensor, Tensor]:
        allowed = table.clone()
        allowed[:, max(0, limit - self.start) :] = EXCLUDED_LOGIT
        values, places = allowed.topk(min(count, table.shape[1]), dim=1)
        found = [torch.empty_like(values) for _ in range(self.group.size())]
        ids = [torch.empty_like(places) for _ in range(self.group.size())]
        dist.all_gather(found, values, group=self.group)
        dist.all_gather(ids, places + self.start, group=self.group)
        log_probs, best = torch.cat(found, 1).topk(count, dim=1)
        return log_probs, torch.cat(ids, 1).gather(1, best)

    def is_best(self, table: Tensor, ids: Tensor, of_ids: Tensor) -> Tensor:
        largest = table.amax(1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return of_ids >= largest

    def rest(self, table: Tensor, ids: Tensor) -> Tensor:
        """(n,): log of the mass of the tokens that are not among ``ids``."""
        mine, places = self.places(ids)
        listed = torch.zeros_like(table).scatter_reduce(1, places, mine.to(table.dtype), "amax")
        mass = self.summed((table.exp() * (1.0 - listed)).sum(1))
        return mass.clamp(min=torch.finfo(mass.dtype).tiny).log()


class LogProbHead(ColumnParallelLinear):
    """An output matrix sharded over the vocabulary that never gathers logits."""

    is_invariant = False
    """The matrix is whole, and log-probs are computed as an engine does (:mod:`roll.models.invariant`)."""

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
        wanted: TopTokens | None = None,
        comparisons: tuple[TargetDistributions, ...] = (),
        weight: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """
        Args:
            hidden: (s, b, H), or this rank's part of it along s with sequence parallelism.
            predictors: int64 (N,), indices into the flattened (s * b) hidden states.
            targets: int64 (N,), the tokens that they predict.
            wanted, comparisons: as of a layout (:mod:`roll.models.layouts`).
            weight: the embeddings' matrix, where it is the output matrix too.
        """
        # Either way the backward pass sums over ranks: each has the gradient of its own part of the vocabulary only.
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
            hidden = hidden.flatten(0, 1).index_select(0, predictors)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden.flatten(0, 1).index_select(0, predictors))
        weight = self.weight if weight is None else weight
        tokens = OwnTokens(weight, parallel_state.get_tensor_model_parallel_group(), self.vocab_size)
        chunk = HeadMemory.for_device(hidden.device).chunk_tokens(weight.shape[0])
        if wanted is not None:
            with torch.no_grad():
                of_rows = lambda rows: tokens.logits(hidden[rows], weight)  # noqa: E731
                return top_tokens(tokens, of_rows, hidden.shape[0], chunk, temperature, wanted)
        if comparisons:
            compare = partial(
                compared, tokens, targets=targets, temperature=temperature, outputs=outputs, comparisons=comparisons
            )
            return chunked(hidden, weight, None, tokens.logits, compare, chunk)
        if self.is_invariant:
            computed = token_log_probs(
                hidden,
                weight,
                targets,
                temperature=temperature,
                with_entropy="entropy" in outputs,
                with_sum_of_squares="sum_of_squares" in outputs,
                product=linear,
            )
        else:
            computed = vocab_parallel_log_probs(hidden, weight, targets, tokens, temperature)
        named = zip(("log_probs", "entropy", "sum_of_squares"), computed, strict=True)
        return {name: values for name, values in named if name in outputs and values is not None}


class ValueHead(nn.Module):
    """A scalar for each predicting hidden state; every tensor-parallel rank computes all of it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        device = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda")
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))

    def forward(self, hidden: Tensor, predictors: Tensor, *_: object, **__: object) -> dict[str, Tensor]:
        """Arguments as of :class:`LogProbHead`."""
        if self.sequence_parallel:
            # All ranks compute the same from here on, so each has the whole gradient and takes its part of it; a
            # reduce-scatter would multiply it by their number.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        hidden = hidden.flatten(0, 1).index_select(0, predictors)
        return {"values": nn.functional.linear(hidden, self.weight, self.bias)[:, 0].float()}


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    tokens: OwnTokens,
    temperature: float = 1.0,
    memory: HeadMemory | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of ``targets[i]`` under ``softmax((W @ hidden[i]) / temperature)``, entropy and sum of squares.

    Args:
        hidden: (N, H), the same on all ranks of the group; N may be 0. Its gradient is this rank's share: the sum over
            ranks is the caller's.
        weight: (V / n, H): this rank's rows, in rank order.
        targets: int64 (N,), in [0, V).
        tokens: those of ``weight``. All n ranks of its group call at the same time, in forward and backward.
        temperature: greater than 0.

    Returns:
        float32 (N,) log-probs, entropies (nats) and sums of squared probabilities, the same on all ranks; the first two
        carry gradients.
    """
    assert hidden.ndim == 2 and targets.shape == hidden.shape[:1], (hidden.shape, targets.shape)
    memory = memory or HeadMemory.for_device(hidden.device)
    return _VocabParallelLogProbs.apply(
        hidden, weight, targets, tokens, temperature, memory.chunk_tokens(weight.shape[0])
    )


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight).float()
    return logits.div_(temperature) if temperature != 1.0 else logits


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, tokens: OwnTokens, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        own, group = tokens.count, tokens.group
        log_probs = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        entropy, squares, log_normalizer = (torch.empty_like(log_probs) for _ in range(3))
        for first in range(0, hidden.shape[0], chunk):
            rows = slice(first, first + chunk)
            logits = _logits(hidden[rows], weight[:own], temperature)
            # A rank whose rows are all padding of the vocabulary still has to take part in the collectives.
            peak = logits.amax(1) if own else logits.new_full((logits.shape[0],), -torch.inf)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
            mine, index = tokens.places(targets[rows, None])
            of_target = logits.gather(1, index)[:, 0] * mine[:, 0] if own else logits.new_zeros(logits.shape[0])
            powers = (logits - peak[:, None]).exp_()
            sums = torch.stack([powers.sum(1), (powers * logits).sum(1), of_target, powers.square_().sum(1)])
            dist.all_reduce(sums, group=group)
            log_normalizer[rows] = peak + sums[0].log()
            log_probs[rows] = sums[2] - log_normalizer[rows]
            entropy[rows] = log_normalizer[rows] - sums[1] / sums[0]
            squares[rows] = sums[3] / sums[0].square()
        ctx.save_for_backward(hidden, weight, targets, log_normalizer, entropy)
        ctx.tokens, ctx.temperature, ctx.chunk = tokens, temperature, chunk
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(squares)
        return log_probs, entropy, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: None) -> tuple[Any, ...]:
        hidden, weight, targets, log_normalizer, entropy = ctx.saved_tensors
        own = ctx.tokens.count
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for first in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(first, first + ctx.chunk)
            table = _logits(hidden[rows], weight[:own], ctx.temperature) - log_normalizer[rows, None]
            factor = torch.zeros_like(table)
            if grad_entropy is not None:
                factor -= (table + entropy[rows, None]) * grad_entropy[rows, None]
            if grad_log_probs is not None:
                factor -= grad_log_probs[rows, None]
            grad_logits = table.exp_().mul_(factor)
            if grad_log_probs is not None and own:
                mine, index = ctx.tokens.places(targets[rows, None])
                grad_logits.scatter_add_(1, index, grad_log_probs[rows, None] * mine)
            grad_logits = grad_logits.div_(ctx.temperature).to(weight.dtype)
            torch.mm(grad_logits, weight[:own], out=grad_hidden[rows])
            grad_weight[:own].addmm_(grad_logits.t(), hidden[rows])
        return grad_hidden, grad_weight, None, None, None, None
