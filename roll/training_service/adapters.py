"""One frozen base model and the LoRA adapters that tenants train on it.

Each tenant has a model of its own, whose frozen tensors are those of the base and whose adapters are nobody else's. One
micro-batch computes at a time, so what a tenant gets does not depend, in any bit, on who else is there.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from roll.config.installation import install_command
from roll.models.build import DTYPES, build_model, has_tied_embeddings
from roll.models.experts import sparse_layers
from roll.models.lora import Adapters, is_adapter
from roll.platforms import current_platform
from roll.training_service.losses import TARGETS, check_datum, loss_of, loss_sum
from roll.training_service.wire import Datum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.config.roles import ModelArguments

logger = logging.getLogger(__name__)

LORA_ALPHA = 32
"""The scale of an adapter is this divided by its rank."""
MICRO_BATCH_TOKENS = 1024
"""Tokens of a forward pass, padding included; a longer datum has a pass of its own."""
HEAD_ROWS = 512
"""Positions whose logits are in memory at a time."""
_STATE = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class LoraOptions:
    """``LoraConfig`` of the SDK."""

    rank: int
    seed: int = 0
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


@dataclass(frozen=True)
class AdamOptions:
    """``AdamParams`` of the SDK; ``grad_clip_norm`` 0: no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            high = 1.0 if key.startswith("beta") else torch.inf
            if not 0 <= value < high:
                raise ValueError(f"adam_params.{key}: {value} must be at least 0" + (", below 1" if high == 1 else ""))


@dataclass(frozen=True)
class AdapterWeights:
    """Matrices A and B by their names in an adapter file, on the CPU, and the factor of their product."""

    tensors: Mapping[str, Tensor]
    scaling: float


class Base:
    """The base model, frozen; its output matrix is not the embeddings.

    Args:
        args: ``model_name_or_path`` and ``dtype`` of the weights.
        max_length: most tokens of a datum.

    Raises:
        ValueError: see :func:`roll.models.build.build_model`; a model whose logits are more than the product of hidden
            states and output matrix.
    """

    def __init__(self, args: ModelArguments, max_length: int) -> None:
        self.args, self.max_length = args, max_length
        self.device = current_platform().device()
        model: Any = build_model(args, "causal_lm", DTYPES[args.dtype])
        self.was_tied = has_tied_embeddings(model)
        if self.was_tied:  # An adapter of the output matrix must leave the embeddings alone.
            head = model.get_output_embeddings()
            head.weight = nn.Parameter(head.weight.detach().clone())
            model.config.tie_word_embeddings = False
        self.model = model.to(self.device).requires_grad_(False).eval()
        self.vocabulary: int = self.model.get_output_embeddings().weight.shape[0]
        ids = torch.arange(min(8, self.vocabulary), device=self.device)[None]
        with torch.no_grad():
            whole = self.model(input_ids=ids, use_cache=False).logits.float()
            own = self.model.get_output_embeddings()(_hidden(self.model, ids)).float()
        if whole.shape != own.shape or not torch.allclose(whole, own, rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"{args.model_name_or_path}: {type(self.model).__name__} does not compute its logits from its "
                "output matrix alone (soft-capping, a scale), which the training service does not do"
            )

    def targets(self, options: LoraOptions) -> list[str]:
        """Names of the linear layers that get an adapter.

        Raises:
            ValueError: none, or experts.
        """
        if options.train_mlp and sparse_layers(self.model):
            raise ValueError("lora_config.train_mlp: adapters of experts are not served; set it to False")
        head = self.model.get_output_embeddings()
        found = []
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear):
                attends = any("attn" in part or "attention" in part for part in name.split("."))
                wanted = options.train_attn if attends else options.train_mlp
                if options.train_unembed if module is head else wanted:
                    found.append(name)
        if not found:
            raise ValueError("lora_config: at least one of train_unembed, train_mlp and train_attn must be True")
        return found


