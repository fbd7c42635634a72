"""A GGUF file (llama.cpp, Ollama, LM Studio) of an exported model, by llama.cpp's own ``gguf`` package.

Dense Qwen2, Qwen3 and Llama models with a byte-pair tokenizer. Matrices have the given type, vectors are float32.
Everything else has a converter in llama.cpp, which reads what ``--to hf`` writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.checkpoint.trained_model import TrainedModel, config_error
from roll.config.installation import install_command
from roll.models.loading import TensorFiles

if TYPE_CHECKING:
    from gguf import GGUFWriter

ARCHITECTURES = {"qwen2": ("QWEN2", "qwen2"), "qwen3": ("QWEN3", "qwen2"), "llama": ("LLAMA", "llama-bpe")}
"""By ``model_type``: gguf's name of the architecture, and how its byte-pair tokenizers split text beforehand."""
TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
FILE_NAME = "model.gguf"


def write_gguf(trained: TrainedModel, folder: Path, dtype: str) -> Path:
    """Write ``folder/model.gguf``. Raises ``ConfigError``: gguf is not installed; a model, tokenizer or type that is
    not translated here."""
    gguf = _import_gguf()
    if dtype not in TYPES:
        raise config_error("--dtype", dtype, f"of a gguf file must be one of {', '.join(TYPES)}", "f16")
    skeleton = trained.skeleton()
    config: Any = skeleton.config
    if config.model_type not in ARCHITECTURES or trained.head != "causal_lm":
        kinds = {"causal_lm": f"a {config.model_type} model", "value": "a value model", "score": "a reward model"}
        kind = kinds[trained.head]
        rule = f"{kind} is not translated here; export --to hf and convert that with llama.cpp's convert_hf_to_gguf.py"
        raise config_error("--to", "gguf", rule)
    name, splitting = ARCHITECTURES[config.model_type]
    architecture = getattr(gguf.MODEL_ARCH, name)
    path = folder / FILE_NAME
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_shape(writer, config)
    _add_tokenizer(gguf, writer, TensorFiles(trained.model).folder, config.vocab_size, splitting)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for source, tensor in trained.tensors(torch.float32):
        if source.endswith(("q_proj.weight", "k_proj.weight")) and config.model_type == "llama":
            heads = config.num_attention_heads if "q_proj" in source else config.num_key_value_heads
            tensor = interleaved(tensor, heads)
        own = names.get_name(source, try_suffixes=(".weight", ".bias"))
        assert own is not None, source
        kind = _kind(gguf, tensor, dtype)
        writer.add_tensor(own, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind(gguf: ModuleType, tensor: Tensor, dtype: str) -> Any:
    """The given type of matrices whose rows are whole blocks of it; float32 of all else."""
    target = getattr(gguf.GGMLQuantizationType, TYPES[dtype])
    block, _ = gguf.GGML_QUANT_SIZES[target]
    return target if tensor.ndim > 1 and tensor.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F32


def rounded(tensor: Tensor, dtype: str) -> Tensor:
    """The float32 values that a file of this type gives back."""
    gguf = _import_gguf()
    kind = _kind(gguf, tensor, dtype)
    quantized = gguf.quants.quantize(tensor.detach().numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(quantized, kind).copy()).view(tensor.shape)


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key matrix in llama.cpp's order for Llama: rotated pairs next to each other."""
    by_half = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return by_half.transpose(1, 2).reshape(weight.shape).contiguous()


def _add_shape(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        rule = f"rotary embeddings of type {rope['rope_type']} are not translated here; export --to hf"
        raise config_error("--to", "gguf", rule)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(gguf: ModuleType, writer: GGUFWriter, folder: Path, vocab_size: int, splitting: str) -> None:
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if described.get("model", {}).get("type") != "BPE":
        rule = f"{folder} has no byte-pair tokenizer (tokenizer.json); export --to hf and convert with llama.cpp"
        raise config_error("--to", "gguf", rule)
    # Embeddings may have more rows than there are tokens (a padded vocabulary), and each row needs a text of its own.
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for token, index in described["model"]["vocab"].items():
        tokens[index], types[index] = token, gguf.TokenType.NORMAL
    for added in described.get("added_tokens", ()):
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    # llama.cpp's name for all byte-level byte-pair tokenizers.
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size).add_to_gguf(writer, quiet=True)


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise config_error("--to", "gguf", f"needs the package gguf: {install_command('gguf')}") from error
    return gguf
