"""Trackers, read back from what they wrote: real event files, real JSON lines."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from roll.config.installation import install_command
from roll.tracking import METRICS_NAME, TrackedRun, build_trackers, read_metrics
from roll.tracking.records import CompositeTracker, JsonlTracker, Tracker, strip_reducer_tags
from roll.tracking.trackers import TensorBoardTracker


def board(log_dir: Path, resume_step: int | None = None) -> TensorBoardTracker:
    return TensorBoardTracker(TrackedRun(log_dir, "demo", {}, resume_step))


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Scalars that TensorBoard shows of a folder."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(event.step, round(event.value, 6)) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_curves_continue_after_resumption(tmp_path: Path) -> None:
    first = board(tmp_path)
    for step in range(6):
        first.log({"loss": float(step)}, step)
    first.close()
    # Killed after step 5, resumed from a checkpoint made after step 3.
    second = board(tmp_path, resume_step=3)
    for step in (4, 5, 6):
        second.log({"loss": 10.0 + step}, step)
    second.close()
    expected = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 14.0), (5, 15.0), (6, 16.0)]
    assert curves(tmp_path / "tensorboard") == {"loss": expected}
    new = board(tmp_path)
    new.log({"loss": 2.0}, 0)
    new.close()
    assert curves(tmp_path / "tensorboard") == {"loss": [(0, 2.0)]}, "a new run hides the old one"


def test_tensorboard_samples_are_a_table_that_no_text_breaks(tmp_path: Path) -> None:
    tracker = board(tmp_path)
    tracker.log_samples("train", [{"prompt": "1 | 2 <b>\nsecond line", "score": 0.5}], 4)
    tracker.log_samples("train", [], 5)
    tracker.close()
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert accumulator.Tags()["tensors"] == ["samples/train/text_summary"]
    event = accumulator.Tensors("samples/train/text_summary")[0]
    lines = event.tensor_proto.string_val[0].decode().split("\n")
    assert event.step == 4
    assert lines == ["| prompt | score |", "| --- | --- |", "| 1 &#124; 2 &lt;b><br>second line | 0.5 |"]


def test_jsonl_rows_read_back_and_merge_by_step(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log({"val": 0.1}, 0)
    tracker.log({"loss": 1.5, "nan": math.nan, "inf": math.inf}, 0)
    tracker.log({"loss": 1.25}, 1)
    tracker.log_samples("validation", [{"prompt": "é?", "score": 1.0}, {"prompt": "b", "score": 0.0}], 1)
    tracker.close()
    for line in (tmp_path / METRICS_NAME).read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON: no NaN, no Infinity
    rows = read_metrics(tmp_path / METRICS_NAME)
    assert [row["step"] for row in rows] == [0, 1]
    assert (rows[0]["val"], rows[0]["loss"], rows[1]["loss"]) == (0.1, 1.5, 1.25)
    assert math.isnan(rows[0]["nan"]) and math.isnan(rows[0]["inf"])
    samples = [json.loads(line) for line in (tmp_path / "samples-validation.jsonl").read_text().splitlines()]
    assert samples == [{"step": 1, "prompt": "é?", "score": 1.0}, {"step": 1, "prompt": "b", "score": 0.0}]


def test_jsonl_resumption_drops_later_rows_and_a_torn_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = JsonlTracker(tmp_path)
    for step in range(5):
        first.log({"loss": float(step)}, step)
        first.log_samples("train", [{"prompt": str(step)}], step)
    first.close()
    with open(tmp_path / METRICS_NAME, "a") as file:
        file.write('{"step": 5, "lo')  # killed while writing
    second = JsonlTracker(tmp_path, resume_step=2)
    second.log({"loss": 30.0}, 3)
    second.log_samples("train", [{"prompt": "new"}], 3)
    second.close()
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path / METRICS_NAME)] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]
    samples = [json.loads(line)["prompt"] for line in (tmp_path / "samples-train.jsonl").read_text().splitlines()]
    assert samples == ["0", "1", "2", "new"]
    assert "line 6 is torn" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == [METRICS_NAME, "samples-train.jsonl"]
    new = JsonlTracker(tmp_path)
    new.log({"loss": 2.0}, 0)
    assert [row["loss"] for row in read_metrics(tmp_path / METRICS_NAME)] == [2.0], "on disk at once"
    new.close()
    kept = read_metrics(tmp_path / f"{METRICS_NAME}.previous")
    assert [row["loss"] for row in kept] == [0.0, 1.0, 2.0, 30.0], "a new run keeps the old record"


def test_reducer_tags_are_stripped_unless_names_would_collide() -> None:
    metrics = {"actor/loss@mean": 1.0, "len@max": 9.0, "len@min": 2.0, "time@p99": 3.0, "val/pass@8": 0.5, "plain": 0.0}
    assert strip_reducer_tags(metrics) == {
        "actor/loss": 1.0,
        "len/max": 9.0,
        "len/min": 2.0,
        "time": 3.0,
        "val/pass@8": 0.5,
        "plain": 0.0,
    }


def build(tmp_path: Path, track_with: str | list[str], kwargs: dict[str, Any] | None = None) -> CompositeTracker:
    return build_trackers(track_with, kwargs or {}, TrackedRun(tmp_path / "logs", "demo", {"seed": 1}))


def test_build_always_keeps_the_runs_own_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = build(tmp_path, ["tensorboard", "stdout"])
    tracker.log({"b@mean": 0.5, "a": 12345.678}, 3)
    tracker.log_samples("train", [{"prompt": "two\nlines"}], 3)
    tracker.close()
    assert capsys.readouterr().out == "step 3  a=1.235e+04 b=0.5\nstep 3  train sample  prompt='two\\nlines'\n"
    assert read_metrics(tmp_path / "logs" / METRICS_NAME)[0]["b"] == 0.5
    assert set(curves(tmp_path / "logs" / "tensorboard")) == {"a", "b"}
    assert tracker.files() == {
        "metrics": tmp_path / "logs" / METRICS_NAME,
        "TensorBoard": tmp_path / "logs" / "tensorboard",
    }


OWN = f"{__name__}.Lines"


@pytest.mark.parametrize(
    ("track_with", "kwargs", "message"),
    [
        ("tensorbord", {}, r"track_with: 'tensorbord' is no tracker; .*did you mean tensorboard\?"),
        ("tensorboard", {"logdir": "x"}, r"kwargs\.logdir: not an option of tensorboard, .*flush_secs, log_dir"),
        ("wandb", {"api_key": "secret-value"}, r"tracker_kwargs\.api_key: secrets do not belong .* WANDB_API_KEY"),
        (["wandb"], {"wandb": {"workspace": "x"}}, r"tracker_kwargs\.wandb\.workspace: not an option"),
        (OWN, {}, r"Lines\(run, \.\.\.\): missing a required argument: 'path'"),
        (OWN, {"pth": "x"}, r"tracker_kwargs\.pth: not an option of .*Lines, which take decimals, path"),
        (f"{__name__}.Line", {}, r"track_with: '.*\.Line' cannot be imported"),
        ("no_such_module.Lines", {}, "track_with: 'no_such_module.Lines' cannot be imported"),
        (f"{__name__}.curves", {}, "must be a subclass of roll.tracking.Tracker"),
        ("roll.tracking.Tracker", {}, "must be a subclass of roll.tracking.Tracker with log and log_samples"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, track_with: str | list[str], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        build(tmp_path, track_with, kwargs)
    assert "secret-value" not in str(raised.value)
    assert not (tmp_path / "logs").exists(), "a refused configuration left files behind"


@pytest.mark.parametrize("nested", [False, True], ids=["its options", "options of one among several"])
def test_log_dir_of_the_yaml_gets_the_experiments_name(tmp_path: Path, nested: bool) -> None:
    """Options that are left empty count for nothing."""
    board = {"log_dir": str(tmp_path / "board")}
    kwargs = {"api_key": "", "project": None, "log_dir": "", "tensorboard": board} if nested else board
    tracker = build(tmp_path, ["tensorboard", "jsonl", "stdout"] if nested else "tensorboard", kwargs)
    tracker.log({"loss": 1.0}, 0)
    tracker.close()
    assert curves(tmp_path / "board" / "demo") == {"loss": [(0, 1.0)]}


class Lines(Tracker):
    """A tracker of one's own."""

    def __init__(self, run: TrackedRun, path: str, decimals: int = 2) -> None:
        self.path, self.decimals, self.title = Path(path), decimals, run.exp_name

    def log(self, metrics: Any, step: int) -> None:
        numbers = " ".join(f"{name}={value:.{self.decimals}f}" for name, value in metrics.items())
        with open(self.path, "a") as file:
            file.write(f"{self.title} {step} {numbers}\n")

    def log_samples(self, name: str, rows: Any, step: int) -> None: ...


