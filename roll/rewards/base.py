"""What a reward is: texts in, a scalar (or an explained failure) a sample out. Torch-free: workers start fast."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from roll.config.reading.masking import masked_text


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Without a ``score`` there is an ``error`` that says why: a failure never looks like a bad answer."""

    score: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    """Further numbers of this sample, averaged per domain in the log."""
    error: str | None = None

    def __post_init__(self) -> None:
        assert self.score is not None or self.error is not None, "a result needs a score or an error"


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One finished response and what is known of its prompt."""

    prompt: str
    """The prompt as the model saw it, template applied."""
    response: str
    """The decoded response, without special tokens."""
    ground_truth: Any = None
    finish_reason: str = "stop"
    """``stop``, ``length`` (cut off) or ``abort``."""
    row: dict[str, Any] = field(default_factory=dict)
    """All columns of the data row."""
    num_tokens: int = 0
    """Length of the response as the model wrote it, end token included."""
    model_result: RewardResult | None = None
    """What the role ``reward_model`` says; None where the domain does not ask it."""


class RewardFunction(Protocol):
    """Scores a batch; called from one thread at a time, in any thread."""

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One result a sample, in order. Never raises for what a model has written."""
        ...

    def close(self) -> None:
        """Release helper processes; the function is not used again."""
        ...


class RewardRule(ABC):
    """A reward that judges one sample at a time. Subclasses are dataclasses: their fields are the rule's options."""

    numbers: ClassVar[tuple[str, ...]] = ()
    """Names in the ``metrics`` of every result; empty: not told."""
    concurrent_calls: ClassVar[int] = 1
    """Calls that may be under way at a time, in as many threads: more than one for rewards that wait for others."""

    @abstractmethod
    def judge(self, sample: RewardSample) -> RewardResult: ...

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        return [self.judge(sample) for sample in samples]

    def check_host(self) -> None:
        """Called once on the driver's host before anything starts; most rules run anywhere.

        Raises:
            RewardOptionError: this host does not give what the options ask for.
        """

    def prepare(self) -> str:
        """Called once in the worker, before the run starts. What it raises ends the run; most rules need nothing.

        Returns:
            A line about the worker's host, which the driver logs once; empty: nothing to say.
        """
        return ""

    def close(self) -> None:
        """Most rules have nothing to release."""


def failure(error: str) -> RewardResult:
    return RewardResult(None, {}, masked_text(error))


class RewardOptionError(ValueError):
    """A reward that does not exist, or an option that it does not have or cannot use."""

    component: str | None = None
    """The component of the domain that it is about; None: the domain has none."""
    key = "reward_kwargs"
    """What it is about, of the domain or the component."""


class RewardNameError(RewardOptionError):
    """A reward that does not exist."""

    key = "worker_cls"
