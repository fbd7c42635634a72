#!/usr/bin/env bash
# GRPO on GSM8K under FSDP2 with padded micro-batches: examples/training_backends/run_no_seq_pack.sh [key=value ...]
# The quickstart lays the answers to a problem behind one copy of it, without padding; here every row stands alone.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
exec "$here/../gsm8k/run_gsm8k.sh" exp_name=gsm8k_grpo_no_packing \
  actor_train.use_prefix_sharing=false actor_train.use_sequence_packing=false \
  actor_train.infer_batch_size=32 reference.infer_batch_size=32 "$@"
