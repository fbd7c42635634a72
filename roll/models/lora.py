"""LoRA (Hu et al., 2021, arXiv:2106.09685): the base is frozen, each target W gets a trained update of low rank.

    y = W x + scaling * B (A x),   A: (r, in), B: (out, r), scaling = alpha / r (alpha / sqrt(r) with rsLoRA)

The fused experts of a sparse layer are tensors W: (E, out, in), adapted through peft's ``target_parameters``: each
expert has A and B of its own, held as A: (E r, in), expert by expert, and B: (out, r E), in whose columns the expert is
the inner index.

peft puts the adapters into a Hugging Face model in place, so its users see the same model; only the names of adapted
modules change.  :class:`Adapters` reverses this: the weights of the model without adapters that computes the same
(``W + scaling * B A``), under the names that the base has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.config.installation import install_command
from roll.config.lora import uses_lora
from roll.models.expert_parallel import DispatchedExperts, substituted
from roll.models.lora_targets import EXPERT_TENSORS, loaded_config, new_config

if TYPE_CHECKING:
    from types import ModuleType

    from peft import LoraConfig
    from peft.tuners.lora.layer import ParamWrapper
    from transformers import PreTrainedModel

    from roll.config.roles import ModelArguments

ADAPTER = "default"
"""peft's name for the one adapter of a model; part of its parameters' names."""

# Suffixes of a weight's name for the matrices A and B of its adapter, where they are sent separately.
DOWN_PART, UP_PART = "#lora_A", "#lora_B"

_WHOLE = f".modules_to_save.{ADAPTER}."
_ORIGINAL = ".original_module."
_LORA_A, _LORA_B = f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}."
_BASES = re.compile(r"(\.base_layer)+\.")  # peft wraps a module once for each of its tensors
_TENSOR = "parameter_name"  # of peft's modules that adapt a tensor
_FILE_PREFIX = "base_model.model."


@dataclass(frozen=True)
class MergedWeight:
    """A tensor of the model without adapters, and the tensors here that it is made of: itself, or W, A and B."""

    name: str
    parts: tuple[Tensor, ...]
    scaling: float = 1.0

    def separate(self) -> list[MergedWeight]:
        """Its parts as tensors of their own: W under its name, then A and B."""
        assert len(self.parts) == 1 or self.parts[1].ndim == self.parts[0].ndim, "experts are sent merged"
        suffixes = ("", DOWN_PART, UP_PART)
        return [MergedWeight(self.name + suffix, (part,)) for suffix, part in zip(suffixes, self.parts, strict=False)]


def adapter_names(weight: str) -> tuple[str, str]:
    """The names in the model of A and B of a weight's adapter: ``...q_proj.weight`` or ``...experts.down_proj``."""
    path, _, last = weight.rpartition(".")
    if last != "weight":
        path += ".base_layer" * (len(EXPERT_TENSORS) - 1 - EXPERT_TENSORS.index(last))
    return f"{path}{_LORA_A}weight", f"{path}{_LORA_B}weight"


def is_adapter(name: str) -> bool:
    """True for A and B."""
    return _LORA_A in name or _LORA_B in name


def is_trained_whole(name: str) -> bool:
    """True for a parameter of the copy of a module that is trained in full alongside adapters."""
    return _WHOLE in name


def base_name(name: str) -> str:
    """The name that the model without adapters has for a parameter that is not A or B."""
    return _BASES.sub(".", name).replace(_WHOLE, ".")


def source_name(name: str) -> str:
    """:func:`base_name`, or the name itself of A and B, which the base does not have."""
    return name if is_adapter(name) else base_name(name)


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """``W + scaling * B A``, computed in float32, in the type of W; of each expert where W is (E, out, in)."""
    if weight.ndim == 3:
        # B (E, out, r) and A (E, r, in) of each expert.
        ups = up.float().unflatten(1, (-1, len(weight))).permute(2, 0, 1)
        downs = down.float().unflatten(0, (len(weight), -1))
        return torch.baddbmm(weight.float(), ups, downs, alpha=scaling).to(weight.dtype)
    # Rounded once: in bfloat16, B A and the sum would each be rounded, and small updates of large weights lost.
    return torch.addmm(weight.float(), up.float(), down.float(), alpha=scaling).to(weight.dtype)


