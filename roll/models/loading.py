"""Tensors of a model folder read one by one, and models built on the ``meta`` device of which each rank reads its rows.

``from_pretrained`` puts the whole model into the memory of every process.  Here a model is built on torch's ``meta``
device, then sharded, and then each tensor's local rows are read from the safetensors files straight into their place.
The result equals ``from_pretrained``, bit by bit.

This works only for folders whose tensors are the model's parameters, name by name and shape by shape; for all others
:func:`build_on_meta` gives None, and every rank loads the whole model.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roll.config.model_files import model_config, model_folder
from roll.config.roles import ModelArguments
from roll.config.weight_files import file_of_each_tensor
from roll.models.build import (
    OUTPUT_MATRIX,
    VALUE_HEAD,
    HeadName,
    attention_implementation,
    checked_config,
    empty_model,
    freeze_modules,
    local_folder,
    new_head,
)
from roll.models.expert_parallel import own_rows
from roll.models.stored import StoredLayout, incomplete, other_names, use_names_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class TensorFiles:
    """The tensors of a model folder or of a model on the Hugging Face hub."""

    def __init__(self, name_or_path: str) -> None:
        """
        Raises:
            OSError: no such folder, or one without safetensors files.
        """
        self.folder = local_folder(name_or_path)
        try:
            self._files = file_of_each_tensor(self.folder)
        except ValueError as error:
            raise OSError(str(error)) from error
        if not self._files:
            raise OSError(f"{self.folder}: no model.safetensors; save the model with save_pretrained in this format")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors, by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        # File by file: opening one for each tensor reads its header as often.
        for path in set(self._files.values()):
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return {name: shapes[name] for name in self._files}

    def fingerprint(self) -> str:
        """Return a hash of names, shapes and two rows of every tensor: it tells models apart without reading them."""
        digest = hashlib.blake2b(digest_size=16)
        samples: dict[str, bytes] = {}
        for path in set(self._files.values()):
            names = [name for name, own in self._files.items() if own == path]
            with safe_open(path, framework="pt") as file:
                samples |= {name: _sample(file.get_slice(name)) for name in names}
        for name in sorted(samples):
            digest.update(name.encode())
            digest.update(samples[name])
        return digest.hexdigest()

    def read_region(self, name: str, rows: slice, columns: slice = slice(None)) -> torch.Tensor:
        """``tensor[rows, columns]`` on the CPU, in the type of the file; nothing else is read.

        Raises:
            ValueError: the folder lacks the tensor.
        """
        if name not in self._files:
            raise ValueError(f"model_args.model_name_or_path: {self.folder} has no tensor {name}")
        with safe_open(self._files[name], framework="pt") as file:
            if rows == columns == slice(None):
                return file.get_tensor(name)
            held = file.get_slice(name)
            return held[rows] if columns == slice(None) else held[rows, columns]


def _sample(tensor: Any) -> bytes:
    """Shape, and the first and the middle row of a tensor in a file (of a vector: some of its elements)."""
    shape = list(tensor.get_shape())
    if not shape or not all(shape):
        return str(shape).encode()
    count = 1 if len(shape) > 1 else 1024
    rows = [tensor[start : start + count] for start in (0, shape[0] // 2)]
    return str(shape).encode() + b"".join(row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows)


def fingerprint(name_or_path: str | None) -> str | None:
    """:meth:`TensorFiles.fingerprint` of a model; None where it has no safetensors files."""
    try:
        return TensorFiles(str(name_or_path)).fingerprint()
    except OSError:
        return None


def content_identity(name_or_path: str | None) -> dict[str, str | None]:
    """Hashes of a model's weights and of its ``config.json``, whatever its folder is called; None: it is not there.

    ``pytorch_model*.bin`` is read whole, where there are no safetensors.  The configuration's notes on where and with
    what it was saved do not count.
    """
    folder, config = model_folder(name_or_path), model_config(name_or_path)
    weights = fingerprint(name_or_path)
    if weights is None and folder is not None:
        weights = _digest_of(folder.glob("pytorch_model*.bin"))
    counted = {key: value for key, value in (config or {}).items() if key not in _NOTES}
    text = json.dumps(counted, sort_keys=True)
    return {
        "weights": weights,
        "config": None if config is None else hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
    }


_NOTES = ("_name_or_path", "transformers_version")


def adapter_fingerprint(name_or_path: str | None) -> str | None:
    """A hash of an adapter's files; the name itself where it is not on this machine, None for no adapter."""
    if name_or_path is None or not Path(name_or_path).is_dir():
        return name_or_path
    return _digest_of(Path(name_or_path).glob("adapter_*"))


