"""Tensors of a model as it computes with them, and as a model folder and inference engines name them.

transformers keeps the experts of a layer as two tensors (E, 2I, H) and (E, H, I); a folder, vLLM and SGLang have three
matrices for each expert, under names that depend on the family:

| live                                    | stored (Qwen, OLMoE, DeepSeek ...)        | stored (Mixtral)            |
|-----------------------------------------|-------------------------------------------|-----------------------------|
| ``mlp.experts.gate_up_proj[e]``, upper  | ``mlp.experts.e.gate_proj.weight``        | ``...experts.e.w1.weight``  |
| ``mlp.experts.gate_up_proj[e]``, lower  | ``mlp.experts.e.up_proj.weight``          | ``...experts.e.w3.weight``  |
| ``mlp.experts.down_proj[e]``            | ``mlp.experts.e.down_proj.weight``        | ``...experts.e.w2.weight``  |

Qwen3-VL-MoE is stored as it computes except for the order of the last two dimensions: (E, H, 2I) and (E, I, H); gpt-oss
exactly as it computes.  Their experts are sent to the engines as matrices too, ``mlp.experts.gate_up_proj[e]``.

The mapping follows transformers' own table: its conversion runs on tensors of row numbers, and its output shows which
rows of which live tensor each stored one is.  So a stored tensor is a view of a live one, in both directions, and
weights are sent and compared under stored names, which are the same for every trainer and every engine.

Some folders also hold a vision tower, where transformers has a class for the language model alone (Qwen3.5):
``config.json`` describes both parts, and the language model's tensors are named ``model.language_model.*``.  The rest
(the tower, layers that predict several tokens) is neither loaded nor trained.  What is written has the published form
again: the same names, the source's other tensors bit by bit, its configuration.

transformers fills a tensor that a folder lacks with random numbers and passes over one that the model has no use for,
with a warning each: :func:`incomplete` makes an error of the report of its loader, which knows the names of the files
of all families.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.config.model_files import VISION_FAMILIES
from roll.config.weight_files import how_to_unwrap

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Part:
    """A stored tensor: some rows of a live one, whose dimensions but the last are flattened into rows."""

    name: str
    begin: int
    end: int
    shape: tuple[int, ...]
    is_transposed: bool = False
    """It is a whole live tensor (E, rows, columns), stored as (E, columns, rows)."""

    def of(self, live: Tensor) -> Tensor:
        """A view."""
        if self.is_transposed:
            return live.transpose(1, 2)
        if tuple(live.shape) == self.shape:
            return live
        return live.view(-1, live.shape[-1])[self.begin : self.end].view(self.shape)


@dataclass(frozen=True)
class Stretch:
    """Consecutive stored tensors of a live one, as elements of it, flattened."""

    begin: int
    end: int
    parts: tuple[tuple[str, int, tuple[int, ...]], ...]
    """Name, first element and shape of each."""

    def of(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors, as views of the elements ``begin:end``."""
        for name, begin, shape in self.parts:
            first = begin - self.begin
            yield name, flat[first : first + torch.Size(shape).numel()].view(shape)


