"""The page of a report as a file: what is in it, and that nothing of a model's text can act in it."""

from __future__ import annotations

import base64
import itertools
import json
import random
import re
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

from roll.cli import main
from roll.report.page import report_command, run_labels, write_page
from roll.report.run_files import read_run
from roll.tracking.run_record import RECORD_FOLDER, SAMPLES_NAME, SampleLog, decoded, read_blocks
from tests.report.made_runs import HOSTILE, made_block, made_run


def parts(page: str) -> dict[str, Any]:
    """The data of a page by the id of its element."""
    found = re.findall(r'<script type="text/plain" id="([\w-]+)">([A-Za-z0-9+/=]*)</script>', page)
    return {name: json.loads(zlib.decompress(base64.b64decode(data))) for name, data in found}


def test_blocks_survive_what_a_crash_leaves(tmp_path: Path) -> None:
    file = tmp_path / SAMPLES_NAME
    log = SampleLog(file, 1 << 30)
    for step in range(4):
        log.append({"step": step, "kind": "train", "value": float("nan")})
    log.close()
    first, second, third, last = file.read_text().splitlines(keepends=True)
    damaged = second.replace('"data": "e', '"data": "f')
    assert damaged != second
    file.write_text(first + damaged + third + last[:-3])  # the last one is torn
    assert [decoded(data)["step"] for data in read_blocks(file)] == [0, 2]
    SampleLog(file, 1 << 30, resume_step=0).close()
    assert [decoded(data) for data in read_blocks(file)] == [{"step": 0, "kind": "train", "value": None}]
    SampleLog(file, 1 << 30).close()
    assert not list(read_blocks(file))
    assert file.with_name(f"{SAMPLES_NAME}.previous").is_file()


def test_record_stays_within_its_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = SampleLog(tmp_path / SAMPLES_NAME, 250)
    for step in range(20):
        log.append({"step": step, "kind": "train"})
    log.close()
    assert 0 < (tmp_path / SAMPLES_NAME).stat().st_size <= 250
    assert caplog.text.count("later samples are not kept") == 1


def written(folder: Path, blocks: list[dict[str, Any]], config: dict[str, Any] | None = None, **keys: Any) -> str:
    """The page of a made run."""
    write_page([read_run(made_run(folder / "run", blocks, config, **keys))], folder / "report.html")
    return (folder / "report.html").read_text()


def test_hostile_text_is_data(tmp_path: Path) -> None:
    """So are infinities of the configuration: ``JSON.parse`` of a browser knows none, and the page would stay empty."""
    rng = random.Random(0)
    blocks = [made_block(step, 2, 3, 5, rng, HOSTILE) for step in range(2)]
    config = {"note": HOSTILE, "rewards": {"math": {"tolerance": float("inf"), "range": [0, float("nan")]}}}
    page = written(tmp_path, blocks, config, name=HOSTILE)
    assert "hacked" not in page.split("</title>")[1], "the text stands outside of its encoding"
    assert "<script>window" not in page
    found = parts(page)
    readable = HOSTILE.encode("utf-8", "replace").decode()
    assert found["s0-0"]["pieces"][-1] == readable
    shown = found["about"]["runs"][0]["config"]
    assert shown["note"].startswith("</script>") and shown["rewards.math.tolerance"] == "inf"
    json.dumps(found["about"], allow_nan=False)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]


def test_index_says_what_the_blocks_hold(tmp_path: Path) -> None:
    rng = random.Random(0)
    found = parts(written(tmp_path, [made_block(step, 3, 4, 6, rng) for step in range(5)]))
    index = found["i0"]
    assert index["size"] == 60
    for i in range(60):
        block = found[f"s0-{index['columns']['block'][i]}"]
        sample = block["samples"][index["columns"]["place"][i]]
        assert index["columns"]["score"][i] == sample["score"]
        assert index["columns"]["mismatch"][i] == max(map(abs, sample["mismatch"]))
        assert index["words"]["finish"][index["columns"]["finish"][i]] == sample["finish_reason"]
        assert index["words"]["domain"][index["columns"]["domain"][i]] == block["prompts"][sample["prompt"]]["domain"]
    assert found["m0"]["val/greedy/accuracy_low"][0] == [0, 4]
    assert [one["role"] for one in found["t0"]["workers"]] == ["actor_train", "actor_train"]


def test_of_too_many_samples_whole_steps_are_left_out_evenly(tmp_path: Path) -> None:
    rng = random.Random(0)
    run = read_run(made_run(tmp_path / "run", [made_block(step, 2, 5, 4, rng) for step in range(20)]))
    count = write_page([run], tmp_path / "report.html", max_samples=50)
    found = parts((tmp_path / "report.html").read_text())
    steps = sorted(set(found["i0"]["columns"]["step"]))
    assert count == 10 * len(steps) == 50
    assert found["about"]["runs"][0]["left_out"] == 150
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 5


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And names: runs of one name are told apart by their folders."""
    run = made_run(tmp_path / "run", [made_block(s, 2, 4, 5, random.Random(s)) for s in range(4)])
    other = made_run(tmp_path / "other", [made_block(0, 1, 2, 3, random.Random(0))])
    assert run_labels([read_run(run), read_run(other)]) == ["run", "other"]
    assert main(["report", str(run), "--out", str(tmp_path / "out/page.html")]) == 0
    assert "32 samples" in capsys.readouterr().out
    assert (tmp_path / "out/page.html").is_file()
    assert main(["diagnose", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["report", str(tmp_path)]) == 2
    assert "must be the output_dir of a run" in capsys.readouterr().err


def test_a_run_in_progress_can_be_read_and_its_guard_writes_what_it_could_not(tmp_path: Path) -> None:
    """Without a last line, a last block, a configuration and an outcome."""
    run = made_run(tmp_path / "run", [made_block(s, 1, 2, 3, random.Random(s)) for s in range(3)])
    for name in (f"{RECORD_FOLDER}/{SAMPLES_NAME}", "logs/metrics.jsonl", f"{RECORD_FOLDER}/timeline.jsonl"):
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[:-7])
    (run / "config.yaml").unlink()
    assert write_page([read_run(run)], tmp_path / "report.html") == 4
    subprocess.run(report_command(run), check=True)
    assert "s0-1" in parts((run / "report.html").read_text())
