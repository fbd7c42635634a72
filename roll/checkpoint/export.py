"""``roll export``: a model in Hugging Face's format, an adapter in peft's or a GGUF file, from a training checkpoint.

Works on the checkpoint of any strategy and any number of ranks, without Ray and without process groups.  Tensors are
read one by one, and written in files of a few gigabytes.  What was written is then loaded as its users load it, and its
log-probs are compared with those of a model put together in another way: the model that the run began with, in memory,
with the checkpoint's weights in it.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from roll.checkpoint.folders import atomic_folder
from roll.checkpoint.hub import add_card, check_repository, push
from roll.checkpoint.tensors import stored_tensors
from roll.checkpoint.trained_model import TrainedModel, config_error, find_trained
from roll.config.installation import install_command
from roll.config.losses import SCORE_INPUT, SCORE_INPUT_DEFAULT
from roll.config.reading.errors import ConfigError
from roll.config.reading.masking import masked_text
from roll.config.run import RESOLVED_CONFIG
from roll.models.build import DTYPES, auto_class, checked_config, folder_config
from roll.models.loading import TensorFiles
from roll.models.lora import adapter_file_name, adapter_names, base_name, is_adapter, merged_weight
from roll.models.stored import whole_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

FORMS = ("hf", "peft", "gguf")
MAX_FILE_BYTES = 4 * 2**30
BOUND = 1e-4
"""Largest difference between log-probs, computed in float32 from the same rounded weights."""
BOUND_OF_MERGED = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}
"""The same for merged adapters, whose sum may be rounded to the next number up or down."""
_KEPT_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
_OWN_FILES = ("config.json", "model.safetensors.index.json", "adapter_config.json")


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


# Comparison


Rounding = Callable[[Tensor], Tensor]
"""Maps a float32 parameter to the float32 values of its exported form."""


def compare(trained: TrainedModel, form: str, path: Path, rounding: Rounding, bound: float) -> float:
    """Return the largest difference between the outputs of the exported model and of the model in memory. Raises
    ``ValueError``: it is larger than rounding explains."""
    ids = torch.randint(0, checked_config(trained.args, trained.head).get_text_config().vocab_size, (2, 48),
                        generator=torch.Generator().manual_seed(0))  # fmt: skip
    wanted = model_outputs(expected_model(trained, rounding), ids)
    found = model_outputs(reloaded_model(trained, form, path), ids)
    difference = float((wanted - found).abs().max())
    # Not "difference > bound", which would let NaN pass.
    if not difference <= bound:
        raise ValueError(
            f"{path}: outputs of the exported model differ from those of the checkpoint by {difference:.2g}, more than "
            f"rounding explains ({bound:g}); it was not kept"
        )
    return difference


def expected_model(trained: TrainedModel, rounding: Rounding) -> PreTrainedModel:
    """The model that the run began with, with the checkpoint's weights in it, rounded; computes in float32."""
    config = checked_config(trained.args, trained.head)
    model: Any = auto_class(config, trained.head).from_pretrained(trained.model, config=config, dtype=torch.float32)
    live = {base_name(name): parameter for name, parameter in model.named_parameters()}
    with stored_tensors(trained.folder) as stored, torch.no_grad():
        for name in trained.contents.trained:
            if not is_adapter(name):
                live[base_name(name)].copy_(trained.read(stored, name))
        for weight, scaling in trained.contents.scalings.items():
            down, up = (trained.read(stored, name) for name in adapter_names(weight))
            live[weight].copy_(merged_weight(live[weight], down, up, scaling))
        for parameter in model.parameters():
            parameter.copy_(rounding(parameter))
    return model.eval()


def reloaded_model(trained: TrainedModel, form: str, path: Path) -> PreTrainedModel:
    """The model as its users load it, in float32."""
    config = checked_config(trained.args, trained.head)
    load = partial(auto_class(config, trained.head).from_pretrained, dtype=torch.float32)
    model: Any
    if form == "peft":
        from peft import PeftModel

        model = PeftModel.from_pretrained(load(trained.model, config=config), str(path))
    elif form == "gguf":
        # transformers reads tensors and their types from the file, and not every key of the shape.
        model = load(path.parent, gguf_file=path.name, config=config)
    else:
        model = load(path)
    return model.eval()


