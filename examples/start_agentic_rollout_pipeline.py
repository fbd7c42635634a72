"""Play without training: ``start_agentic_rollout_pipeline.py [--config_path DIR] [--config_name NAME] [key=value]``.

The file is an agentic file; ``val_env_manager`` is played once, or ``train_env_manager`` for ``max_steps`` steps where
there is none. Without arguments the tiny lake's warm start plays its validation. ``roll evaluate`` does the same.
"""

import sys
from pathlib import Path

from tiny_agentic.warm_start import FOLDER, PHASES, make_warm_start, seed_of

from roll.cli import refuse
from roll.config.reading.compose import parse_launcher_args
from roll.config.reading.errors import ConfigError
from roll.evaluate import evaluate

if __name__ == "__main__":
    arguments = parse_launcher_args(None, default_path="tiny_agentic", default_name="lake_config")
    task = arguments.config_name.removesuffix("_config")
    if (Path(__file__).parent / arguments.config_path).resolve() == FOLDER and task in PHASES:
        make_warm_start(task, seed_of(arguments.overrides))
    try:
        sys.exit(evaluate(arguments.config_path, arguments.config_name, arguments.overrides, {}))
    except ConfigError as error:
        sys.exit(refuse(error))
