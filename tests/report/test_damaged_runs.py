"""Commands on folders of runs whose files are damaged: what can be read is shown, and nothing ends in a traceback."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from roll import cli
from roll.report.run_files import read_run
from roll.tracking.records import JsonlTracker, read_metrics
from tests.report.made_runs import made_block, made_run

Damage = Callable[[Path], object]
BINARY = bytes(range(256)) * 5
FILES = ("logs/metrics.jsonl", "record/run.json", "record/samples.jsonl", "record/timeline.jsonl", "config.yaml")
STEP = {"step": 2, "begin": 1.0, "end": 2.0, "phases": [["step_train", 1.0, 2.0]]}
ODD_CALLS = ("null", '["update", 1]', '["update", "a", {}]', '{"x": 1}', '{"role": "a", "rank": 0, "devices": 5}')
WORKER = "logs/workers/actor_train-0.calls.jsonl"


def text(name: str, *lines: str, more: bool = False) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_text((path.read_text() if more else "") + "\n".join(lines) + "\n")

    return damage


def binary(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes(BINARY)


def utf16(name: str) -> Damage:
    return lambda folder: (folder / name).write_text("{}", "utf-16")


def missing(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def folder_instead(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


DAMAGES: dict[str, Damage] = {
    **{f"{name} is binary": binary(name) for name in FILES},
    **{f"{name} is UTF-16": utf16(name) for name in FILES},
    **{f"{name} is empty": text(name) for name in FILES},
    **{f"{name} is missing": missing(name) for name in FILES if "run" not in name},
    **{f"{name} is a folder": folder_instead(name) for name in FILES},
    **{
        f"metrics with {line}": text("logs/metrics.jsonl", line, more=True)
        for line in ("[1, 2]", "null", "7", '{"no": 1}', '{"step": null}', '{"step": "six"}')
    },
    **{
        f"timeline without {key}": text(
            "record/timeline.jsonl", json.dumps({name: STEP[name] for name in STEP if name != key}), more=True
        )
        for key in STEP
    },
    **{
        f"timeline with an odd {key}": text("record/timeline.jsonl", json.dumps(STEP | {key: {"a": []}}), more=True)
        for key in STEP
    },
    **{f"run.json with {odd}": text("record/run.json", odd) for odd in ("[]", '{"began": []}', '{"panels": 5}')},
    **{f"config.yaml with {odd}": text("config.yaml", odd) for odd in ("a: [1", "- 1", "!!python/name:os.system")},
    **{f"calls with {line}": text(WORKER, line, '["update", 1.0, 9e9]') for line in ODD_CALLS},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_run_is_shown(damage: Damage, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", [made_block(step, 1, 2, 3, random.Random(step)) for step in range(2)])
    (run / "config.yaml").write_text("pipeline: rlvr\n")
    damage(run)
    for command in ("report", "diagnose"):
        assert cli.main([command, str(run)]) in (0, 1)


def test_what_is_whole_is_kept(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", [made_block(step, 1, 2, 3, random.Random(step)) for step in range(2)])
    whole = read_run(run)
    metrics, timeline, calls = whole.metrics, whole.timeline, whole.calls
    assert metrics and timeline and calls
    for name in ("logs/metrics.jsonl", "record/timeline.jsonl", WORKER):
        text(name, "null", "[]", '{"step": "six"}', "7", more=True)(run)
    damaged = read_run(run)
    assert (damaged.metrics, damaged.timeline, damaged.calls) == (metrics, timeline, calls)


def test_a_resumed_record_passes_over_lines_without_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 1.0}\nnull\n{"x": 5}\n{"step": 2, "x": 2.0}\n{"step": 3, "x": 3.0}\n')
    JsonlTracker(tmp_path, resume_step=2).close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
