#!/usr/bin/env bash
# Measure this machine's GPU, stage by stage; see docs/gpu.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD"
# FlashInfer compiles its kernels when they are first used, which needs a compiler and minutes.
export VLLM_USE_FLASHINFER_SAMPLER=0
exec "${PYTHON:-python3}" -m benchmarks.gpu.run "$@"