class Tenant:
    """One client's adapter and optimizer.

    Raises:
        ValueError: see :meth:`Base.targets`; a rank below 1.
        ImportError: peft is not installed; the message names the extra.
    """

    def __init__(self, base: Base, options: LoraOptions) -> None:
        try:
            import peft
        except ImportError as error:
            raise ImportError(f"the training service needs peft: {install_command('peft')}") from error
        if not 1 <= options.rank <= 1024:
            raise ValueError(f"lora_config.rank: {options.rank} must be in [1, 1024]")
        if not -(2**63) <= options.seed < 2**64:
            raise ValueError(f"lora_config.seed: {options.seed} must be an integer of 64 bits")
        self.base, self.options = base, options
        shared: dict[int, Any] = {id(t): t for t in chain(base.model.parameters(), base.model.buffers())}
        self.model: PreTrainedModel = copy.deepcopy(base.model, shared)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=options.rank,
            lora_alpha=LORA_ALPHA,
            target_modules=base.targets(options),
        )
        with torch.random.fork_rng():
            torch.manual_seed(options.seed)
            peft.inject_adapter_in_model(config, self.model, "default")
        named = [(name, own) for name, own in self.model.named_parameters() if is_adapter(name)]
        for _, parameter in named:
            parameter.data = parameter.data.float()
        self.adapters = Adapters(self.model, config)
        self._names = [name for name, _ in self.adapters.own(named)]
        self._parameters = [parameter for _, parameter in named]
        self._optimizer = torch.optim.AdamW(self._parameters, foreach=False)
        self._lacks_a_pass = False

    def forward_backward(
        self, data: Sequence[Datum], name: str, options: Mapping[str, float | str], backward: bool
    ) -> Generator[None, None, tuple[list[Tensor], dict[str, float]]]:
        """The sum of a loss over all data; with ``backward`` its gradient is added to those since the last step.

        Yields after each micro-batch but the last: other tenants may compute meanwhile.

        Returns:
            Log-probs of the target tokens of each datum, float32, on the CPU; metrics.

        Raises:
            ValueError: a loss, an option or a datum that is not served; nothing has been computed.
        """
        loss = loss_of(name, options)
        for index, datum in enumerate(data):
            check_datum(loss, name, datum, f"data[{index}]", self.base.vocabulary, self.base.max_length)
        numbers = {key: float(value) for key, value in options.items()}
        log_probs: list[Tensor] = []
        total, gradients = 0.0, [torch.zeros_like(parameter) for parameter in self._parameters if backward]
        for number, batch in enumerate(_micro_batches(data)):
            if number:
                yield
            with torch.set_grad_enabled(backward):  # Not around the yield: it holds for the whole thread.
                own = self._log_probs(batch)
                losses = [
                    loss_sum(name, one, {key: t.to(one.device) for key, t in datum.inputs.items()}, numbers)
                    for one, datum in zip(own, batch, strict=True)
                ]
                sum_of_losses = torch.stack(losses).sum()
            if backward:
                parts = torch.autograd.grad(sum_of_losses, self._parameters, allow_unused=True)
                for gradient, part in zip(gradients, parts, strict=True):
                    if part is not None:
                        gradient += part
            total += float(sum_of_losses.detach())
            log_probs += [one.detach().cpu() for one in own]
        # Not before all data are done: a request that fails leaves no part of a gradient.
        for parameter, gradient in zip(self._parameters, gradients, strict=False):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return log_probs, {"loss:sum": total}

    def _log_probs(self, batch: Sequence[Datum]) -> list[Tensor]:
        ids = nn.utils.rnn.pad_sequence([datum.tokens for datum in batch], batch_first=True).to(self.base.device)
        hidden = _hidden(self.model, ids)  # Causal: padding on the right is seen by nothing before it.
        head, lengths = self.model.get_output_embeddings(), [len(datum.tokens) for datum in batch]
        rows = torch.cat([row[:length] for row, length in zip(hidden, lengths, strict=True)])
        # Several targets a position: as many columns as the datum with the most has, the others' filled up with id 0.
        tables = [datum.inputs[TARGETS].view(length, -1) for datum, length in zip(batch, lengths, strict=True)]
        width = max(table.shape[1] for table in tables)
        targets = torch.cat([nn.functional.pad(table, (0, width - table.shape[1])) for table in tables])
        targets = targets.to(self.base.device)
        parts = [
            checkpoint(_head_log_probs, head, rows[start:end], targets[start:end], use_reentrant=False)
            for start in range(0, len(rows), HEAD_ROWS)
            for end in [start + HEAD_ROWS]
        ]
        own = torch.cat(parts).split(lengths)
        return [
            found[:, : table.shape[1]].reshape(datum.inputs[TARGETS].shape)
            for found, table, datum in zip(own, tables, batch, strict=True)
        ]

    def miss_pass(self) -> None:
        """A backward pass has failed: the next step, which may be on its way already, would lack its gradient."""
        self._lacks_a_pass = True

    def optim_step(self, options: AdamOptions) -> dict[str, float]:
        """AdamW on the sum of the gradients since the last step.

        Raises:
            ValueError: no gradient, or one that is not whole or not finite, which is dropped: the weights stay as they
                are.
        """
        if self._lacks_a_pass:
            self._drop_gradients()
            raise ValueError(
                "optim_step: a forward_backward since the last step has failed; the gradient of the others is dropped, "
                "the weights are unchanged"
            )
        if all(parameter.grad is None for parameter in self._parameters):
            raise ValueError("optim_step: there is no gradient; call forward_backward first")
        limit = options.grad_clip_norm or torch.inf
        norm = float(nn.utils.clip_grad_norm_(self._parameters, limit, foreach=False))
        if not torch.isfinite(torch.tensor(norm)):
            self._drop_gradients()
            raise ValueError(
                f"optim_step: the norm of the gradient is {norm}; it is dropped, the weights are unchanged"
            )
        for group in self._optimizer.param_groups:
            group.update(
                lr=options.learning_rate,
                betas=(options.beta1, options.beta2),
                eps=options.eps,
                weight_decay=options.weight_decay,
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"grad_norm": norm, "learning_rate": options.learning_rate}

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad()
        self._lacks_a_pass = False

    def weights(self) -> AdapterWeights:
        """A copy of the adapter."""
        tensors = {name: own.detach().cpu().clone() for name, own in zip(self._names, self._parameters, strict=True)}
        return AdapterWeights(tensors, LORA_ALPHA / self.options.rank)

    def save(self, folder: Path, base: str, optimizer: bool) -> None:
        """Write the adapter as peft reads it, and with ``optimizer`` the state of AdamW."""
        from safetensors.torch import save_file

        self.adapters.save(folder, self.weights().tensors, base)
        if optimizer:
            state = {
                f"{name}#{key}": self._optimizer.state[own][key].detach().cpu().clone()
                for name, own in zip(self._names, self._parameters, strict=True)
                if own in self._optimizer.state
                for key in _STATE
            }
            save_file(state, folder / OPTIMIZER_FILE)

    @torch.no_grad()
    def load(self, folder: Path, optimizer: bool) -> None:
        """Take over what :meth:`save` has written; gradients are dropped.

        Raises:
            ValueError: an adapter of other layers or another rank, or no state of an optimizer.
        """
        from safetensors.torch import load_file

        tensors = load_file(folder / ADAPTER_FILE)
        shapes = {name: own.shape for name, own in zip(self._names, self._parameters, strict=True)}
        if {name: own.shape for name, own in tensors.items()} != shapes:
            raise ValueError("the checkpoint is of an adapter with another rank or other layers")
        if optimizer and not (folder / OPTIMIZER_FILE).exists():
            raise ValueError("the checkpoint has no state of the optimizer; save_state writes it")
        state = load_file(folder / OPTIMIZER_FILE) if optimizer else {}
        for name, own in zip(self._names, self._parameters, strict=True):
            own.copy_(tensors[name])
            self._optimizer.state.pop(own, None)
            found = {key: state[f"{name}#{key}"] for key in _STATE if f"{name}#{key}" in state}
            if found:
                self._optimizer.state[own] = {
                    key: value if key == "step" else value.to(own.device) for key, value in found.items()
                }
        self._drop_gradients()


ADAPTER_FILE, OPTIMIZER_FILE = "adapter_model.safetensors", "optimizer.safetensors"


def _hidden(model: PreTrainedModel, ids: Tensor) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden


def _head_log_probs(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """float32, the shape of ``targets`` (n, K)."""
    return head(hidden).float().log_softmax(-1).gather(1, targets)


def _micro_batches(data: Sequence[Datum]) -> list[list[Datum]]:
    batches: list[list[Datum]] = []
    longest = 0
    for datum in data:
        longest = max(longest, len(datum.tokens))
        if not batches or longest * (len(batches[-1]) + 1) > MICRO_BATCH_TOKENS:
            batches.append([])
            longest = len(datum.tokens)
        batches[-1].append(datum)
    return batches
