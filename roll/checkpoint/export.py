"""``roll export``: a model in Hugging Face's format, an adapter in peft's or a GGUF file, from a training checkpoint.

Works on the checkpoint of any strategy and any number of ranks, without Ray and without process groups.  Tensors are
read one by one, and written in files of a few gigabytes.  What was written is then loaded as its users load it, and its
log-probs are compared with those of a model put together in another way: the model that the run began with, in memory,
with the checkpoint's weights in it.  ``--push`` brings it to the Hugging Face hub, with a model card written from the
run.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor

from roll import __version__
from roll.checkpoint.folders import atomic_folder
from roll.checkpoint.forms import rounded, write_gguf, write_hf, write_peft
from roll.checkpoint.tensors import stored_tensors
from roll.checkpoint.trained_model import TrainedModel, config_error, find_trained
from roll.config.model_files import looks_like_folder
from roll.config.reading.errors import ConfigError
from roll.config.reading.masking import masked_text
from roll.config.run import RESOLVED_CONFIG
from roll.models.build import DTYPES, auto_class, checked_config
from roll.models.lora import adapter_names, base_name, is_adapter, merged_weight
from roll.tracking.records import METRICS_NAME, read_metrics
from roll.tracking.run_record import RECORD_FOLDER

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

FORMS = {"hf": "transformers", "peft": "peft", "gguf": "gguf"}
"""The library of each at the hub."""
BOUND = 1e-4
"""Largest difference between log-probs, computed in float32 from the same rounded weights."""
BOUND_OF_MERGED = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}
"""The same for merged adapters, whose sum may be rounded to the next number up or down."""

CARD = "README.md"
TRAINING_CONFIG = "training_config.yaml"
_TASKS = {"causal_lm": "text-generation", "score": "text-classification", "value": "token-classification"}


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


# The hub


def check_repository(repository: str) -> None:
    """
    Raises:
        ConfigError: no name of a repository, or no token in the environment.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise config_error("--push", repository, str(error).splitlines()[0], "me/my-model") from error
    if get_token() is None:
        rule = "needs a token of the hub with write access: set HF_TOKEN, or log in with `hf auth login`"
        raise config_error("--push", repository, rule)


def push(folder: Path, repository: str, public: bool) -> str:
    """Upload a folder as one commit, to a repository that is made if need be (one that exists keeps its visibility);
    its URL. Raises ``OSError``: the hub refuses, or cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the httpx that it was built on

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="roll", library_version=__version__)
    try:
        made = hub.create_repo(repository, private=not public, exist_ok=True)
        hub.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=f"Exported by roll {__version__}")
    except HTTPError as error:
        raise OSError(f"the hub cannot be reached: {error}") from error
    return str(made)


def add_card(trained: TrainedModel, form: str, folder: Path, repository: str) -> None:
    """Write the model card into an export, and beside it the configuration of the run, where that is still there."""
    run = trained.folder.resolve().parent.parent.parent
    resolved = run / RESOLVED_CONFIG
    if resolved.is_file():
        shutil.copyfile(resolved, folder / TRAINING_CONFIG)
    (folder / CARD).write_text(model_card(trained, form, repository, run), encoding="utf-8")


def _name(choice: Any) -> Any:
    return choice.get("name") if isinstance(choice, dict) else choice


def model_card(trained: TrainedModel, form: str, repository: str, run: Path) -> str:
    """The model card: base model, data, algorithm, the first and last values of the curves, and the command; what the
    folder of the ``run`` does not have (any more) is left out."""
    config = _mapping(run / RESOLVED_CONFIG)
    about = _mapping(run / RECORD_FOLDER / "run.json")
    base = str(config.get("pretrain") or trained.contents.path or trained.model)
    pipeline = str(about.get("pipeline") or config.get("pipeline") or "")
    estimator = _name(config.get("estimator") or config.get("adv_estimator"))
    files = list(dict.fromkeys(_data_files(config)))
    at_hub = [name.removeprefix("hub:") for name in files if name.startswith("hub:")]
    head: dict[str, Any] = {"library_name": FORMS[form], "pipeline_tag": _TASKS[trained.head]}
    if not looks_like_folder(base) and not Path(base).exists():
        head["base_model"] = base
    if at_hub:
        head["datasets"] = at_hub
    head["tags"] = ["roll", *filter(None, (pipeline, estimator))]
    # Folders of one's own host say nothing to others.
    shown = {
        "base model": head.get("base_model", Path(base).name),
        "data": ", ".join(at_hub + [Path(name).name for name in files if not name.startswith("hub:")]),
        "pipeline": pipeline,
        "advantages": estimator,
        "loss": _name(config.get("loss") or config.get("pg_variant")),
        "steps": trained.state.get("step"),
        "seed": config.get("seed"),
    }
    lines = ["---", yaml.safe_dump(head, sort_keys=False, allow_unicode=True).rstrip(), "---", ""]
    lines += [f"# {repository.rpartition('/')[2]}", "", f"Trained with roll {__version__}.", "", "| | |", "|---|---|"]
    for name, value in shown.items():
        if value not in (None, ""):
            cell = str(value).replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {name} | {cell} |")
    metrics = run / str(about.get("log_dir", "logs")) / METRICS_NAME
    rows = read_metrics(metrics) if metrics.is_file() else []
    present = list(dict.fromkeys(name for row in rows for name in row))
    curves = []
    for key in dict.fromkeys(key for panel in about.get("panels", ()) for key in panel["keys"]):
        shape = re.compile(re.escape(key).replace(r"\*", "[^/]+"))
        for metric in filter(shape.fullmatch, present):
            points = [(row["step"], row[metric]) for row in rows if metric in row]
            ends = [f"{value:.4g} (step {step})" for step, value in (points[0], points[-1])]
            curves.append(f"| `{metric}` | {ends[0]} | {ends[1]} |")
    if curves:
        lines += ["", "## Curves", "", "| metric | first | last |", "|---|---|---|", *curves]
    if config:
        lines += ["", "## Training", "", "```bash", f"roll run {TRAINING_CONFIG}", "```"]
    return "\n".join([*lines, ""])


def _data_files(section: Mapping[str, Any]) -> Iterator[str]:
    for key, value in section.items():
        if key == "data_args" and isinstance(value, Mapping):
            names = value.get("file_name") or []
            yield from [names] if isinstance(names, str) else map(str, names)
        elif key != "validation" and isinstance(value, Mapping):
            yield from _data_files(value)


def _mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML too
    return found if isinstance(found, dict) else {}


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
