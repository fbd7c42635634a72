#!/usr/bin/env bash
# examples/qwen2.5-7B-rlvr_fsdp2/run.sh [CONFIG] [key=value ...]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" qwen2.5-7B-rlvr_fsdp2 "$@"
