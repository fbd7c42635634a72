"""A model's files on disk: its folder, GGUF file or the hub's cache, its ``config.json``, its tokenizer's vocabulary;
and its family, by its name where the file is not here. Torch-free; only the hub's vocabularies are fetched."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

CONFIG = "config.json"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # `owner/name`, or `name` alone


def looks_like_folder(path: str) -> bool:
    """A path rather than a hub name (``name`` or ``owner/name``), or something that exists."""
    # os.path, since the name may come from a file: Path.exists() raises on names too long for any file.
    return path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or os.path.exists(path)


OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # variables that forbid to ask the hub, where they have one of
TRUE_WORDS = ("1", "ON", "YES", "TRUE")


def cache_home() -> Path:
    """Where this package keeps what it need not compute again: ``$ROLL_CACHE_DIR``, else ``~/.cache/roll``."""
    return Path(os.environ.get("ROLL_CACHE_DIR") or Path("~/.cache/roll").expanduser())


def model_folder(path: str | None) -> Path | None:
    """The folder on this machine that holds the model: the path itself, the cached snapshot of a hub name, or the
    folder of a GGUF file's dequantised weights, which may not be there yet."""
    if not path:
        return None
    if looks_like_folder(path):
        file = gguf_file(path)
        return Path(path).expanduser() if file is None else dequantised_folder(file)
    if HUB_NAME.fullmatch(path) is None:
        return None
    # Where huggingface_hub keeps what it downloads.
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    repository = cache / f"models--{path.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = repository / "snapshots" / revision
    return folder if os.path.isdir(folder) else None


GGUF = ".gguf"


def gguf_files(path: str | None) -> list[Path]:
    """The GGUF files that a path names: itself, or those of a folder without a ``config.json``."""
    if not path or not looks_like_folder(path):
        return []
    place = Path(path).expanduser()
    if os.path.isfile(place):
        return [place] if place.suffix == GGUF else []
    is_other = not os.path.isdir(place) or os.path.isfile(place / CONFIG)
    return [] if is_other else sorted(place.glob(f"*{GGUF}"))


def gguf_file(path: str | None) -> Path | None:
    """The GGUF file that a path names; None where it names none, or several."""
    files = gguf_files(path)
    return files[0] if len(files) == 1 else None


def loadable(path: str | None) -> str | None:
    """The folder or hub name that loaders are given: of a GGUF file the folder of its dequantised weights, else the
    path itself."""
    file = gguf_file(path)
    return path if file is None else str(dequantised_folder(file))


def dequantised_folder(file: Path) -> Path:
    """Place of a GGUF file's model in the cache: by the file's contents and the version of transformers, whose reader
    makes it."""
    status = file.stat()
    name = f"{file.stem}-{_content_hash(file.absolute(), status.st_size, status.st_mtime_ns)}"
    return cache_home() / "gguf" / name


@lru_cache(maxsize=32)
def _content_hash(file: Path, size: int, modified: int) -> str:
    """Size and time of the last change tell a file that was replaced in the meantime."""
    with open(file, "rb", buffering=0) as stream:
        begun = hashlib.file_digest(stream, lambda: xxhash.xxh3_128(version("transformers").encode()))
    return begun.hexdigest()[:16]


def is_installed(module: str) -> bool:
    """A package is there; it is not imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package that is missing
        return False


def lacks_flash_attention(implementation: str | None) -> bool:
    """``fa2`` is written and the package is not there: sdpa takes its place, and packed rows use torch's own kernel for
    sequences of different lengths."""
    return implementation in ("fa2", "flash_attention_2") and not is_installed("flash_attn")


def model_config(path: str | None) -> Mapping[str, Any] | None:
    """The model's ``config.json``; None: it is not on this machine, or is no JSON object."""
    try:
        return read_model_config(path)
    except ValueError:
        return None


def require_model(path: str) -> None:
    """Check that the path of a folder or file leads to a model; of a hub name nothing. Raises ``ValueError``: it leads
    to none, or to one that cannot be read, with the reason."""
    if looks_like_folder(path) and read_model_config(path) is None:
        trained = Path(path).expanduser() / "model"
        nearest = f"; this run's model is {trained}" if os.path.isfile(trained / CONFIG) else ""
        raise ValueError(f"must be a model folder (with a config.json), a .gguf file or a hub name{nearest}")


