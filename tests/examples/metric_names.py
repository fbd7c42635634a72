"""The names that ``docs/metrics.md`` documents, as patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/metrics.md"


def documented_patterns() -> list[re.Pattern[str]]:
    """One for each name in the first column of a table; ``<name>`` is any text, ``{a,b}`` one of the words."""
    patterns = []
    for row in re.findall(r"^\|([^|]*)\|", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row):
            pattern = re.sub(r"<[^>]+>", "[^/]+", name)
            pattern = re.sub(r"\{([^}]+)\}", lambda match: f"(?:{match[1].replace(',', '|')})", pattern)
            patterns.append(re.compile(pattern))
    return patterns


def undocumented(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that no pattern of the page matches, sorted."""
    patterns = documented_patterns()
    return sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in patterns))
