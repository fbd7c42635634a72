"""Proof that a reloaded vLLM model holds the tensors that were sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.models.utils import is_pp_missing_parameter

from roll.weight_sync.encoding import tensor_checksum

logger = logging.getLogger(__name__)

_ROWS = 8192  # rows of a matrix that are taken to float32 at a time
_PROBE_SEED = 1
_MASK = (1 << 64) - 1


def quieten() -> None:
    """vLLM warns of every layer without tensors of its own, at each update; what arrived is compared by name."""
    logging.getLogger("vllm").setLevel(logging.WARNING)
    logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)


@dataclass(frozen=True)
class _Held:
    """Place of a rank's part of a tensor of the checkpoint."""

    layer: Any
    parameter_name: str
    checksum: int
    """Checksum of the tensor as sent, if the part was right."""

    @property
    def key(self) -> tuple[int, str]:
        return id(self.layer), self.parameter_name


class ReloadVerifier:
    """Watches layer-by-layer reloads of ``model`` and compares what arrives in the layers with what was sent.

    The checksum of a tensor is that of the model's own parameter (its part of it, where the model fuses several). A
    rank of several holds a part of the tensor, and an engine of another dtype converted values: where these are, bit
    for bit, that part of the tensor sent, or what it converts to, the checksum is that of the tensor sent.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._held: dict[str, _Held] = {}
        self._as_loaded: dict[tuple[int, str], int] = {}
        """Checksums of parameters as they are computed with."""
        self._received: dict[str, int] = {}
        """Checksums of tensors that cannot be found again."""
        self._probes: dict[int, Probe] = {}
        """Probes of the packed layers, by identity."""
        self._sent: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        self._checksums: dict[str, int] = {}
        self._processed: set[int] = set()
        self._watched: list[Any] = []

    def start(self) -> None:
        """A reload begins."""
        self._checksums, self._processed = {}, set()
        for layer in self._model.modules():
            method = getattr(layer, "quant_method", None)
            if hasattr(method, "process_weights_after_loading") and method not in self._watched:
                self._watch(method)

    def expect(self, name: str, tensor: torch.Tensor) -> None:
        """This very tensor object is about to be loaded."""
        self._sent[name] = tensor
        self._names[id(tensor)] = name

    def _watch(self, method: Any) -> None:
        """Look at the layers of ``method`` when they are loaded and before, on a CPU, they are packed."""
        process: Callable[[Any], None] = method.process_weights_after_loading

        def process_watched(layer: Any) -> None:
            self._compare_loaded(layer)
            probe = Probe.of(layer.weight) if is_packed(layer) else None
            packed_before = getattr(method, "moe_kernel", None)
            process(layer)
            if packed_before is not None:
                pack_experts(layer, packed_before)
            self._processed.add(id(layer))
            if probe is not None:
                check_packing(layer, probe)
                self._probes[id(layer)] = probe

        method.process_weights_after_loading = process_watched
        self._watched.append(method)

    def _compare_loaded(self, layer: Any) -> None:
        for parameter_name, bound in get_layerwise_info(layer).loaded_weights:
            arguments = bound.arguments
            name = self._names.get(id(arguments.get("loaded_weight")))
            if name is None:
                continue
            if "expert_id" in arguments:
                self._compare_expert(name, layer, parameter_name, arguments["shard_id"], arguments["expert_id"])
            else:
                self._compare(name, layer, parameter_name, arguments.get("loaded_shard_id"))

    def _compare_expert(self, name: str, layer: Any, parameter_name: str, shard: str, expert: int) -> None:
        """One matrix of one expert, of which another rank may have all or a part."""
        local = layer._map_global_expert_id_to_local_expert_id(expert)
        sent = self._sent.pop(name)
        del self._names[id(sent)]
        if local < 0:
            return
        held = expert_part(getattr(layer, parameter_name), local, shard)
        self._note(name, layer, parameter_name, sent, held)

    def _compare(self, name: str, layer: Any, parameter_name: str, shard: Any = None) -> None:
        sent = self._sent.pop(name)
        del self._names[id(sent)]
        self._note(
            name, layer, parameter_name, sent, held_part(layer, getattr(layer, parameter_name), shard, len(sent))
        )

    def _note(self, name: str, layer: Any, parameter_name: str, sent: torch.Tensor, held: torch.Tensor) -> None:
        checksum = tensor_checksum(held)
        meant = meant_part(layer, sent, held).to(held.dtype)
        if meant is not sent and checksum == tensor_checksum(meant):
            checksum = tensor_checksum(sent)
        self._held[name] = _Held(layer, parameter_name, checksum)
        self._checksums[name] = checksum

    def finish(self, remember: bool = False) -> dict[str, int]:
        """The checksums of the tensors that the model holds; to be called when the reload is over. A stage of several
        leaves out those of the others.

        Args:
            remember: :meth:`held` will be asked.
        """
        for method in self._watched:
            del method.process_weights_after_loading
        self._watched.clear()
        self._pack_shared()
        parameters = dict(self._model.named_parameters())
        for name in list(self._sent):
            if is_pp_missing_parameter(name, self._model):
                del self._names[id(self._sent.pop(name))]
            elif name in parameters and parameters[name].shape == self._sent[name].shape:
                path, _, parameter_name = name.rpartition(".")
                self._compare(name, self._model.get_submodule(path), parameter_name)
        if self._sent:
            # Renamed or rearranged by the model's own loader, so there is nothing to compare them with.
            logger.warning(
                "%d tensors (%s, ...) cannot be found again in vLLM's model: they are verified as received only",
                len(self._sent),
                next(iter(self._sent)),
            )
        received = {name: tensor_checksum(tensor) for name, tensor in self._sent.items()}
        self._sent.clear()
        self._names.clear()
        self._received |= received
        if remember:
            self._as_loaded = {held.key: self._now(held) for held in self._held.values()}
        return self._checksums | received

    def _now(self, held: _Held) -> int:
        """State of what is computed with: 1 for a packed layer that is right, a checksum for another parameter."""
        if held.parameter_name == "weight" and id(held.layer) in self._probes:
            return int(computes_with(held.layer, self._probes[id(held.layer)]))
        return tensor_checksum(getattr(held.layer, held.parameter_name))

    def held(self, names: Iterable[str]) -> dict[str, int]:
        """The checksums of tensors of earlier reloads, as sent, where the rank computes with what it did then."""
        known = {name: self._held[name] for name in names if name in self._held}
        now = {held.key: self._now(held) for held in known.values()}
        found = {
            name: held.checksum if now[held.key] == self._as_loaded[held.key] else ~held.checksum & _MASK
            for name, held in known.items()
        }
        return found | {name: self._received[name] for name in names if name in self._received}

    def _pack_shared(self) -> None:
        """Pack again what got new values through another layer: an output matrix tied to the embeddings has no tensor
        of its own in the checkpoint, so the reload leaves its packed copy as it was."""
        layer: Any
        for layer in self._model.modules():
            if is_packed(layer) and layer.weight.numel() and id(layer) not in self._processed:
                layer.quant_method.process_weights_after_loading(layer)
                check_packing(layer, Probe.of(layer.weight))


def is_packed(layer: Any) -> bool:
    """True for a matrix that is multiplied in a packed form on a CPU."""
    # Its own attribute: what vLLM wraps around a layer for LoRA passes on all of the layer's.
    return "cpu_linear" in vars(layer) and getattr(layer, "weight", None) is not None and layer.weight.ndim == 2


def pack_experts(layer: Any, kernel: Any) -> None:
    """Pack reloaded experts for a CPU's kernel. vLLM 0.32 does so when the kernel is made, at the first load only, and
    after a reload would read the plain matrices as packed ones: other numbers, without an error."""
    if layer.w13_weight.device.type == "cpu":
        kernel.fused_experts.process_weights_after_loading(layer)


@dataclass(frozen=True)
class Probe:
    """One product of a matrix (out, in), computed the plain way; float32."""

    vector: torch.Tensor
    """Random signs, (in,)."""
    product: torch.Tensor
    """(out,)."""
    magnitude: torch.Tensor
    """Sum of the magnitudes of each row, (out,): what rounding is relative to."""

    @staticmethod
    def of(weight: torch.Tensor) -> Probe:
        generator = torch.Generator().manual_seed(_PROBE_SEED)
        vector = torch.randint(0, 2, (weight.shape[1],), generator=generator).mul_(2).sub_(1).float()
        products, magnitudes = [], []
        for rows in weight.data.split(_ROWS):
            rows = rows.float()
            products.append(rows @ vector)
            magnitudes.append(rows.abs().sum(1))
        return Probe(vector, torch.cat(products), torch.cat(magnitudes))


def check_packing(layer: Any, probe: Probe) -> None:
    """Compare the product that a packed layer computes with that of its plain matrix.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    if not computes_with(layer, probe):
        raise RuntimeError(f"vLLM's {type(layer).__name__} does not compute with the weights it was loaded with")


