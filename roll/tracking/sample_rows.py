"""Recorded samples as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

PARTIAL = "\ufffd"
"""Replacement character in the text of a token that holds only a part of a character."""

_PROMPT = {"id": "prompt_id", "text": "prompt", "truth": "ground_truth", "domain": "domain", "tag": "tag"}
_SAMPLE = ("group", "score", "reward", "kind", "response_tokens", "finish_reason", "outcome", "error")


def sample_rows(block: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """One row a sample of a block of :mod:`roll.tracking.run_record`.

    A row has ``step``, ``set`` (``train``, ``validation``), ``prompt_id``, ``prompt``, ``response`` and, where the
    record knows them, ``group``, ``ground_truth``, ``domain``, ``tag``, ``score``, ``reward`` (normalised), ``kind``
    (``chosen`` or ``rejected``), ``response_tokens`` (sampled ones), ``finish_reason``, ``outcome``, ``error`` and the
    parts of the reward as ``metrics/<name>``.

    Args:
        decode: from token ids to text; called for responses with characters of several tokens.
    """
    ids, pieces = block["ids"], block["pieces"]

    def response(sample: Mapping[str, Any]) -> str:
        if "response" in sample:
            return str(sample["response"])
        text = "".join(pieces[place] for place in sample.get("tokens", ()))
        return decode([ids[place] for place in sample["tokens"]]) if PARTIAL in text else text

    rows = []
    for sample in block["samples"]:
        prompt = block["prompts"][sample["prompt"]]
        row = {"step": block["step"], "set": block["kind"], "response": response(sample)}
        row |= {name: prompt[key] for key, name in _PROMPT.items() if key in prompt}
        row |= {name: sample[name] for name in _SAMPLE if name in sample}
        rows.append(row | {f"metrics/{name}": value for name, value in sample.get("metrics", {}).items()})
    return rows
