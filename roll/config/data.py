"""``<role>.data_args``: which rows a role reads, what their columns are called, and how they become prompts.

Torch-free; a loaded configuration is frozen.  The text under each field is the user documentation of its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from roll.config.fields import DOTTED_PATH, rules, setting
from roll.config.names import TEMPLATE_ENDINGS, TEMPLATES


def parse_filter(value: Any) -> Any:
    """A dotted path, or conditions by column."""
    if isinstance(value, str) and not DOTTED_PATH.fullmatch(value):
        raise ValueError("must be {column: value or list or {min, max}}, or the dotted path of your own function")
    for column, condition in value.items() if isinstance(value, Mapping) else ():
        if isinstance(condition, Mapping) and (not condition or set(condition) - {"min", "max"}):
            raise ValueError(f"{column}: a range has min, max or both, found {sorted(map(str, condition))}")
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
    tag_to_system_prompt: dict[str, str] = field(default_factory=dict)
    """System message by the rows' tag, before ``system_prompt``."""
    file_name: str | list[str] | None = None
    """Data file or files (json, jsonl, csv, parquet, arrow, txt; the text formats also with .gz), folders, patterns
    such as ``data/*.jsonl``, or ``hub:OWNER/NAME[/CONFIG][:SPLIT]`` for a data set of the Hugging Face hub."""
    on_bad_row: Literal["raise", "skip"] = "raise"
    """What becomes of a row that cannot be used: the run ends with its file and number, or it is left out and
    counted."""
    dataset_filter: str | dict[str, Any] | None = field(
        default=None, metadata=rules(parse=parse_filter, example="{difficulty: {min: 0.2}}")
    )
    """Which rows are used: ``{column: value}``, ``{column: [values]}`` or ``{column: {min: 0.2, max: 0.8}}``, all of
    which must hold; or the dotted path of your own function, which is given a row and says true or false. null: all."""
    filter_overlong_prompts: bool = True
    """Leave out prompts that are longer than the prompt length; false: ``truncation`` says what becomes of them."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """With ``filter_overlong_prompts: false``: end the run, or truncate the last user message at its beginning, end or
    middle until the prompt fits. The template around it stays whole."""
    shuffle: bool = True
    """Draw the rows of each epoch in an order of its own; false: in the order of the files."""
    curriculum: CurriculumArguments | None = None
    """Rows in order of difficulty; null: none."""
    use_cache: bool | None = None
    """Keep the prepared rows on disk and read them from there the next time; null: for files of 4 MiB and more."""
    cache_dir: str | None = None
    """Folder of prepared rows; null: ``$ROLL_CACHE_DIR``, else ``~/.cache/roll``, in the folder ``datasets``."""
    eval_file_name: str | list[str] | None = field(
        default=None, metadata=rules(inert="validation.data_args.file_name decides")
    )
    """Accepted for older files."""
    dataset_dir: str | None = setting(None, inert="file names start from the working directory")
    """Accepted for older files."""
    dataset_type: str = setting("json", inert="the file's extension decides")
    """Accepted for older files."""
    domain_interleave_probs: dict[str, float] | None = None
    """Share of each domain (a name under ``rewards``) in a rollout batch; the shares are divided by their sum. null: by
    data size."""
    interleave_probs: str | float | None = setting(None, inert="domain_interleave_probs decides")
    """Accepted for older files."""
    preprocessing_num_workers: int | None = setting(None, ge=1)
    """Processes that render and tokenise rows, but no more than there are cores, and than 8 MiB of data files for each;
    null or 1: the run's own process, with the tokenizer's threads."""
    tag: str = "tag"
    """Column that says which reward a row is routed to."""
    id: str = "id"
    """Column of the row's identity."""
    prompt: str | None = None
    """Column of the plain prompt text; excludes ``messages``."""
    response: str = "solution"
    """Column of the demonstrated response in supervised training."""
    messages: str | None = None
    """Column of the chat messages (a list, or the same as a JSON string); excludes ``prompt``."""
    image_folder: str | None = None
    """Folder of images (vision-language models)."""
    image_min_pixels: int | None = setting(None, ge=1)
    """Smallest image size in pixels."""
    image_max_pixels: int | None = setting(None, ge=1)
    """Largest image size in pixels."""
    video_folder: str | None = None
    """Folder of videos."""
    video_fps: float = setting(2.0, gt=0)
    """Frames per second taken from a video."""
    video_max_frames: int = setting(128, ge=1)
    """Most frames taken from a video."""
    video_min_pixels: int | None = setting(None, ge=1)
    """Smallest frame size in pixels."""
    video_max_pixels: int | None = setting(None, ge=1)
    """Largest frame size in pixels."""
    video_total_pixels: int | None = setting(None, ge=1)
    """Most pixels of all frames of a video together."""
    audio_folder: str | None = None
    """Folder of audio files."""
    custom_data_kwargs_func: str | None = None
    """Dotted path of a function that gives further processor arguments for a row."""
