"""``roll prepare-data``: published data files to this project's columns."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from roll.datasets import gsm8k
from roll.datasets.reading import Row, SourceRow, read_rows
from roll.datasets.types import DataError

logger = logging.getLogger(__name__)

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet", ".json", ".csv")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 with one line on what is wrong with the input."""
    parser = argparse.ArgumentParser(prog="roll prepare-data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("gsm8k", help="GSM8K: train and test file with the columns question and answer")
    command.add_argument(
        "--input", type=Path, required=True, help="folder with train.jsonl and test.jsonl (or .parquet)"
    )
    command.add_argument("--output", type=Path, required=True, help="folder for train.jsonl and validation.jsonl")
    command.add_argument(
        "--instruction",
        default=gsm8k.INSTRUCTION,
        help="appended to every question, so that the model knows how to state its answer; '' for none",
    )
    command.add_argument("--system", default=None, help="a system message before every question")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        prepare_gsm8k(options.input, options.output, options.instruction, options.system)
    except DataError as error:
        logger.error("%s", error)
        return 2
    return 0


def prepare_gsm8k(
    source: Path, output: Path, instruction: str = gsm8k.INSTRUCTION, system: str | None = None
) -> dict[str, int]:
    """Write ``train.jsonl`` and ``validation.jsonl`` (from the published test split); return their row counts.

    Raises:
        DataError: a split is missing, or a row lacks question, answer or final number.
    """

    def convert(row: SourceRow, row_id: str) -> Row:
        return gsm8k.convert(row, row_id, instruction, system)

    return {
        target: convert_split(find_split(source, split), output / f"{target}.jsonl", f"gsm8k-{split}", convert)
        for split, target in (("train", "train"), ("test", "validation"))
    }


def find_split(folder: Path, split: str) -> Path:
    """``<split>.jsonl`` and the like, or the only file whose name begins with the split's (``test-00000-of-00001``)."""
    for ending in ENDINGS:
        path = folder / f"{split}{ending}"
        if path.is_file():
            return path
    loose = [path for path in sorted(folder.glob(f"{split}-*")) if path.name.endswith(ENDINGS)]
    if len(loose) == 1:
        return loose[0]
    found = ", ".join(sorted(p.name for p in folder.iterdir())) if folder.is_dir() else "no such folder"
    raise DataError(f"{folder}: expected {split}.jsonl (or {', '.join(ENDINGS[1:])}); found: {found or 'nothing'}")


def convert_split(source: Path, target: Path, id_prefix: str, convert: Callable[[SourceRow, str], Row]) -> int:
    def converted() -> Iterator[Row]:
        for position, row in enumerate(read_rows(str(source))):
            yield convert(row, f"{id_prefix}-{position}")

    # All rows are converted before anything is written: a bad row leaves no half file behind.
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in converted()]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(lines), encoding="utf-8")
    logger.info("%s: %d rows from %s", target, len(lines), source)
    return len(lines)


if __name__ == "__main__":
    raise SystemExit(main())
