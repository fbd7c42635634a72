"""Engines of several ranks."""

from __future__ import annotations

import os

import pytest

whole_engines = pytest.mark.skipif(
    not os.environ.get("TEST_VLLM_PARALLEL"), reason="two ranks take a minute to start: make test-vllm-parallel"
)
"""Run where ``TEST_VLLM_PARALLEL`` is set: four processes that import vLLM take about a minute to start."""
