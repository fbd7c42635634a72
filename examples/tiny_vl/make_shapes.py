"""Make what the tiny vision-language example needs: pictures with questions, faulty demonstrations, untrained models.

    python examples/tiny_vl/make_shapes.py --output examples/tiny_vl/artifacts --seeds 0 1 2

writes ``data/train.parquet`` and ``data/sft.parquet`` (images as bytes), ``data/val.jsonl`` (images as files in
``data/images``) and an untrained model in ``seed<N>/init`` for each seed.  What is already there, made by the same
recipe, is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import shapes
import tiny_vl_model
from shapes import Picture

logger = logging.getLogger("make_shapes")

TAG = "tiny_shapes"
TRAIN_PICTURES, TRAIN_SEED = 4000, 1
VALIDATION_PICTURES, VALIDATION_SEED = 200, 999
DEMONSTRATIONS_PER_PICTURE, DEMONSTRATION_SEED = 8, 2
SLIP_PROBABILITY = 0.2
"""Of each shape's judgement."""
RECIPE_FILE = "recipe.txt"
DEFAULT_OUTPUT = Path(__file__).resolve().parent / "artifacts"


def make(output: Path, seeds: Sequence[int] = (0,), kind: tiny_vl_model.Kind = "qwen3_vl") -> Path:
    """Make what is missing or was made by another recipe under ``output``."""
    recipe = recipe_hash(kind)
    pictures: list[Picture] = []
    missing = [seed for seed in seeds if not is_current(model_folder(output, seed), recipe)]
    if missing or not is_current(output / "data", recipe):
        pictures = shapes.draw_pictures(TRAIN_PICTURES, TRAIN_SEED)
    if not is_current(output / "data", recipe):
        write_data(output / "data", pictures)
        (output / "data" / RECIPE_FILE).write_text(recipe, encoding="utf-8")
        logger.info("wrote pictures and demonstrations to %s", output / "data")
    for seed in missing:
        folder = model_folder(output, seed)
        if folder.exists():
            shutil.rmtree(folder)
        tokenizer = tiny_vl_model.make_tokenizer(
            f"<|im_start|>user\n{one.question}<|im_end|>\n<|im_start|>assistant\n{one.solution()}"
            for one in pictures[:1000]
        )
        model = tiny_vl_model.make_model(tokenizer, seed, kind)
        tiny_vl_model.save(model, tokenizer, folder)
        (folder / RECIPE_FILE).write_text(recipe, encoding="utf-8")
        logger.info("wrote a model of %d weights to %s", model.num_parameters(), folder)
    return output


def model_folder(output: Path, seed: int) -> Path:
    return output / f"seed{seed}" / "init"


def write_data(folder: Path, pictures: Sequence[Picture]) -> None:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    images = [one.png() for one in pictures]
    write_parquet(
        folder / "train.parquet",
        [prompt_row(f"train-{i}", one) | {"images": [images[i]]} for i, one in enumerate(pictures)],
    )
    rng = random.Random(DEMONSTRATION_SEED)
    write_parquet(
        folder / "sft.parquet",
        [
            {
                "id": f"demo-{turn}-{i}",
                "tag": TAG,
                "prompt": f"<image>{one.question}",
                "images": [images[i]],
                "response": one.demonstration(rng, SLIP_PROBABILITY),
            }
            for turn in range(DEMONSTRATIONS_PER_PICTURE)
            for i, one in enumerate(pictures)
        ],
    )
    with (folder / "val.jsonl").open("w", encoding="utf-8") as file:
        for i, one in enumerate(shapes.draw_pictures(VALIDATION_PICTURES, VALIDATION_SEED)):
            (folder / "images" / f"val-{i}.png").write_bytes(one.png())
            file.write(json.dumps(prompt_row(f"val-{i}", one) | {"images": [f"images/val-{i}.png"]}) + "\n")


def prompt_row(row_id: str, one: Picture) -> dict[str, object]:
    """A row without its image."""
    return {
        "id": row_id,
        "tag": TAG,
        "prompt": f"<image>{one.question}",
        "ground_truth": str(one.answer),
        "solution": one.solution(),
    }


def write_parquet(path: Path, rows: list[dict[str, object]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def recipe_hash(kind: str) -> str:
    """Changes whenever one of these modules does."""
    digest = hashlib.sha256(kind.encode())
    for module in ("make_shapes.py", "shapes.py", "tiny_vl_model.py"):
        digest.update((Path(__file__).resolve().parent / module).read_bytes())
    return digest.hexdigest()


def is_current(folder: Path, recipe: str) -> bool:
    file = folder / RECIPE_FILE
    return file.is_file() and file.read_text(encoding="utf-8") == recipe


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the models to make")
    parser.add_argument("--kind", choices=("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), default="qwen3_vl")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    make(options.output, options.seeds, options.kind)


if __name__ == "__main__":
    main()
