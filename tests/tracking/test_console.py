"""Logs, progress and summary, as a person sees them."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from roll.methods.sft_keys import SFT
from roll.pipelines.rlvr.definition import RLVR
from roll.tracking import LOG_NAME, ProgressReporter, RunSummary, setup_logging
from roll.tracking.console import format_seconds
from tests.support.disks import largest_file

METRICS = {
    "critic/score/mean": 0.4123,
    "token/response_length/mean": 24.31,
    "system/tps": 1830.4,
    "time/step_generate": 0.91,
    "time/step_train": 0.5,
    "time/actor_train/train_step/total": 0.4,
    "time/val_step_total": 0.3,
    "time/step_total": 1.5,
}
"""The two totals are no phases of the step."""


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    package = logging.getLogger("roll")
    handlers, level, propagate = list(package.handlers), package.level, package.propagate
    yield
    for handler in set(package.handlers) - set(handlers):
        handler.close()
    package.handlers[:], package.propagate = handlers, propagate
    package.setLevel(level)


def test_plain_lines_without_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    out = io.StringIO()
    with (
        caplog.at_level(logging.INFO),
        ProgressReporter(60, RLVR.headlines, first_step=10, console=Console(file=out)) as progress,
    ):
        progress.update(METRICS)
    assert out.getvalue() == ""
    message = caplog.messages[0]
    assert message.startswith("step 11/60  reward 0.412  length 24.3  tok/s 1,830  (generate 0.91s, train 0.50s)  ")
    assert message.endswith(" left")


def test_bar_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140, legacy_windows=False)
    with ProgressReporter(2, RLVR.headlines, console=console) as progress:
        progress.update(METRICS)
        progress.update(METRICS)
    assert "2/2" in out.getvalue() and "reward 0.412" in out.getvalue() and "0s left" in out.getvalue()


def test_time_left_follows_recent_steps(caplog: pytest.LogCaptureFixture) -> None:
    progress = ProgressReporter(10, SFT.headlines, console=Console(file=io.StringIO()))
    assert progress.seconds_left() == 0.0
    for _ in range(4):
        progress.update({"sft_train/loss": 1.0})
    assert 0 < progress.seconds_left() < 5
    for _ in range(8):
        progress.update({})
    assert progress.seconds_left() == 0.0
    every_few = ProgressReporter(10, RLVR.headlines, console=Console(file=io.StringIO()))
    with caplog.at_level(logging.INFO), every_few:
        time.sleep(0.1)
        every_few.update({}, done=5)
    assert "step 5/10" in caplog.messages[-1]
    assert 0.1 <= every_few.seconds_left() < 60, "five steps in 0.1 s or more: as much again for the other five"


def test_seconds_as_text() -> None:
    seconds = (0.4, 59.6, 187, 3599.7, 7500, 274_000)
    assert [*map(format_seconds, seconds)] == ["0s", "1m00s", "3m07s", "1h00m", "2h05m", "3d04h"]


@pytest.mark.parametrize("interactive", [False, True])
def test_log_file_has_everything_and_the_console_what_the_bar_does_not_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], interactive: bool
) -> None:
    for _ in range(2):  # set up twice, a line is written once
        path = setup_logging(tmp_path / "logs", interactive=interactive)
    assert path == tmp_path / "logs" / LOG_NAME
    logging.getLogger("roll.pipelines").info("rollout starts")
    logging.getLogger("roll.pipelines").debug("too fine")
    logging.getLogger("roll.steps").info("step 1/2")
    logging.getLogger("another.package").warning("not ours")
    text = path.read_text()
    assert text.count("roll.pipelines: rollout starts") == text.count("step 1/2") == 1
    assert "too fine" not in text and "not ours" not in text
    console = capsys.readouterr().err
    assert "rollout starts" in console
    assert ("step 1/2" in console) is not interactive


def test_lines_that_a_full_disk_refused_do_not_end_the_next_run_of_the_process(tmp_path: Path) -> None:
    setup_logging(tmp_path / "first")
    with largest_file(100):
        logging.getLogger("roll").error("x" * 200)
        log = setup_logging(tmp_path / "second")
        logging.getLogger("roll").error("begins")
    assert "begins" in log.read_text()


def test_log_lines_appear_above_the_bar(tmp_path: Path) -> None:
    """The console handler follows the bar's redirection of standard error: no line lands in the middle of the bar."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, legacy_windows=False)
    setup_logging(tmp_path, interactive=True)
    with ProgressReporter(2, RLVR.headlines, console=console) as progress:
        logging.getLogger("roll.pipelines").warning("look here")
        progress.update({})
    assert "look here" in out.getvalue()


def shown(width: int, *arguments: Any, **keys: Any) -> tuple[str, list[list[str]]]:
    """The summary's text, and the cells of its rows."""
    out = io.StringIO()
    RunSummary(*arguments, **keys).show(Console(file=out, width=width))
    lines = [line for line in out.getvalue().splitlines() if "val/" in line]
    return out.getvalue(), [[cell.strip() for cell in line.strip("│ ").split("│")] for line in lines]


def test_summary_shows_before_after_and_files(tmp_path: Path) -> None:
    long_path = tmp_path / "a-folder-with-[brackets]-and-a-long-name" / "tensorboard"
    before, after = ({"val/sampled/accuracy": value, f"only {value}": 1.0} for value in (0.312, 0.892))
    files = {"TensorBoard": long_path, "plot": tmp_path / "run.png"}
    text, rows = shown(70, "tiny_grpo", before=before, after=after, seconds=187, steps=100, files=files)
    assert "tiny_grpo: 100 steps in 3m07s" in text
    assert rows == [["val/sampled/accuracy", "0.312", "0.892", "+0.580"]]
    assert f"TensorBoard  {long_path}\n" in text
    assert f"plot         {tmp_path / 'run.png'}\n" in text


def test_summary_shows_intervals_and_says_nothing_twice(tmp_path: Path) -> None:
    before = {"val/sampled/accuracy": 0.3, "val/sampled/accuracy_low": 0.25, "val/sampled/accuracy_high": 0.36}
    before |= {"val/sampled/pass@1": 0.3, "val/sampled/best@1": 0.4, "val/sampled/pass@4": 0.7}
    _, rows = shown(120, "run", before=before, after=before, seconds=1, steps=1, files={})
    path = tmp_path / "run.log"
    bare, _ = shown(200, "run [1]", before={}, after={}, seconds=61, steps=3, files={"log": path})
    assert bare == f"run [1]: 3 steps in 1m01s\nlog  {path}\n", "no empty table without a validation"
    interval = "0.300 [0.250, 0.360]"
    assert rows == [
        ["val/sampled/accuracy", interval, interval, "+0.000"],
        ["val/sampled/best@1", "0.400", "0.400", "+0.000"],
        ["val/sampled/pass@4", "0.700", "0.700", "+0.000"],
    ]
