"""A batch outside of its process: columns without their padding, the pickled form that is made of them, and a file.

A per-token column (B, L, ...) of a right- or left-padded batch is constant outside one span of each row.  Packing finds
that constant and those spans and keeps the tokens inside, one after another (the *payload*); unpacking restores every
bit, with one exception: padding of zeros comes back as 0.0 where it was -0.0, which ``values * mask`` makes of negative
values.  Whatever is constant inside its spans too (most masks) costs only the spans, columns share spans where they
can, and what is left of int64 is narrowed to the smallest integer that holds its values.  A column with hardly any
padding is left as it is: readers then see it without a copy.

Everything works on numpy arrays of integers as wide as the column's dtype (its *bits*), since numpy has no bfloat16.

With pickle protocol 5 (Ray's arguments, results and ``ray.put``; multiprocessing falls back to copies) the payload of
each column is a buffer of its own, so Ray writes it to the object store once and readers map it.  On arrival nothing is
unpacked: a column costs its reader something when it is first touched, ``select``, ``chunk`` and slices work on the
packed form, and a batch that is passed on is sent as it came.

What a reader gets from ``batch[key]`` is private and writable, ``batch.peek(key)`` is read-only and free for dense
columns.  Tensors inside objects and ``meta_info`` arrive as private copies.  Devices and gradients do not travel:
every tensor arrives on the CPU.

A file holds nothing that executes. It is one of safetensors: tensor columns are under ``batch/NAME``, tensors and
numeric arrays met inside objects under ``object/NUMBER``, and one uint8 tensor, ``structure``, holds UTF-8 JSON of
``non_tensor_batch`` and ``meta_info``. Objects may be None, bool, int, float, str, bytes, list, tuple, dict, numpy
scalars and arrays, and tensors, nested at will.  A type that JSON lacks is written as a dict with a single key that
starts with ``$``.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll.protocol.columns import BITS, Column, ObjectColumns, Packed, Spans, TensorColumns, flat_view

_SIGNED_ZEROS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_NARROW = [
    (dtype, np.iinfo(dtype).min, np.iinfo(dtype).max)
    for dtype in (np.uint8, np.uint16, np.uint32, np.int8, np.int16, np.int32)
]
_MIN_NARROW = 64  # fewest values for which narrowing saves more than it costs
_DENSE_FRACTION = 0.85
"""A column with a larger fraction inside its spans is sent whole: less work at both ends for at most 18% more bytes."""


def pack(tensors: Sequence[torch.Tensor]) -> list[Packed]:
    """Pack columns of one batch, with shared spans. Dense columns stay views of the tensors' memory.

    Tensors on an accelerator are copied to the CPU; gradients do not travel.

    Raises:
        TypeError: a dtype wider than 8 bytes.
    """
    packer = _Packer()
    # Masks first: their spans are the true ones, and serve columns in which a real token happens to equal the padding.
    order = sorted(range(len(tensors)), key=lambda i: tensors[i].dtype != torch.bool)
    packed = {place: packer.pack(tensors[place]) for place in order}
    return [packed[place] for place in range(len(tensors))]


def to_bits(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bits as integers of its width, over the same memory where the tensor is contiguous on the CPU.
    Raises ``TypeError``: a dtype wider than 8 bytes."""
    if tensor.dtype.itemsize not in BITS:
        raise TypeError(f"a {tensor.dtype} tensor cannot be sent: elements have at most 8 bytes, convert it first")
    integers = BITS[tensor.dtype.itemsize][0]
    return flat_view(tensor.detach().cpu()).view(integers).numpy().reshape(tensor.shape)


