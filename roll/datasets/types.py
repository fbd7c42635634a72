"""The rows that the rest of the system works with. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class DataError(ValueError):
    """A data file or a data setting that cannot be used; the message names file, row and what was expected."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt, ready to be sampled from."""

    prompt_id: str
    """Unique over a run: a prompt drawn again in a later epoch carries ``@<epoch>`` behind its id, so that groups
    found by this id never mix two draws."""
    domain: str
    """The ``rewards.<domain>`` section that scores it."""
    tag: str
    token_ids: list[int]
    prompt_text: str
    """The prompt as the model sees it, template applied."""
    ground_truth: Any
    row: dict[str, Any] = field(repr=False)
    """All columns of the row as read, for reward functions."""


@dataclass(frozen=True, slots=True)
class SftRow:
    """One demonstration: prompt and response in one sequence."""

    row_id: str
    tag: str
    input_ids: list[int]
    prompt_length: int
    """Tokens of the prompt; what follows is the response, its end-of-turn token included, and carries the loss."""

    @property
    def response_mask(self) -> list[bool]:
        """True on the tokens that carry the loss, aligned to ``input_ids``."""
        return [False] * self.prompt_length + [True] * (len(self.input_ids) - self.prompt_length)
