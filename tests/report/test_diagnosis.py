"""The diagnosis of recorded runs: seeded pathologies and healthy ones, as ``benchmarks/pathologies`` has kept them."""

from __future__ import annotations

import json
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pathologies.cases import HEALTHY, PATHOLOGIES
from roll.report.diagnosis import RULES, diagnose
from roll.report.run_files import read_run
from tests.report.made_runs import made_block, made_run

RECORDS = Path(__file__).parent / "records"
LEAST_RIGHT = 18 / 20


@pytest.fixture(scope="module")
def causes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The causes named for each run, in order."""
    found = {}
    for archive in sorted(RECORDS.glob("*.tar.xz")):
        folder = tmp_path_factory.mktemp(archive.name)
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        found[archive.name.removesuffix(".tar.xz")] = [finding.cause for finding in diagnose(read_run(folder))]
    return found


@pytest.mark.long
def test_the_right_cause_is_named_first_and_nothing_in_healthy_runs(causes: dict[str, list[str]]) -> None:
    kept, healthy = ([case for case in cases if case.name in causes] for cases in (PATHOLOGIES, HEALTHY))
    assert len(kept) >= 20 and len(healthy) >= 10
    wrong = {case.name: causes[case.name] for case in kept if causes[case.name][:1] != [case.cause]}
    assert 1 - len(wrong) / len(kept) >= LEAST_RIGHT, wrong
    assert {case.name: causes[case.name] for case in healthy if causes[case.name]} == {}


def test_every_rule_has_a_pathology_and_a_row() -> None:
    """But the last one, which repeats the error of a run that has said its cause itself."""
    page = (Path(__file__).parents[2] / "docs/diagnosis.md").read_text(encoding="utf-8")
    named = {case.cause for case in PATHOLOGIES}
    assert len(named) == len(RULES) - 1
    assert [cause for cause in named if f"| `{cause}` |" not in page] == []


def made_blocks(steps: int) -> list[dict[str, Any]]:
    return [made_block(step, 4, 4, 6, random.Random(step)) for step in range(steps)]


def found(folder: Path, blocks: list[dict[str, Any]], **metrics: list[float]) -> dict[str, tuple[str, ...]]:
    """Evidence by cause of a made run; ``a__b`` stands for the metric ``a/b``."""
    run = made_run(folder, blocks)
    rows = [json.loads(line) for line in (run / "logs/metrics.jsonl").read_text().splitlines()]
    for name, values in metrics.items():
        for row, value in zip(rows, values, strict=True):
            row[name.replace("__", "/")] = value
    (run / "logs/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {finding.cause: finding.evidence for finding in diagnose(read_run(run))}


def test_prompts_that_the_tokenizer_changes(tmp_path: Path) -> None:
    blocks = made_blocks(4)
    assert found(tmp_path / "healthy", blocks) == {}
    blocks[2]["prompts"][1]["decoded"] = "Question"
    assert "16 prompts" in found(tmp_path / "one", blocks)["tokeniser"][0]


def test_a_rank_that_others_wait_for_in_every_call(tmp_path: Path) -> None:
    """Its calls take as long as theirs: the time in which it was busy tells."""
    blocks = made_blocks(6)
    even = {"time__step_train__actor_train__rank_0": [0.4] * 6, "time__step_total": [1.0] * 6}
    assert found(tmp_path / "even", blocks, **even, time__step_train__actor_train__rank_1=[0.5] * 6) == {}
    slow = found(tmp_path / "slow", blocks, **even, time__step_train__actor_train__rank_1=[1.3] * 6)
    assert "1.30 s, the other ranks 0.40 s" in slow["straggler"][0]


def test_rounding_is_no_mismatch_of_engine_and_trainer(tmp_path: Path) -> None:
    """The first is a run of a model of 135M in bf16; in the second the engine sampled from fewer tokens."""
    blocks = made_blocks(4)
    distance, excess = "actor__train_infer_log_diff_abs_mean", "actor__train_infer_kl_k1"
    assert found(tmp_path / "bf16", blocks, **{distance: [0.0465] * 4, excess: [0.0022, 0.001, 0.0013, 0.0077]}) == {}
    assert "engine_mismatch" in found(tmp_path / "top_k", blocks, **{distance: [0.05] * 4, excess: [0.05] * 4})


def test_scores_that_become_equal_are_no_constant_reward(tmp_path: Path) -> None:
    blocks = made_blocks(6)
    low, high = "critic__score__min", "critic__score__max"
    assert "reward_constant" in found(tmp_path / "always", blocks, **{low: [0.0] * 6, high: [0.0] * 6})
    assert found(tmp_path / "later", blocks, **{low: [0.0] * 6, high: [1.0, *[0.0] * 5]}) == {}
    (tmp_path / "always/config.yaml").write_text("is_pure_opd: true\n")
    assert diagnose(read_run(tmp_path / "always")) == [], "they say nothing where only a teacher is learnt from"


def test_rules_bear_a_single_finite_kl_and_samples_without_scores(tmp_path: Path) -> None:
    blocks = made_blocks(8)
    for block in blocks:
        for sample in block["samples"]:
            sample["score"] = None
    kl = [0.0, *[float("nan")] * 7]
    rates = {"actor__lr": [1e-6] * 8, "actor__grad_norm": [1.0] * 8, "actor__kl_loss": kl}
    evidence = found(tmp_path, blocks, **rates, actor__entropy=[1.0] * 8, critic__score__mean=[0.5] * 8)
    assert "learning_rate_low" not in evidence
