#!/usr/bin/env bash
# GRPO on GSM8K: examples/gsm8k/run_gsm8k.sh [key=value ...]
# Overrides are those of the configuration, for example: run_gsm8k.sh max_steps=20 rollout_batch_size=32
# GSM8K_DIR names the folder with the published files, should data/gsm8k not be prepared yet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [[ -z "${PYTHON:-}" ]]; then
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi

if [[ -n "${GSM8K_DIR:-}" && ! -f data/gsm8k/train.jsonl ]]; then
  "$PYTHON" -m roll.datasets.prepare gsm8k --input "$GSM8K_DIR" --output data/gsm8k
fi

exec "$PYTHON" examples/start_rlvr_pipeline.py --config_path gsm8k --config_name rlvr_config "$@"
