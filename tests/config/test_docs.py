"""The first example of the configuration page loads, and its plan is the one that the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roll import cli
from roll.config.loader import load_config
from roll.config.reading.errors import ConfigError

TEXT = (Path(__file__).parents[2] / "docs/configuration.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(autouse=True)
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_first_run.yaml").write_text(next(text for kind, text in BLOCKS if kind == "yaml"))


def words(text: str) -> str:
    return " ".join(text.split())


def test_example_and_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    shown = next(text for _, text in BLOCKS if text.startswith("$ roll check"))
    assert cli.main(["check", "my_first_run.yaml", "--skip-files"]) == 0
    assert words(shown.partition("\n")[2]) == words(capsys.readouterr().out)


def test_the_mistakes_that_the_page_shows() -> None:
    text = Path("my_first_run.yaml").read_text()
    text = text.replace("max_steps", "max_step").replace(
        "gradient_accumulation_steps: 8", "gradient_accumulation_steps: 3"
    )
    Path("my_first_run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(None, "my_first_run.yaml", check_files=False)
    shown = next(text for _, text in BLOCKS if text.startswith("2 mistakes"))
    assert words(shown) == words(str(caught.value))