@dataclass(eq=False)
class _Packer:
    """Packs the columns of one batch one after another."""

    _known: list[Spans] = field(init=False, default_factory=list)
    _inside: np.ndarray = field(init=False, default_factory=lambda: np.zeros((0, 0), dtype=bool))

    def pack(self, tensor: torch.Tensor) -> Packed:
        bits = to_bits(tensor)
        if tensor.dim() < 2 or not bits.size:
            return Packed(tensor.dtype, tensor.shape, bits)
        found = self._find_spans(bits, tensor.dtype)
        if found is None:
            return Packed(tensor.dtype, tensor.shape, _one_value(bits))
        own, padding = found
        if not own.total:
            return Packed(tensor.dtype, tensor.shape, padding)
        # Wider spans are shared where a token more in each row costs less than other spans would (8 bytes a row, and
        # the work of an index).  Not by a mask: it is constant inside its own spans only, and then costs nothing else.
        slack = 0 if tensor.dtype == torch.bool else max(len(tensor), own.total // 64)
        spans = next((other for other in self._known if other.covers(own, slack)), own)
        if spans is own:
            self._known.append(own)
        if tensor.dtype == torch.bool:
            # A mask (bits 0 or 1) without padding inside its spans: counting is cheaper than looking inside them.
            ones = own.total * (bits.size // (bits.shape[0] * bits.shape[1]))
            if np.count_nonzero(bits) == (bits.size - ones if padding else ones):
                return Packed(tensor.dtype, tensor.shape, 1 - padding, spans, padding)
        by_token = bits.reshape(bits.shape[0] * bits.shape[1], *bits.shape[2:])
        payload = _one_value(by_token.take(spans.index, axis=0))
        if tensor.dtype == torch.int64 and isinstance(payload, np.ndarray) and payload.size >= _MIN_NARROW:
            low, high = int(payload.min()), int(payload.max())
            # The first, being the smallest, type that holds them all.
            narrow = (dtype for dtype, least, most in _NARROW if least <= low and high <= most)
            payload = payload.astype(next(narrow, np.int64), copy=False)
        return Packed(tensor.dtype, tensor.shape, payload, spans, padding)

    def _find_spans(self, bits: np.ndarray, dtype: torch.dtype) -> tuple[Spans, int] | None:
        """The tightest spans outside which ``bits`` (B, L, ...) is one value, and that value; None if hardly any is.

        The second candidate is tried only if the first leaves the column dense (a begin-of-sequence token in front of
        all rows must not hide the padding after them, nor a last token that many rows share the padding in front).
        """
        flat = bits.reshape(len(bits), -1)
        (size, width), per_token = flat.shape, flat.shape[1] // bits.shape[1]
        rows, words = np.arange(size), -(-width // 8)
        if self._inside.shape != (size, 8 * words):  # kept between columns: fresh pages cost more than comparing
            self._inside = np.zeros((size, 8 * words), dtype=bool)
        inside, signed_zeros = self._inside, dtype in _SIGNED_ZEROS
        for padding in _padding_candidates(flat, signed_zeros):
            inside[:, width:] = False
            compared = flat
            if signed_zeros and padding == 0:
                # As floats -0.0 equals 0.0 (and NaN nothing); numpy has no bfloat16, there the sign is shifted out.
                compared = flat << 1 if flat.itemsize == 2 else flat.view(f"f{flat.itemsize}")
            np.not_equal(compared, padding, out=inside[:, :width])
            starts = inside.argmax(axis=1)
            # numpy's search stops at the first hit, but copies a reversed row first: search by eight, then in one word.
            word = words - 1 - (inside.view(np.uint64) != 0)[:, ::-1].argmax(axis=1)
            stops = 8 * word + 8 - inside.reshape(size, words, 8)[rows, word, ::-1].argmax(axis=1)
            empty = ~inside[rows, starts]
            starts[empty] = stops[empty] = 0
            starts, stops = starts // per_token, -(-stops // per_token)
            spans = Spans(starts.astype(np.int32), stops.astype(np.int32), bits.shape[1])
            if spans.total <= _DENSE_FRACTION * bits.shape[0] * bits.shape[1]:
                return spans, padding
        return None


def _padding_candidates(flat: np.ndarray, signed_zeros: bool) -> list[int]:
    """The most frequent values of the last and of the first element of a row, if enough rows end or begin with them."""
    candidates: list[int] = []
    last, first = flat[:, -1], flat[:, 0]
    for edge in (last, first):
        if not edge.any():
            value = 0
        else:
            if signed_zeros:
                edge = np.where(edge == np.iinfo(edge.dtype).min, 0, edge)
            values, counts = np.unique(edge, return_counts=True)
            value = int(values[counts.argmax()])
        if value in candidates:
            continue
        # A row that neither begins nor ends with it is full: with too many of those a search would be for nothing.
        if value == 0 or np.count_nonzero((last == value) | (first == value)) > (1 - _DENSE_FRACTION) * len(flat):
            candidates.append(value)
    return candidates


def _one_value(values: np.ndarray) -> np.ndarray | int:
    flat = values.reshape(-1)
    first = flat[0]
    # Two samples spare most columns that are not constant the full comparison.
    if first == flat[-1] and first == flat[len(flat) // 2] and (flat == first).all():
        return int(first)
    return values


_PLAIN = {type(None), bool, int, float, complex, str, bytes}


WireState = tuple[dict[str, Column], dict[str, list[Any]], dict[str, Any]]
"""Tensor columns, object columns and ``meta_info`` in the form that is pickled."""


def to_wire(stored: Mapping[str, Column], objects: ObjectColumns, meta_info: Mapping[str, Any]) -> WireState:
    """Pickled form of a batch; columns that arrived packed are passed on as they came."""
    fresh = {key: column for key, column in stored.items() if isinstance(column, torch.Tensor)}
    packed = dict(stored) | dict(zip(fresh, pack(list(fresh.values())), strict=True))
    plain = {key: _without_tensors(list(values)) for key, values in objects.items()}
    return packed, plain, _without_tensors(dict(meta_info))


def _without_tensors(value: Any) -> Any:
    """``value`` with the tensors in its lists, tuples and dicts in a form that pickles without torch.save."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return _TensorInTransit(value)
    if kind is list or kind is tuple:
        return value if _PLAIN.issuperset(map(type, value)) else kind(map(_without_tensors, value))
    if kind is dict:
        if _PLAIN.issuperset(map(type, value.values())):
            return value
        return {key: _without_tensors(entry) for key, entry in value.items()}
    return value


class _TensorInTransit:
    """A tensor's form in a pickle; unpickling gives the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (to_bits(self._tensor), self._tensor.dtype)


def _arrived(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits.copy()).view(dtype)


# Files


_FORMAT = "roll.DataProto 1"
_STRUCTURE = "structure"
_ENCODING = ("utf-8", "surrogatepass")  # a str may hold half a surrogate pair, which a truncated token stream leaves


def save(columns: TensorColumns, objects: ObjectColumns, meta_info: Mapping[str, Any], path: Path) -> None:
    """Write a batch to ``path`` (its folder must exist), through a temporary file that replaces it when complete.

    Raises:
        TypeError: an object of a kind that the format does not hold; the message names its column.
        OSError: the file could not be written; no part of it remains.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {f"batch/{key}": _storable(columns.peek(key)) for key in columns}
    encoder = _Encoder(tensors)
    structure = {
        "columns": list(columns),
        "non_tensor_batch": {
            key: [encoder.encode(value, f"non_tensor_batch[{key!r}]") for value in values]
            for key, values in objects.items()
        },
        "meta_info": encoder.encode(dict(meta_info), "meta_info"),
    }
    text = bytearray(json.dumps(structure, ensure_ascii=False, separators=(",", ":")).encode(*_ENCODING))
    tensors[_STRUCTURE] = torch.frombuffer(text, dtype=torch.uint8)
    # In the same folder: os.replace() is atomic within one file system only.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata={"format": _FORMAT})
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, SafetensorError):  # what the system said, in words alone
            raise OSError(f"{path}: {error}") from error
        raise


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]], dict[str, Any]]:
    """Columns, objects and ``meta_info`` in a file of :func:`save`; tensors come to the CPU. Raises ``ValueError``: a
    safetensors file that holds no DataProto."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        found = (file.metadata() or {}).get("format")
        if found != _FORMAT:
            raise ValueError(f"{path} is no DataProto file: its format is {found!r}, expected {_FORMAT!r}")
        structure = json.loads(file.get_tensor(_STRUCTURE).numpy().tobytes().decode(*_ENCODING))
        tensors = {key: file.get_tensor(f"batch/{key}") for key in structure["columns"]}
        objects = {
            key: [_decode(value, file.get_tensor) for value in values]
            for key, values in structure["non_tensor_batch"].items()
        }
        return tensors, objects, _decode(structure["meta_info"], file.get_tensor)


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    # A copy: safetensors refuses tensors that share memory, and columns may be views of each other.
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


@dataclass
class _Encoder:
    """Turns objects into JSON; tensors met on the way go to ``tensors``."""

    tensors: dict[str, torch.Tensor]

    def encode(self, value: object, where: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            return [self.encode(entry, where) for entry in value]
        if type(value) is dict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.encode(entry, f"{where}[{key!r}]") for key, entry in value.items()}
            return {"$dict": [[self.encode(key, where), self.encode(entry, where)] for key, entry in value.items()]}
        if type(value) is tuple:
            return {"$tuple": [self.encode(entry, where) for entry in value]}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._keep(value)}
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {"$scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1:
            return {"$objects": [self.encode(entry, where) for entry in value]}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            name = self._keep(torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8)))
            return {"$array": [value.dtype.str, list(value.shape), name]}
        raise TypeError(
            f"{where} holds a {type(value).__name__}, which a DataProto file cannot: it holds None, numbers, strings, "
            "bytes, lists, tuples, dicts, arrays and tensors"
        )

    def _keep(self, tensor: torch.Tensor) -> str:
        name = f"object/{len(self.tensors)}"
        self.tensors[name] = _storable(tensor)
        return name


def _decode(value: object, get_tensor: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(entry, get_tensor) for entry in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tuple": entries}:
            return tuple(_decode(entry, get_tensor) for entry in entries)
        case {"$bytes": text}:
            return base64.b64decode(text)
        case {"$tensor": name}:
            return get_tensor(name)
        case {"$scalar": [dtype, text]}:
            return np.frombuffer(base64.b64decode(text), dtype)[0]
        case {"$objects": entries}:
            decoded = [_decode(entry, get_tensor) for entry in entries]
            return np.fromiter(decoded, dtype=object, count=len(decoded))
        case {"$array": [dtype, shape, name]}:
            return get_tensor(name).numpy().view(dtype).reshape(shape)
        case {"$dict": pairs}:
            return {_decode(key, get_tensor): _decode(entry, get_tensor) for key, entry in pairs}
    return {key: _decode(entry, get_tensor) for key, entry in value.items()}
