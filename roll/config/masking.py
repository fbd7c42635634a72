"""Hides secrets wherever a configuration is shown or written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

MASK = "********"
SECRET_KEY = re.compile(r"(^|_)(api_?)?(key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
COLUMN_KEYS = frozenset({"prompt_key", "query_key", "response_key", "chosen_key", "rejected_key"})
"""Keys that end in ``key`` and name a data column."""


def is_secret(key: str) -> bool:
    """True for keys such as ``judge_api_key``, ``WANDB_API_KEY``, ``hf_token``, ``password``."""
    return key not in COLUMN_KEYS and SECRET_KEY.search(key) is not None


def masked(data: Any) -> Any:
    """A copy of a configuration tree with the values of secret keys replaced."""
    if isinstance(data, Mapping):
        return {key: MASK if value and is_secret(str(key)) else masked(value) for key, value in data.items()}
    if isinstance(data, list):
        return [masked(entry) for entry in data]
    return data


def dump_yaml(data: Mapping[str, Any]) -> str:
    """The tree as YAML, secrets masked."""
    return yaml.safe_dump(masked(data), sort_keys=False, allow_unicode=True, width=120)
