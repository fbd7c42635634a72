"""Run on-policy distillation alone: ``start_onpolicy_distill_pipeline.py [--config_path DIR] [--config_name NAME]
[key=value ...]``."""

from roll.cli import launch

if __name__ == "__main__":
    launch("opd", default_path="tiny_distill", default_name="opd_config")