class StoredLayout:
    """The stored tensors of one model."""

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, Sequence[int]] | None = None) -> None:
        """
        Args:
            model: on any device; a model of remote code is stored as it computes.
            shapes: of its live tensors; by default of all parameters and persistent buffers.

        Raises:
            ValueError: a tensor is stored in another form than rows of the live one.
        """
        if shapes is None:
            shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        convert = _conversion(model)
        self._parts: dict[str, tuple[Part, ...]] = {}
        for name, shape in self._shapes.items():
            self._parts[name] = (Part(name, 0, 0, shape),) if convert is None else _parts(name, shape, convert)
        self._live = {part.name: (name, part) for name, parts in self._parts.items() for part in parts}

    @property
    def transposes(self) -> bool:
        """Some tensors are stored with the last two dimensions in another order."""
        return any(parts[0].is_transposed for parts in self._parts.values())

    def parts(self, name: str) -> tuple[Part, ...]:
        """The stored tensors of a live one, in the order of its rows; one that the model does not have is its own."""
        return self._parts.get(name) or (Part(name, 0, 0, ()),)

    def live_shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def stretches(self, name: str, most: int) -> list[Stretch]:
        """A live tensor of several stored ones as stretches of at most ``most`` elements; a larger stored tensor is one
        by itself."""
        columns, found = self._shapes[name][-1], list[list[Part]]([[]])
        for part in self._parts[name]:
            if found[-1] and (part.end - found[-1][0].begin) * columns > most:
                found.append([])
            found[-1].append(part)
        return [
            Stretch(
                run[0].begin * columns,
                run[-1].end * columns,
                tuple((part.name, part.begin * columns, part.shape) for part in run),
            )
            for run in found
        ]

    def split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors of a live one, as views."""
        parts = self._parts.get(name)
        if parts is None or (len(parts) == 1 and parts[0].shape == tuple(tensor.shape)):
            yield (name if parts is None else parts[0].name), tensor
            return
        yield from ((part.name, part.of(tensor)) for part in parts)

    def views(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all stored tensors of ``live``, as views: writing into them changes what the model computes."""
        return {name: view for key, tensor in live.items() for name, view in self.split(key, tensor)}

    def live_name(self, stored: str) -> str:
        """Return the name of the live tensor that holds a stored one."""
        return self._live[stored][0] if stored in self._live else stored

    def joined(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The live tensors of ``stored``, which holds all parts of each."""
        live: dict[str, Tensor] = {}
        for name in dict.fromkeys(map(self.live_name, stored)):
            parts = self.parts(name)
            if len(parts) == 1:
                whole = stored[parts[0].name]
                live[name] = whole.transpose(1, 2).contiguous() if parts[0].is_transposed else whole
                continue
            rows = torch.cat([stored[part.name].reshape(part.end - part.begin, -1) for part in parts])
            live[name] = rows.view(self._shapes[name])
        return live

    def on_the_way(self) -> StoredLayout:
        """Return the layout in which weights are sent: as stored, but experts stored as one tensor become matrices, so
        that never more than a bucket of them is gathered at a time."""
        layout = copy(self)
        layout._parts = dict(self._parts)
        for name, (stored, *others) in self._parts.items():
            if _EXPERTS in name and len(self._shapes[name]) == 3 and not others:
                number, rows, columns = self._shapes[name]
                layout._parts[name] = tuple(
                    Part(f"{stored.name}[{expert}]", expert * rows, (expert + 1) * rows, (rows, columns))
                    for expert in range(number)
                )
        layout._live = {part.name: (name, part) for name, parts in layout._parts.items() for part in parts}
        return layout

    def part(self, stored: str) -> Part:
        """The rows of its live tensor that a stored one is."""
        return self._live[stored][1] if stored in self._live else Part(stored, 0, 0, ())

    def read(self, files: Any, stored: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """``tensor[rows, columns]`` of a stored tensor (all of a vector's elements are rows) from a folder
        (:class:`~roll.models.loading.TensorFiles`), also one that holds live tensors.

        Raises:
            ValueError: the folder lacks it.
        """
        live, part = self._live.get(stored, (stored, None))
        if part is None or stored in files or live not in files or live == stored:
            return files.read_region(stored, rows, columns)
        if len(self._parts[live]) == 1:
            return files.read_region(live, rows, columns)
        # Folders that hold experts as one tensor are read an expert at a time, never whole.
        height = self._shapes[live][1] if len(self._shapes[live]) == 3 else 1
        expert, offset = divmod(part.begin, height)
        own = files.read_region(live, slice(expert, expert + 1)).flatten(0, -2)
        whole = own[offset : offset + part.end - part.begin].reshape(part.shape)
        return whole[rows] if whole.ndim < 2 else whole[rows, columns]

    def stored_shapes(self) -> dict[str, torch.Size]:
        """By stored name."""
        return {part.name: torch.Size(part.shape) for parts in self._parts.values() for part in parts}


_EXPERTS = ".experts."  # in the names of their tensors, in every family
_Conversion = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def _conversion(model: PreTrainedModel) -> _Conversion | None:
    """From live tensors to stored ones; None where they are the same."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    # The loader notes what it applied to the names of the files, such as a prefix or matrices of single experts.
    table = getattr(model, "_weight_conversions", None)
    if table is None:
        whole = get_model_conversion_mapping(model, add_legacy=False)
        table = [one for one in whole if not isinstance(one, PrefixChange)]
    if not table:
        return None
    # All that the conversion reads of a model. With shape None a transposition that depends on the shapes takes place.
    stand_in: Any = SimpleNamespace(
        _weight_conversions=table, config=model.config, get_parameter=lambda name: SimpleNamespace(shape=None)
    )
    return lambda tensors: revert_weight_conversion(stand_in, tensors)


_COLUMNS = 2  # of the tensors of row numbers: one column would be squeezed away


def _parts(name: str, shape: tuple[int, ...], convert: _Conversion) -> tuple[Part, ...]:
    if len(shape) < 3:
        # Vectors and matrices are renamed, if anything.
        (stored,) = convert({name: torch.empty(shape, device="meta")})
        return (Part(stored, 0, 0, shape),)
    rows = torch.Size(shape[:-1]).numel()
    numbers = torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, _COLUMNS)
    live = numbers.reshape(*shape[:-1], _COLUMNS)
    found = convert({name: live})
    if len(found) == 1 and len(shape) == 3:
        ((stored, tensor),) = found.items()
        if torch.equal(tensor, live.transpose(1, 2)):
            return (Part(stored, 0, rows, (shape[0], shape[2], shape[1]), is_transposed=True),)
    parts = []
    for stored, tensor in found.items():
        taken = tensor.reshape(-1, tensor.shape[-1])[:, 0]
        begin, end = int(taken[0]), int(taken[0]) + len(taken)
        if tensor.shape[-1] != _COLUMNS or not torch.equal(taken, torch.arange(begin, end, dtype=taken.dtype)):
            raise ValueError(f"{name} is stored as {stored}, which is not some rows of it: such a model is not known")
        parts.append(Part(stored, begin, end, (*tensor.shape[:-1], shape[-1])))
    parts.sort(key=lambda part: part.begin)
    assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])] and parts[-1].end == rows, parts
    return tuple(parts)


