"""``benchmarks/reproduce.py``: the tables of the pages, verdicts, and a tiny table that is really run."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks import reproduce
from benchmarks.reproduce import Figure, Row, Table, judge, main, page_lines, read_table, student_quantile, table_names
from roll.config.loader import load_config
from roll.config.reading.errors import ConfigError
from tests.examples.pages import ROOT

ACCURACY = "val/sampled/accuracy"


def made(**changes: object) -> Table:
    """Three seeds of one row, another with one seed, a third with none."""
    rows = [
        Row("three", "a.yaml", [], ["three"], results=[{"seed": s, "after": 0.5 + 0.1 * s} for s in range(3)]),
        Row("one", "a.yaml", [], ["one"], results=[{"seed": 0, "after": 0.5}]),
        Row("none", "a.yaml", [], ["none"]),
    ]
    figures = {"after": Figure(ACCURACY, "last", "after")}
    return Table("made", "page.md", "made", "after", 0.01, figures, ["name"], rows, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", table_names())
def test_pages_have_the_tables_whose_rows_can_be_run(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Written by ``benchmarks/reproduce.py NAME --page``; the file as ``--record`` writes it. Of the first quick row
    and the last that needs nothing, a seed's own folder is named in the words."""
    table = read_table(name)
    begin, end = table.marks
    block = (ROOT / table.page).read_text(encoding="utf-8").split(begin)[1].split(end)[0]
    assert block.strip() == "\n".join(page_lines(table))
    reproduce.write_table(table, tmp_path / "copy.json")
    assert (tmp_path / "copy.json").read_text() == (reproduce.TABLES / f"{name}.json").read_text()
    monkeypatch.chdir(ROOT)
    for row in (next(row for row in table.rows if row.quick), [row for row in table.rows if not row.needs][-1]):
        words = [word.replace("{seed}", "1") for word in ("seed=1", *table.overrides, *row.overrides)]
        loaded = load_config(None, ROOT / row.config, None, words, check_files=False)
        assert loaded.config.max_steps == int(next(w for w in words[::-1] if w.startswith("max_steps="))[10:])
        assert not [word for word in words if "seed0" in word]


def test_students_quantiles() -> None:
    """Against the printed tables."""
    for freedom, expected in ((1, 12.7062), (2, 4.30265), (10, 2.22814), (30, 2.04227)):
        assert student_quantile(0.975, freedom) == pytest.approx(expected, rel=1e-5)


def test_verdicts() -> None:
    """By hand: z = 1.96 for one row; same seeds 1.96 * 0.01 * sqrt(2/2), others 4.303 * 0.1 * sqrt(1/3 + 1)."""
    table = made()
    three, one, none = table.rows

    def of(row: Row, *pairs: tuple[int, float], rows: int = 1) -> reproduce.Verdict:
        return judge(table, row, [{"seed": seed, "after": value} for seed, value in pairs], rows)

    near, far = of(three, (0, 0.519), (1, 0.619)), of(three, (0, 0.5), (1, 0.641))
    assert (near.word, far.word) == ("agrees", "differs")
    assert near.half_width == pytest.approx(0.0195996, rel=1e-4)
    assert of(three, (0, 0.5), (1, 0.641), rows=30).word == "agrees"
    others = of(three, (7, 1.09))
    assert (others.word, others.recorded) == ("agrees", pytest.approx(fmean((0.5, 0.6, 0.7))))
    assert others.half_width == pytest.approx(4.30265 * 0.1 * (4 / 3) ** 0.5, rel=1e-4)
    assert of(three, (7, 1.11)).word == "differs"
    assert of(one, (1, 0.9)).word == of(none, (0, 0.9)).word == "new"
    assert judge(table, three, ["exit status 1, see log"], 1).word == "failed"
    assert judge(table, three, [None], 1).word == judge(table, three, ["needs sglang"], 1).word == "not run"


def test_a_seed_that_starts_from_another_model_is_another_start() -> None:
    """So are recorded rows."""
    table = made(start="before")
    row = table.rows[0]
    for result in row.results:
        result["before"] = 0.3
    same, other = ([{"seed": 0, "before": before, "after": 0.6}] for before in (0.3, 0.32))
    assert judge(table, row, same, 1).word == "differs"
    verdict = judge(table, row, other, 1)
    assert (verdict.word, verdict.why) == ("agrees", "1 other starts than the 3 recorded")
    table = made(start="before")
    for row, before in zip(table.rows, (0.32, 0.301, 0.32), strict=True):
        reproduce.keep_results(table, {row.name: [{"seed": 0, "before": before, "after": 0.7}]})
    assert table.rows[0].results[0] == {"seed": 0, "before": 0.32, "after": 0.7}, "the newest figures of a seed"
    (sentence,) = reproduce.mixed_starts(table)
    assert sentence.startswith("seed 0: one started from other models than the rest (before is not 0.32)")
    assert list(reproduce.mixed_starts(made())) == []


