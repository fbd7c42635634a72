"""Make the warm starts of the tiny agentic examples on first use: demonstrations, an untrained model, imitation.

python examples/tiny_agentic/warm_start.py lake [--seed 0]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TINY = FOLDER.parent / "tiny"
sys.path[:0] = [str(FOLDER), str(TINY)]

import demonstrations  # noqa: E402  found next to this file, whatever script was started
import tiny_model  # noqa: E402

from roll.cli import run  # noqa: E402
from roll.config.loader import load_config  # noqa: E402
from roll.platforms import use_cpu_below  # noqa: E402

ARTIFACTS = FOLDER / "artifacts"
FINGERPRINT = "fingerprint.json"
TEXTS_OF_TOKENIZER = 3000
PHASES = {"lake": ["sft"], "guess": ["sft"], "calculator": ["sft", "sft2"], "tools": ["sft", "sft2"]}
"""By task, the SFT configurations in their order: ``<task>_<phase>_config.yaml``."""


def make_warm_start(task: str, seed: int = 0) -> Path:
    """The folder of the warm-started model; nothing is done where it is there already."""
    use_cpu_below(2)
    folder = ARTIFACTS / task / f"seed{seed}"
    finished = folder / "warm_start" / FINGERPRINT
    recipe = recipe_hash(task)
    if finished.is_file() and json.loads(finished.read_text())["recipe"] == recipe:
        return folder / "warm_start" / "model"
    shutil.rmtree(folder, ignore_errors=True)
    prepare(task, seed, folder)
    for phase in PHASES[task]:
        status = run(load_config(None, FOLDER / f"{task}_{phase}_config.yaml", overrides=[f"seed={seed}"]))
        if status:
            sys.exit(status)
    finished.write_text(json.dumps({"recipe": recipe}))
    return folder / "warm_start" / "model"


def prepare(task: str, seed: int, folder: Path) -> None:
    """Write the demonstrations and an untrained model."""
    data = ARTIFACTS / task / "data"
    data.mkdir(parents=True, exist_ok=True)
    texts: list[str] = []
    for name, (player, count) in demonstrations.PLAYERS[task].items():
        rows = demonstrations.rows(player, count)
        texts += [conversation(row) for row in rows[:TEXTS_OF_TOKENIZER]]
        with (data / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"id": f"{task}-{i}", "tag": task} | row) + "\n" for i, row in enumerate(rows))
    tokenizer = tiny_model.make_tokenizer(texts)
    tiny_model.save(tiny_model.make_model(tokenizer, seed), tokenizer, folder / "init")


def conversation(row: demonstrations.Row) -> str:
    """The text of a demonstration, for the tokenizer to learn from."""
    turns = [*row["messages"], {"role": "assistant", "content": row["response"]}]
    return "\n".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>" for turn in turns)


def recipe_hash(task: str) -> str:
    """Changes whenever the demonstrations, the model or the warm start's configuration does."""
    files = [FOLDER / "demonstrations.py", TINY / "tiny_model.py"]
    files += [FOLDER / f"{task}_{phase}_config.yaml" for phase in PHASES[task]]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def seed_of(overrides: Sequence[str], default: int = 0) -> int:
    """The seed that ``seed=N`` among command-line overrides chooses."""
    values = [override.partition("=")[2] for override in overrides if override.lstrip("+").partition("=")[0] == "seed"]
    return int(values[-1]) if values else default


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(PHASES))
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    make_warm_start(chosen.task, chosen.seed)