def merged_rows(rows: Tensor, first: int, shape: Sequence[int], down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """The rows ``first`` and following of :func:`merged_weight`'s W, all of one expert.

    Args:
        rows: (n, in), of W as (E * out, in).
        shape: of W, (E, out, in).
    """
    expert, begin = divmod(first, shape[1])
    own_up = up[begin : begin + len(rows)].unflatten(1, (-1, shape[0]))[..., expert]
    own_down = down.unflatten(0, (shape[0], -1))[expert]
    return torch.addmm(rows.float(), own_up.float(), own_down.float(), alpha=scaling).to(rows.dtype)


class Adapters:
    """The adapters of one model."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig) -> None:
        self._config = config
        named = dict(model.named_modules())
        # Modules, not names: wrappers of a sharding backend change the names but not the objects.
        self._switches: list[Any] = [module for module in named.values() if hasattr(module, "disable_adapters")]
        adapting: dict[str, Any] = {path: module for path, module in named.items() if hasattr(module, "lora_A")}
        self.scalings = {
            base_name(f"{path}.{getattr(module, _TENSOR, 'weight')}"): module.scaling[ADAPTER]
            for path, module in adapting.items()
        }
        """The factor of ``B A`` for every adapted weight."""

    @property
    def adapt_experts(self) -> bool:
        """Tensors of fused experts are among the adapted weights."""
        return any(not weight.endswith(".weight") for weight in self.scalings)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute with the base model as it was loaded, in a block without gradients."""
        # peft's own switch also turns requires_grad off and on, which a backend that has sharded the parameters may
        # meet at the wrong moment; without gradients the flag is all that matters.
        for module in self._switches:
            module._disable_adapters = True
        try:
            yield
        finally:
            for module in self._switches:
                module._disable_adapters = False

    def merged(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[MergedWeight]:
        """The tensors of the model without adapters, in the order of ``named``: all tensors of this one.

        Adapters are merged; modules trained in full replace the originals.
        """
        tensors = dict(named)
        for name, tensor in tensors.items():
            if _ORIGINAL in name or is_adapter(name):
                continue
            weight = base_name(name)
            if weight in self.scalings:
                down, up = (tensors[part] for part in adapter_names(weight))
                yield MergedWeight(weight, (tensor, down, up), self.scalings[weight])
            else:
                yield MergedWeight(weight, (tensor,))

    def own(self, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """The tensors that an adapter file holds, under the names that peft gives them there."""
        return [(adapter_file_name(name), t) for name, t in named if is_adapter(name) or is_trained_whole(name)]

    def save(self, folder: Path, tensors: Mapping[str, Tensor], base: str) -> None:
        """Write ``adapter_config.json`` and ``adapter_model.safetensors``, as ``PeftModel.from_pretrained`` reads them.

        Args:
            tensors: what :meth:`own` names, whole, on the CPU.
            base: the model that the adapter belongs to.
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self._config.base_model_name_or_path = base
        # As PeftModel.save_pretrained does: the file says inference, while this model goes on training.
        trains, self._config.inference_mode = self._config.inference_mode, True
        self._config.save_pretrained(str(folder))
        self._config.inference_mode = trains


def adapter_file_name(name: str) -> str:
    """The name that an adapter's file has for a tensor of the adapted model."""
    return f"{_FILE_PREFIX}{name.replace(_WHOLE, '.').replace(f'.{ADAPTER}.', '.')}"


def add_adapters(model: PreTrainedModel, args: ModelArguments, seed: int, dtype: torch.dtype) -> Adapters:
    """Freeze ``model`` and put adapters into it, in place: new ones, or those of ``adapter_name_or_path``.

    A new adapter changes nothing (B is 0, A is random).  A value model's head is trained in full.

    Args:
        seed: of A, the same on every rank.
        dtype: of everything that is trained.

    Raises:
        ValueError: a target that no module of this model has, or that cannot be adapted; an adapter that does not fit.
        ImportError: peft is not installed; the message names the extra.
    """
    assert uses_lora(args)
    try:
        import peft
    except ImportError as error:
        raise ImportError(f"model_args.lora_target needs peft: {install_command('peft')}") from error
    config = loaded_config(peft, model, args) if args.adapter_name_or_path else new_config(peft, model, args)
    inject(model, config, seed)
    # peft's own way to adapt a tensor does not survive sharding; see the function.
    wrappers: list[Any] = [module for module in model.modules() if hasattr(module, _TENSOR)]
    for wrapper in wrappers:
        wrapper._activate_lora = partial(_with_adapted_tensor, wrapper)
    if args.adapter_name_or_path:
        _load(peft, model, args.adapter_name_or_path)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return Adapters(model, config)


def inject(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Freeze ``model`` and put new adapters into it, in place."""
    from peft import inject_adapter_in_model

    # Every rank draws the same A, and then its own random numbers (seeded by rank) as if nothing had been drawn.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)


@contextmanager
def _with_adapted_tensor(wrapper: ParamWrapper, active: Sequence[str]) -> Iterator[None]:
    """Give the experts that ``wrapper`` wraps ``W + scaling B A`` under the name of W, inside the block.

    It replaces peft's parametrization, which writes to parameters and changes the module's class in every pass: FSDP1's
    parameters are views of a flat one and must not be written to.
    """
    name, experts = getattr(wrapper, _TENSOR), wrapper.get_base_layer()
    up, down, scaling = wrapper.get_delta_factors(ADAPTER)
    if isinstance(experts.forward, DispatchedExperts):
        with experts.forward.adapted(name, up, down, scaling):
            yield
        return
    with substituted(experts, name, torch.baddbmm(getattr(experts, name), up, down, alpha=scaling)):
        yield


def _load(peft: ModuleType, model: PreTrainedModel, path: str) -> None:
    """ValueError: tensors that the adapted model does not have, does not get, or has in another shape."""
    from peft.utils import load_peft_weights

    weights = {
        name.removeprefix(_FILE_PREFIX): tensor for name, tensor in load_peft_weights(path, device="cpu").items()
    }
    try:
        result = peft.set_peft_model_state_dict(model, weights)
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"model_args.adapter_name_or_path: {path} does not fit the model: {error}") from error
    missing = [name for name in result.missing_keys if is_adapter(name) or is_trained_whole(name)]
    wrong = [*result.unexpected_keys, *missing]
    if wrong:
        raise ValueError(
            f"model_args.adapter_name_or_path: {path} does not fit the model; {len(wrong)} tensors are missing on one "
            f"side, such as {wrong[0]}"
        )
