#!/usr/bin/env bash
# examples/qwen3-8B-rlvr_fsdp2/run.sh [CONFIG] [key=value ...]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" qwen3-8B-rlvr_fsdp2 "$@"
