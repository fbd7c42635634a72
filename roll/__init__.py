"""Reinforcement-learning post-training of language models, driven by YAML."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.1.0"


class _NoSuchModule(MetaPathFinder):
    """The last finder: an import of a module that is not here names the page for Python code written for ROLL."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """
        Raises:
            ModuleNotFoundError: a module below ``roll`` that no finder before this one knows.
        """
        if fullname.startswith(f"{__name__}."):
            text = (
                f"No module named {fullname!r}. Files written for ROLL load here; Python code written for it does not, "
            )
            text += "and docs/migration.md (Code written for ROLL) says what each of its classes becomes"
            raise ModuleNotFoundError(text, name=fullname)
        return None


sys.meta_path.append(_NoSuchModule())
