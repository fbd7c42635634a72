"""One GRPO run with two trainers, two engines and a reference, and everything that it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.distributed import WorkerFailed
from roll.report.run_files import REPORT_NAME, read_run
from tests.pipelines.conftest import Run
from tests.support.tiny_runs import GRPO_STEPS, HERE, SECRET

pytestmark = [pytest.mark.e2e, pytest.mark.long]

EXPECTED = {
    "system": "global_step samples tokens tps actor_infer/response/tps_dp",
    "scheduler": "collect_query_count query_use_count",
    "critic": "score/mean rewards/mean advantages/mean returns/mean",
    "token": "response_length/mean prompt_length/mean total_length/max",
    "actor": "pg_loss total_loss kl_loss grad_norm lr approxkl clipfrac ratio_mean ratio_max ratio_min "
    "train_infer_log_diff_abs_mean",
    "digits": "score/mean",
    "reward": "digits/error_rate",
    "time": "step_total step_generate step_train step_model_update ref_log_probs_values adv",
}
EXPECTED_EACH_STEP = [f"{family}/{name}" for family, names in EXPECTED.items() for name in names.split()]
"""Names that users' dashboards are built on."""


def test_every_step_has_the_metrics_of_the_contract(grpo_run):
    assert [row["system/global_step"] for row in grpo_run.steps] == list(range(GRPO_STEPS))
    missing = {name for row in grpo_run.steps for name in EXPECTED_EACH_STEP if name not in row}
    assert not missing
    measured = [any(name.startswith("memory/") for name in row) for row in grpo_run.steps]
    assert measured == [True, False, True, False], "peak memory in the steps asked for"


def test_batch_arithmetic_is_reported(grpo_run):
    for row in grpo_run.steps:
        assert row["system/samples"] == row["actor/total_samples"] == row["actor/samples_used"] == 16
        assert row["system/tokens"] == pytest.approx(16 * row["token/total_length/mean"])
        assert row["system/tps"] == pytest.approx(row["system/tokens"] / row["time/step_total"])
        phases = ("step_model_update", "step_generate", "ref_log_probs_values", "adv", "step_train")
        assert sum(row[f"time/{phase}"] for phase in phases) <= row["time/step_total"]
    assert len(set(grpo_run.values("token/response_length/mean"))) > 1, "the case needs responses of different lengths"


def test_engines_follow_the_trainer(grpo_run):
    """Float32 on both sides: rounding alone is left, though the weights have moved at every step. An update on the data
    of the current policy has the ratio 1."""
    for name in ("actor/ratio_mean", "actor/ratio_max", "actor/ratio_min"):
        assert grpo_run.values(name) == [1.0] * GRPO_STEPS
    assert grpo_run.values("actor/approxkl") == [0.0] * GRPO_STEPS
    assert max(grpo_run.values("actor/train_infer_log_diff_abs_max")) < 1e-4
    assert grpo_run.values("model_update/version") == list(range(GRPO_STEPS))
    moved = grpo_run.values("actor/kl_loss")
    assert moved[0] == pytest.approx(0, abs=1e-10)
    assert moved[-1] > 1e-4, "without a change of the policy the comparison would show nothing"


def test_validation_before_between_and_after(grpo_run):
    rows = {row["step"]: row for row in grpo_run.with_metric("val/sampled/accuracy")}
    assert sorted(rows) == [0, 2, GRPO_STEPS]
    assert {"val/greedy/accuracy", "val_correct/all/mean", "val/sampled/pass@2"} <= rows[0].keys()
    for row in rows.values():
        low, accuracy, high = (row[f"val/evens.sampled/accuracy{end}"] for end in ("_low", "", "_high"))
        assert 0 <= low <= accuracy <= high <= 1 and row["val_correct/evens/mean"] == accuracy
    assert "val/evens.greedy/accuracy" not in rows[0]
    table = [json.loads(line) for line in (grpo_run.logs / "samples-validation-evens.jsonl").open()]
    assert {row["tag"] for row in table} == {"even"}


def test_tensorboard_shows_what_the_metrics_file_says(grpo_run):
    events = EventAccumulator(str(grpo_run.logs / "tensorboard"))
    events.Reload()
    for name in EXPECTED_EACH_STEP:
        written = [(event.step, event.value) for event in events.Scalars(name)]
        assert written == [(row["step"], pytest.approx(row[name])) for row in grpo_run.steps], name


def test_samples_and_checkpoints_are_written(grpo_run):
    for step in range(GRPO_STEPS):
        rows = grpo_run.samples(step)
        assert len(rows) == 16
        assert len({row["prompt_id"] for row in rows}) == 4
        mean = sum(row["score"] for row in rows) / len(rows)
        assert mean == pytest.approx(grpo_run.steps[step]["critic/score/mean"])
    assert len((grpo_run.output / "rollouts/validation-000002.jsonl").read_text().splitlines()) == 8 * 2
    assert sorted(path.name for path in (grpo_run.output / "checkpoints").iterdir()) == ["checkpoint-2", "checkpoint-4"]


