"""Every strategy and layout compared with the plain model: loss, gradient norm and log-probs.

    python -m benchmarks.parity                            # print the table; exit 1 if a number is out of bounds
    python -m benchmarks.parity --into docs/backends.md    # and put its largest figures between the page's markers
    python -m benchmarks.parity --only megatron --dtypes fp32

A four-layer Qwen2 model, 12 rows of many lengths in micro-batches of 4, REINFORCE with an entropy bonus, AdamW with
weight decay.  Figures are relative differences to a plain Hugging Face model on one process in float32, at the first
step and after five optimizer steps.  Layouts whose package is not installed are left out, and named.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.parity.layouts import LAYOUTS
from benchmarks.parity.table import BOUNDS, compare, insert, markdown, summary
from tests.strategies.ranks import RankPool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="layouts whose title contains this")
    parser.add_argument("--dtypes", nargs="+", default=list(BOUNDS), choices=list(BOUNDS))
    parser.add_argument("--into", type=Path, help="a page with the table's markers")
    args = parser.parse_args()
    chosen = [layout for layout in LAYOUTS if args.only in layout.title]
    missing = {layout.package for layout in chosen if layout.package and not _is_installed(layout.package)}
    for package in sorted(missing):
        print(f"left out: layouts that need {package}", file=sys.stderr)
    pool = RankPool(max(layout.ranks for layout in chosen))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = partial(pool.run, folder)
        try:
            rows = compare(
                run, [layout for layout in chosen if layout.package not in missing], args.dtypes, folder / "model"
            )
        finally:
            pool.close()
    table = markdown(rows)
    print(table)
    if args.into:
        insert(args.into, summary(rows))
    violations = [line for row in rows for line in row.violations()]
    sys.exit("out of bounds:\n" + "\n".join(violations) if violations else 0)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package.partition(".")[0]) is not None


if __name__ == "__main__":
    main()
