"""Run a distillation pipeline: ``start_distill_pipeline.py [--config_path DIR] [--config_name NAME] [key=value
...]``."""

from roll.cli import launch

if __name__ == "__main__":
    launch("distill", default_path="tiny_distill", default_name="distill_config")