def test_secrets_are_masked_in_all_that_is_written(grpo_run):
    given = grpo_run.output / "input" / "config.yaml"
    assert SECRET in given.read_text()
    assert yaml.safe_load((grpo_run.output / "config.yaml").read_text())["estimator"] == "grpo"
    for path in grpo_run.output.rglob("*"):
        if path.is_file() and path != given:
            assert SECRET.encode() not in path.read_bytes(), path


def test_trained_model_loads_with_the_auto_classes(grpo_run, world):
    trained = AutoModelForCausalLM.from_pretrained(grpo_run.output / "model")
    start = AutoModelForCausalLM.from_pretrained(world.model)
    assert AutoTokenizer.from_pretrained(grpo_run.output / "model").get_vocab()
    moved = [not a.equal(b) for a, b in zip(trained.parameters(), start.parameters(), strict=True)]
    assert all(moved)


def ascii_of(text):
    """A letter of several bytes may come from several tokens, none of which is a letter by itself."""
    return "".join(letter for letter in text if letter.isascii())


def test_the_record_for_reports_has_the_samples_of_the_run(grpo_run):
    blocks = [block for block in read_run(grpo_run.output).blocks() if block["kind"] == "train"]
    assert [block["step"] for block in blocks] == list(range(GRPO_STEPS))
    for block in blocks:
        rows = grpo_run.samples(block["step"])
        assert len(rows) == len(block["samples"]) == 16
        for row, sample in zip(rows, block["samples"], strict=True):
            assert block["prompts"][sample["prompt"]]["text"] == row["prompt"]
            assert sample["score"] == pytest.approx(row["score"], rel=1e-5)
            assert all(sample[name] == row[name] for name in ("finish_reason", "response_tokens"))
            pieces = (block["pieces"][place] for place in sample["tokens"])
            assert ascii_of(row["response"]) in ascii_of("".join(pieces))
            assert sample["versions"] == block["step"]
        # Every second step had a pass of its own: float32 on both sides, a hundred-thousandth is the record's unit.
        assert all(("mismatch" in sample) == (block["step"] % 2 == 0) for sample in block["samples"])
        assert all(abs(difference) <= 2 for sample in block["samples"] for difference in sample.get("mismatch", ()))


def test_the_record_for_reports_has_phases_and_calls(grpo_run):
    read = read_run(grpo_run.output)
    for row in grpo_run.steps:
        phases = [phase for line in read.timeline if line["step"] == row["step"] for phase in line["phases"]]
        (seconds,) = (end - begin for name, begin, end in phases if name == "step_train")
        assert seconds == pytest.approx(row["time/step_train"], rel=0.1, abs=0.01), "by another clock"
    calls = {(one.role, one.rank): {name for name, _, _ in one.spans} for one in read.calls}
    assert "step" in calls["actor_train", 1] and "advance" in calls["actor_infer", 1]
    begin, end = read.timeline[0]["begin"], read.timeline[-1]["end"]
    train = next(one for one in read.calls if one.role == "actor_train")
    assert any(begin < first < last < end for name, first, last in train.spans if name == "step")
    assert read.about["outcome"] == "finished"
    assert (grpo_run.output / REPORT_NAME).stat().st_size > 10_000


PLANTED = {
    "PLANTED_PAT": "pat-planted-1",
    "PLANTED_PGPASSWORD": "password-planted-2",
    "PLANTED_URL": "https://user:url-planted-3@example.org/score?token=query-planted-5",
}


@pytest.mark.long
def test_a_run_that_fails_has_its_report_and_no_secret_in_anything_that_it_writes(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rewards quote them in their errors, which end the run; where they are logged and dumped: test_security.py."""
    changes = {
        "system_envs": PLANTED,
        "rewards.digits.worker_cls": f"{HERE}.rewards.leaks_for_some",
        "rewards.digits.on_error": "raise",
        "track_with": ["jsonl", "stdout", "tensorboard"],
        "tracker_kwargs": {"tensorboard": {}},
    }
    with pytest.raises(WorkerFailed) as failure:
        run(changes, output=tmp_path)
    assert "rewards.digits rank 0" in str(failure.value) and "'score'" in str(failure.value)
    outcome = read_run(tmp_path).about["outcome"]
    assert "401 for https://user:********@example.org" in outcome and (tmp_path / REPORT_NAME).is_file()
    out, err = capfd.readouterr()
    texts = {"message": str(failure.value).encode(), "stdout": out.encode(), "stderr": err.encode()}
    given = tmp_path / "input"
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(given)]
    texts |= {str(path): path.read_bytes() for path in files}
    for name, text in texts.items():
        assert b"-planted-" not in text, (name, text[max(0, text.index(b"-planted-") - 200) :][:300])
