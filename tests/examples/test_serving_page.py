"""The first commands of the serving page, as they stand there, on what the tiny example leaves behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.pages import ROOT, blocks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl"),
]
ROLL = [sys.executable, "-m", "roll.cli"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
SHORT = ("pretrain=examples/tiny/artifacts/seed0/init", "max_steps=1", "eval_steps=0", "track_with=[jsonl]")


@pytest.fixture
def trained(tiny_model: Path, tmp_path: Path) -> Path:
    """A clone in which the tiny example has run for a step, without the warm start."""
    ignored = shutil.ignore_patterns("artifacts", "__pycache__")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=ignored)
    shutil.copytree(tiny_model.parents[1], tmp_path / "examples/tiny/artifacts")
    command = [*ROLL, "run", "examples/tiny/rlvr_config.yaml", *SHORT]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return tmp_path


@pytest.fixture
def commands() -> tuple[list[str], list[str]]:
    """The words of ``roll serve`` and of ``curl``, with a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    text = next(text for _, text in blocks(ROOT / "docs/serving.md") if text.startswith("roll serve"))
    lines = text.replace("\\\n", " ").splitlines()
    serve, curl = (shlex.split(re.sub(r"\b8000\b", port, line)) for line in lines)
    assert serve[0] == "roll" and curl[0] == "curl" and port in serve
    return serve, curl


@pytest.fixture
def served(trained: Path, commands: tuple[list[str], list[str]]) -> Iterator[None]:
    process = subprocess.Popen(
        [*ROLL, *commands[0][1:]],
        cwd=trained,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:  # ends with the process, should it fail
        lines.append(line)
        if "is served at" in line:
            break
    else:
        pytest.fail("".join(lines))
    yield
    process.terminate()
    process.communicate(timeout=60)


@pytest.mark.usefixtures("served")
def test_the_page_s_commands_answer(commands: tuple[list[str], list[str]]) -> None:
    done = subprocess.run([*commands[1], "--silent", "--show-error"], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] > 0