def text_part(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a configuration that a language model by itself is made of; the whole where there is no such part, or
    where images are read (:data:`~roll.config.model_files.VISION_FAMILIES`)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    part_class = config.sub_configs.get("text_config")
    if part_class is None or config.model_type in VISION_FAMILIES or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    language_model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if language_model.config_class is not part_class:
        return config
    part = config.get_text_config()
    # What only the whole may say: transformers takes the part at its word.
    part.tie_word_embeddings = part.tie_word_embeddings or getattr(config, "tie_word_embeddings", False)
    for name in ("dtype", "architectures", "quantization_config"):
        if getattr(part, name, None) is None and getattr(config, name, None) is not None:
            setattr(part, name, getattr(config, name))
    return part


def whole_config(whole: PretrainedConfig, part: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a folder that holds a trained language model: ``part``, in its place in ``whole``."""
    if text_part(whole) is whole:
        return part
    whole.text_config, whole.dtype, whole.tie_word_embeddings = part, part.dtype, part.tie_word_embeddings
    return whole


def use_names_of(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Note in the model what its files' names differ by from its own, as ``from_pretrained`` does: a prefix, or experts
    as single matrices. :class:`StoredLayout` goes by it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    table = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [one for one in table if isinstance(one, WeightRenaming)]
    converters = [one for one in table if isinstance(one, WeightConverter)]
    for name in names:
        rename_source_key(name, renamings, converters)
    made: Any = model
    made._weight_conversions = [one for one in table if one.was_used()]


def other_names(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Those of a folder's tensors that belong to parts which ``model`` does not have."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def incomplete(
    model: PreTrainedModel,
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Iterable[tuple[str, Any, Any]],
    overridden: bool,
) -> str | None:
    """The meaning of a loader's report; None: the model is whole.

    A tensor that the model has no use for is ignored where it belongs to a part that the model does not have (the score
    head of a reward model, a tower of another modality). It is a fault where it is one more of what the model has: a
    layer beyond ``num_hidden_layers``, a bias that ``config.json`` denies.

    Args:
        model: that was built.
        missing, unexpected: names.
        mismatched: names with the shape in the files and in the model.
        overridden: ``model_config_kwargs`` changes ``config.json``, so that layers may be left out on purpose.
    """
    parts = []
    if missing:
        parts.append(f"lacks {_some(missing)}")
    for name, stored, expected in mismatched:
        parts.append(f"holds {name} of shape {list(stored)}, and the model has {list(expected)}")
        break
    # The model has a module of this name with parameters, apart from the number of the layer.
    known = {_NUMBER.sub("#", name.rpartition(".")[0]) for name, _ in model.named_parameters()}
    more = [name for name in unexpected if not overridden and _NUMBER.sub("#", name.rpartition(".")[0]) in known]
    if missing and unexpected:
        parts.append(f"holds {_some(unexpected)}, which the model does not have")
    elif more:
        parts.append(f"holds {_some(more)}, which this model has no place for")
    if not parts:
        return None
    remedy = how_to_unwrap(unexpected) or (
        "download the folder again, or save the bare model (no wrapper, adapters merged) by save_pretrained"
    )
    return f"{'; it '.join(parts)}: config.json describes another model. To mend it, {remedy}"


def _some(names: Collection[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