def computes_with(layer: Any, probe: Probe) -> bool:
    """True if a packed layer computes the product that its plain matrix had, but for rounding."""
    dtype = layer.weight.dtype
    computed = layer.cpu_linear(probe.vector.to(dtype)[None], layer.weight, None)[0].float()
    # Sums are float32 in any order, and the result is rounded once to its dtype.
    allowed = probe.product.abs() * torch.finfo(dtype).eps + probe.magnitude * 1e-5
    # Rows that are not finite say nothing: weights may be so, and rows that nothing was sent for are as memory was.
    agrees = ((computed - probe.product).abs() <= allowed) | ~probe.product.isfinite()
    return bool(agrees.all())


def held_part(layer: Any, parameter: torch.Tensor, shard: Any, num_rows: int) -> torch.Tensor:
    """The part of a layer's parameter that one tensor of the checkpoint went to, as far as this rank has any of it.

    Args:
        shard: which of a fused parameter's tensors: ``q``, ``k``, ``v`` or an index; None: the parameter is not fused.
        num_rows: of the tensor.
    """
    if hasattr(layer, "shard_indices"):  # a vocabulary matrix, padded to more rows
        own = layer.shard_indices
        return parameter.data[: own.org_vocab_end_index - own.org_vocab_start_index]
    if shard is None:
        return parameter.data[:num_rows]
    if isinstance(shard, str):
        begin, size = layer._get_shard_offset_mapping(shard), layer._get_shard_size_mapping(shard)
    else:
        sizes = layer.output_partition_sizes
        begin, size = sum(sizes[:shard]), sizes[shard]
    return parameter.data[begin : begin + size]


def expert_part(parameter: torch.Tensor, expert: int, shard: str) -> torch.Tensor:
    """The part of experts' fused parameter (experts, rows, columns) that one matrix of the checkpoint went to.

    Args:
        shard: ``w1`` (gate) and ``w3`` (up) are above one another, ``w2`` (down) is by itself.
    """
    whole = parameter.data[expert]
    if shard == "w2":
        return whole
    rows = len(whole) // 2
    return whole[:rows] if shard == "w1" else whole[rows:]


def meant_part(layer: Any, whole: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that belongs into ``held``; the whole where sizes do not tell, which is then no match."""
    if hasattr(layer, "shard_indices"):
        own = layer.shard_indices
        return whole[own.org_vocab_start_index : own.org_vocab_end_index]
    rank, size = getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)
    if held.ndim != whole.ndim:
        return whole
    for dim, (all_of_it, own) in enumerate(zip(whole.shape, held.shape, strict=True)):
        # Ranks share heads of keys and values that are fewer than they.
        sharing = own * size // all_of_it if all_of_it else 0
        if own != all_of_it and sharing and rank // sharing * own + own <= all_of_it:
            whole = whole.narrow(dim, rank // sharing * own, own)
    return whole
