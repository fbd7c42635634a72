"""Run a DPO pipeline: ``start_dpo_pipeline.py [--config_path DIR] [--config_name NAME] [key=value ...]``."""

from roll.cli import launch

if __name__ == "__main__":
    launch("dpo", default_path="tiny_dpo", default_name="dpo_config")
