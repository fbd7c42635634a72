"""A Hugging Face language model for training or for forward passes.

Weights are loaded in float32 whatever the compute dtype: the strategy casts a copy to compute with and keeps these as
master weights.

MLP layers can be computed a tile of tokens at a time, so that activations of ``intermediate_size`` never exist for all.
An MLP works on each token alone: ``mlp(x) = concat(mlp(tile) for tile in x)``.  A tile's activations are computed again
in the backward pass (gradient checkpointing, for each tile), so at most one tile's exist at any time: 1/n of the memory
for one more forward pass of the layer.  The tiles' gradients of the weights are summed by autograd before anyone sees
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from roll.config.lora import frozen_by, names_of
from roll.config.model_files import lacks_flash_attention, model_folder
from roll.config.roles import INVARIANT_ATTENTION, ModelArguments
from roll.config.weight_files import file_of_each_tensor, stored_shapes
from roll.models.layout_setup import attention_cap
from roll.models.stored import incomplete, text_part
from roll.models.vision import reads_images

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


HeadName = Literal["causal_lm", "value", "score"]
"""``value`` is a critic's head, with a bias, ``score`` a reward model's, without one; both are named ``score.``."""

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

OUTPUT_MATRIX = "lm_head.weight"
# Beginning of the names of a value head's parameters.
VALUE_HEAD = "score."

_ATTENTION_NAMES = {"fa2": "flash_attention_2"}


def build_model(
    args: ModelArguments, head: HeadName, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """Load the model of a role from a folder or hub name, on the CPU.

    Args:
        args: ``model_name_or_path`` must be set.
        head: ``causal_lm``, or ``value``: the same body with a scalar head, which is zero unless the folder has one
            (a reward model's has, and one written by an earlier run of a critic); or ``score``: a reward model, whose
            head is drawn by :func:`new_head` unless the folder has one.
        dtype: of the weights in memory.
        seed: of a new score head.

    Raises:
        ValueError: no path, a model that cannot be computed here, a folder that lacks a tensor of the model, or
            ``freeze_module_prefix`` that matches nothing.
        OSError: no such folder, or a folder without a model.
    """
    config = checked_config(args, head)
    model, info = auto_class(config, head).from_pretrained(
        args.model_name_or_path,
        config=config,
        dtype=dtype,
        attn_implementation=attention_implementation(args, config),
        trust_remote_code=args.trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    missing = set(info["missing_keys"])
    if head != "causal_lm":
        for name, parameter in model.score.named_parameters():
            # A sequence-classification model has a weight and no bias.
            if f"{VALUE_HEAD}{name}" in missing:
                missing.remove(f"{VALUE_HEAD}{name}")
                parameter.data.copy_(new_head(head, parameter, seed))
    problem = incomplete(
        model, missing, info["unexpected_keys"], info["mismatched_keys"], bool(args.model_config_kwargs)
    )
    if problem is not None:
        raise ValueError(f"model_args.model_name_or_path: {args.model_name_or_path} {problem}")
    freeze_modules(model, args.freeze_module_prefix)
    return model


def pickled_shapes(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of ``.bin`` files, by name; of their data nothing is read.

    Raises:
        ValueError: a file that holds something else.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            tensors = torch.load(file, map_location="meta", weights_only=True, mmap=True)
            shapes |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        except Exception as error:  # of the pickle, in many types
            raise ValueError(f"{file} holds no tensors that can be read: {error}") from error
    return shapes


def compare_with_headers(
    shapes: Mapping[str, tuple[int, ...]], path: str, overrides: Mapping[str, Any], without_head: bool
) -> str | None:
    """Compare a local folder's headers with its ``config.json``.

    Args:
        shapes: of all tensors of the files, by name.
        path: the folder.
        overrides: ``model_config_kwargs``.
        without_head: the role has a head of its own, and no use for an output matrix.

    Returns:
        What is wrong; None where everything fits, or where only the loader of the role can tell: code of the model's
        own, quantised weights.

    Raises:
        OSError, ValueError: transformers cannot read the configuration.
    """
    from transformers import AutoConfig

    config = text_part(AutoConfig.from_pretrained(path, **overrides))
    if getattr(config, "quantization_config", None) is not None:
        return None
    family = auto_class(config, "causal_lm")._model_mapping
    if type(config) not in family:
        return None
    cls = family[type(config)]
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with quiet_transformers():
        model, info = cls.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    missing = set(info["missing_keys"]) - ({OUTPUT_MATRIX} if without_head else set())
    return incomplete(model, missing, info["unexpected_keys"], info["mismatched_keys"], bool(overrides))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' report and its progress bar from the terminal: its loader's report is in the error."""
    from transformers.utils import logging

    level, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bar:
            logging.enable_progress_bar()


def empty_model(config: PretrainedConfig, head: HeadName, **options: object) -> PreTrainedModel:
    """A model of this configuration without weights: on torch's ``meta`` device.

    Args:
        options: of ``from_config``, such as ``dtype`` and ``attn_implementation``.
    """
    cls = auto_class(config, head)
    with torch.device("meta"):
        return (getattr(cls, "from_config", None) or cls._from_config)(config, **options)


def new_head(head: HeadName, parameter: Tensor, seed: int) -> Tensor:
    """The first values of a head's parameter on the CPU: zero for a critic; for a reward model normal with a deviation
    of 1/sqrt(d + 1), d the hidden size, as in "Learning to summarize from human feedback" (arXiv 2009.01325, sec. 3.4),
    and the same whatever the ranks and the backend."""
    drawn = torch.zeros(parameter.shape)
    if head == "score":
        drawn.normal_(std=(parameter.shape[-1] + 1) ** -0.5, generator=torch.Generator().manual_seed(seed))
    return drawn


def auto_class(config: PretrainedConfig, head: HeadName) -> Any:
    """The class of transformers that makes a model of this configuration with this head."""
    import transformers

    sees = reads_images(config)
    generates: Any = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    if head == "causal_lm":
        return generates
    name = "SequenceClassification" if head == "score" else "TokenClassification"
    classifies: Any = getattr(transformers, f"AutoModelFor{name}")
    is_known = type(config) in classifies._model_mapping or type(config) not in generates._model_mapping
    if is_known and not sees:
        return classifies
    # A classifier of a family that transformers has the parts of but does not define.
    from transformers import modeling_layers

    cls: Any = generates._model_mapping[type(config)]
    bases = (getattr(modeling_layers, f"GenericFor{name}"), cls.__bases__[0])
    own_name = re.sub("For(ConditionalGeneration|CausalLM)$", f"For{name}", cls.__name__)
    return type(own_name, bases, {"__module__": cls.__module__, "config_class": cls.config_class})


def checked_config(args: ModelArguments, head: HeadName) -> PretrainedConfig:
    """The configuration of a model that can be computed here, with the given head.

    Raises:
        ValueError: no path; see also :func:`load_config`.
        OSError: no such folder.
    """
    if not args.model_name_or_path:
        raise ValueError("model_args.model_name_or_path: empty; give a model folder, or set `pretrain` for all roles")
    config = load_config(args)
    if head != "causal_lm":
        config.num_labels = 1
    return config


def load_config(args: ModelArguments) -> PretrainedConfig:
    """The configuration of the model that is computed: the whole folder's, or its language model's.

    Raises: as :func:`folder_config`.
    """
    return text_part(folder_config(args))


def folder_config(args: ModelArguments) -> PretrainedConfig:
    """A folder's configuration with ``model_config_kwargs`` applied.

    Raises:
        ValueError: a key in ``model_config_kwargs`` that this configuration does not have.
    """
    from transformers import AutoConfig

    assert args.model_name_or_path
    config, unused = AutoConfig.from_pretrained(
        args.model_name_or_path,
        trust_remote_code=args.trust_remote_code,
        return_unused_kwargs=True,
        **args.model_config_kwargs,
    )
    if unused:
        raise ValueError(
            f"model_args.model_config_kwargs: the {config.model_type} model has no {', '.join(sorted(unused))}; "
            f"it has {', '.join(sorted(key for key in config.to_dict() if not key.startswith('_')))}"
        )
    tied = [part for part in (config, config.get_text_config()) if getattr(part, "tie_word_embeddings", False)]
    if tied and unties_output(args.model_name_or_path):
        for part in tied:
            part.tie_word_embeddings = False
    return config


def local_folder(name_or_path: str) -> Path:
    """The model's folder on this machine; a hub model's files are fetched."""
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name_or_path, allow_patterns=["*.safetensors", "*.json"]))


