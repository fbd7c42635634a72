#!/usr/bin/env bash
# GRPO on GSM8K, trained under Megatron: examples/training_backends/megatron/run_megatron.sh [key=value ...]
# The quickstart with one key changed and an output folder of its own; whatever follows is handed on.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
exec "$here/../../gsm8k/run_gsm8k.sh" exp_name=gsm8k_grpo_megatron actor_train.strategy_args.strategy_name=megatron_train "$@"
