"""``<role>.data_args``: which rows a role reads, what their columns are called, and how they become prompts.

Torch-free; a loaded configuration is frozen.  The text under each field is the user documentation of its key."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from roll.config.reading.fields import DOTTED_PATH, setting

# Those of `roll.datasets.templates`.
TEMPLATES = (
    *("native", "qwen2_5", "qwen2-vl", "qwen3", "qwen3_nothink", "qwen3_coder"),
    *("chatml", "empty", "base", "raw", "longCOT_qwen2.5", "longcot_V3"),
)
TEMPLATE_ENDINGS = (".jinja", ".j2")  # endings of files that hold a chat template


def parse_filter(value: object) -> Any:
    """A dotted path, or conditions by column."""
    if isinstance(value, str) and not DOTTED_PATH.fullmatch(value):
        raise ValueError("must be {column: value or list or {min, max}}, or the dotted path of your own function")
    for column, condition in value.items() if isinstance(value, Mapping) else ():
        if isinstance(condition, Mapping) and (not condition or set(condition) - {"min", "max"}):
            raise ValueError(f"{column}: a range has min, max or both, found {sorted(map(str, condition))}")
    return value


def parse_truth(value: object) -> Any:
    """The name of a column, or the column and a regular expression."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, Mapping) or "column" not in value or set(value) - {"column", "pattern"}:
        raise ValueError("must be the name of a column, or {column: NAME, pattern: REGULAR EXPRESSION}")
    try:
        re.compile(value.get("pattern", ""))
    except re.error as error:
        raise ValueError(f"pattern is no regular expression: {error}") from error
    return value


@dataclass(frozen=True)
class CurriculumArguments:
    """``data_args.curriculum``: rows in order of difficulty, band by band, for the first epochs.

    Within a domain the rows are sorted by ``column`` and cut into ``bands`` of equal size; an epoch gives one band
    after the other, each shuffled. Every row still comes once an epoch.
    """

    column: str = "difficulty"
    """Column with each row's difficulty, a number: the larger the harder."""
    bands: int = setting(4, ge=1)
    """Parts of like difficulty that a domain is divided into; one band is no curriculum."""
    epochs: int = setting(1, ge=1)
    """Epochs given in bands; later ones are shuffled as a whole."""
    order: Literal["easy_first", "hard_first"] = "easy_first"
    """Which band comes first."""


@dataclass(frozen=True)
class DataArguments:
    """``<role>.data_args``: files, columns and templates."""

    template: str = setting("native", choices=TEMPLATES, endings=TEMPLATE_ENDINGS)
    """Chat template: ``native`` (the tokenizer's own), ``qwen2_5``, ``qwen3``, ``chatml``, ``base``, ``empty`` ... or a
    file with a Jinja template (``.jinja``, ``.j2``)."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the tokenizer's template or the Jinja file, such as ``enable_thinking: false``."""
    system_prompt: str | None = None
    """System message of conversations that have none of their own."""
    file_name: str | list[str] | None = None
    """Data file or files (json, jsonl, csv, parquet, arrow, txt; the text formats also with .gz), folders, patterns
    such as ``data/*.jsonl``, or ``hub:OWNER/NAME[/CONFIG][:SPLIT]`` for a data set of the Hugging Face hub."""
    on_bad_row: Literal["raise", "skip"] = "raise"
    """Treatment of a row that cannot be used: the run ends with its file and number, or it is left out and
    counted."""
    dataset_filter: str | dict[str, Any] | None = setting(None, parse=parse_filter, example="{difficulty: {min: 0.2}}")
    """Which rows are used: ``{column: value}``, ``{column: [values]}`` or ``{column: {min: 0.2, max: 0.8}}``, all of
    which must hold; or the dotted path of a function from a row to true or false. null: all."""
    filter_overlong_prompts: bool = True
    """Leave out prompts that are longer than the prompt length; false: ``truncation`` says what becomes of them."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """With ``filter_overlong_prompts: false``: end the run, or truncate the last user message at its beginning, end or
    middle."""
    shuffle: bool = True
    """Draw the rows of each epoch in an order of its own; false: in the order of the files."""
    curriculum: CurriculumArguments | None = None
    """Rows in order of difficulty; null: none."""
    streaming: bool = False
    """Supervised training: prepare rows as they are needed, 8,192 at a time, which are shuffled among themselves, not
    all of them before the first step; ``max_steps`` is needed then."""
    use_cache: bool | None = None
    """Keep the prepared rows on disk, in ``datasets`` under ``$ROLL_CACHE_DIR`` (``~/.cache/roll``); null: those of
    files of 4 MiB and more."""
    domain_interleave_probs: dict[str, float] | None = None
    """Share of each domain (a name under ``rewards``) in a rollout batch; the shares are divided by their sum. null: by
    data size."""
    preprocessing_num_workers: int | None = setting(None, ge=1)
    """Processes that render and tokenise rows, at most one per core and per 8 MiB of data files; null or 1: the run's
    own process, with the tokenizer's threads."""
    tag: str = "tag"
    """Column that says which reward a row is routed to."""
    id: str = "id"
    """Column of the row's identity."""
    prompt: str | None = None
    """Column of the plain prompt text, or a dotted name of an entry of a column (``extra_info.question``); excludes
    ``messages``."""
    response: str = "solution"
    """Column of the demonstrated response in supervised training."""
    messages: str | None = None
    """Column of the chat messages (a list, or the same as a JSON string); excludes ``prompt``."""
    ground_truth: str | dict[str, str] | None = setting(
        None, parse=parse_truth, example="{column: answer, pattern: '#### (.+)'}"
    )
    """Column of what a reward compares with: its text after ``####``, its last box, or all of it; with a pattern, the
    last match. null: ``ground_truth``, verl's and SkyRL's sections, ``answer``, or the box of ``solution``."""
    images: str = "images"
    """Column of a row's images: one or a list, each bytes, a path, a ``data:`` URI, or ``{bytes, path}``. They stand
    where the text has ``<image>``, else before the first user message. Rows without images, or with ``image_flag:
    false``, are rows of text."""
    image_folder: str | None = None
    """Folder from which relative paths of images start; null: the data file's."""
    image_min_pixels: int | None = setting(None, ge=1)
    """Smaller images are enlarged to about as many pixels; null: as the model's image processor says."""
    image_max_pixels: int | None = setting(None, ge=1)
    """Larger images are shrunk to about as many pixels; null: as the model's image processor says."""
    videos: str = "videos"
    """Column of a row's videos: a list, each a list of frames (as ``images`` are) or ``{video: [...], fps: ...}``. They
    stand where the text has ``<video>``, else before the first user message."""
    video_folder: str | None = None
    """Folder from which relative paths of frames start; null: ``image_folder``."""
    video_fps: float = setting(2.0, gt=0)
    """Frames per second taken from a video whose row says its ``fps``; those of others are as many already."""
    video_max_frames: int = setting(128, ge=2)
    """Most frames taken from a video, evenly spread."""
    video_min_pixels: int | None = setting(None, ge=1)
    """Smaller frames are enlarged to about as many pixels; null: as the model's video processor says."""
    video_max_pixels: int | None = setting(None, ge=1)
    """Larger frames are shrunk to about as many pixels; null: as the model's video processor says."""
    video_total_pixels: int | None = setting(None, ge=1)
    """Most pixels of all frames of a video together; null: as the model's video processor says."""


