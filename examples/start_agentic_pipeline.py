"""Run an agentic pipeline: ``start_agentic_pipeline.py [--config_path DIR] [--config_name NAME] [key=value ...]``.

Without arguments a tiny model learns to cross a frozen lake; the warm starts of the tiny examples are made on first
use.
"""

from pathlib import Path

from tiny_agentic.warm_start import FOLDER, PHASES, make_warm_start, seed_of

from roll.cli import launch
from roll.config.reading.compose import parse_launcher_args

OTHERS = {"agent_black_box": "guess", "agent_tools_mcp": "tools"}
"""Folder of an example to the warm start that it begins with."""

if __name__ == "__main__":
    arguments = parse_launcher_args(None, default_path="tiny_agentic", default_name="lake_config")
    folder = (Path(__file__).parent / arguments.config_path).resolve()
    task = OTHERS.get(folder.name, arguments.config_name.removesuffix("_config"))
    if folder.parent == FOLDER.parent and folder.name in ("tiny_agentic", *OTHERS) and task in PHASES:
        make_warm_start(task, seed_of(arguments.overrides))
    launch("agentic", default_path="tiny_agentic", default_name="lake_config")
