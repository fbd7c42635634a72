from __future__ import annotations

from typing import Any

import pytest

from roll.agents.chat_ids import ChatTemplate
from tests.agents.templates import WRITTEN_HERE, published


def rows(*named: str) -> list[Any]:
    """All families as rows of a test; those that are not named run in the matrix alone."""
    families = [*WRITTEN_HERE, *published()]
    return [pytest.param(one, id=one.name, marks=[] if one.name in named else pytest.mark.matrix) for one in families]


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    """ChatML."""
    return WRITTEN_HERE[0].chat_template()
