"""A GGUF file (llama.cpp, Ollama, LM Studio) as a model folder in the cache, dequantised once to float32.

transformers reads the file (``from_pretrained(folder, gguf_file=...)``). Its reader silently skips tensors that it does
not know and most entries of the header, such as the scaling of Llama 3's rotary embeddings or a head size other than
the family's default. The result would compute something else than llama.cpp does, so such a file is refused.

Checking a configuration needs only the header (:func:`describe`); the weights are written before a run starts
(:func:`dequantise`). Files are moved into place once they are complete, the weights last.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roll.config.installation import install_command
from roll.config.model_files import CONFIG, dequantised_folder, gguf_file, is_installed
from roll.config.weight_files import SINGLE
from roll.models.build import auto_class, empty_model, quiet_transformers
from roll.models.stored import incomplete

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.integrations.gguf.reader import GgufHeader

# Needed by transformers' reader.
PACKAGES = ("gguf", "accelerate")
_NOT_SHARDED = "100000GB"
_REMEDY = "give the model's folder or hub name in Hugging Face's format"


def describe(file: Path) -> Path:
    """Write ``config.json`` and the tokenizer's files, unless they are there.

    Returns:
        The folder.

    Raises:
        ValueError: a package is missing, or transformers cannot read the file, or not all of it.
    """
    folder = dequantised_folder(file)
    if not (folder / CONFIG).is_file() and (problem := _describe(file, folder)) is not None:
        raise ValueError(problem)
    return folder


def dequantised_path(path: str) -> str:
    """Return the path that loaders are given: of a GGUF file the folder of its weights, dequantised first if need be.

    Raises:
        ValueError, OSError: see :func:`dequantise`.
    """
    file = gguf_file(path)
    return path if file is None else str(dequantise(file))


def dequantise(file: Path) -> Path:
    """:func:`describe`, and the weights in float32, unless they are there.

    Returns:
        The folder, which is now a complete model folder.

    Raises:
        ValueError: see :func:`describe`. OSError: the folder cannot be written.
    """
    from transformers import AutoConfig, GgufConfig

    folder = describe(file)
    if is_dequantised(file):
        return folder
    config = AutoConfig.from_pretrained(folder)
    with quiet_transformers():
        model, info = auto_class(config, "causal_lm").from_pretrained(
            file.parent,
            gguf_file=file.name,
            config=config,
            dtype=torch.float32,
            quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    problem = incomplete(model, info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"], False)
    if problem is not None:
        raise ValueError(f"{file} {problem}")
    with _moved_into(folder) as partial:
        model.save_pretrained(partial, max_shard_size=_NOT_SHARDED)
        for other in set(partial.iterdir()) - {partial / SINGLE}:
            other.unlink()
    return folder


def is_dequantised(file: Path) -> bool:
    """The weights are in the cache."""
    return (dequantised_folder(file) / SINGLE).is_file()


@cache
def _describe(file: Path, folder: Path) -> str | None:
    """The reason why it cannot be done; None: it is done."""
    missing = [package for package in PACKAGES if not is_installed(package)]
    if missing:
        return f"is read with a package that is not installed, {missing[0]}: {install_command('gguf')}"
    from transformers import AutoConfig, AutoTokenizer
    from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

    reader = f"transformers {version('transformers')}"
    try:
        metadata, _ = read_gguf_metadata(str(file))
        if metadata.get("split.count", 1) > 1:
            return "is one part of a split file: join the parts with llama-gguf-split --merge"
        header = GgufHeader.from_file(str(file))
        with quiet_transformers():
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model = empty_model(config, "causal_lm", dtype=torch.float32)
    except Exception as error:  # of the reader, in many types
        return f"cannot be read by {reader} ({error}): {_REMEDY}"
    if (lost := _not_read(header, model)) or (lost := list(_differences(metadata, config))):
        return (
            f"cannot be read completely by {reader}, which ignores {', '.join(lost[:3])}: the model would compute "
            f"something else; {_REMEDY}"
        )
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    with _moved_into(folder) as partial:
        tokenizer.save_pretrained(partial)
        assert model.generation_config is not None
        model.generation_config.save_pretrained(partial)
        config.save_pretrained(partial)
    return None


@contextmanager
def _moved_into(folder: Path) -> Iterator[Path]:
    """Yield a new folder whose files replace those of ``folder`` at the end, ``config.json`` last: its existence tells
    other processes that the rest is there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        partial = Path(name)
        yield partial
        for file in sorted(partial.iterdir(), key=lambda file: file.name == CONFIG):
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
            os.replace(file, folder / file.name)


def _not_read(header: GgufHeader, model: PreTrainedModel) -> list[str]:
    """Names of tensors that the reader has no place for. Of the families whose files it loads as it loads safetensors
    files, the loader reports them."""
    from transformers.integrations.gguf.utils import is_gguf_arch_supported
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    if is_gguf_arch_supported(header.architecture):
        return []
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    known = get_gguf_hf_weights_map(model, processor)
    return [tensor.name for tensor in header.tensors if tensor.name not in known]


def _differences(metadata: Mapping[str, Any], config: PretrainedConfig) -> Iterator[str]:
    """Entries of the header that the configuration contradicts."""
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)
    rope = getattr(config, "rope_parameters", None) or {}
    rotated = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1
    meant: dict[str, tuple[Any, ...]] = {
        "attention.key_length": (size, getattr(config, "global_head_dim", size)),
        "attention.layer_norm_rms_epsilon": (getattr(config, "rms_norm_eps", None),),
        "rope.dimension_count": (None if size is None else int(size * rotated),),
        "rope.freq_base": (rope.get("rope_theta"),),
        "rope.scaling.type": ("none" if rope.get("rope_type") == "default" else rope.get("rope_type"),),
    }
    for name, values in meant.items():
        key = f"{metadata['general.architecture']}.{name}"
        if key not in metadata or None in values:
            continue
        stated: Any = metadata[key]
        is_text = isinstance(stated, str)
        # Numbers are float32 in the file.
        if not any(stated == value if is_text else math.isclose(stated, value, rel_tol=1e-6) for value in values):
            yield f"{key} {stated} (it assumes {values[0]})"