def read_model_config(path: str | None) -> Mapping[str, Any] | None:
    """:func:`model_config` for callers that report a damaged file; that of a GGUF file is made from its header. Raises
    ``ValueError``: the file is there and is no JSON object, or a GGUF file cannot be read, with the reason."""
    folder, gguf = model_folder(path), gguf_file(path)
    if gguf is not None and folder is not None and not os.path.isfile(folder / CONFIG):
        import_module("roll.models.gguf_reading").describe(gguf)  # imports torch
    if folder is None or not os.path.isfile(folder / CONFIG):
        return None
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder / CONFIG} holds no JSON object")
    return config


def model_number(path: str | None, key: str) -> int | None:
    """An entry of ``config.json`` such as ``max_position_embeddings``."""
    number = (model_config(path) or {}).get(key)
    return number if isinstance(number, int) and not isinstance(number, bool) else None


@cache
def layer_classes(model_type: str) -> frozenset[str]:
    """Names of the classes in transformers' file of a model type, which is read as text: importing it would take
    seconds. Empty where there is no such file."""
    spec = find_spec("transformers")
    if spec is None or not re.fullmatch(r"\w+", model_type):
        return frozenset()
    module = Path("models") / model_type / f"modeling_{model_type}.py"
    files = [Path(root) / module for root in spec.submodule_search_locations or ()]
    texts = [file.read_text(encoding="utf-8") for file in files if os.path.isfile(file)]
    return frozenset(name for text in texts for name in re.findall(r"^class (\w+)", text, re.MULTILINE))


VISION, AUDIO, EXPERTS, RECURRENT, ENCODER = "vision", "audio", "experts", "recurrent", "encoder"
OTHER_VISION, VISION_EXPERTS = "other vision", "vision and experts"
# Values of `model_type` of the vision-language models that are tested.
VISION_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
# Description of each capability.
NEEDS = {
    VISION: "a vision-language model",
    VISION_EXPERTS: "a vision-language model with experts",
    OTHER_VISION: f"a vision-language model of another family than {', '.join(VISION_FAMILIES)}",
    AUDIO: "a model that hears or speaks",
    EXPERTS: "a mixture-of-experts model",
    RECURRENT: "a model with linear-attention or state-space layers",
    ENCODER: "an encoder-decoder model",
}
# By capability: the strategies (by the beginning of their name) under which it is tested.
SUPPORT: dict[str, tuple[str, ...]] = {
    VISION: ("fsdp", "deepspeed_", "hf_", "vllm"),
    VISION_EXPERTS: ("fsdp", "deepspeed_", "hf_", "vllm"),
    OTHER_VISION: (),
    AUDIO: (),
    EXPERTS: ("fsdp", "deepspeed", "megatron", "hf_infer", "vllm", "sglang"),
    RECURRENT: (),
    ENCODER: (),
}
_LINEAR = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_LINEAR_STRATEGIES = ("fsdp", "deepspeed", "hf_infer", "vllm")
# The same for values of `model_type` that are tested under other strategies than the rest. Those of a vision-language
# model are computed without its tower, as models of text.
FAMILIES: dict[str, dict[str, tuple[str, ...]]] = {
    OTHER_VISION: dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _LINEAR_STRATEGIES),
    EXPERTS: {
        **dict.fromkeys(("glm4_moe", "gpt_oss"), ("fsdp2", "hf_infer", "vllm")),
        "deepseek_v3": ("fsdp2", "hf_infer"),
        **dict.fromkeys(_LINEAR, _LINEAR_STRATEGIES),
    },
    RECURRENT: dict.fromkeys(_LINEAR, _LINEAR_STRATEGIES),
}

# By `model_type` and strategy: what was found where the family was tried.
REASONS: dict[tuple[str, str], str] = {
    ("deepseek_v3", "vllm"): (
        "vLLM 0.32 takes every weight of it, but on a CPU its log-probs are not the model's (0.1 apart in float32), so "
        "nothing tested says that they are elsewhere"
    ),
    **dict.fromkeys(
        [(family, "sglang") for family in VISION_FAMILIES],
        "on a CPU SGLang 0.5.23 loads no image processor of this family: that imports kernels which it publishes for "
        "GPUs alone",
    ),
}

