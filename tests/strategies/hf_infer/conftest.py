"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies.hf_infer import helpers


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the workers of a run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return helpers.make_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen2 with its tokenizer, as files."""
    folder = tmp_path_factory.mktemp("model")
    helpers.save_model(folder, tokenizer)
    return folder