# Kinds of data files; the text formats also with `.gz` appended.
FORMATS = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")
# `hub:OWNER/NAME[/CONFIG][:SPLIT]`; a split may be a part of one, as `train[:100]`.
HUB = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(:(?P<split>[\w.-]+(\[-?\d*%?:-?\d*%?\])?))?")


@dataclass(frozen=True)
class HubName:
    """A data set of the Hugging Face hub."""

    name: str
    config: str | None
    split: str


def hub_name(name: str) -> HubName | None:
    """The parts of a hub name; None for a name of files. Raises ``ValueError``: begins like a hub name and is none."""
    if not name.startswith("hub:"):
        return None
    found = HUB.fullmatch(name)
    if found is None:
        raise ValueError(
            "a data set of the hub is written hub:OWNER/NAME, hub:OWNER/NAME/CONFIG or with :SPLIT appended, such as "
            ":train or :train[:100]"
        )
    return HubName(found["name"], found["config"], found["split"] or "train")


def format_of(path: Path) -> str:
    """``.jsonl`` of ``train.jsonl`` and of ``train.jsonl.gz``."""
    return path.with_suffix("").suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def matching_files(path: Path) -> list[Path]:
    """The file itself, the data files of a folder, or the files that a pattern matches, in alphabetical order."""
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        if saved_splits(path) or "_data_files" in json_object(path / "state.json"):
            return saved_files(path)
        return sorted(p for p in path.iterdir() if os.path.isfile(p) and format_of(p) in FORMATS)
    return sorted(Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match))


def saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder that ``datasets`` wrote (``save_to_disk``), in its order; of a folder with several
    splits those of ``train``, or of the only one. None: another folder."""
    splits = saved_splits(folder)
    if splits:
        return saved_files(folder / splits[0]) if len(splits) == 1 or splits[0] == "train" else []
    state = json_object(folder / "state.json")
    files = state.get("_data_files")
    names = [one.get("filename") for one in files if isinstance(one, dict)] if isinstance(files, list) else []
    return [folder / name for name in names if isinstance(name, str) and os.path.isfile(folder / name)]


def saved_splits(folder: Path) -> list[str]:
    """The splits of a folder that ``datasets`` wrote, ``train`` first; none: it is no such folder."""
    splits = json_object(folder / "dataset_dict.json").get("splits")
    names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
    return sorted(names, key=lambda name: name != "train")


def json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def name_problem(name: str, check_files: bool) -> str | None:
    """The rule that a name in ``file_name`` breaks; None: it is fine."""
    try:
        if hub_name(name) is not None:
            return None
    except ValueError as error:
        return str(error)
    path = Path(name).expanduser()
    is_folder = os.path.isdir(path) or name.endswith("/")
    if not is_folder and not glob.has_magic(name) and format_of(path) not in FORMATS:
        hint = f"; a data set of the hub is written hub:{name}" if name.count("/") == 1 and not path.suffix else ""
        return f"must be a file of one of the kinds {', '.join(FORMATS)}, a folder or a pattern{hint}"
    if check_files and not matching_files(path):
        if saved_splits(path):
            return f"holds the splits {', '.join(saved_splits(path))}: name one, as in {path / saved_splits(path)[0]}"
        if os.path.isdir(path):
            return f"the folder holds no data file ({', '.join(FORMATS)})"
        return f"no such file (relative names start from {Path.cwd()})"
    return None
