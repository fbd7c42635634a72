"""Evaluate: ``start_rlvr_rollout_pipeline.py [--config_path DIR] [--config_name NAME] [key=value ...]``.

The file is an RLVR file with ``actor_infer``, ``rewards`` and ``validation``; nothing is trained. Without arguments the
tiny example's warm start answers its validation problems. ``roll evaluate`` does the same, with flags of its own.
"""

import sys
from pathlib import Path

from tiny.warm_start import FOLDER, make_warm_start, seed_of

from roll.cli import refuse
from roll.config.reading.compose import parse_launcher_args
from roll.config.reading.errors import ConfigError
from roll.evaluate import evaluate

if __name__ == "__main__":
    arguments = parse_launcher_args(None, default_path="tiny", default_name="evaluate_config")
    if (Path(__file__).parent / arguments.config_path).resolve() == FOLDER:
        make_warm_start(seed_of(arguments.overrides))
    try:
        sys.exit(evaluate(arguments.config_path, arguments.config_name, arguments.overrides, {}))
    except ConfigError as error:
        sys.exit(refuse(error))
