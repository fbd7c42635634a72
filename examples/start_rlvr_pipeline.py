"""Run an RLVR pipeline: ``python examples/start_rlvr_pipeline.py [--config_path DIR] [--config_name NAME] [key=value ...]``.

Without arguments it runs the tiny example (made on first use).
"""

from roll.cli import launch

if __name__ == "__main__":
    launch("rlvr", default_path="tiny", default_name="rlvr_config")
