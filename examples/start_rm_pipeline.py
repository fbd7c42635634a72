"""Run a reward-model pipeline: ``start_rm_pipeline.py [--config_path DIR] [--config_name NAME] [key=value ...]``."""

from roll.cli import launch

if __name__ == "__main__":
    launch("rm", default_path="tiny_rm", default_name="rm_config")
