"""The tiny world of the pipelines' tests, and its runs."""

from __future__ import annotations

from tests.datasets.conftest import tiny  # noqa: F401
from tests.pipelines.conftest import run, start, world  # noqa: F401
