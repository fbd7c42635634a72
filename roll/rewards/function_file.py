"""A function in a file, of verl's kind: ``compute_score(data_source, solution_str, ground_truth, extra_info)``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from functools import cache
from numbers import Real
from types import ModuleType
from typing import Any


def score(
    response: str,
    ground_truth: object,
    path: str,
    name: str = "compute_score",
    data_source: object = None,
    extra_info: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The score that the function ``name`` of the file ``path`` gives a response.

    Args:
        path: a Python file; it runs in the reward worker, as a function of one's own does.
        data_source: column of the row.
        extra_info: column of the row.
        options: further keyword arguments of the function (verl's ``reward_kwargs``).

    Returns:
        ``score``, and what else the function returns that is a number.

    Raises:
        FileNotFoundError: no such file.
        AttributeError: the file has no such function.
    """
    module = load_file(os.path.abspath(os.path.expanduser(path)))
    if not hasattr(module, name):
        raise AttributeError(f"{module.__file__} has no function {name}")
    found = getattr(module, name)(
        data_source=data_source,
        solution_str=response,
        ground_truth=ground_truth,
        extra_info=dict(extra_info or {}),
        **(options or {}),
    )
    if not isinstance(found, Mapping):
        return {"score": found[0] if isinstance(found, list | tuple) else found}
    return {key: value for key, value in found.items() if key == "score" or isinstance(value, Real)}


@cache
def load_file(path: str) -> ModuleType:
    """The file as a module; ``FileNotFoundError`` where there is none."""
    spec = importlib.util.spec_from_file_location("reward_function_file", path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise FileNotFoundError(f"reward function file {path}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
