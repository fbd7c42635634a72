"""``roll merge``: one model out of several of the same architecture, such as checkpoints of a run or of several runs.

Merging is mergekit's (github.com/arcee-ai/mergekit): ``linear`` (model soups, arXiv 2203.05482), ``slerp`` (Shoemake,
1985), ``ties`` (arXiv 2306.01708), ``dare_linear`` and ``dare_ties`` (arXiv 2311.03099).  A source may be a model
folder or a training checkpoint, which is exported first.  What was written is loaded again before the command
says done.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.checkpoint.export import compare, write_hf
from roll.checkpoint.folders import atomic_folder
from roll.checkpoint.trained_model import config_error, find_trained
from roll.config.reading.errors import ConfigError, Problem
from roll.models.loading import TensorFiles

logger = logging.getLogger(__name__)

METHODS = ("linear", "slerp", "ties", "dare_linear", "dare_ties")
ON_DIFFERENCES = ("ties", "dare_linear", "dare_ties")
"""Methods that merge differences to a base model."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RECORD = "merge.json"


@dataclass(frozen=True)
class Recipe:
    """A merge, with sources as folders of Hugging Face's format.

    Attributes:
        weights: of each source; their ratios count for ``linear`` and ``ties``, their values for ``dare_*``.
        density: share of each difference that is kept (``ties``: the largest; ``dare_*``: drawn, and scaled up).
        t: how far from the first source (0) to the second (1) ``slerp`` goes.
    """

    method: str
    sources: tuple[Path, ...]
    base: Path | None
    weights: tuple[float, ...]
    density: float
    t: float
    dtype: torch.dtype
    seed: int

    def as_mergekit(self) -> dict[str, Any]:
        """The configuration that mergekit reads."""
        dtype = str(self.dtype).removeprefix("torch.")
        if self.method == "slerp":
            models: list[dict[str, Any]] = [{"model": str(source)} for source in self.sources]
            shared = {"base_model": str(self.sources[0]), "parameters": {"t": self.t}}
        else:
            of_each = [{"weight": weight} for weight in self.weights]
            if self.method in ON_DIFFERENCES:
                of_each = [{**one, "density": self.density} for one in of_each]
            pairs = zip(self.sources, of_each, strict=True)
            models = [{"model": str(source), "parameters": parameters} for source, parameters in pairs]
            shared = {"parameters": {"normalize": self.method in ("linear", "ties")}}
            if self.base is not None:
                shared["base_model"] = str(self.base)
        return {"merge_method": self.method, "models": models, "dtype": dtype, **shared}


def merge(recipe: Recipe, folder: Path) -> None:
    """Write the merged model, with the first source's tokenizer, into ``folder``.

    Raises:
        ConfigError: mergekit is not there.
        ValueError: what came out is no model of the sources' architecture, or holds numbers that are not finite.
    """
    try:
        from mergekit.config import MergeConfiguration
        from mergekit.merge import run_merge
        from mergekit.options import MergeOptions
    except ImportError as error:
        rule = f"needs mergekit ({error}): pip install 'roll-rl[merge]'"
        raise ConfigError([Problem("roll merge", recipe.method, rule)]) from error
    options = MergeOptions(random_seed=recipe.seed, write_model_card=False, copy_tokenizer=True, quiet=True)
    run_merge(MergeConfiguration.model_validate(recipe.as_mergekit()), str(folder), options)
    check_merged(recipe, folder)


