"""Engines live in a process of their own. ``make test-sglang`` puts stand-ins for SGLang's GPU kernels on the path."""

from __future__ import annotations

from tests.strategies.engine_process import process_fixture

MISSING = "SGLang is not installed, or its kernels are not: make test-sglang"
in_engine_process = process_fixture(MISSING, "sglang", "sgl_kernel")
