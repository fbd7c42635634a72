"""``roll env`` as a user calls it, and the commands of docs/environments.md."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from roll.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text("utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_s_commands(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    assert words.pop(0) == "roll"
    monkeypatch.setattr(sys, "stdin", __import__("io").StringIO("Up\n"))
    assert main(words) == 0
    assert capsys.readouterr().out


def test_the_page_s_class_passes_and_can_be_played(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    (tmp_path / "my_package.py").write_text(code)
    for action, answers in (("check", ""), ("play", "even\n")):
        # -P: as the installed command, which has its own folder on the path and not the working directory.
        command = [sys.executable, "-P", "-m", "roll.cli", "env", action, "my_package.Parity"]
        done = subprocess.run(command, cwd=tmp_path, input=answers, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert "return 1, success" in done.stdout


def test_wrong_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", "frozen_lak"]) == 2
    assert "did you mean 'frozen_lake'?" in capsys.readouterr().err
    assert main(["env", "play", "frozen_lake", "size"]) == 2
    assert "key=value" in capsys.readouterr().err


def test_faults_give_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", "tests.environments.test_environments.Unseeded", "--episodes", "2"]) == 1
    assert "start apart" in " ".join(capsys.readouterr().out.split())
