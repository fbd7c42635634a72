"""``python examples/data/convert.py KIND``: published data files to this project's columns."""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from code_sets import CODE_INSTRUCTION, CODE_TAG, convert_code
from math_sets import (
    GSM8K_INSTRUCTION,
    GSM8K_TAG,
    MATH_INSTRUCTION,
    MATH_TAG,
    convert_gsm8k,
    convert_math,
)
from preference_sets import (
    PAIR_TAG,
    NoPreferenceError,
    convert_label,
    convert_pair,
    convert_ranking,
)
from published import Convert, PrepareOptions

from roll.datasets.reading import Row, data_files, read_rows, stream_rows
from roll.datasets.types import BadRows, DataError

logger = logging.getLogger(__name__)

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet", ".json", ".csv")


@dataclass(frozen=True)
class Kind:
    """A kind of data set that one converter reads."""

    convert: Convert
    tag: str
    help: str
    instruction: str = ""


KINDS = {
    "math": Kind(convert_math, MATH_TAG, "problems with answers: MATH, DAPO-Math, NuminaMath, AIME", MATH_INSTRUCTION),
    "code": Kind(convert_code, CODE_TAG, "problems with tests: MBPP, HumanEval, TACO, LiveCodeBench", CODE_INSTRUCTION),
    "preferences": Kind(convert_pair, PAIR_TAG, "pairs: HH, UltraFeedback, Skywork, HelpSteer, SHP, Nectar ..."),
    "rankings": Kind(convert_ranking, PAIR_TAG, "several responses with scores: Nectar, UltraFeedback, HelpSteer2"),
    "labels": Kind(convert_label, PAIR_TAG, "single responses, desirable or not: KTO"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 with one line on what is wrong with the input."""
    options = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if options.command == "gsm8k":
            prepare_gsm8k(options.input, options.output, options.instruction, options.system)
        else:
            settings = PrepareOptions(options.tag, options.instruction, options.system)
            prepare_files(KINDS[options.command].convert, options.input, options.output, settings, options.on_bad_row)
    except DataError as error:
        logger.error("%s", error)
        return 2
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("gsm8k", help="GSM8K: train and test file with the columns question and answer")
    command.add_argument(
        "--input", type=Path, required=True, help="folder with train.jsonl and test.jsonl (or .parquet)"
    )
    command.add_argument("--output", type=Path, required=True, help="folder for train.jsonl and validation.jsonl")
    add_wording(command, GSM8K_INSTRUCTION)
    for name, kind in KINDS.items():
        command = commands.add_parser(name, help=kind.help)
        command.add_argument(
            "--input", nargs="+", required=True, help="files, folders, patterns or hub:OWNER/NAME:SPLIT"
        )
        command.add_argument("--output", type=Path, required=True, help="the JSONL file to write")
        command.add_argument("--tag", default=kind.tag, help=f"tag of the rows ({kind.tag})")
        command.add_argument(
            "--on-bad-row", choices=("raise", "skip"), default="raise", help="rows that cannot be converted"
        )
        add_wording(command, kind.instruction)
    return parser


def add_wording(command: argparse.ArgumentParser, instruction: str) -> None:
    text = "appended to every question, so that the model knows how to state its answer; '' for none"
    command.add_argument("--instruction", default=instruction, help=text)
    command.add_argument("--system", default=None, help="a system message before every question")


def prepare_gsm8k(
    source: Path, output: Path, instruction: str = GSM8K_INSTRUCTION, system: str | None = None
) -> dict[str, int]:
    """Write ``train.jsonl`` and ``validation.jsonl`` (from the published test split); return their row counts.

    Raises:
        DataError: a split is missing, or a row lacks question, answer or final number.
    """
    options = PrepareOptions(GSM8K_TAG, instruction, system)
    return {
        target: convert_split(find_split(source, split), output / f"{target}.jsonl", f"gsm8k-{split}", options)
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


def prepare_files(
    convert: Convert,
    inputs: Sequence[str],
    target: Path,
    options: PrepareOptions,
    on_bad_row: Literal["raise", "skip"] = "raise",
) -> int:
    """Convert the rows of all inputs into one JSONL file; return their number.

    Raises:
        DataError: a file or (unless skipped) a row that cannot be used, or no row left.
    """
    bad_rows, prefix, dropped = BadRows(on_bad_row), target.stem, Counter[str]()
    rows: list[Row] = []
    for position, source in enumerate(stream_rows(data_files(inputs), bad_rows)):
        try:
            row = convert(source, f"{prefix}-{position}", options)
        except NoPreferenceError as error:
            dropped[error.reason] += 1
            continue
        except DataError as error:
            bad_rows.report(error)
            continue
        rows.append(row)
    if not rows:
        count = bad_rows.count + dropped.total()
        raise DataError(f"{', '.join(inputs)}: none of {count} rows could be converted{listed(dropped)}")
    write_rows(target, rows)
    left_out = f"{bad_rows.count + dropped.total()} left out{listed(dropped)}"
    logger.info("%s: %d rows from %s, %s", target, len(rows), ", ".join(inputs), left_out)
    return len(rows)


def listed(dropped: Counter[str]) -> str:
    """`` (12 tie, 3 same response)``; nothing where nothing was dropped."""
    return f" ({', '.join(f'{count} {reason}' for reason, count in dropped.most_common())})" if dropped else ""


def convert_split(source: Path, target: Path, id_prefix: str, options: PrepareOptions) -> int:
    # All rows are converted before anything is written: a bad row leaves no half file behind.
    rows = [
        convert_gsm8k(row, f"{id_prefix}-{position}", options) for position, row in enumerate(read_rows(str(source)))
    ]
    write_rows(target, rows)
    logger.info("%s: %d rows from %s", target, len(rows), source)
    return len(rows)


def write_rows(target: Path, rows: Iterable[Row]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