# Values of `model_type` of models whose layers keep a state.
RECURRENT_TYPES = frozenset(
    (
        *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear"),
        *("lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h"),
        *("olmo_hybrid", "plamo2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
        *("qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
    )
)
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_AUDIO_KEYS = ("audio_config", "thinker_config", "talker_config", "speech_config")
_VISION_KEYS = ("vision_config", "vision_tower", "visual", "image_token_id", "image_token_index")


def needed(config: Mapping[str, Any]) -> list[str]:
    """The capabilities that a model needs beyond those of a dense language model with attention layers."""
    sections = list(_sections(config))
    types = {str(section.get("model_type", "")) for section in sections}
    sees = any(section.get(key) is not None for section in sections for key in _VISION_KEYS)
    is_known = config.get("model_type") in VISION_FAMILIES
    has_experts = num_experts(config) > 1
    layers = [section.get("layer_types") or section.get("layers_block_type") for section in sections]
    kinds = [str(kind) for listed in layers if isinstance(listed, list) for kind in listed]
    found = {
        AUDIO: any(section.get(key) for section in sections for key in _AUDIO_KEYS),
        VISION: sees and is_known,
        VISION_EXPERTS: sees and is_known and has_experts,
        OTHER_VISION: sees and not is_known,
        EXPERTS: has_experts,
        RECURRENT: bool(types & RECURRENT_TYPES)
        or any(word in kind for kind in kinds for word in ("linear", "mamba", "recurrent")),
        ENCODER: bool(config.get("is_encoder_decoder")),
    }
    return [name for name, holds in found.items() if holds]


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts of a sparse layer that tokens choose from; 0 of a dense model."""
    # A list has a number for each layer.
    found = [section.get(key) for section in _sections(config) for key in _EXPERT_KEYS]
    numbers = [number for one in found for number in (one if isinstance(one, list) else [one])]
    return max((number for number in numbers if isinstance(number, int)), default=0)


def missing(config: Mapping[str, Any], strategy: str) -> list[str]:
    """The capabilities that ``strategy`` does not have."""
    model_type = str(config.get("model_type", ""))
    tested = {name: FAMILIES.get(name, {}).get(model_type, SUPPORT[name]) for name in needed(config)}
    return [name for name, strategies in tested.items() if not strategy.startswith(strategies or ("-",))]


def describe(config: Mapping[str, Any], capabilities: list[str]) -> str:
    """``model_type qwen3_moe: a mixture-of-experts model``."""
    kinds = " and ".join(NEEDS[name] for name in capabilities)
    return f"model_type {config.get('model_type', '?')}: {kinds}"


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The configuration and those of its parts (``text_config`` and the like)."""
    yield config
    for key, value in config.items():
        if str(key).endswith("_config") and isinstance(value, Mapping):
            yield value


_HAS_EXPERTS: dict[str, Any] = {"num_experts": 2}
_SEES: dict[str, Any] = {"vision_config": {}}
# Patterns of names, the first that fits, and as much of a `config.json` as says what the family needs.
NAMES_OF_FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"qwen2[.-]?5-vl", {"model_type": "qwen2_5_vl", **_SEES}),
    (r"qwen3-vl-\d+b-a\d+b", {"model_type": "qwen3_vl_moe", **_SEES, **_HAS_EXPERTS}),
    (r"qwen3-vl", {"model_type": "qwen3_vl", **_SEES}),
    (r"qwen3-omni|qwen2[.-]?5-omni", {"model_type": "qwen_omni", "thinker_config": {"hidden_size": 1}}),
    (r"qwen3-next", {"model_type": "qwen3_next", **_HAS_EXPERTS}),
    (r"qwen3\.[5-9]-\d+b-a\d+b", {"model_type": "qwen3_5_moe", **_SEES, **_HAS_EXPERTS}),
    (r"qwen3\.[5-9]", {"model_type": "qwen3_5", **_SEES}),
    (r"qwen3-(?:\w+-)?\d+b-(?:a\d+b|moe)|qwen3-?moe", {"model_type": "qwen3_moe", **_HAS_EXPERTS}),
    (r"qwen2-57b-a14b|qwen1\.5-moe", {"model_type": "qwen2_moe", **_HAS_EXPERTS}),
    (r"mixtral", {"model_type": "mixtral", **_HAS_EXPERTS}),
    (r"olmoe", {"model_type": "olmoe", **_HAS_EXPERTS}),
    (r"moonlight|671b|deepseek-(?:v3|r1$|r1-0528$)|(?<![a-z])dsv3", {"model_type": "deepseek_v3", **_HAS_EXPERTS}),
    (r"deepseek-(?:v2|moe)", {"model_type": "deepseek_v2", **_HAS_EXPERTS}),
    (r"glm-4\.7-flash", {"model_type": "glm4_moe_lite", **_HAS_EXPERTS}),
    (r"glm-4\.[5-9]v", {"model_type": "glm4v_moe", **_SEES, **_HAS_EXPERTS}),
    (r"glm-4\.[5-9]", {"model_type": "glm4_moe", **_HAS_EXPERTS}),
    (r"glm-?5", {"model_type": "glm_moe_dsa", **_HAS_EXPERTS}),
    (r"gpt-oss", {"model_type": "gpt_oss", **_HAS_EXPERTS}),
    (
        r"(?<![a-z])vl(?:a|m)?(?![a-z])|[\d.]vl(?![a-z])|vision|minicpm-?[ov]|omni(?![a-z])|llava|internvl|openvla|pixtral"
        r"|glm-?4\.?\d?v|kimi-vl|paligemma|idefics|smolvlm",
        {"model_type": "", **_SEES},
    ),
    (r"(?<![a-z])moe(?![a-z])|-a\d+(?:\.\d+)?b\b|kimi-k|minimax-m|llama-4|dbrx", {"model_type": "", **_HAS_EXPERTS}),
    (
        r"mamba|rwkv|jamba|recurrentgemma|falcon-h1|(?<![a-z])lfm|nemotron-(?:h|nano|3(?:\.\d)?-[a-z])",
        {"model_type": "falcon_h1"},
    ),
    (r"(?<![a-z])(?:flan-)?t5(?![a-z])|(?<![a-z])bart|whisper", {"model_type": "t5", "is_encoder_decoder": True}),
    (r"qwen|llama|mistral|ministral|smollm|olmo|gemma|phi-?\d|granite|deepseek|internlm|yi-|glm|gpt2|pythia|opt-", {}),
)


