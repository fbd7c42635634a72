"""Types of rows, counts of rows kept and left out, and the error that names file, row and rule. Torch-free."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from roll.protocol.vision import VisionInputs


class DataError(ValueError):
    """A data file or a data setting that cannot be used; the message names file, row and what was expected."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt, ready to be sampled from."""

    prompt_id: str
    """Unique over a run: a prompt drawn again in a later epoch carries ``@<epoch>`` after its id, so that groups
    found by this id never mix two draws."""
    domain: str  # the `rewards.<domain>` section that scores it
    tag: str
    token_ids: list[int]
    prompt_text: str  # the prompt as the model sees it, template applied
    ground_truth: Any
    row: dict[str, Any] = field(repr=False)  # all columns of the row as read, for reward functions
    vision: VisionInputs | None = field(default=None, repr=False)
    """Images of the prompt, whose placeholders ``token_ids`` has, expanded."""

    def state_dict(self) -> dict[str, str]:
        """By which it is found again."""
        return {"domain": self.domain, "prompt_id": self.prompt_id}


@dataclass(frozen=True, slots=True)
class SftRow:
    """One demonstration: prompt and response in one sequence."""

    row_id: str
    tag: str
    input_ids: list[int]
    prompt_length: int  # tokens in front of the first that carries the loss
    vision: VisionInputs | None = field(default=None, repr=False)  # images of the prompt
    spans: list[int] = field(default_factory=list)
    """Begin and end of every run of tokens that carry the loss, in turn; empty: all after the prompt, which is the
    response with its end-of-turn token."""

    @property
    def response_mask(self) -> list[bool]:
        """True on the tokens that carry the loss, aligned to ``input_ids``."""
        mask = [False] * len(self.input_ids)
        spans = self.spans or [self.prompt_length, len(mask)]
        for begin, end in zip(spans[::2], spans[1::2], strict=True):
            mask[begin:end] = [True] * (end - begin)
        return mask


@dataclass(frozen=True)
class LoadCounts:
    """Numbers of rows read, kept and left out."""

    read: int
    kept: dict[str, int]  # by domain
    too_long: dict[str, int] = field(default_factory=dict)  # by domain: rows above the length limit, left out
    truncated: dict[str, int] = field(default_factory=dict)  # by domain: rows above the length limit, cut and kept
    filtered: int = 0  # left out by `dataset_filter`
    bad: int = 0  # left out because they could not be used (`on_bad_row: skip`)
    without_truth: dict[str, int] = field(default_factory=dict)
    """By domain: rows that are kept and have no ground truth."""
    answered: dict[str, int] = field(default_factory=dict)
    """By domain: prompts that are kept and end in an assistant's turn."""

    def __str__(self) -> str:
        dropped = sum(self.too_long.values())
        parts = [f"{self.read} rows read, {sum(self.kept.values())} kept, {dropped} too long"]
        others = (("truncated", sum(self.truncated.values())), ("filtered out", self.filtered), ("bad", self.bad))
        parts += [f"{count} {name}" for name, count in others if count]
        return f"{', '.join(parts)}; kept by domain: {self.kept}"


logger = logging.getLogger(__name__)

SHOWN = 5  # skipped rows that the log names one by one


@dataclass(eq=False)
class BadRows:
    """Policy for each: ``on_bad_row``."""

    policy: Literal["raise", "skip"] = "raise"
    count: int = 0

    def report(self, error: DataError) -> None:
        """Count the row, or raise ``error`` itself unless bad rows are skipped."""
        if self.policy == "raise":
            raise error
        self.count += 1
        if self.count <= SHOWN:
            logger.warning("left out: %s", error)
        elif self.count == SHOWN + 1:
            logger.warning("further rows are left out without a line of their own")
