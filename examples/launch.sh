#!/usr/bin/env bash
# Run a recipe of this folder: examples/launch.sh FOLDER [CONFIG] [key=value ...]
# CONFIG is the name of a YAML file in FOLDER (rlvr_config if it is left out).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${PYTHON:-}" ]]; then
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi

folder="${1:?usage: examples/launch.sh FOLDER [CONFIG] [key=value ...]}"
shift
config=rlvr_config
if [[ $# -gt 0 && "$1" != *=* && "$1" != "~"* ]]; then
  config="$1"
  shift
fi
exec "$PYTHON" examples/start_rlvr_pipeline.py --config_path "$folder" --config_name "$config" "$@"