def test_figures_of_a_run() -> None:
    rows = [{"step": 0, "a": 1.0}, {"step": 1}, {"step": 2, "a": 2.0}, {"step": 3, "a": 6.0}]
    assert [Figure("a", take, "").of(rows) for take in reproduce.TAKES] == [1.0, 6.0, 4.0]
    with pytest.raises(KeyError):
        Figure("b", "last", "").of(rows)


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no such table"):
        main(["nothing"])
    with pytest.raises(ConfigError, match="no row's name"):
        main(["backends", "--rows", "no-such"])
    for text in ("{}", "[]", "{,}"):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(ConfigError, match="is not a table"):
            main([str(tmp_path / "wrong.json")])
    assert main(["--list"]) == main(["backends", "--list"]) == 0
    assert "GRPO fsdp2" in capsys.readouterr().out


@pytest.mark.e2e
@pytest.mark.matrix
def test_a_tiny_table(
    tiny_model: Path,
    shared_ray: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Measured and recorded; measured again elsewhere, it agrees; against a falsified record it differs."""
    monkeypatch.setenv("RAY_ADDRESS", shared_ray)
    data = tiny_model.parents[1] / "data"
    few = tmp_path / "val.jsonl"
    few.write_text("\n".join((data / "val.jsonl").read_text().splitlines()[:16]))
    short = [f"pretrain={tiny_model}", "max_steps=1", "eval_steps=1", "rollout_batch_size=8"]
    short += [
        "actor_train.training_args.per_device_train_batch_size=32",
        f"validation.data_args.file_name=[{few}]",
    ]
    short += [f"actor_train.data_args.file_name=[{data}/train.jsonl]"]
    figures = {"length": Figure("val/sampled/response_length", "last", "length", ".4f")}
    page = tmp_path / "page.md"
    row = Row("grpo", "examples/tiny/rlvr_config.yaml", ["seed={seed}"], ["GRPO"])
    absent = Row("other", "examples/tiny/rlvr_config.yaml", [], ["other"], needs="no_such_module")
    table = Table(
        "tiny", str(page), "tiny", "length", 0.1, figures, ["run"], [row, absent], [], short, "critic/score/mean"
    )
    page.write_text("\n".join(["# Page", *table.marks, "end"]))
    file = tmp_path / "tiny.json"
    reproduce.write_table(table, file)
    assert main([str(file), "--output", str(tmp_path / "first"), "--record"]) == 1, "nothing to compare with"
    assert "needs no_such_module" in capsys.readouterr().out
    recorded = json.loads(file.read_text())["rows"][0]["results"][0]
    assert recorded["length"] > 1 and len(recorded["curve"]) == 1
    assert f"| GRPO | {recorded['length']:.4f} | {recorded['length']:.4f} |" in page.read_text()
    assert main([str(file), "--output", str(tmp_path / "second")]) == 0
    file.write_text(file.read_text().replace(str(recorded["length"]), str(recorded["length"] + 1)))
    assert main([str(file), "--output", str(tmp_path / "second")]) == 1, "made before, not made again"
    assert "differs" in capsys.readouterr().out


@pytest.mark.long
def test_the_index_of_algorithms_is_that_of_the_registries() -> None:
    """Written by ``python docs/site/algorithms.py``, with its curves."""
    spec = importlib.util.spec_from_file_location("algorithms_page", ROOT / "docs/site/algorithms.py")
    assert spec is not None and spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = site
    spec.loader.exec_module(site)
    text = site.page()
    assert text == site.PAGE.read_text(encoding="utf-8")
    assert {file.name: file.read_text() for file in site.CURVES.glob("*.svg")} == {
        f.name: t for f, t in site.pictures()
    }
    sections = [(re.search(r"^Defined in .*\]\(([\w-]+\.md)", part, re.M), part) for part in text.split("\n## ")[1:]]
    rows = [(name, page[1]) for page, part in sections if page for name in re.findall(r"\[`([^`]+)`\]", part)]
    assert len(rows) >= 70
    assert [row for row in rows if f"`{row[0]}`" not in (ROOT / "docs" / row[1]).read_text(encoding="utf-8")] == []
