"""The kit that carries roll to a GPU host without a network, without the GPU: bundle, unpacking, results, page."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import page, run, stages
from benchmarks.gpu.bundle import CUBIN, FATBIN, PTX, pack, without_other_chips
from benchmarks.gpu.unpack import unpack
from roll import __version__

ROOT = Path(__file__).parents[1]


def container(*entries: tuple[int, int, bytes]) -> bytes:
    """Kind, architecture and code of each entry, as CUDA packs them."""
    body = b""
    for kind, arch, code in entries:
        body += (
            struct.pack("<HHIQ", kind, 0x101, 64, len(code)) + bytes(12) + struct.pack("<I", arch) + bytes(32) + code
        )
    return FATBIN + struct.pack("<HHQ", 1, 16, len(body)) + body


def test_gpu_code_for_other_chips_is_blanked() -> None:
    codes = {arch: bytes([arch]) * 100 for arch in (75, 80, 90, 100)}
    whole = b"ELF" + container(*((CUBIN, arch, code) for arch, code in codes.items())) + b"host"
    whole += container((PTX, 80, b"p" * 50), (CUBIN, 100, b"c" * 50))
    kept = without_other_chips(whole, 90)
    assert len(kept) == len(whole) and kept.startswith(b"ELF") and b"host" in kept
    assert [arch for arch, code in codes.items() if code in kept] == [90]
    assert b"p" * 50 in kept and b"c" * 50 not in kept, "without machine code for it, what the driver can compile"
    assert without_other_chips(b"no GPU code", 90) == b"no GPU code"


def test_parts_come_together_where_all_have_arrived(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "module.py").write_text("x = 1\n" * 5000)
    parts = tmp_path / "parts"
    parts.mkdir()
    rows = pack(tmp_path / "site", "core", parts, 100)
    assert len(rows) > 1
    (parts / "manifest.json").write_text(json.dumps({"parts": rows}))
    last = parts / str(rows[-1]["file"])
    held = last.read_bytes()
    last.unlink()
    assert unpack(parts, tmp_path / "out") == []
    last.write_bytes(held[:-1] + b"?")
    with pytest.raises(SystemExit, match=last.name):
        unpack(parts, tmp_path / "out")
    last.write_bytes(held)
    assert unpack(parts, tmp_path / "out") == ["core"] and unpack(parts, tmp_path / "out") == []
    assert (tmp_path / "out" / "module.py").read_text() == "x = 1\n" * 5000
    assert all(hashlib.sha256((parts / str(row["file"])).read_bytes()).hexdigest() == row["sha256"] for row in rows)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages that are measured, which takes a second each; ``train_step`` ends after its limit."""
    made: list[str] = []

    def measured(name: str) -> dict[str, object]:
        made.append(name)
        return {"seconds": 1.0} | ({"error": "ended after its limit"} if name == "train_step" else {})

    monkeypatch.setattr(run, "RESULT", tmp_path / "result.json")
    monkeypatch.setattr(run, "run_stage", measured)
    monkeypatch.setattr(run, "machine", lambda: {"gpu": "none"})
    return made


def test_what_was_measured_is_kept_and_what_there_is_no_time_for_is_left_to_the_next_call(
    calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for names in (["tests", "train_step"], ["tests", "train_step", "generation"]):
        monkeypatch.setattr(sys, "argv", ["run", *names])
        run.main()
    assert calls == ["tests", "train_step", "train_step", "generation"]
    assert set(json.loads((tmp_path / "result.json").read_text())["stages"]) == {"tests", "train_step", "generation"}
    chosen = {name: stages.Stage(stages.tests, seconds, 1, name) for name, seconds in (("slow", 200), ("quick", 2))}
    monkeypatch.setattr(run, "STAGES", chosen)
    monkeypatch.setattr(sys, "argv", ["run"])
    for seconds in (100, 300):
        monkeypatch.setattr(run, "SECONDS", seconds)
        run.main()
    assert calls[4:] == ["quick", "slow"]
    assert "for the next call: slow\n" in capsys.readouterr().out


@pytest.mark.long
def test_a_stage_ends_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys, time, pathlib; pathlib.Path(sys.argv[2]).write_text('{\"steps\": 3}'); time.sleep(60)"
    started = subprocess.Popen

    def start(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        return started([sys.executable, "-c", script, *command[-2:]], **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(run, "WORK", tmp_path)
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setitem(run.STAGES, "tests", stages.Stage(stages.tests, 1, 2, "a stage that hangs"))
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: None)
    figures = run.run_stage("tests")
    assert (figures["steps"], figures["error"]) == (3, "ended after its limit of 2 s")
    assert figures["seconds"] < 15


@pytest.mark.matrix
@pytest.mark.e2e
def test_the_doctor_is_a_stage_and_on_the_page(tmp_path: Path) -> None:
    """As a rehearsal without a GPU runs it."""
    variables = {"ROLL_PLATFORM": "cpu", "GPU_WORK": str(tmp_path), "GPU_RESULT": str(tmp_path / "result.json")}
    command = [sys.executable, "-m", "benchmarks.gpu.run", "doctor"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=True)
    result = json.loads((tmp_path / "result.json").read_text())
    figures = result["stages"]["doctor"]
    assert "error" not in figures and figures["report"]["roll"] == __version__
    machine = {"gpu": "none", "memory_gib": 0, "driver": "none", "cuda": "none"}
    lines = page.page([{**result, "machine": {**result["machine"], **machine}}]).splitlines()
    assert "| cuda_ipc | not on a CPU | note |" in lines
    assert any(line.startswith("| two steps | two devices: start") and line.endswith("| ok |") for line in lines)
    assert any(line.startswith("| `roll doctor --gpu` | ") and figures["summary"] in line for line in lines)


def test_the_page_is_written_from_the_results() -> None:
    """Write it again with ``python -m benchmarks.gpu.page > docs/gpu.md``."""
    results = [json.loads(path.read_text()) for path in sorted(page.RESULTS.glob("*.json"))]
    assert (ROOT / "docs" / "gpu.md").read_text() == page.page(results)
