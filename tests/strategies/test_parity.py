"""Rows of the parity table, within its bounds; and that a number outside them is found."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from benchmarks.parity.layouts import LAYOUTS
from benchmarks.parity.measure import Errors
from benchmarks.parity.table import BEGIN, BOUNDS, END, Row, compare, insert, markdown, summary

CHECKED = {"fsdp2": "HSDP 2x2", "deepspeed": "ZeRO-3 offload, 2 ranks", "megatron": "TP2 x PP2"}
"""One layout of each: padded in float32; packed, the harder of the two, in both types."""


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", CHECKED)
def test_rows_are_within_bounds(run_ranks, tmp_path, strategy):
    layouts = [layout for layout in LAYOUTS if (layout.strategy, layout.name) == (strategy, CHECKED[strategy])]
    padded, packed = ([layout for layout in layouts if layout.batch == batch] for batch in ("padded", "packed"))
    assert padded and packed
    package = layouts[0].package
    if package and importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"needs {package}")
    rows = compare(run_ranks, packed, list(BOUNDS), tmp_path) + compare(
        run_ranks, padded, ["fp32"], tmp_path / "padded"
    )
    assert len(rows) == 1 + len(layouts)
    assert [line for row in rows for line in row.violations()] == []
    for row in rows[1 : 1 + len(packed)]:
        assert row.errors["bf16"][0].log_probs > 1e-4, "bf16 rounds; equality would mean float32"


def test_a_number_out_of_bounds_is_named():
    good = Errors(0.0, 1e-6, 1e-6)
    row = Row("fsdp2", "2 ranks", "packed", {"fp32": [good, replace(good, grad_norm=1.1e-5)], "bf16": [good, good]})
    (line,) = row.violations()
    assert line.startswith("fsdp2 2 ranks, packed, fp32 after 5 steps") and "1.1e-05" in line
    assert "| fsdp2 | 2 ranks | packed | 0e+00 / 0e+00 | 1e-06 / 1e-05 |" in markdown([row])
    assert "| fsdp2 | 2 ranks; 1 rank | 2e-06 | 1e-05 | 1e-06 | 0e+00 | 1e-06 | 1e-06 |" in summary(
        [row, replace(row, layout="1 rank", errors=row.errors | {"fp32": [good, replace(good, loss=2e-6)]})]
    )


def test_the_table_replaces_the_one_between_the_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    insert(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    page.write_text("no place")
    with pytest.raises(ValueError, match=r"page\.md: no place for the table"):
        insert(page, "new")