def check_merged(recipe: Recipe, folder: Path) -> None:
    """Tensors are those of the first source and finite, a linear merge is the weighted mean, the model computes.

    Raises:
        ValueError: it is not so.
    """
    from transformers import AutoModelForCausalLM

    merged, sources = TensorFiles(str(folder)), [TensorFiles(str(source)) for source in recipe.sources]
    if missing := set(sources[0]) ^ set(merged):
        raise ValueError(f"{folder}: other tensors than those of {recipe.sources[0]}: {', '.join(sorted(missing)[:5])}")
    for name in merged:
        tensor = merged.read(name)
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{folder}: {name} has numbers that are not finite")
        if recipe.method == "linear":
            wanted = weighted_mean([source.read(name) for source in sources], recipe.weights)
            difference = float((tensor.float() - wanted.to(recipe.dtype).float()).abs().max())
            if difference > 2 * torch.finfo(recipe.dtype).eps * float(wanted.abs().max()):
                raise ValueError(f"{folder}: {name} differs from the weighted mean by {difference:.2g}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(8)[None]).logits
    if not bool(torch.isfinite(logits).all()):
        raise ValueError(f"{folder}: the merged model's outputs are not finite")


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """In float32."""
    parts = [tensor.float() * (weight / sum(weights)) for tensor, weight in zip(tensors, weights, strict=True)]
    return torch.stack(parts).sum(0)


# Sources


def model_folder(source: Path, scratch: Path) -> Path:
    """``source`` if it is a model of Hugging Face's format; else the checkpoint there, exported and compared.

    Raises:
        ConfigError: it is neither.
        ValueError: the export does not compute what the checkpoint does.
    """
    if (source / "config.json").is_file() and any(source.glob("*.safetensors")):
        return source
    trained = find_trained(source, None, None)
    folder = scratch / f"source-{len(list(scratch.iterdir()))}"
    folder.mkdir()
    write_hf(trained, folder, torch.float32)
    compare(trained, "hf", folder, lambda tensor: tensor, 1e-4)
    logger.info("%s: exported from %s", source, trained.folder)
    return folder


def check_alike(folders: Sequence[Path]) -> None:
    """Raises ``ConfigError`` where two have other tensors or shapes."""
    shapes = [TensorFiles(str(folder)).shapes() for folder in folders]
    for folder, found in zip(folders[1:], shapes[1:], strict=True):
        if found != shapes[0]:
            names = sorted(found.keys() | shapes[0].keys())
            name = next(name for name in names if found.get(name) != shapes[0].get(name))
            rule = f"must have the tensors of {folders[0]}: {name} is {found.get(name)} and {shapes[0].get(name)}"
            raise config_error("MODEL", str(folder), rule)


# The command


def main(words: Sequence[str]) -> int:
    """Exit status 0, or 1 where what came out is not what it should be."""
    options = build_parser().parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    check_options(options)
    try:
        with tempfile.TemporaryDirectory() as scratch, atomic_folder(options.output) as folder:
            sources = tuple(model_folder(source, Path(scratch)) for source in options.models)
            base = None if options.base is None else model_folder(options.base, Path(scratch))
            check_alike([*sources, *([] if base is None else [base])])
            weights = tuple(options.weights or [1.0] * len(sources))
            dtype = DTYPES[options.dtype]
            numbers = (options.density, options.t, dtype, options.seed)
            merge(Recipe(options.method, sources, base, weights, *numbers), folder)
            about = {key: value for key, value in vars(options).items() if key != "output"}
            (folder / RECORD).write_text(json.dumps(about, default=str, indent=1), encoding="utf-8")
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1
    logger.info("%s: %s of %d models, loaded again", options.output, options.method, len(sources))
    return 0


def check_options(options: argparse.Namespace) -> None:
    """Raises ``ConfigError``: every mistake."""
    count, on_differences = len(options.models), options.method in ON_DIFFERENCES
    weights = options.weights or [1.0] * count
    rules = [
        ("MODEL", count >= 2 or on_differences, "name two models or more"),
        ("--method", options.method != "slerp" or count == 2, "slerp goes from one model to another: name two"),
        ("--weights", len(weights) == count, f"one for each of the {count} models"),
        ("--weights", options.method != "slerp" or options.weights is None, "slerp has --t instead"),
        ("--weights", sum(weights) > 0, "their sum must be positive"),
        ("--base", not on_differences or options.base, f"{options.method} merges differences to one model: name it"),
        ("--base", on_differences or options.base is None, f"{options.method} has none"),
        ("--density", 0 <= options.density <= 1, "must lie between 0 and 1"),
        ("--t", 0 <= options.t <= 1, "must lie between 0 and 1"),
        ("--output", not options.output.exists(), "exists; name a folder that is not there yet"),
    ]
    given = {"MODEL": options.models, "--method": options.method} | {f"--{k}": v for k, v in vars(options).items()}
    problems = [Problem(key, str(given[key]), rule) for key, holds, rule in rules if not holds]
    for path in [*options.models, *([options.base] if options.base else [])]:
        if not path.exists():
            problems.append(Problem("MODEL", str(path), "no such folder"))
    if problems:
        raise ConfigError(problems)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll merge",
        description="One model out of several of the same architecture: model folders, or training checkpoints, which "
        "are exported first. Needs mergekit: pip install 'roll-rl[merge]'.",
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="a model folder, a run or a checkpoint")
    parser.add_argument("--method", choices=METHODS, default="linear", help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--base", type=Path, help="ties, dare_*: the model that all began with")
    parser.add_argument("--weights", type=float, nargs="+", help="of each model (default: 1)")
    parser.add_argument("--density", type=float, default=0.5, help="ties, dare_*: share of each difference (0.5)")
    parser.add_argument("--t", type=float, default=0.5, help="slerp: from the first model (0) to the second (1) (0.5)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the weights (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="dare_*: of what is dropped (default: 0)")
    return parser
