"""The reference page says every key, and is the generated one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from roll.config.reference import PAGES, field_texts, page

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("cls", [cls for _, cls, _ in PAGES], ids=lambda cls: cls.__name__)
def test_every_field_has_a_text(cls: type) -> None:
    texts = field_texts(cls)
    assert [item.name for item in fields(cls) if not texts.get(item.name)] == []


def test_page_is_up_to_date() -> None:
    """Write it again with ``python -m roll.config.reference > docs/configuration-reference.md``."""
    assert (DOCS / "configuration-reference.md").read_text(encoding="utf-8") == page()
