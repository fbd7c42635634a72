"""Make the tiny example's warm start on first use: data and untrained model, then imitation by the SFT pipeline.

python examples/tiny/warm_start.py [--seed 0]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

import prepare  # noqa: E402  found next to this file, whatever script was started

from roll.cli import run  # noqa: E402
from roll.config.loader import load_config  # noqa: E402
from roll.platforms import use_cpu_below  # noqa: E402


def make_warm_start(seed: int) -> Path:
    """The folder of the warm-started model of ``seed``; nothing is done where it is there already."""
    use_cpu_below(2)
    artifacts = prepare.prepare(prepare.DEFAULT_OUTPUT, [seed])
    untrained = artifacts.model_folder(seed)
    model = untrained.parent / "warm_start" / "model"
    if not model.is_dir() or model.stat().st_mtime < (untrained / prepare.FINGERPRINT_FILE).stat().st_mtime:
        status = run(load_config(None, FOLDER / "sft_config.yaml", overrides=[f"seed={seed}"]))
        if status:
            sys.exit(status)
    return model


def seed_of(overrides: Sequence[str], default: int = 0) -> int:
    """The seed that ``seed=N`` among command-line overrides chooses."""
    values = [override.partition("=")[2] for override in overrides if override.lstrip("+").partition("=")[0] == "seed"]
    return int(values[-1]) if values else default


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    make_warm_start(parser.parse_args().seed)
