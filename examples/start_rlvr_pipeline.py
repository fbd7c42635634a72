"""Run an RLVR pipeline: ``start_rlvr_pipeline.py [--config_path DIR] [--config_name NAME] [key=value ...]``.

Without arguments it runs the tiny example, whose data and warm start are made on first use.
"""

from pathlib import Path

from tiny.warm_start import FOLDER, make_warm_start, seed_of

from roll.cli import launch
from roll.config.reading.compose import parse_launcher_args

if __name__ == "__main__":
    arguments = parse_launcher_args(None, default_path="tiny", default_name="rlvr_config")
    if (Path(__file__).parent / arguments.config_path).resolve() == FOLDER:
        make_warm_start(seed_of(arguments.overrides))
    launch("rlvr", default_path="tiny", default_name="rlvr_config")
