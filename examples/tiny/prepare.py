"""Make what the tiny example needs: word problems, faulty demonstrations, tokenizer and untrained models.

    python examples/tiny/prepare.py --output examples/tiny/artifacts --seeds 0 1 2

writes ``data/train.jsonl`` and ``data/val.jsonl`` (prompts with their answers), ``data/sft.jsonl`` (demonstrations for
the warm start) and an untrained model in ``seed<N>/init`` for each seed.  Everything is a function of the numbers below
and the seed.  What is already there, made by the same recipe, is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tiny_model
import word_problems
from word_problems import WordProblem

logger = logging.getLogger("prepare")

TAG = "tiny_word_problems"
TRAIN_PROBLEMS, TRAIN_SEED = 8000, 1
VALIDATION_PROBLEMS, VALIDATION_SEED = 200, 999
DEMONSTRATIONS_PER_PROBLEM, DEMONSTRATION_SEED = 4, 2
"""4 x 8,000 = 32,000 demonstrations: 1,000 steps of 32."""
SLIP_PROBABILITY = 0.3
"""Of each step: 0.7^3 = 34% of the demonstrations are free of slips."""
TOKENIZER_TEXTS = 3000
FINGERPRINT_FILE = "fingerprint.json"
DEFAULT_OUTPUT = Path(__file__).resolve().parent / "artifacts"


@dataclass(frozen=True)
class Artifacts:
    """Where everything lies."""

    folder: Path

    @property
    def data_folder(self) -> Path:
        return self.folder / "data"

    @property
    def train_file(self) -> Path:
        return self.data_folder / "train.jsonl"

    @property
    def validation_file(self) -> Path:
        return self.data_folder / "val.jsonl"

    @property
    def demonstrations_file(self) -> Path:
        return self.data_folder / "sft.jsonl"

    def model_folder(self, seed: int) -> Path:
        return self.folder / f"seed{seed}" / "init"


def prepare(output: Path, seeds: Sequence[int] = (0,)) -> Artifacts:
    """Make what is missing or was made by another recipe under ``output``; return the paths."""
    artifacts = Artifacts(output)
    recipe = recipe_hash()
    problems: list[WordProblem] = []
    if not is_current(artifacts.data_folder, recipe):
        problems = word_problems.draw_problems(TRAIN_PROBLEMS, TRAIN_SEED, validation=False)
        write_data(artifacts, problems)
        write_fingerprint(artifacts.data_folder, recipe)
        logger.info("wrote the word problems and their demonstrations to %s", artifacts.data_folder)
    missing = [seed for seed in seeds if not is_current(artifacts.model_folder(seed), recipe)]
    if missing:
        problems = problems or word_problems.draw_problems(TRAIN_PROBLEMS, TRAIN_SEED, validation=False)
        write_models(artifacts, problems, missing, recipe)
    return artifacts


def write_data(artifacts: Artifacts, problems: Sequence[WordProblem]) -> None:
    artifacts.data_folder.mkdir(parents=True, exist_ok=True)
    validation = word_problems.draw_problems(VALIDATION_PROBLEMS, VALIDATION_SEED, validation=True)
    write_jsonl(artifacts.train_file, (prompt_row(f"train-{i}", p) for i, p in enumerate(problems)))
    write_jsonl(artifacts.validation_file, (prompt_row(f"val-{i}", p) for i, p in enumerate(validation)))
    rng = random.Random(DEMONSTRATION_SEED)
    demonstrations = (
        {
            "id": f"demo-{turn}-{i}",
            "tag": TAG,
            "messages": messages(problem),
            "response": word_problems.demonstration(problem, rng, SLIP_PROBABILITY),
        }
        for turn in range(DEMONSTRATIONS_PER_PROBLEM)
        for i, problem in enumerate(problems)
    )
    write_jsonl(artifacts.demonstrations_file, demonstrations)


def messages(problem: WordProblem) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem.question}]


def prompt_row(row_id: str, problem: WordProblem) -> dict[str, object]:
    return {
        "id": row_id,
        "tag": TAG,
        "messages": messages(problem),
        "ground_truth": str(problem.answer),
        "ground_truth_size": abs(problem.answer),
        "solution": word_problems.solution(problem),
    }


def write_models(artifacts: Artifacts, problems: Sequence[WordProblem], seeds: Iterable[int], recipe: str) -> None:
    tokenizer = tiny_model.make_tokenizer(
        f"<|im_start|>user\n{problem.question}<|im_end|>\n<|im_start|>assistant\n{word_problems.solution(problem)}"
        for problem in problems[:TOKENIZER_TEXTS]
    )
    for seed in seeds:
        folder = artifacts.model_folder(seed)
        if folder.exists():
            shutil.rmtree(folder)
        model = tiny_model.make_model(tokenizer, seed)
        tiny_model.save(model, tokenizer, folder)
        write_fingerprint(folder, recipe)
        logger.info("wrote a model of %d weights to %s", model.num_parameters(), folder)


def write_jsonl(path: Path, rows: Iterable[dict[str, object]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def recipe_hash() -> str:
    """Changes whenever one of these modules does, so that an edited recipe never meets old artefacts."""
    digest = hashlib.sha256()
    for module in sorted(("prepare.py", "tiny_model.py", "word_problems.py")):
        digest.update((Path(__file__).resolve().parent / module).read_bytes())
    return digest.hexdigest()


def is_current(folder: Path, recipe: str) -> bool:
    """True where ``folder`` was finished by this recipe and still holds the files it held then, by name and size."""
    fingerprint = folder / FINGERPRINT_FILE
    if not fingerprint.is_file():
        return False
    return json.loads(fingerprint.read_text()) == {"recipe": recipe, "files": file_sizes(folder, fingerprint)}


def write_fingerprint(folder: Path, recipe: str) -> None:
    fingerprint = folder / FINGERPRINT_FILE
    fingerprint.write_text(json.dumps({"recipe": recipe, "files": file_sizes(folder, fingerprint)}, indent=1))


def file_sizes(folder: Path, fingerprint: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in sorted(folder.iterdir()) if p.is_file() and p != fingerprint}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the models to make")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    prepare(options.output, options.seeds)


if __name__ == "__main__":
    main()
