"""A language model that computes log-probs, entropies or values of response tokens, and nothing else."""

from __future__ import annotations

from collections.abc import Collection
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll.models.layouts import TokenLayout
from roll.models.log_probs import token_log_probs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _head_log_probs(
    head: nn.Linear, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    return token_log_probs(
        hidden, head.weight, targets, bias=head.bias, temperature=temperature, with_entropy=with_entropy
    )


def run_head_when_called(language_model: PreTrainedModel) -> None:
    """Compute log-probs in the output matrix's ``forward``: for a backend that acts on a module when it is called."""
    for head in output_matrices(language_model):
        head.forward = MethodType(_head_log_probs, head)
        head.log_probs = MethodType(type(head).__call__, head)


def output_matrices(language_model: PreTrainedModel) -> list[Any]:
    """The output matrix; with LoRA's ``additional_target`` the trained copy and the original behind it."""
    head = language_model.get_output_embeddings()
    if head is None:
        return []
    copies = getattr(head, "modules_to_save", None)
    return [head] if copies is None else [head.original_module, *copies.values()]


class ResponseModel(nn.Module):
    """Runs the body of a Hugging Face model, then a head on the hidden states that predict response tokens.

    ``language_model`` is the Hugging Face model itself (a causal LM, or a token classifier with one label as value
    model), with its own parameter names.  The head runs inside this module's forward, so that a sharding root put on
    this module has the output matrix (tied to the embeddings or not) at hand.

    With a ``context_group`` each of its ranks is given a chunk of one layout (:meth:`TokenLayout.chunk`).
    """

    def __init__(self, language_model: PreTrainedModel, context_group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.language_model = language_model
        self.context_group = context_group
        for head in output_matrices(language_model):
            # A method of the output matrix's own module, so that one who shards that module apart can gather it first.
            head.log_probs = MethodType(_head_log_probs, head)

    def forward(self, layout: TokenLayout, outputs: Collection[str], temperature: float = 1.0) -> dict[str, Tensor]:
        """Float32 (N,) tensors, one for each of ``outputs``: ``log_probs``, ``entropy``, ``values``.

        ``values[i]`` is the value of the state in which response token i is about to be sampled.
        """
        # Plain rows must not meet a model that would take the keywords for something else.
        keywords = {"attention_pattern": layout.pattern, "context_group": self.context_group}
        extra = {name: value for name, value in keywords.items() if value is not None}
        hidden = self.language_model.base_model(
            input_ids=layout.input_ids, position_ids=layout.position_ids, use_cache=False, **extra
        ).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, layout.predictors)
        if "values" in outputs:
            # Not a view: FSDP hooks what a module returns, and a view would pass by the hook when written to.
            return {"values": self.language_model.get_submodule("score")(hidden)[:, 0].float().clone()}
        head = self.language_model.get_output_embeddings()
        log_probs, entropy = head.log_probs(hidden, layout.targets, temperature, "entropy" in outputs)
        computed = {"log_probs": log_probs, "entropy": entropy}
        return {name: value for name, value in computed.items() if name in outputs and value is not None}
