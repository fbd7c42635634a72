"""Needs a package that is nowhere."""

import package_that_is_nowhere  # noqa: F401
