"""The reference page says every key, and is the generated one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from roll.config.reference import field_texts, tables

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("cls", [cls for _, cls, _ in tables()], ids=lambda cls: cls.__name__)
def test_every_field_has_a_text(cls: type) -> None:
    texts = field_texts(cls)
    assert [item.name for item in fields(cls) if not texts.get(item.name)] == []


def test_page_is_up_to_date() -> None:
    """Write it again with ``python -m roll.config.reference > docs/configuration-reference.md``."""
    # A process of its own: tables of names are live, and other tests add to them.
    page = subprocess.run([sys.executable, "-m", "roll.config.reference"], capture_output=True, text=True, check=True)
    assert (DOCS / "configuration-reference.md").read_text(encoding="utf-8") == page.stdout


@pytest.mark.long
def test_page_of_the_commands_is_up_to_date() -> None:
    """Write it again with ``python docs/site/commands.py > docs/commands.md``."""
    page = subprocess.run([sys.executable, DOCS / "site/commands.py"], capture_output=True, text=True, check=True)
    # How argparse breaks its lines depends on the version of Python.
    assert (DOCS / "commands.md").read_text(encoding="utf-8").split() == page.stdout.split()
