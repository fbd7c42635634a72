"""Run an RLVR pipeline with images or videos.

    start_rlvr_vl_pipeline.py [--config_path DIR] [--config_name NAME] [key=value]

It is the RLVR pipeline: whether images take part is up to model and data. Without arguments it runs the tiny
vision-language example, with ``--config_name clips_config`` that of videos; data and warm start are made on first use.
"""

from pathlib import Path

from tiny_vl.vl_warm_start import FOLDER, make_warm_start, seed_of

from roll.cli import launch
from roll.config.reading.compose import parse_launcher_args

if __name__ == "__main__":
    arguments = parse_launcher_args(None, default_path="tiny_vl", default_name="rlvr_config")
    if (Path(__file__).parent / arguments.config_path).resolve() == FOLDER:
        make_warm_start(seed_of(arguments.overrides), clips=arguments.config_name == "clips_config")
    launch("rlvr", default_path="tiny_vl", default_name="rlvr_config")
