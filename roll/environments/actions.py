"""Actions in a model's text: the pattern that finds them, and the move of a grid that they name."""

from __future__ import annotations

import re
from dataclasses import dataclass

MOVES: dict[str, tuple[int, int]] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
"""Name of a move to its change of row and column."""

_BY_NAME = {name.lower(): name for name in MOVES}


@dataclass(frozen=True)
class ActionPattern:
    """Place of the action in a response.

    ``pattern`` has one group (the action) or two (thought and action); the first match counts, the dot matches line
    breaks. None: the whole response, stripped.
    """

    pattern: str | None = None

    def __post_init__(self) -> None:
        if self.pattern is None:
            return
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"action_pattern {self.pattern!r} is not a regular expression: {error}") from None
        if groups not in (1, 2):
            raise ValueError(
                f"action_pattern {self.pattern!r} has {groups} groups; it needs one (the action), as in "
                "'<answer>(.*?)</answer>', or two (thought and action)"
            )

    def find(self, text: str) -> str | None:
        """The action in ``text``, stripped; None where the pattern does not match."""
        if self.pattern is None:
            return text.strip()
        match = re.search(self.pattern, text, re.DOTALL)
        return None if match is None else match.group(match.re.groups).strip()


def move_named(action: str | None) -> str | None:
    """``Left``, ``Down``, ``Right`` or ``Up``, whatever the case; None for anything else."""
    return None if action is None else _BY_NAME.get(action.strip().lower())


def moved(position: tuple[int, int], move: str) -> tuple[int, int]:
    """The cell next to ``position`` in the direction of ``move``."""
    change = MOVES[move]
    return position[0] + change[0], position[1] + change[1]
