"""Bodies of the ``tinker`` SDK (0.38): JSON, and protobuf, optionally compressed by zstd, for passes and samples.

Each field of a JSON body is read, or refused by its name; nothing is passed over. The schema of protobuf is built here,
so that the service does not need the SDK. It differs from the SDK's file in what the wire does not show: enumerations
are int32, maps are repeated pairs, and members of a oneof are plain fields.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from roll.serving.http import MAX_BODY, BadRequest
from roll.strategies.engines.requests import SamplingParams, check_sampling_params

if TYPE_CHECKING:
    from google.protobuf.message import Message

T = TypeVar("T")
MAX_DECODED = 8 * MAX_BODY  # bytes of a request after decompression, or of its sparse tensors after they are made dense
MAX_DATA = 4096  # data of one request; the SDK sends 1,024
PROTOBUF = "application/x-protobuf"

_REFUSED = {
    "kind": "inflight sampling clients are not served; use kind='snapshot'",
    "record_stability_info": "stable_reinforce is not served, and so nothing is recorded for it",
    "target_prompt_logprobs": "not served; topk_prompt_logprobs is",
    "prompt_alt_tokens_k": "not served",
    "weights_access_token": "not served: whoever has the service's key reads all its checkpoints",
    "age_encryption_recipients": "not served; encrypt the downloaded files",
    "project_id": "there are no projects here",
}
SERVED_NOWHERE = "is not served here; docs/training-service.md lists what is"


class Fields:
    """The fields of a JSON body, each read once; :meth:`end` refuses those that nobody has read."""

    def __init__(self, body: object, where: str = "") -> None:
        if not isinstance(body, dict):
            raise BadRequest(f"{where or 'the body'} must be an object")
        self._body = {key: value for key, value in body.items() if value is not None and key != "type"}
        self._where = f"{where}." if where else ""

    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """The value of a field; ``BadRequest`` for one of another type."""
        value = self._body.pop(key, default)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) <= sys.float_info.max else math.inf
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not right or (isinstance(value, float) and not math.isfinite(value)):
            raise BadRequest(f"{self._where}{key}: {value!r:.100} must be of type {kind.__name__}", key)
        return value

    def need(self, key: str, kind: type[T]) -> T:
        """The value of a field that must be there; ``BadRequest`` where it is not, or of another type."""
        value = self.get(key, kind)
        if value is None:
            raise BadRequest(f"{self._where}{key} is missing", key)
        return value

    def off(self, key: str, *harmless: object) -> None:
        """Raise ``BadRequest`` for a feature that is not served, unless its value leaves it off."""
        value = self._body.pop(key, None)
        if value is not None and value not in harmless:
            raise BadRequest(f"{self._where}{key}: {_REFUSED[key]}", key)

    def end(self) -> None:
        """Raise ``BadRequest`` for a field that was not read."""
        for key in self._body:
            raise BadRequest(f"{self._where}{key} {SERVED_NOWHERE}", key)


def check_optimizer(fields: Fields) -> None:
    """Raise ``BadRequest`` for another optimizer than AdamW."""
    config = fields.get("optimizer_config", dict) or {}
    if config.get("type", "adamw") != "adamw":
        raise BadRequest(
            f"optimizer_config.type: {config['type']!r:.100} is not served; 'adamw' is", "optimizer_config"
        )


def read_prompt(body: object) -> list[int]:
    fields, tokens = Fields(body, "prompt"), []
    for index, chunk in enumerate(fields.need("chunks", list)):
        own = Fields(chunk, f"prompt.chunks[{index}]")
        if chunk.get("type", "encoded_text") != "encoded_text":
            kind = f"{chunk['type']!r:.50}"
            raise BadRequest(
                f"prompt.chunks[{index}]: chunks of type {kind} are not served; send encoded text", "prompt"
            )
        part = own.need("tokens", list)
        if not all(type(token) is int for token in part):
            raise BadRequest(f"prompt.chunks[{index}].tokens: must be integers", "prompt")
        tokens += part
    return tokens


def read_params(body: object, room: int, top: int) -> SamplingParams:
    """Sampling parameters; ``max_tokens`` as many as there is room for, unless the body says less. Raises
    ``BadRequest``: a value outside its range."""
    fields = Fields(body, "sampling_params")
    stop: Any = fields.get("stop", object)
    if stop == []:
        raise BadRequest("sampling_params.stop: [] (go on past the model's own end) is not served", "stop")
    stops: Any = [stop] if isinstance(stop, str) else stop or []
    kinds = {type(one) for one in stops} if isinstance(stops, list) else set()
    if stop is not None and kinds not in ({str}, {int}):
        raise BadRequest("sampling_params.stop: must be a text, texts, or token ids", "stop")
    limit = fields.get("max_tokens", int)
    values: dict[str, Any] = {key: fields.get(key, float) for key in ("temperature", "top_p")}
    values |= {key: fields.get(key, int) for key in ("top_k", "seed")}
    fields.end()
    params = SamplingParams(
        max_new_tokens=max(room, 1) if limit is None else limit,
        stop_strings=tuple(stops) if kinds == {str} else (),
        stop_token_ids=tuple(stops) if kinds == {int} else (),
        top_log_probs=top,
        **{key: value for key, value in values.items() if value is not None},
    )
    try:
        check_sampling_params(params, "sampling_params")
    except ValueError as error:
        raise BadRequest(str(error)) from error
    return params


_FLOAT32, _INT64 = 1, 2
_DTYPES: dict[int, np.dtype[Any]] = {_FLOAT32: np.dtype(np.float32), _INT64: np.dtype(np.int64)}
STOP, LENGTH = 0, 1  # reasons why a sample ends

_SCHEMA = """
SparseCsr: values bytes 1, crow_indices bytes 2, col_indices bytes 3
Tensor: dense bytes 1, sparse_csr SparseCsr 2, dtype int32 3, shape *int64 4
Text: tokens bytes 1
Blob: data bytes 1
Chunk: encoded_text Text 1, image Blob 2, dmel Blob 3
NamedTensor: key string 1, value Tensor 2
Datum: model_input *Chunk 1, loss_fn_inputs *NamedTensor 2
Number: key string 1, value double 2
Value: number double 1, text string 2
NamedValue: key string 1, value Value 2
ForwardBackwardRequest: model_id string 1, seq_id int32 2, data *Datum 3, loss_fn string 4, loss_fn_config *Number 5,\
 forward_only bool 6, loss_fn_config_v2 *NamedValue 7
