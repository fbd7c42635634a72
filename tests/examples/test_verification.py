"""docs/verification.md names tests that exist."""

from __future__ import annotations

import re

from tests.examples.pages import ROOT

ROW = re.compile(r"^\| .* \| (.+) \|$", re.MULTILINE)


def test_every_guard_exists() -> None:
    missing = []
    for cell in ROW.findall((ROOT / "docs/verification.md").read_text(encoding="utf-8")):
        names = re.findall(r"`([^`]+)`", cell)
        files = [ROOT / name for name in names if name.endswith(".py")]
        missing += [str(file) for file in files if not file.is_file()]
        text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        missing += [name for name in names if name.startswith("test_") and f"def {name}(" not in text]
    assert missing == []