def unties_output(name_or_path: str) -> bool:
    """The files hold an output matrix that differs from the embeddings.

    transformers then computes with both, whatever ``tie_word_embeddings`` says; others (Megatron, vLLM, the next loader
    of an export) trust the flag. A hub model that is not on this machine yet is taken at its word: who
    must know fetches it before (:func:`local_folder`).
    """
    folder = model_folder(name_or_path)
    try:
        shapes = None if folder is None else stored_shapes(folder)
    except ValueError:
        return False
    if folder is None or not shapes or OUTPUT_MATRIX not in shapes:
        return False
    files = file_of_each_tensor(folder)
    embeddings = [name for name, shape in shapes.items() if name != OUTPUT_MATRIX and shape == shapes[OUTPUT_MATRIX]]
    with safe_open(files[OUTPUT_MATRIX], framework="pt") as file:
        output = file.get_slice(OUTPUT_MATRIX)
        for name in embeddings:
            with safe_open(files[name], framework="pt") as other:
                inputs, step = other.get_slice(name), 16384
                starts = range(0, shapes[name][0], step)
                if all(torch.equal(output[start : start + step], inputs[start : start + step]) for start in starts):
                    return False
    return bool(embeddings)


def overrides(args: ModelArguments) -> dict[str, Any]:
    """Entries of ``config.json`` that an engine which reads the file itself must be given: those of
    ``model_config_kwargs``, and an output matrix that is not the embeddings."""
    untied = {"tie_word_embeddings": False} if unties_output(str(local_folder(str(args.model_name_or_path)))) else {}
    return {**untied, **args.model_config_kwargs}


