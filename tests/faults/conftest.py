"""The tiny world of the pipelines' tests, and its runs."""

from __future__ import annotations

import os

import pytest

from tests.datasets.conftest import tiny  # noqa: F401
from tests.pipelines.conftest import run, start, world  # noqa: F401

only_test_faults = pytest.mark.skipif(not os.environ.get("TEST_FAULTS"), reason="`make test-faults` runs it")
"""For what the long tier has no time for."""
