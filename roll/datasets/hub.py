"""Data sets of the Hugging Face hub, through ``datasets``: downloaded once, then read from the files it keeps."""

from __future__ import annotations

from pathlib import Path

from roll.config.data import hub_name
from roll.datasets.types import DataError


def hub_files(name: str) -> list[Path]:
    """The Arrow files that ``datasets`` keeps of ``hub:OWNER/NAME[/CONFIG][:SPLIT]``.

    Raises:
        DataError: the data set is not there, not reachable, or has no such configuration or split.
    """
    import datasets

    wanted = hub_name(name)
    assert wanted is not None, f"{name} is no hub name"
    try:
        found = datasets.load_dataset(wanted.name, wanted.config, split=wanted.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        offline = datasets.config.HF_HUB_OFFLINE
        hint = "HF_HUB_OFFLINE is set" if offline else "is this machine online?"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"data_args.file_name: {name!r} cannot be loaded ({type(error).__name__}: {reason}); {hint} "
            "Without the hub, download the data set's files elsewhere and name them, such as data/train.parquet"
        ) from error
    return [Path(entry["filename"]) for entry in found.cache_files]