def test_a_tracker_of_ones_own_gets_the_run_and_its_options(tmp_path: Path) -> None:
    own = {"path": str(tmp_path / "own.txt"), "decimals": 1}
    tracker = build(tmp_path, ["tensorboard", OWN], {"log_dir": str(tmp_path / "board"), OWN: own})
    tracker.log({"loss@mean": 0.25, "b": 2.0}, 3)
    tracker.close()
    assert (tmp_path / "own.txt").read_text() == "demo 3 loss=0.2 b=2.0\n"
    assert set(curves(tmp_path / "board" / "demo")) == {"loss", "b"}


class FailingTracker(Tracker):
    def log(self, metrics: Any, step: int) -> None: ...

    def log_samples(self, name: str, rows: Any, step: int) -> None: ...

    def close(self) -> None:
        raise OSError("disk full")


def test_one_tracker_that_cannot_close_does_not_keep_the_others_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = CompositeTracker([FailingTracker(), board(tmp_path)])
    tracker.log({"loss": 1.0}, 0)
    with caplog.at_level(logging.ERROR), pytest.raises(OSError, match="disk full"):
        tracker.close()
    assert "FailingTracker could not be closed" in caplog.text
    assert curves(tmp_path / "tensorboard") == {"loss": [(0, 1.0)]}


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio", "mlflow"])
def test_online_tracker_says_what_is_missing(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package: the extra to install. With it: the variable to set. Never a prompt."""
    for variable in ("WANDB_API_KEY", "SWANLAB_API_KEY", "WANDB_MODE", "SWANLAB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    if name in ("trackio", "mlflow"):  # they need no key
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises((ModuleNotFoundError, ValueError)) as raised:
        build(tmp_path, name)
    if isinstance(raised.value, ModuleNotFoundError):
        assert str(raised.value) == f"track_with: {name} is not installed; {install_command(name)}"
    else:
        assert f"{name.upper()}_API_KEY" in str(raised.value)


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_online_tracker_offline_and_resumed(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    for resume_step in (None, 1):
        run = TrackedRun(tmp_path / "logs", "demo", {"seed": 1}, resume_step)
        tracker = build_trackers(name, {"mode": "offline", "tags": ["t"], "notes": "n"}, run)
        for step in (0, 1, 2) if resume_step is None else (2, 3):
            tracker.log({"loss": float(step)}, step)
        tracker.log_samples("train", [{"prompt": "a", "score": 1.0}], 2)
        tracker.close()
    folder = tmp_path / "logs" / name
    run_id = (folder / "run-id").read_text()
    runs = [path for path in folder.glob("**/*run-*") if path.is_dir() and not path.is_symlink()]
    assert len(runs) >= 1 and all(run_id in path.name for path in runs)
    assert sum(file.stat().st_size for path in runs for file in path.rglob("*") if file.is_file()) > 0


def test_trackio_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run is one of its own even under an old name; a resumed one goes on in the newest."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    for steps, resume_step in (((0,), None), ((0, 1), None), ((2,), 1)):
        tracker = build_trackers("trackio", {"log_dir": str(tmp_path)}, TrackedRun(tmp_path, "demo", {}, resume_step))
        for step in steps:
            tracker.log({"loss": float(step)}, step)
        tracker.log_samples("train", [{"prompt": "a", "score": 1.0}], steps[-1])
        tracker.close()
    runs = [trackio.SQLiteStorage.get_logs("roll", "demo", run_id=run["id"]) for run in records(trackio)]
    losses = sorted([log["loss"] for log in run if "loss" in log] for run in runs)
    assert losses == [[0.0], [0.0, 1.0, 2.0]]


def records(trackio: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = trackio.SQLiteStorage.get_run_records("roll")
    return found


@pytest.mark.default_rows("database of the run")
@pytest.mark.parametrize("own_store", [False, True], ids=["database of the run", "file store"])
def test_mlflow_goes_on_in_the_same_run(tmp_path: Path, own_store: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    if not own_store:
        pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    store = (tmp_path / "store").as_uri() if own_store else f"sqlite:///{tmp_path}/logs/mlflow/mlflow.db"
    kwargs = {"tags": ["grpo"], "notes": "n", "project": "maths"} | ({"tracking_uri": store} if own_store else {})
    config = {"seed": 1, "actor_train": {"lr": 1e-6, "long": "x" * 9000}, "many": {str(n): n for n in range(120)}}
    for steps, resume_step in (((0,), None), ((0, 1), None), ((2,), 1)):
        tracker = build_trackers("mlflow", kwargs, TrackedRun(tmp_path / "logs", "demo", config, resume_step))
        for step in steps:
            tracker.log({"val/pass@8": step / 2, "loss": math.nan}, step)
        tracker.log_samples("train", [{"prompt": "é", "score": 1.0}], steps[-1])
        tracker.close()
    client = mlflow.MlflowClient(store)
    experiment = client.get_experiment_by_name("maths")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    courses = [[(m.step, m.value) for m in client.get_metric_history(r.info.run_id, "val/pass_at_8")] for r in runs]
    assert sorted(courses) == [[(0, 0.0)], [(0, 0.0), (1, 0.5), (2, 1.0)]]
    run = client.get_run((tmp_path / "logs/mlflow/run-id").read_text())
    assert (run.info.run_name, run.info.status, run.data.tags["grpo"]) == ("demo", "FINISHED", "")
    assert run.data.params["actor_train.lr"] == "1e-06" and run.data.params["many.119"] == "119"
    found = [file.path for file in client.list_artifacts(run.info.run_id, "samples/train")]
    assert found == ["samples/train/1.json", "samples/train/2.json"]
    text = Path(client.download_artifacts(run.info.run_id, found[1], str(tmp_path))).read_text()
    assert json.loads(text) == [{"prompt": "é", "score": 1.0}]
    assert not (tmp_path / "mlruns").exists()
