"""The forms of an exported model: Hugging Face's model folder, an adapter of peft's, or a GGUF file.

A GGUF file (llama.cpp, Ollama, LM Studio) is written by llama.cpp's own ``gguf`` package: of dense Qwen2, Qwen3 and
Llama models with a byte-pair tokenizer. Matrices have the given type, vectors are float32. Everything else has a
converter in llama.cpp, which reads what ``--to hf`` writes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from roll.checkpoint.tensors import stored_tensors
from roll.checkpoint.trained_model import TrainedModel, config_error
from roll.config.installation import install_command
from roll.config.losses import SCORE_INPUT, SCORE_INPUT_DEFAULT
from roll.config.run import RESOLVED_CONFIG
from roll.models.build import folder_config
from roll.models.layout_setup import head_dim
from roll.models.loading import TensorFiles
from roll.models.lora import adapter_file_name, adapter_names, base_name, is_adapter
from roll.models.stored import whole_config

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PretrainedConfig

MAX_FILE_BYTES = 4 * 2**30
_KEPT_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
_OWN_FILES = ("config.json", "model.safetensors.index.json", "adapter_config.json")

ARCHITECTURES = {"qwen2": ("QWEN2", "qwen2"), "qwen3": ("QWEN3", "qwen2"), "llama": ("LLAMA", "llama-bpe")}
"""By ``model_type``: gguf's name of the architecture, and how its byte-pair tokenizers split text beforehand."""
TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
FILE_NAME = "model.gguf"


def write_hf(trained: TrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Weights in files of at most :data:`MAX_FILE_BYTES`, configuration, and the tokenizer's files."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(pending, folder / f"part{len(shards):05d}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in trained.tensors(dtype):
        if pending and sum(one.nbytes for one in pending.values()) + tensor.nbytes > MAX_FILE_BYTES:
            flush()
        pending[name] = tensor
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "part00000").rename(folder / "model.safetensors")
    else:
        files: dict[str, str] = {}
        for index, names in enumerate(shards):
            shard = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
            # The names state the number of files, which is known only now.
            (folder / f"part{index:05d}").rename(folder / shard)
            files |= dict.fromkeys(names, shard)
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2)
        (folder / "model.safetensors.index.json").write_text(index_text, encoding="utf-8")
    skeleton = trained.skeleton()
    config = skeleton.config
    config.dtype, config.architectures = dtype, [type(skeleton).__name__]
    source = TensorFiles(trained.model).folder
    if trained.head == "score":
        describe_scores(config, trained, source)
    elif trained.head == "causal_lm":
        config = whole_config(folder_config(trained.args), config)
    config.save_pretrained(folder)
    for file in [file for pattern in _KEPT_FILES for file in source.glob(pattern)]:
        if file.name not in _OWN_FILES:
            shutil.copyfile(file, folder / file.name)


def describe_scores(config: PretrainedConfig, trained: TrainedModel, source: Path) -> None:
    """Add what a reward model's users need: the padding token, without which transformers scores one row at a time, and
    ``score_input`` of its run, where the checkpoint is still in the run's folder."""
    from transformers import AutoTokenizer

    if config.get_text_config().pad_token_id is None and (source / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(source)
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        config.get_text_config().pad_token_id = pad
    checkpoints = trained.folder.resolve().parent.parent
    resolved = checkpoints.parent / RESOLVED_CONFIG
    if resolved.is_file():
        settings = yaml.safe_load(resolved.read_text(encoding="utf-8"))
        # The file leaves defaults out.
        setattr(config, SCORE_INPUT, settings.get(SCORE_INPUT, SCORE_INPUT_DEFAULT))


def write_peft(trained: TrainedModel, folder: Path) -> None:
    """``adapter_config.json`` and ``adapter_model.safetensors``, float32 as they were trained."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise config_error("--to", "peft", f"needs peft: {install_command('peft')}") from error
    contents = trained.contents
    if not contents.scalings:
        rule = f"{trained.folder} holds no adapters; only a run with model_args.lora_target has any"
        raise config_error("--to", "peft", rule, "hf")
    plain = dict(trained.skeleton().named_parameters())
    shapes = {weight: tuple(plain[weight].shape) for weight in contents.scalings}
    experts = [weight for weight, shape in shapes.items() if len(shape) == 3]
    ranks = {
        weight: contents.trained[adapter_names(weight)[0]][0] // (shape[0] if len(shape) == 3 else 1)
        for weight, shape in shapes.items()
    }
    # The factor is alpha / rank, whichever formula the run had it from; peft writes an integer without a fraction.
    exact = {weight: scaling * ranks[weight] for weight, scaling in contents.scalings.items()}
    alphas: dict[str, Any] = {weight: int(a) if a == int(a) else a for weight, a in exact.items()}
    first = next(iter(ranks))
    modules = [weight.removesuffix(".weight") for weight in ranks if weight not in experts]
    whole = sorted({base_name(name).rpartition(".")[0] for name in contents.trained if not is_adapter(name)})
    config = LoraConfig(
        task_type={"causal_lm": "CAUSAL_LM", "value": "TOKEN_CLS", "score": "SEQ_CLS"}[trained.head],
        r=ranks[first],
        lora_alpha=alphas[first],
        rank_pattern={w.removesuffix(".weight"): r for w, r in ranks.items() if r != ranks[first]},
        alpha_pattern={w.removesuffix(".weight"): a for w, a in alphas.items() if a != alphas[first]},
        target_modules=modules or None,
        target_parameters=experts or None,
        modules_to_save=whole or None,
        base_model_name_or_path=trained.model,
        inference_mode=True,
    )
    with stored_tensors(trained.folder) as stored:
        tensors = {adapter_file_name(name): trained.read(stored, name) for name in contents.trained}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


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
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(head_dim(config))
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
