from __future__ import annotations

import pytest

from roll.agents.chat_ids import ChatTemplate
from tests.agents.templates import WRITTEN_HERE


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    """ChatML."""
    return WRITTEN_HERE[0].chat_template()
