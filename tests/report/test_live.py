"""``roll top`` and ``roll trace`` on runs of known times."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest

from roll import cli
from roll.report.live import sparkline
from roll.report.run_files import read_run
from roll.report.traces import perfetto, spans_of, write_traces
from tests.report.made_runs import made_block, made_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    blocks = [made_block(step, 1, 2, 4, rng) for step in range(3)]
    run = made_run(tmp_path_factory.mktemp("runs") / "made", blocks, config={"max_steps": 5, "pipeline": "rlvr"})
    (run / "logs/run.log").write_text("first line\n" + "a long line " * 40 + "\n")
    rows = [json.loads(line) for line in (run / "logs/metrics.jsonl").read_text().splitlines()]
    rows[-1] |= {"time/step_train": 0.5, "time/step_total": 1.0, "memory/step_train/actor_train": 2.0**30}
    (run / "logs/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_top_shows_where_the_run_stands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", str(folder), "--once"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].startswith("made  rlvr  step 3/5  1.00s a step") and lines[0].rstrip().endswith("finished")
    (train,) = [line.split() for line in lines if line.startswith("train ")]
    assert train[1] == "0.50" and train[-3:] == ["actor_train", "1.00", "GiB"]
    workers = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("actor_train-")}
    # Of three steps of a second each, .2 s and .4 s in each.
    assert workers == {
        "actor_train-0": ["0", "h", "update", "20%"],
        "actor_train-1": ["1", "h", "update", "40%"],
    }
    assert "first line" in lines and max(map(len, lines)) <= 80


def test_top_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", str(tmp_path), "--once"]) == cli.EXIT_CONFIG
    assert "must be the output_dir of a run" in " ".join(capsys.readouterr().err.split())


def test_small_curves() -> None:
    assert sparkline([0.0, 1.0, 0.5, float("nan")]) == "▁█▅ "
    assert (sparkline([2.0, 2.0]), sparkline([]), sparkline([float("inf")])) == ("▁▁", "", "")


def test_spans_lie_inside_their_parents(folder: Path) -> None:
    spans = list(spans_of(read_run(folder)))
    root, *rest = spans
    assert root.parent is None and (root.begin, root.end) == (0.0, 3.0)
    for span in rest:
        assert span.parent is not None
        assert span.parent.begin <= span.begin <= span.end <= span.parent.end
    assert {span.parent.name for span in rest if span.service == "actor_train-1"} == {"step 0", "step 1", "step 2"}  # type: ignore[union-attr]
    assert len({span.span_id for span in spans}) == len(spans) == 1 + 3 * (1 + 2 + 2)


def test_otlp_is_what_a_collector_reads(folder: Path, tmp_path: Path) -> None:
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    from google.protobuf.json_format import ParseDict

    write_traces(folder, tmp_path / "traces")
    (line,) = (tmp_path / "traces/made.traces.jsonl").read_text().splitlines()
    request = ParseDict(with_base64_ids(json.loads(line)), service.ExportTraceServiceRequest())
    named = {
        resource.resource.attributes[0].value.string_value: [
            span for scope in resource.scope_spans for span in scope.spans
        ]
        for resource in request.resource_spans
    }
    assert {name: len(spans) for name, spans in named.items()} == {
        "roll.driver": 10,
        "roll.actor_train-0": 3,
        "roll.actor_train-1": 3,
    }
    spans = [span for group in named.values() for span in group]
    ids = {span.span_id for span in spans}
    assert all(len(one) == 8 for one in ids) and all(len(span.trace_id) == 16 for span in spans)
    assert sum(not span.parent_span_id for span in spans) == 1
    assert all(span.parent_span_id in ids for span in spans if span.parent_span_id)
    assert (min(span.start_time_unix_nano for span in spans), max(span.end_time_unix_nano for span in spans)) == (
        0,
        3 * 10**9,
    )


def with_base64_ids(value: Any) -> Any:
    """OTLP writes ids in hexadecimal digits where protobuf's own JSON has base64."""
    if isinstance(value, list):
        return [with_base64_ids(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64encode(bytes.fromhex(one)).decode() if key.lower().endswith("id") else with_base64_ids(one)
        for key, one in value.items()
    }


def test_a_trace_for_perfetto(folder: Path, tmp_path: Path) -> None:
    assert cli.main(["trace", str(folder), "--out", str(tmp_path / "t.json")]) == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(names.values()) == ["driver", "actor_train-0", "actor_train-1"]
    (train,) = [one for one in events if one["name"] == "update" and names[one["tid"]] == "actor_train-1"][:1]
    assert (train["ts"], round(train["dur"])) == (0.4e6, 400_000)


def test_requests_and_calls_of_environments_are_spans(tmp_path: Path) -> None:
    """Each with the step in which it began; those in flight together on tracks of their own, told apart by number."""
    folder = made_run(tmp_path / "made", [made_block(step, 1, 2, 4, random.Random(step)) for step in range(2)])
    rows = [
        ["request", 0.1, 0.3, {"id": "0", "samples": 8, "tokens": 99}],
        ["request", 0.1, 0.3, {"id": "1", "samples": 8, "tokens": 99}],
        ["step", 1.2, 1.3, {"environment": "lake"}],
        ["request", 0.3, 1.4, {"id": "2", "samples": 8, "tokens": 99}],
    ]
    (folder / "record/requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "[torn")
    run = read_run(folder)
    spans = [span for span in spans_of(run) if span.service in ("requests", "environments")]
    assert [(span.name, span.parent.name) for span in spans if span.parent] == [
        ("request", "step 0"),
        ("request", "step 0"),
        ("step", "step 1"),
        ("request", "step 0"),
    ]
    assert len({span.span_id for span in spans}) == 4
    assert dict(spans[3].attributes) == {"number": 3, "id": "2", "samples": 8, "tokens": 99}
    events = perfetto(run)["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    placed = [(tracks[event["tid"]], event["args"]["id"]) for event in events if "id" in event["args"]]
    assert sorted(placed) == [("requests 0", "0"), ("requests 0", "2"), ("requests 1", "1")]
