"""Make the tiny vision-language examples' warm starts on first use: data and untrained model, then imitation.

python examples/tiny_vl/vl_warm_start.py [--seed 0] [--clips]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

import make_clips  # noqa: E402  found next to this file, whatever script was started
import make_shapes  # noqa: E402

from roll.cli import run  # noqa: E402
from roll.config.loader import load_config  # noqa: E402
from roll.platforms import use_cpu_below  # noqa: E402


def make_warm_start(seed: int, clips: bool = False) -> Path:
    """The folder of the warm-started model of ``seed``; nothing is done where it is there already.

    Args:
        clips: of the video example.
    """
    use_cpu_below(2)
    output = make_shapes.make(make_shapes.DEFAULT_OUTPUT, [seed])
    untrained = make_shapes.model_folder(output, seed)
    recipes = [untrained / make_shapes.RECIPE_FILE]
    if clips:
        recipes.append(make_clips.make(output) / make_shapes.RECIPE_FILE)
    model = untrained.parent / ("clips_warm_start" if clips else "warm_start") / "model"
    if not model.is_dir() or model.stat().st_mtime < max(recipe.stat().st_mtime for recipe in recipes):
        config = FOLDER / ("clips_sft_config.yaml" if clips else "sft_config.yaml")
        status = run(load_config(None, config, overrides=[f"seed={seed}"]))
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
    parser.add_argument("--clips", action="store_true", help="of the video example")
    options = parser.parse_args()
    make_warm_start(options.seed, options.clips)
