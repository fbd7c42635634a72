"""The command that adds an optional package to this installation of the project."""

from __future__ import annotations

import json
import shlex
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME = "roll-rl"


@cache
def install_command(extra: str) -> str:
    """``pip install`` of an extra, from where this installation came: a clone, a wheel, or the package index.

    pip records it in ``direct_url.json`` (PEP 610).
    """
    records = (found.read_text("direct_url.json") for found in distributions(name=NAME))
    record = next((json.loads(text) for text in records if text), None)
    clone = Path(__file__).resolve().parents[2]
    if record is None and (clone / "setup.py").is_file():
        record = {"dir_info": {"editable": True}, "url": clone.as_uri()}
    place = unquote(urlsplit((record or {}).get("url", "")).path)
    is_editable = (record or {}).get("dir_info", {}).get("editable", False)
    source = "." if place and Path(place) == Path.cwd() else place or NAME
    return f"pip install {'-e ' if is_editable else ''}{shlex.quote(f'{source}[{extra}]')}"
