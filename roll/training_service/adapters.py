"""One frozen base model, the LoRA adapters that tenants train on it, and their losses.

Each tenant has a model of its own, whose frozen tensors are those of the base and whose adapters are nobody else's. One
micro-batch computes at a time, so what a tenant gets does not depend, in any bit, on who else is there.

:class:`roll.TrainClient` gives a batch to worker processes of one model, with one schedule; here are many adapters in
one process, rates chosen at each step, and targets that need not be the next token. So what both share is below it:
the model with its layouts, kernels and log-probs, the equations of the losses, the optimizer and the adapter files.

Losses have the SDK's names. They are those of :mod:`roll.algorithms.policy_losses`, summed over tokens, never averaged:

    cross_entropy         vanilla, with the weights as advantages
    importance_sampling   ppo without clipping
    ppo, cispo            themselves
    dro                   kimi15: dro of the package has the square of a whole response

Every token is a row of its own, since the SDK's losses know tokens only. Clipping bounds are bounds of the ratio
itself, .8 and 1.2 unless the request or the datum gives others.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from roll.algorithms import policy_losses
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.policy_losses import LossInputs, PolicyLossFunction
from roll.config.choices import CispoOptions, Kimi15Options, NoOptions, PpoOptions
from roll.config.installation import install_command
from roll.config.roles import TrainingArguments, WorkerConfig
from roll.models.build import DTYPES, build_model, has_tied_embeddings
from roll.models.experts import sparse_layers
from roll.models.layouts import on_device, packed_layout, row_layout
from roll.models.log_probs import ResponseModel
from roll.models.lora import Adapters, inject
from roll.models.self_test import check_role, use_own_operations
from roll.platforms import current_platform
from roll.strategies.base import Output
from roll.strategies.training.adamw import adamw
from roll.strategies.training.optimizer import clip_, global_norm
from roll.training_service.wire import Datum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.config.roles import ModelArguments

logger = logging.getLogger(__name__)

LORA_ALPHA = 32  # the scale of an adapter is this divided by its rank
MICRO_BATCH_TOKENS = 1024  # tokens of a forward pass, padding included; a longer datum has a pass of its own
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
    """The base model, frozen; its output matrix is not the embeddings. ``args``: ``model_name_or_path`` and ``dtype``
    of the weights; ``max_length``: most tokens of a datum. Raises ``ValueError``: see
    :func:`roll.models.build.build_model` and :func:`roll.models.self_test.check_role`."""

    def __init__(self, args: ModelArguments, max_length: int) -> None:
        self.args, self.max_length = args, max_length
        self.device = current_platform().device()
        self.role = WorkerConfig("serve-training", model_args=args, use_remove_padding=True)
        try:
            check_role(self.role, "causal_lm", trains=True)
        except ValueError as error:
            logger.info("passes are padded: %s", error)
            self.role = replace(self.role, use_remove_padding=False)
            check_role(self.role, "causal_lm", trains=True)
        model: Any = build_model(args, "causal_lm", DTYPES[args.dtype])
        self.was_tied = has_tied_embeddings(model)
        if self.was_tied:  # An adapter of the output matrix must leave the embeddings alone.
            head = model.get_output_embeddings()
            head.weight = nn.Parameter(head.weight.detach().clone())
            model.config.tie_word_embeddings = False
        self.model = model.to(self.device).requires_grad_(False).eval()
        self.vocabulary: int = self.model.get_output_embeddings().weight.shape[0]

    def targets(self, options: LoraOptions) -> list[str]:
        """Names of the linear layers that get an adapter. Raises ``ValueError``: none, or experts."""
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
    """One client's adapter and optimizer. Raises ``ValueError``: see :meth:`Base.targets`; a rank below 1;
    ``ImportError``: peft is not installed; the message names the extra."""

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
        model: PreTrainedModel = copy.deepcopy(base.model, shared)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=options.rank, lora_alpha=LORA_ALPHA, target_modules=base.targets(options)
        )
        inject(model, config, options.seed)
        use_own_operations(model, base.role)
        self.adapters, self.model = Adapters(model, config), ResponseModel(model)
        self._parameters = dict(self.adapters.own(model.named_parameters()))  # by name in an adapter file
        for parameter in self._parameters.values():
            parameter.data = parameter.data.float()
        self._optimizer = adamw([{"params": list(self._parameters.values())}], TrainingArguments())
        self.lacks_a_pass = False  # a backward pass since the last step has failed

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
        total = 0.0
        for number, batch in enumerate(_micro_batches(data, self.base.role.use_remove_padding)):
            if number:
                yield
            with torch.set_grad_enabled(backward):  # Not around the yield: it holds for the whole thread.
                own = self._log_probs(batch)
                sum_of_losses = loss.sum(own, batch, numbers)
            if backward:
                sum_of_losses.backward()
            total += float(sum_of_losses.detach())
            log_probs += [one.detach().cpu() for one in own]
        return log_probs, {"loss:sum": total}

    def _log_probs(self, batch: Sequence[Datum]) -> list[Tensor]:
        lengths = [len(datum.tokens) for datum in batch]
        # A column more, for the target of the last token: layouts leave out what predicts nothing.
        ids = nn.utils.rnn.pad_sequence([pad(datum.tokens, (0, 1)) for datum in batch], batch_first=True)
        columns = torch.arange(ids.shape[1])
        asked = (columns > 0) & (columns <= torch.tensor(lengths)[:, None])
        layout = (packed_layout if self.base.role.use_remove_padding else row_layout)(ids, asked)
        # Several targets a position: as many columns as the datum with the most has, the others' filled up with id 0.
        tables = [datum.inputs[TARGETS].view(length, -1) for datum, length in zip(batch, lengths, strict=True)]
        width = max(table.shape[1] for table in tables)
        targets = torch.cat([pad(table, (0, width - table.shape[1])) for table in tables])
        layout = on_device(replace(layout, targets=targets), self.base.device)
        own = self.model(layout, (Output.LOG_PROBS,))[Output.LOG_PROBS].split(lengths)
        return [
            found[:, : table.shape[1]].reshape(datum.inputs[TARGETS].shape)
            for found, table, datum in zip(own, tables, batch, strict=True)
        ]

    def optim_step(self, options: AdamOptions) -> dict[str, float]:
        """AdamW on the sum of the gradients since the last step. Raises ``ValueError``: no gradient, or one that is not
        whole or not finite, which is dropped: the weights stay as they are."""
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        norm = float(global_norm(gradients, None, self.base.device))
        if not gradients and not self.lacks_a_pass:
            raise ValueError("optim_step: there is no gradient; call forward_backward first")
        if self.lacks_a_pass or not math.isfinite(norm):
            failed = "a forward_backward since the last step has failed"
            why = failed if self.lacks_a_pass else f"the norm of the gradient is {norm}"
            self._drop_gradients()
            raise ValueError(f"optim_step: {why}; the gradient is dropped, the weights are unchanged")
        clip_(gradients, 1.0, norm, options.grad_clip_norm or None)
        for group in self._optimizer.param_groups:
            group.update(lr=options.learning_rate, betas=(options.beta1, options.beta2))
            group.update(eps=options.eps, weight_decay=options.weight_decay)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"grad_norm": norm, "learning_rate": options.learning_rate}

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad()
        self.lacks_a_pass = False

    def weights(self) -> AdapterWeights:
        """A copy of the adapter."""
        tensors = {name: own.detach().cpu().clone() for name, own in self._parameters.items()}
        return AdapterWeights(tensors, LORA_ALPHA / self.options.rank)

    def save(self, folder: Path, base: str, optimizer: bool) -> None:
        """Write the adapter as peft reads it, and with ``optimizer`` the state of AdamW."""
        from safetensors.torch import save_file

        self.adapters.save(folder, self.weights().tensors, base)
        if optimizer:
            state = {
                f"{name}#{key}": value.cpu().clone()
                for name, own in self._parameters.items()
                for key, value in self._optimizer.state.get(own, {}).items()
            }
            save_file(state, folder / OPTIMIZER_FILE)

    @torch.no_grad()
    def load(self, folder: Path, optimizer: bool) -> None:
        """Take over what :meth:`save` has written; gradients are dropped. Raises ``ValueError``: an adapter of other
        layers or another rank, or no state of an optimizer."""
        from safetensors.torch import load_file

        tensors = load_file(folder / ADAPTER_FILE)
        shapes = {name: own.shape for name, own in self._parameters.items()}
        if {name: own.shape for name, own in tensors.items()} != shapes:
            raise ValueError("the checkpoint is of an adapter with another rank or other layers")
        if optimizer and not (folder / OPTIMIZER_FILE).exists():
            raise ValueError("the checkpoint has no state of the optimizer; save_state writes it")
        state = load_file(folder / OPTIMIZER_FILE) if optimizer else {}
        for name, own in self._parameters.items():
            own.copy_(tensors[name])
            held = {key: state.get(f"{name}#{key}") for key in _STATE}
            self._optimizer.state[own] = {key: value.to(own.device) for key, value in held.items() if value is not None}
        self._drop_gradients()


ADAPTER_FILE, OPTIMIZER_FILE = "adapter_model.safetensors", "optimizer.safetensors"


def _micro_batches(data: Sequence[Datum], packed: bool) -> list[list[Datum]]:
    batches: list[list[Datum]] = []
    longest = tokens = 0
    for datum in data:
        own = len(datum.tokens)
        longest, tokens = max(longest, own), tokens + own
        if not batches or (tokens if packed else longest * (len(batches[-1]) + 1)) > MICRO_BATCH_TOKENS:
            batches.append([])
            longest = tokens = own
        batches[-1].append(datum)
    return batches


TARGETS = "target_tokens"
_SAMPLED, _ADVANTAGES, _WEIGHTS = "logprobs", "advantages", "weights"
_LOW, _HIGH, _BETA = "clip_low_threshold", "clip_high_threshold", "beta"
_SAMPLES = (TARGETS, _SAMPLED, _ADVANTAGES)
_CLIPPED = (_SAMPLES, (_LOW, _HIGH), (_LOW, _HIGH))
_DEFAULTS = {_LOW: 0.8, _HIGH: 1.2, _BETA: 0.05}


@dataclass(frozen=True)
class Loss:
    """A policy loss, its options, and what the SDK gives it."""

    function: PolicyLossFunction
    settings: Callable[..., Any]  # from the values of `options`, (N, 1) each, to the options of `function`
    needs: tuple[str, ...] = _SAMPLES  # tensors that each datum must have
    takes: tuple[str, ...] = ()  # tensors that a datum may have, in place of the options of these names
    options: tuple[str, ...] = ()

    def sum(self, log_probs: Sequence[Tensor], data: Sequence[Datum], options: Mapping[str, float]) -> Tensor:
        """The loss of data that :func:`check_datum` has checked, from the log-probs of their targets."""
        own = torch.cat([one.flatten() for one in log_probs])[:, None]

        def column(key: str) -> Tensor:
            default = options.get(key, _DEFAULTS.get(key, 0.0))
            parts = [
                datum.inputs[key].flatten() if key in datum.inputs else torch.full((one.numel(),), default)
                for datum, one in zip(data, log_probs, strict=True)
            ]
            return torch.cat(parts)[:, None].to(own.device)

        inputs = LossInputs(
            log_probs=own,
            advantages=column(_ADVANTAGES if _ADVANTAGES in self.needs else _WEIGHTS),
            mask=torch.ones_like(own, dtype=torch.bool),
            old_log_probs=column(_SAMPLED) if _SAMPLED in self.needs else None,
        )
        return self.function(inputs, self.settings(*map(column, self.options)), MetricBuilder()).sum()


LOSSES = {
    "cross_entropy": Loss(policy_losses.vanilla, NoOptions, (TARGETS, _WEIGHTS)),
    "importance_sampling": Loss(policy_losses.ppo, lambda: PpoOptions(clip=math.inf)),
    "ppo": Loss(policy_losses.ppo, lambda low, high: PpoOptions(clip_low=1 - low, clip_high=high - 1), *_CLIPPED),
    "cispo": Loss(
        policy_losses.cispo, lambda low, high: CispoOptions(epsilon_low=1 - low, epsilon_high=high - 1), *_CLIPPED
    ),
    "dro": Loss(policy_losses.kimi15, lambda beta: Kimi15Options(tau=beta), options=(_BETA,)),
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


MAX_TARGETS = 1024  # targets of a position: the columns of all data of a micro-batch are as many as those of the widest


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
