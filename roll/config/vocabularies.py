"""Vocabularies of models that are compared token by token: an id must be the same token on both sides. Torch-free.

Added tokens count: the id that ends a turn is one, and a teacher that means something else by it would teach the
student never to stop.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from roll.config.model_files import model_folder
from roll.config.reading.errors import ConfigError, Problem
from roll.config.reading.yaml_files import shown

TOKENIZER = "tokenizer.json"


@lru_cache(maxsize=8)
def vocabulary_of(path: str, fetch: bool = False) -> Mapping[int, str] | None:
    """Token by id, added tokens included; None where the tokenizer is not on this machine.

    Args:
        fetch: load it all the same, from wherever transformers finds it.
    """
    folder = model_folder(path)
    if folder is not None and (folder / TOKENIZER).is_file():
        return _stored(folder / TOKENIZER)
    if not fetch:
        return None
    from transformers import AutoTokenizer

    return {number: token for token, number in AutoTokenizer.from_pretrained(path).get_vocab().items()}


def _stored(file: Path) -> dict[int, str]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"].get("vocab", {})
    pairs = (
        vocabulary.items()
        if isinstance(vocabulary, dict)
        else ((entry[0], number) for number, entry in enumerate(vocabulary))  # Unigram: [token, score]
    )
    found = {number: token for token, number in pairs}
    return found | {added["id"]: added["content"] for added in content.get("added_tokens") or ()}


def vocabulary_hash(path: str) -> str:
    """A fingerprint of id -> token, in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    for number, token in sorted((vocabulary_of(path, fetch=True) or {}).items()):
        digest.update(f"{number}\t{token}\n".encode())
    return digest.hexdigest()


def check_vocabularies(student: str, teacher: str, key: str, source: Any, fetch: bool = False) -> None:
    """Compare the vocabularies of two models.

    Args:
        key: names the teacher's model, for the message.
        source: the configuration's file.
        fetch: also where a tokenizer is not on this machine yet.

    Raises:
        ConfigError: an id that is another token, or is a token on one side only.
    """
    if student == teacher:
        return
    ours, theirs = vocabulary_of(student, fetch), vocabulary_of(teacher, fetch)
    if ours is None or theirs is None or ours == theirs:
        return
    differing = sorted(number for number in ours.keys() | theirs.keys() if ours.get(number) != theirs.get(number))
    first = differing[0]
    count = f"{len(differing)} token ids differ" if len(differing) > 1 else "1 token id differs"
    rule = (
        f"has another vocabulary than the student's {student}: {count}, the first is {first} (student "
        f"{_shown(ours.get(first))}, teacher {_shown(theirs.get(first))}); distributions are compared id by id, so "
        "both need one tokenizer, added tokens included"
    )
    raise ConfigError([Problem(key, teacher, rule, source=shown(source))])


def _shown(token: str | None) -> str:
    return "has none" if token is None else repr(token)
