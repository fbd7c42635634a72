"""Fixtures of the engine's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.strategies.hf_infer import helpers


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return helpers.make_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen2 with its tokenizer, as files."""
    folder = tmp_path_factory.mktemp("model")
    helpers.save_model(folder, tokenizer)
    return folder
