#!/usr/bin/env bash
# GRPO on GSM8K: examples/gsm8k/run_gsm8k.sh [key=value ...]
# Overrides are those of the configuration, for example: run_gsm8k.sh max_steps=20 rollout_batch_size=32
# GSM8K_DIR names the folder with the published files; they are prepared into data/gsm8k on first use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [[ -z "${PYTHON:-}" ]]; then
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi

# Whoever names training files of their own needs none of ours.
if [[ ! -f data/gsm8k/train.jsonl && " $*" != *" actor_train.data_args.file_name="* ]]; then
  if [[ -z "${GSM8K_DIR:-}" ]]; then
    cat >&2 <<'MESSAGE'
data/gsm8k/train.jsonl is not there. Download the published files and say where they are:

    git clone https://github.com/openai/grade-school-math
    GSM8K_DIR=grade-school-math/grade_school_math/data examples/gsm8k/run_gsm8k.sh

GSM8K_DIR is a folder with train.jsonl and test.jsonl (or the same as Parquet); relative names start from the
repository's root.
MESSAGE
    exit 2
  fi
  "$PYTHON" examples/data/convert.py gsm8k --input "$GSM8K_DIR" --output data/gsm8k
fi

exec "$PYTHON" examples/start_rlvr_pipeline.py --config_path gsm8k --config_name rlvr_config "$@"