BatchedTensor: data bytes 1, offsets bytes 2, dtype int32 3, trailing_shape *int64 4
NamedBatch: key string 1, value BatchedTensor 2
ArrayRecord: type_tag string 1, fields *NamedBatch 2, num_datums int64 3
ForwardBackwardOutput: loss_fn_output_type string 1, loss_fn_outputs *ArrayRecord 2, metrics *Number 3
TopkLogprobs: token_ids bytes 1, logprobs bytes 2, k uint32 3, length uint32 4
SampledSequence: stop_reason int32 1, tokens bytes 2, logprobs bytes 3, topk_sampled_logprobs TopkLogprobs 4
SampleResponse: sequences *SampledSequence 1, prompt_logprobs bytes 2, topk_prompt_logprobs TopkLogprobs 3
"""


@cache
def messages() -> dict[str, Any]:
    """Message classes by name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="roll_tinker.proto", package="roll_tinker", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for line in _SCHEMA.strip().splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            key, kind, number = field.split()
            label = kinds.LABEL_REPEATED if kind.startswith("*") else kinds.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            made = message.field.add(name=key, number=int(number), label=label)
            if kind[0].isupper():
                made.type, made.type_name = kinds.TYPE_MESSAGE, f".roll_tinker.{kind}"
            else:
                made.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"roll_tinker.{message.name}"))
        for message in file.message_type
    }


@dataclass(frozen=True)
class Datum:
    """Input tokens and the named tensors of a loss."""

    tokens: torch.Tensor  # int64 (T,)
    inputs: Mapping[str, torch.Tensor]  # int64 or float32, (T,) or (T, K)


