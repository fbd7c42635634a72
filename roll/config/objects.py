"""The user's code by dotted path: :func:`imported` gives what is there.

What a configuration from Python holds as an object has a path if it can be imported. What cannot (a function of a
script or a notebook, a lambda, a partial) becomes an attribute of this module in every process of the run: a process
that is started gets :func:`pickles` and keeps them by :func:`adopt` until the attribute is read.
"""

from __future__ import annotations

import pickle
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import count
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

_objects: dict[str, Any] = {}
_pickles: dict[str, bytes] = {}


def own_module(name: str) -> ModuleType:
    """A user's module. Raises ``ImportError``, whatever the module raised: the message says what and where."""
    try:
        return import_module(name)
    except ImportError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        raise ImportError(f"{type(error).__name__}: {error}{place}") from error


def imported(path: str) -> Any:
    """The object at ``package.module.name`` or ``package.module:name``. Raises ``ImportError``: there is none, or its
    module cannot be imported."""
    path = path.replace(":", ".")
    module, _, name = path.rpartition(".")
    if not module:
        raise ImportError("it names no module: write package.module.name")
    try:
        return getattr(own_module(module), name)
    except AttributeError as error:
        raise ImportError(str(error)) from error
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
    try:
        return resolve_name(path)  # an attribute of a class
    except (AttributeError, ValueError) as error:  # ValueError: no dotted path, such as "my_module..name"
        raise ImportError(str(error)) from error


def path_of(value: object, pickled: Callable[[Any], bytes]) -> str:
    """Dotted path of a function, class or other callable, by which every process of a run finds it. ``pickled`` pickles
    by value what cannot be imported, as ``cloudpickle.dumps``; whatever it raises is raised."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module not in (None, "__main__", "__mp_main__") and getattr(sys.modules.get(module), name, None) is value:
        return f"{module}.{name}"
    data = pickled(value)
    stem = re.sub(r"\W", "", getattr(value, "__name__", type(value).__name__))
    names = (stem if number == 1 else f"{stem}_{number}" for number in count(1))
    free = next(name for name in names if name not in globals() and _pickles.get(name, data) == data)
    _objects[free], _pickles[free] = value, data
    return f"{__name__}.{free}"


def pickles() -> dict[str, bytes]:
    """The objects without a module, by name, for another process of the run."""
    return dict(_pickles)


def adopt(given: Mapping[str, bytes]) -> None:
    """Take over the :func:`pickles` of the process that started this one."""
    _pickles.update(given)


def __getattr__(name: str) -> Any:
    if name not in _objects:
        if name not in _pickles:
            text = f"{name} was an object of a run from Python, and a file cannot hold it: put it into a module, and "
            raise AttributeError(f"{text}write its dotted path, such as my_package.{name}")
        _objects[name] = pickle.loads(_pickles[name])
    return _objects[name]