@torch.no_grad()
def model_outputs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Log-probs of the next token, values, or scores."""
    # Row by row: a sequence classifier without a padding token refuses more.
    logits = torch.cat([model(input_ids=row[None]).logits.float() for row in ids])
    return logits if logits.shape[-1] == 1 else logits.log_softmax(-1)


# Command


def main(words: Sequence[str]) -> int:
    """Exit status 0, or 1 where the comparison fails."""
    parser = build_parser()
    options = parser.parse_args(words)
    if options.public and options.push is None:
        parser.error("--public goes with --push")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.push is not None:
        check_repository(options.push)
    trained = find_trained(options.checkpoint, options.role, options.model)
    output = options.output or Path(f"{trained.folder.parent.name}-{trained.folder.name}-{options.to}")
    if output.exists():
        raise config_error("--output", str(output), "exists; name a folder that is not there yet")
    try:
        dtype = _dtype(options, trained)
        with atomic_folder(output) as folder:
            difference = _write(trained, options.to, folder, dtype, options)
            if options.push is not None:
                add_card(trained, options.to, folder, options.push)
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1
    compared = "not compared" if difference is None else f"log-probs differ from the checkpoint's by {difference:.2g}"
    logger.info("%s: %s of %s, %s", output, options.to, trained.folder, compared)
    if options.push is not None:
        try:
            logger.info("pushed to %s", push(output, options.push, options.public))
        except OSError as error:
            logger.error("%s is kept, and could not be pushed: %s", output, masked_text(str(error)))
            return 1
    return 0


def _write(
    trained: TrainedModel, form: str, folder: Path, dtype: torch.dtype, options: argparse.Namespace
) -> float | None:
    path = folder
    rounding: Rounding = lambda tensor: tensor.to(dtype).float()  # noqa: E731
    if form == "hf":
        write_hf(trained, folder, dtype)
    elif form == "peft":
        write_peft(trained, folder)
    else:
        from roll.checkpoint.gguf_file import rounded, write_gguf

        path = write_gguf(trained, folder, options.dtype or "f16")
        rounding = partial(rounded, dtype=options.dtype or "f16")
    bound = BOUND_OF_MERGED[dtype] if trained.contents.scalings and form != "peft" else BOUND
    return None if options.no_check else compare(trained, form, path, rounding, bound)


def _dtype(options: argparse.Namespace, trained: TrainedModel) -> torch.dtype:
    if options.to == "peft":
        return torch.float32
    if options.to == "gguf":
        return {"f32": torch.float32, "bf16": torch.bfloat16}.get(options.dtype or "f16", torch.float16)
    if options.dtype in DTYPES:
        return DTYPES[options.dtype]
    if options.dtype is not None:
        raise config_error("--dtype", options.dtype, "of an hf export one of bf16, fp16, fp32")
    own = checked_config(trained.args, trained.head).dtype
    return own if own in BOUND_OF_MERGED else torch.bfloat16


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="roll export", description=__doc__.split("\n\n")[0])
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint, or a run's folder: its newest")
    parser.add_argument(
        "--to", choices=FORMS, default="hf", help="hf: a model folder; peft: the adapter; gguf: one file"
    )
    parser.add_argument("--output", type=Path, help="a new folder (default: checkpoint-<n>-<role>-<form> here)")
    parser.add_argument("--role", help="actor_train, critic, sft_train ...; needed where there are several")
    parser.add_argument("--model", help="the model that the run began with, if it has moved")
    parser.add_argument(
        "--dtype", help="hf: bf16, fp16, fp32 (default: the model's); gguf: f32, f16 (default), bf16, q8_0"
    )
    parser.add_argument("--push", metavar="REPO", help="upload it to the Hugging Face hub (HF_TOKEN) with a model card")
    parser.add_argument("--public", action="store_true", help="of a new repository that --push makes: not private")
    parser.add_argument("--no-check", action="store_true", help="write only: the comparison needs the model in memory")
    return parser
