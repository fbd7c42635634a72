"""A small byte-level tokenizer without files."""

from __future__ import annotations

import copy
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "tiny"))

import tiny_model

TEXTS = ["hello world tool 1 2 3 Left Right Up Down calc answer having shaving " * 4, "HAVING AVING SHAVING " * 8]


@cache
def _made() -> Any:
    return tiny_model.make_tokenizer(TEXTS)


def make_tokenizer() -> Any:
    """A copy, free to be given tokens and a template."""
    return copy.deepcopy(_made())
