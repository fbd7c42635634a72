"""Which versions of a generation engine's package this code was tried with."""

from __future__ import annotations

import logging

from packaging.version import Version

logger = logging.getLogger(__name__)

TESTED_VERSIONS = {
    "SGLang": (Version("0.5.23"), Version("0.5.24")),
    "vLLM": (Version("0.32"), Version("0.34")),
}
"""By package, as its makers write it: from the first up to, not including, the second."""


def check_version(package: str, version: str, allow_untested: bool) -> None:
    """Refuse a version that this code was not tried with.

    Raises:
        ValueError: a version outside :data:`TESTED_VERSIONS`, unless ``allow_untested``.
    """
    low, high = TESTED_VERSIONS[package]
    if low <= Version(Version(version).base_version) < high:
        return
    text = f"{package} {version} is outside the tested versions (at least {low}, below {high})"
    if not allow_untested:
        raise ValueError(
            f"{text}; install one of them, or set strategy_config.allow_untested_version: true to try this one"
        )
    logger.warning("%s", text)