@dataclass(frozen=True)
class PassRequest:
    """A request for a forward pass, or a forward and a backward pass."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: str
    options: Mapping[str, float | str]
    forward_only: bool
    problem: str | None = None  # why the request is refused, where its model and number could be read


def decompressed(body: bytes) -> bytes:
    """The content of a zstd frame. Raises ``BadRequest``: no zstd, or (413) more than :data:`MAX_DECODED` bytes."""
    import pyarrow

    try:
        with pyarrow.CompressedInputStream(io.BytesIO(body), "zstd") as stream:
            content: bytes = stream.read(MAX_DECODED + 1)
    except (OSError, pyarrow.ArrowException) as error:
        raise BadRequest(f"the body is not zstd: {error}") from error
    if len(content) > MAX_DECODED:
        raise BadRequest(f"the body is longer than {MAX_DECODED} bytes when decompressed", status=413)
    return content


def read_pass(body: bytes) -> PassRequest:
    """Parse ``ForwardBackwardRequest``. Raises ``BadRequest``: no such message, or one without model and number."""
    from google.protobuf.message import DecodeError

    message = messages()["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise BadRequest(f"the body is no ForwardBackwardRequest: {error}") from error
    if not message.model_id or message.seq_id < 1:
        raise BadRequest("model_id and seq_id (from 1) must be set")
    data, problem = [], None
    try:
        if not 1 <= len(message.data) <= MAX_DATA:
            raise ValueError(f"{len(message.data)} data; a request has 1 to {MAX_DATA}")
        # Python integers, before anything is made: rows and columns of a few bytes can ask for any amount of memory.
        values = (pair.value for datum in message.data for pair in datum.loss_fn_inputs)
        dense = sum(8 * math.prod(map(abs, one.shape)) for one in values if one.HasField("sparse_csr"))
        if dense > MAX_DECODED:
            raise ValueError(
                f"sparse tensors of {dense} bytes when they are dense; a request has {MAX_DECODED} at most"
            )
        data = [_datum(datum, f"data[{index}]") for index, datum in enumerate(message.data)]
    except ValueError as error:
        problem = str(error)
    options: dict[str, float | str] = {pair.key: pair.value for pair in message.loss_fn_config}
    options |= {pair.key: pair.value.text or pair.value.number for pair in message.loss_fn_config_v2}
    return PassRequest(message.model_id, message.seq_id, data, message.loss_fn, options, message.forward_only, problem)


def _datum(message: Message, where: str) -> Datum:
    parts = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            kind = "image" if chunk.HasField("image") else "audio"
            raise ValueError(f"{where}.model_input: {kind} chunks are not served; send encoded text")
        parts.append(_array(chunk.encoded_text.tokens, np.dtype(np.int32), f"{where}.model_input"))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
    inputs = {pair.key: _tensor(pair.value, f"{where}.{pair.key}") for pair in message.loss_fn_inputs}
    return Datum(torch.from_numpy(tokens), inputs)


def _array(data: bytes, dtype: np.dtype[Any], where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ValueError(f"{where}: {len(data)} bytes are no whole number of {dtype} values")
    return np.frombuffer(data, dtype)


def _tensor(message: Message, where: str) -> torch.Tensor:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise ValueError(f"{where}: dtype {message.dtype} is not served; float32 (1) and int64 (2) are")
    shape = list(message.shape)
    if message.HasField("sparse_csr"):
        csr = message.sparse_csr
        if len(shape) != 2 or min(shape) < 0:
            raise ValueError(f"{where}: a sparse tensor of shape {shape} must be (T, K)")
        values = _array(csr.values, dtype, where)
        rows = _array(csr.crow_indices, np.dtype(np.int64), where)
        columns = _array(csr.col_indices, np.dtype(np.int64), where)
        counts = np.diff(rows)
        fits = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(values) == len(columns)
        if not fits or (counts < 0).any() or ((columns < 0) | (columns >= shape[1])).any():
            raise ValueError(f"{where}: the indices of the sparse tensor do not fit its shape {shape}")
        dense = np.zeros(shape, dtype)
        dense[np.repeat(np.arange(shape[0]), counts), columns] = values
        return torch.from_numpy(dense)
    values = _array(message.dense, dtype, where)
    shape = shape or [len(values)]
    # Python integers: a product of int64 sizes can overflow to the wanted number.
    if any(size < 0 for size in shape) or np.prod(shape, dtype=object) != len(values):
        raise ValueError(f"{where}: {len(values)} values do not fill the shape {shape}")
    # A copy: the bytes of a message are read-only, and tensors are not.
    return torch.from_numpy(values.reshape(shape).copy())


def pass_output(log_probs: Sequence[torch.Tensor], metrics: Mapping[str, float]) -> bytes:
    """``ForwardBackwardOutput``. ``log_probs``: float32 (T,) or (T, K) of each datum's target tokens; ``metrics``:
    names end in ``:`` and the reduction over the requests of one pass."""
    message = messages()["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for own in log_probs:
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        data = own.float().contiguous().numpy().tobytes()
        batch = {"data": data, "offsets": np.array([0, len(data)], np.int64).tobytes(), "dtype": _FLOAT32}
        record.fields.add(key="logprobs", value={**batch, "trailing_shape": own.shape[1:]})
    for name, value in metrics.items():
        message.metrics.add(key=name, value=value)
    return bytes(message.SerializeToString())


# By position the most probable tokens with their log-probs; an empty position was not computed.
Top = Sequence[Sequence[tuple[int, float]]]
_NO_LOG_PROB = -99999.0


def _top(top: Top, k: int) -> dict[str, Any]:
    ids, log_probs = np.zeros((len(top), k), np.int32), np.full((len(top), k), _NO_LOG_PROB, np.float32)
    for row, entries in enumerate(top):
        for column, (token, value) in enumerate(entries[:k]):
            ids[row, column], log_probs[row, column] = token, value
    return {"token_ids": ids.tobytes(), "logprobs": log_probs.tobytes(), "k": k, "length": len(top)}


def sample_output(
    samples: Sequence[tuple[int, Sequence[int], Sequence[float], Top]],
    sample_top: int,
    prompt_log_probs: np.ndarray | None,
    prompt_top: Top,
    prompt_k: int,
) -> bytes:
    """``SampleResponse``. ``samples``: of each, :data:`STOP` or :data:`LENGTH`, tokens, their log-probs, and the most
    probable ones; ``prompt_log_probs``: float32 (length of the prompt,), NaN where not computed."""
    message = messages()["SampleResponse"]()
    for reason, tokens, log_probs, top in samples:
        sequence = message.sequences.add(
            stop_reason=reason,
            tokens=np.asarray(tokens, np.int32).tobytes(),
            logprobs=np.asarray(log_probs, np.float32).tobytes(),
        )
        if sample_top:
            sequence.topk_sampled_logprobs.CopyFrom(messages()["TopkLogprobs"](**_top(top, sample_top)))
    if prompt_log_probs is not None:
        message.prompt_logprobs = prompt_log_probs.astype(np.float32).tobytes()
    if prompt_k:
        message.topk_prompt_logprobs.CopyFrom(messages()["TopkLogprobs"](**_top(prompt_top, prompt_k)))
    return bytes(message.SerializeToString())