def attention_implementation(args: ModelArguments, config: PretrainedConfig) -> str | None:
    """The name by which transformers knows ``model_args.attn_implementation``; None: ``sdpa`` where the model has it,
    else ``eager`` (gpt-oss). Likewise for flash attention where its package is missing: torch brings a flash kernel of
    its own. A model with capped scores (Gemma 2) is ``eager`` where others are ``sdpa``."""
    name = args.attn_implementation
    if name in (None, "auto", INVARIANT_ATTENTION) or lacks_flash_attention(name):
        name = None
    # transformers passes the cap to sdpa as well, which drops it without a word.
    if name in (None, "sdpa") and attention_cap(config) is not None:
        return "eager"
    return name if name is None else _ATTENTION_NAMES.get(name, name)


def eager_or_default(args: ModelArguments, config: PretrainedConfig) -> str | None:
    """For where a flash kernel cannot be: ``eager`` where the role's model is, or its scores are capped; else None."""
    return "eager" if attention_cap(config) is not None or attention_implementation(args, config) == "eager" else None


def enable_gradient_checkpointing(model: PreTrainedModel, args: ModelArguments) -> None:
    """Recompute each layer's activations in the backward pass, unless the role disables it."""
    if not args.disable_gradient_checkpointing:
        # Renamed within transformers 5; the old name warns where the new one exists.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": args.gradient_checkpointing_use_reentrant})
        if args.gradient_checkpointing_use_reentrant and not model.get_input_embeddings().weight.requires_grad:
            # The reentrant form gives a layer no gradient unless its input wants one.
            model.enable_input_require_grads()


def has_tied_embeddings(model: PreTrainedModel) -> bool:
    output = model.get_output_embeddings()
    return output is not None and output.weight is model.get_input_embeddings().weight


def freeze_modules(model: PreTrainedModel, prefixes: str | Sequence[str] | None) -> None:
    """Freeze the parameters whose name starts with one of the prefixes (a list, or with commas).

    Raises:
        ValueError: a prefix that matches nothing.
    """
    parameters = dict(model.named_parameters())
    for prefix in names_of(prefixes):
        matching = frozen_by(prefix, parameters)
        if not matching:
            tops = {".".join(name.split(".")[:2]).removesuffix(".weight") for name in parameters}
            raise ValueError(
                f"model_args.freeze_module_prefix: no parameter starts with {prefix!r}; the top modules are "
                f"{', '.join(sorted(tops))}"
            )
        for name in matching:
            parameters[name].requires_grad_(False)


# `model_type` (Qwen2.5 is `qwen2`) and the class of its MLP layers.
TILED_FAMILIES = {"qwen2": "Qwen2MLP", "qwen3": "Qwen3MLP", "llama": "LlamaMLP"}


def tile_mlp_layers(model: PreTrainedModel, num_tiles: int) -> None:
    """Compute every MLP layer of ``model`` in ``num_tiles`` tiles, in place.

    Raises:
        ValueError: a family whose MLP layers are not known to work on each token alone.
    """
    family = model.config.model_type
    if family not in TILED_FAMILIES:
        raise ValueError(
            f"strategy_config.apply_tiled_mlp: true, but the MLP layers of a {family} model cannot be tiled; it works "
            f"for {', '.join(TILED_FAMILIES)}. Set apply_tiled_mlp: false"
        )
    layers = [module for module in model.modules() if type(module).__name__ == TILED_FAMILIES[family]]
    assert layers, type(model)
    for layer in layers:
        layer.forward = partial(_tiled, layer.forward, num_tiles)


def _tiled(mlp: Callable[[Tensor], Tensor], num_tiles: int, hidden: Tensor) -> Tensor:
    """``mlp(hidden)`` for (..., H) ``hidden``, in tiles along the longest of its leading dimensions."""
    dim = max(range(hidden.ndim - 1), key=hidden.shape.__getitem__)
    if torch.is_grad_enabled():
        # An MLP draws no random numbers, so their state need not be saved and restored for each tile.
        mlp = partial(checkpoint, mlp, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([mlp(tile) for tile in hidden.chunk(num_tiles, dim)], dim)
