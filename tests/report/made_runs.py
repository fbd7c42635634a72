"""Runs on disk that no run has made: what a report reads, with samples of any number and any text."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from roll.tracking.run_record import RECORD_FOLDER, SAMPLES_NAME, SampleLog

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\u2028 ]]> <!-- \x00 \ud800"
)


def made_block(step: int, groups: int, size: int, tokens: int, rng: random.Random, text: str = "") -> dict[str, Any]:
    """Samples of a step with all that a block can hold; ``text`` is a prompt and a token of each response."""
    pieces = [*(f" w{place}" for place in range(60)), text or " plain"]
    prompts = [
        {"id": f"{step}-{g}", "text": f"Question {g} {text}", "domain": f"d{g % 2}", "tag": text or "t", "truth": g}
        for g in range(groups)
    ]
    samples = []
    for g in range(groups):
        for member in range(size):
            score = float(rng.random() < 0.5)
            mismatch = [rng.randint(-9, 9) for _ in range(tokens)]
            mismatch[tokens // 2] = 20_000 if member == 0 else 0
            samples.append(
                {
                    "prompt": g,
                    "group": str(g),
                    "score": score,
                    "reward": score - 0.5,
                    "finish_reason": "length" if member == 1 else "stop",
                    "response_tokens": tokens,
                    "metrics": {"correct": score},
                    "tokens": [*(rng.randrange(60) for _ in range(tokens - 1)), 60],
                    "log_probs": [-rng.randrange(4000) for _ in range(tokens)],
                    "mismatch": mismatch,
                    "advantages": score - 0.5,
                    "versions": step,
                    "experts": [*([rng.randrange(8), 8] for _ in range(tokens - 1)), None],
                }
            )
            if member == 2:
                samples[-1]["error"] = f"failed {text}"
    ids = list(range(len(pieces)))
    return {
        "step": step,
        "kind": "train",
        "time": 0.0,
        "prompts": prompts,
        "ids": ids,
        "pieces": pieces,
        "samples": samples,
    }


def made_run(
    folder: Path,
    blocks: Sequence[dict[str, Any]],
    config: dict[str, Any] | None = None,
    name: str = "made",
    seed: int = 0,
) -> Path:
    """A run of as many steps as there are blocks; its ``output_dir``."""
    rng = random.Random(seed)
    log = SampleLog(folder / RECORD_FOLDER / SAMPLES_NAME, 1 << 40)
    for block in blocks:
        log.append(block)
    log.close()
    steps = range(len(blocks))
    panel = {
        "title": "Accuracy",
        "keys": ["val/greedy/accuracy"],
        "first_only": False,
        "unit_range": True,
        "smooth": False,
    }
    about = {
        "exp_name": name,
        "pipeline": "rlvr",
        "log_dir": "logs",
        "began": 0.0,
        "outcome": "finished",
        "panels": [panel],
    }
    (folder / RECORD_FOLDER / "run.json").write_text(json.dumps(about))
    phases = [["step_generate", 0.0, 0.4], ["step_train", 0.4, 0.9]]
    lines = [
        {"step": s, "begin": 1.0 * s, "end": s + 1.0, "phases": [[n, s + a, s + b] for n, a, b in phases]}
        for s in steps
    ]
    (folder / RECORD_FOLDER / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    workers = folder / "logs/workers"
    workers.mkdir(parents=True)
    for rank in range(2):
        rows: list[Any] = [{"role": "actor_train", "rank": rank, "devices": [rank], "host": "h"}]
        rows += [["update", s + 0.4, s + 0.6 + 0.2 * rank] for s in steps]
        (workers / f"actor_train-{rank}.calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = []
    for step in steps:
        row = {"step": step, "time": 0.0, "system/global_step": step, "critic/score/mean": 0.5 + 0.1 * math.sin(step)}
        if step % 4 == 0:
            accuracy = 0.4 + 0.1 * rng.random()
            row |= {"val/greedy/accuracy": accuracy}
            row |= {"val/greedy/accuracy_low": accuracy - 0.05, "val/greedy/accuracy_high": accuracy + 0.05}
        metrics.append(row)
    (folder / "logs/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (folder / "config.yaml").write_text(yaml.safe_dump(config or {"seed": 1, "actor_train": {"learning_rate": 1e-3}}))
    return folder
