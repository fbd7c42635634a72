"""Samples as rows that a person reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll.rollout.groups import SampleGroup
from roll.tracking import SampleTable


def sample_table(groups: Sequence[SampleGroup]) -> list[dict[str, Any]]:
    """One row a sample: ids, texts, ground truth, score and what went wrong, if anything."""
    return [
        {
            "prompt_id": group.prompt.prompt_id,
            "sample": index,
            "domain": group.prompt.domain,
            "tag": group.prompt.tag,
            "prompt": group.prompt.prompt_text,
            "response": text,
            "ground_truth": group.prompt.ground_truth,
            "score": reward.score,
            "error": reward.error,
            "finish_reason": reason,
            "response_tokens": int(length),
        }
        for group in groups
        for index, (text, reward, reason, length) in enumerate(
            zip(
                group.finished.texts,
                group.rewards,
                group.finished.finish_reasons,
                group.finished.sampled_lengths,
                strict=True,
            )
        )
    ]


def write_samples(file: Path, rows: SampleTable) -> None:
    """One JSON object a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
