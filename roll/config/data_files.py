"""What the names in ``file_name`` stand for: files, folders, patterns, data sets of the hub."""

from __future__ import annotations

import glob
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMATS = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")
"""Kinds of data files; the text formats also with ``.gz`` behind."""
HUB = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(:(?P<split>[\w.-]+))?")
"""``hub:OWNER/NAME[/CONFIG][:SPLIT]``."""


@dataclass(frozen=True)
class HubName:
    """A data set of the Hugging Face hub."""

    name: str
    config: str | None
    split: str


def hub_name(name: str) -> HubName | None:
    """The parts of a hub name; None for a name of files.

    Raises:
        ValueError: begins like a hub name and is none.
    """
    if not name.startswith("hub:"):
        return None
    found = HUB.fullmatch(name)
    if found is None:
        raise ValueError("a data set of the hub is written hub:OWNER/NAME, hub:OWNER/NAME/CONFIG or with :SPLIT behind")
    return HubName(found["name"], found["config"], found["split"] or "train")


def format_of(path: Path) -> str:
    """``.jsonl`` of ``train.jsonl`` and of ``train.jsonl.gz``."""
    return path.with_suffix("").suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def is_pattern(name: str) -> bool:
    return glob.has_magic(name)


def matching_files(path: Path) -> list[Path]:
    """The file itself, the data files of a folder, or the files that a pattern matches, in alphabetical order."""
    if path.is_file():
        return [path]
    if path.is_dir():
        if saved_splits(path) or "_data_files" in _json_object(path / "state.json"):
            return saved_files(path)
        return sorted(p for p in path.iterdir() if p.is_file() and format_of(p) in FORMATS)
    return sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file())


def saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder that ``datasets`` wrote (``save_to_disk``), in its order; none: another folder.

    Of a folder with several splits those of ``train``, or of the only one.
    """
    splits = saved_splits(folder)
    if splits:
        return saved_files(folder / splits[0]) if len(splits) == 1 or splits[0] == "train" else []
    state = _json_object(folder / "state.json")
    files = state.get("_data_files")
    names = [one.get("filename") for one in files if isinstance(one, dict)] if isinstance(files, list) else []
    return [folder / name for name in names if isinstance(name, str) and (folder / name).is_file()]


def saved_splits(folder: Path) -> list[str]:
    """The splits of a folder that ``datasets`` wrote, ``train`` first; none: it is no such folder."""
    splits = _json_object(folder / "dataset_dict.json").get("splits")
    names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
    return sorted(names, key=lambda name: name != "train")


def _json_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def name_problem(name: str, check_files: bool) -> str | None:
    """What is wrong with a name in ``file_name``, as a rule that it breaks; None: nothing."""
    try:
        if hub_name(name) is not None:
            return None
    except ValueError as error:
        return str(error)
    path = Path(name).expanduser()
    is_folder = path.is_dir() or name.endswith("/")
    if not is_folder and not is_pattern(name) and format_of(path) not in FORMATS:
        hint = f"; a data set of the hub is written hub:{name}" if name.count("/") == 1 and not path.suffix else ""
        return f"must be a file of one of the kinds {', '.join(FORMATS)}, a folder or a pattern{hint}"
    if check_files and not matching_files(path):
        if saved_splits(path):
            return f"holds the splits {', '.join(saved_splits(path))}: name one, as in {path / saved_splits(path)[0]}"
        if path.is_dir():
            return f"the folder holds no data file ({', '.join(FORMATS)})"
        return f"no such file (relative names start from {Path.cwd()})"
    return None