def family_of(name: str) -> Mapping[str, Any] | None:
    """Entries of the model's ``config.json`` that its name tells (none for a dense language model); None: the name
    says nothing."""
    # The folders above say nothing.
    last = "/".join(name.rstrip("/").split("/")[-2:]).lower()
    return next((config for pattern, config in NAMES_OF_FAMILIES if re.search(pattern, last)), None)


TOKENIZER = "tokenizer.json"


@lru_cache(maxsize=8)
def vocabulary_of(path: str, fetch: bool = False) -> Mapping[int, str] | None:
    """Token by id, added tokens included; None where the tokenizer is not on this machine, unless ``fetch`` lets
    transformers load it, from the hub if need be."""
    folder = model_folder(path)
    if folder is None or not os.path.isfile(folder / TOKENIZER):
        if not fetch:
            return None
        from transformers import AutoTokenizer

        return {number: token for token, number in AutoTokenizer.from_pretrained(path).get_vocab().items()}
    content: dict[str, Any] = json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
    vocabulary = content["model"].get("vocab", {})
    if isinstance(vocabulary, dict):
        found = {number: token for token, number in vocabulary.items()}
    else:
        found = {number: entry[0] for number, entry in enumerate(vocabulary)}  # Unigram: [token, score]
    return found | {added["id"]: added["content"] for added in content.get("added_tokens") or ()}


def vocabulary_hash(path: str) -> str:
    """A fingerprint of id -> token, in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    for number, token in sorted((vocabulary_of(path, fetch=True) or {}).items()):
        digest.update(f"{number}\t{token}\n".encode())
    return digest.hexdigest()
