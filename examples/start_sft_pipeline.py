"""Run an SFT pipeline: ``start_sft_pipeline.py [--config_path DIR] [--config_name NAME] [key=value ...]``."""

from roll.cli import launch

if __name__ == "__main__":
    launch("sft", default_path="tiny", default_name="sft_config")
