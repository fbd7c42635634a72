"""Reading the documentation's pages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAMED_FILE = re.compile(r"# (\S+\.(?:yaml|py))\n")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def named_files(page: Path) -> dict[str, str]:
    """Blocks whose first line is a comment with a file's name: whole files, which a reader may copy."""
    found = {}
    for _, text in blocks(page):
        if match := NAMED_FILE.match(text):
            found[match[1]] = text
    return found