def _digest_of(paths: Iterable[Path]) -> str | None:
    """A hash of the names and the whole contents of files; None where there are none."""
    digest, found = hashlib.blake2b(digest_size=16), sorted(paths)
    for path in found:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest() if found else None


@dataclass(frozen=True)
class MetaModel:
    """A language model whose parameters are on ``meta``, and the files that hold them."""

    language_model: PreTrainedModel
    files: TensorFiles
    layout: StoredLayout
    head: HeadName
    new_head: frozenset[str]
    """Parameters of a head that the files do not have (:func:`~roll.models.build.new_head`)."""
    seed: int

    @torch.no_grad()
    def read(
        self, root: nn.Module, device: torch.device, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> None:
        """Allocate the parameters and buffers of ``root`` on ``device`` and read them.

        Args:
            root: the language model, or a module around it; its parameters may be sharded (``fully_shard``) by rows.
            whole: a parameter as a shard of the stored tensor, where that is more than the module knows of.
        """
        # Buffers that no file has (rotary frequencies) are computed already; to_empty() would drop their values.
        computed = {name: buffer for name, buffer in root.named_buffers() if not buffer.is_meta}
        root.to_empty(device=device)
        if not any(isinstance(parameter, DTensor) for parameter in root.parameters()):
            # to_empty() replaces parameters, a tied one once for each of its names: tie them again. DTensors it keeps.
            self.language_model.tie_weights()
        for name, buffer in root.named_buffers():
            if name in computed:
                buffer.copy_(computed[name])
        for name, part in persistent_tensors(self.language_model).items():
            self.fill(name, whole(part))

    @torch.no_grad()
    def fill(self, name: str, tensor: Tensor) -> None:
        """Read a stored tensor (of a sharded one this rank's rows) into its place."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if name in self.new_head:
            local.copy_(new_head(self.head, tensor, self.seed)[own_rows(tensor)])
        elif local.numel():
            self._read_run(name, local, own_rows(tensor), tensor.shape)

    def elements(self, name: str, shape: torch.Size, begin: int, end: int) -> Tensor:
        """float32 (end - begin,): elements of the flattened tensor of this shape; only their rows are read."""
        width = shape[1:].numel()
        first, last = begin // width, -(-end // width)
        if name in self.new_head:
            rows = new_head(self.head, torch.empty(shape), self.seed)[first:last]
        else:
            rows = torch.empty(last - first, *shape[1:])
            self._read_run(name, rows, slice(first, last), shape)
        return rows.flatten()[begin - first * width : end - first * width]

    def _read_run(self, name: str, local: Tensor, own: slice, shape: torch.Size) -> None:
        """Read the rows ``own`` of a tensor of this whole shape: of fused experts, from the matrices of those among
        them."""
        parts = self.layout.parts(name)
        if len(parts) == 1:
            local.copy_(self.files.read_region(parts[0].name, own))
            return
        flat = local.view(-1, local.shape[-1])
        begin = (own.start or 0) * shape[1]
        for part in parts:
            low, high = max(begin, part.begin), min(begin + len(flat), part.end)
            if low < high:
                rows = slice(low - part.begin, high - part.begin)
                flat[low - begin : high - begin] = self.files.read_region(part.name, rows)


class ModuleReader:
    """Reads the tensors of a model on ``meta`` module by module, for backends that shard each module before the next
    one is read, so that a rank never holds the whole model. Tied parameters stay tied."""

    def __init__(self, meta: MetaModel, device: torch.device) -> None:
        self._meta, self._device = meta, device
        self._paths = {id(module): name for name, module in meta.language_model.named_modules()}
        # By id(), so the meta parameters are kept alive: a freed object's id may be given to another.
        self._on_meta = dict(meta.language_model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._on_meta.items()}
        self._made: dict[int, nn.Parameter] = {}

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        """Read the parameters and buffers that ``module`` has itself, whole."""
        path = self._paths.get(id(module))
        for name, parameter in [] if path is None else list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            if id(parameter) not in self._made:
                tensor = torch.empty_like(parameter, device=self._device)
                self._meta.fill(self._names[id(parameter)], tensor)
                self._made[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            setattr(module, name, self._made[id(parameter)])
        for name, buffer in [] if path is None else list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                tensor = torch.empty_like(buffer, device=self._device)
                self._meta.fill(f"{path}.{name}" if path else name, tensor)
                setattr(module, name, tensor)


def build_on_meta(
    args: ModelArguments, head: HeadName, dtype: torch.dtype = torch.float32, seed: int = 0
) -> MetaModel | None:
    """:func:`~roll.models.build.build_model`, with the weights still to be read.

    Returns:
        None where ``from_pretrained`` has more to do than copy tensors (the log says what).

    Raises: as :func:`~roll.models.build.build_model`.
    """
    config = checked_config(args, head)
    obstacle: str | None = None
    if args.lora_target or args.adapter_name_or_path:
        obstacle = "adapters are added to a model that is there"
    if args.trust_remote_code and getattr(config, "auto_map", None):
        obstacle = "the model has code of its own"
    try:
        files = TensorFiles(str(args.model_name_or_path))
    except OSError:
        obstacle = "there are no safetensors files"
    if obstacle is None:
        model = empty_model(config, head, dtype=dtype, attn_implementation=attention_implementation(args, config))
        use_names_of(model, files)
        stored, found = persistent_tensors(model), files.shapes()
        # For a critic made of a reward model, the bias of the head.
        in_head = [name for name in stored if name.startswith(VALUE_HEAD) and head != "causal_lm"]
        not_stored = frozenset(name for name in in_head if name not in found)
        layout = _layout(model, stored)
        obstacle = _obstacle(model, dtype, found, not_stored, layout)
    if obstacle is not None:
        logger.info("%s is loaded whole by every rank: %s", args.model_name_or_path, obstacle)
        return None
    assert layout is not None
    unused = found.keys() - layout.stored_shapes().keys() - (set() if head == "causal_lm" else {OUTPUT_MATRIX})
    unused -= set(other_names(model, unused))
    problem = incomplete(model, (), unused, (), bool(args.model_config_kwargs))
    if problem is not None:
        raise ValueError(f"model_args.model_name_or_path: {args.model_name_or_path} {problem}")
    if unused:
        logger.warning("%s: the model has no use for %s", args.model_name_or_path, ", ".join(sorted(unused)))
    _compute_buffers(model)
    if model.can_generate():
        from transformers import GenerationConfig

        try:
            model.generation_config = GenerationConfig.from_pretrained(str(args.model_name_or_path))
        except OSError:
            logger.debug("%s has no generation configuration: it follows from the model's", args.model_name_or_path)
    freeze_modules(model, args.freeze_module_prefix)
    return MetaModel(model.eval(), files, layout, head, not_stored, seed)


def _layout(model: PreTrainedModel, stored: Mapping[str, Tensor]) -> StoredLayout | None:
    """None where stored tensors are not rows of those that the model computes with."""
    try:
        layout = StoredLayout(model, {name: tensor.shape for name, tensor in stored.items()})
    except ValueError:
        return None
    split = [parts for name in stored if len(parts := layout.parts(name)) > 1]
    return None if layout.transposes or any(len(part.shape) != 2 for parts in split for part in parts) else layout


def _obstacle(
    model: PreTrainedModel,
    dtype: torch.dtype,
    found: Mapping[str, tuple[int, ...]],
    not_stored: frozenset[str],
    layout: StoredLayout | None,
) -> str | None:
    """Why tensors cannot be copied as they are stored (shapes ``found``, those of ``not_stored`` need not be there)."""
    if getattr(model.config, "quantization_config", None) is not None:
        return "its weights are quantized"
    if layout is None:
        return f"a {model.config.model_type} model is stored in another form than it computes with"
    if model._get_dtype_plan(dtype):
        return f"parts of it must stay in float32 under {dtype}"
    stored = persistent_tensors(model)
    twice = (model.state_dict().keys() - stored.keys()) & found.keys()
    if twice:
        return f"tied tensors are stored twice ({', '.join(sorted(twice))})"
    for part in (part for name in stored if name not in not_stored for part in layout.parts(name)):
        if part.name not in found:
            return f"the files lack {part.name}"
        if found[part.name] != part.shape:
            return f"{part.name} is {found[part.name]} in the files and {part.shape} in the model"
    return None


def persistent_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters, tied ones once, then persistent buffers (not those that every model computes itself, such as rotary
    frequencies)."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return dict(model.named_parameters()) | buffers


def _compute_buffers(model: PreTrainedModel) -> None:
    """Give values to what is in no file, such as rotary frequencies: the model class computes them."""
    stored = model.state_dict().keys()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if (f"{prefix}.{name}" if prefix else name) not in stored:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
    # Parameters are still on meta, where initialisation does nothing.
    model.initialize_weights()
