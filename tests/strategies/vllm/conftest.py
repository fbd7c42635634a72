"""vLLM lives in a process of its own."""

from __future__ import annotations

from tests.strategies.engine_process import process_fixture

in_engine_process = process_fixture("vllm is not installed: make install-vllm", "vllm")
