"""The picture of a run: which panels it has, and that it is a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from roll.config.pipelines import Panel
from roll.methods.sft_keys import SFT
from roll.pipelines.rlvr.definition import RLVR
from roll.tracking.plots import plot_run
from roll.tracking.records import JsonlTracker


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved, for a look at their axes."""
    saved: list[Figure] = []
    original = Figure.savefig

    def savefig(figure: Figure, *arguments: Any, **options: Any) -> None:
        saved.append(figure)
        original(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def write_run(folder: Path, steps: int, with_phases: bool = True) -> Path:
    tracker = JsonlTracker(folder)
    for step in range(steps):
        if step % 10 == 0:
            tracker.log({"val/sampled/accuracy": step / steps, "val/greedy/accuracy": 0.5}, step)
            tracker.log({"val/greedy/sums/accuracy": 0.5}, step)
        phases = {"time/step_generate": 0.5, "time/step_train": 0.25, "time/step_total": 0.8, "time/a/b/total": 9.0}
        metrics = {"critic/score/mean": step / steps, "token/response_length/mean": 20.0, "critic/kl": 0.01}
        tracker.log(metrics | (phases if with_phases else {}), step)
    tracker.close()
    return folder / "metrics.jsonl"


def titles(figure: Figure) -> list[str]:
    return [axis.get_title(loc="left") for axis in figure.axes if axis.get_visible()]


def test_picture_of_a_run(tmp_path: Path, figures: list[Figure]) -> None:
    image = tmp_path / "new folder" / "run.png"
    plot_run(write_run(tmp_path, 40), image, "demo", RLVR.panels)
    pixels = matplotlib.image.imread(image)
    assert pixels.shape[0] > 500 and pixels.shape[1] > 1000
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 20, "the picture is empty"
    assert titles(figures[0]) == [
        "Reward",
        "Validation accuracy",
        "Response length (tokens)",
        "KL",
        "Time per step (seconds)",
    ]
    accuracy = figures[0].axes[1]
    assert [text.get_text() for text in accuracy.get_legend().get_texts()] == ["sampled", "greedy"]
    assert list(accuracy.lines[0].get_xdata()) == [0, 10, 20, 30]
    reward = figures[0].axes[0]
    np.testing.assert_allclose(reward.lines[0].get_ydata(), np.arange(40) / 40)
    times = figures[0].axes[4]
    assert [text.get_text() for text in times.get_legend().get_texts()] == ["generate", "train"]
    tops = [bar.get_y() + bar.get_height() for bar in times.patches]
    assert max(tops) == pytest.approx(0.75)


def test_panels_without_data_are_left_out(tmp_path: Path, figures: list[Figure]) -> None:
    path = write_run(tmp_path, 5, with_phases=False)
    plot_run(path, tmp_path / "run.png", "demo", SFT.panels)
    assert titles(figures[0]) == []
    plot_run(path, tmp_path / "run.png", "demo", [Panel("Only reward", ("critic/score/mean",))])
    assert titles(figures[1]) == ["Only reward"]


def test_numbers_that_are_not_finite_do_not_spoil_the_curve(tmp_path: Path, figures: list[Figure]) -> None:
    """And a divergence that is zero throughout has no panel."""
    with pytest.raises(FileNotFoundError):
        plot_run(tmp_path / "metrics.jsonl", tmp_path / "run.png", "demo", RLVR.panels)
    tracker = JsonlTracker(tmp_path)
    for step in range(60):
        tracker.log({"critic/score/mean": math.nan if step == 30 else 1.0, "actor/approxkl": 0.0}, step)
    tracker.close()
    plot_run(tmp_path / "metrics.jsonl", tmp_path / "run.png", "demo", RLVR.panels)
    assert titles(figures[0]) == ["Reward"]
    smooth = figures[0].axes[0].lines[1].get_ydata()
    np.testing.assert_allclose(smooth, np.ones(60))
