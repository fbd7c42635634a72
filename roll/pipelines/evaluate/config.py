"""The evaluation's configuration: an RLVR file, and which models answer its validation prompts how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from roll.config.reading.fields import LOWEST_TEMPERATURE, setting
from roll.pipelines.rlvr.config import RLVRConfig

GREEDY = 0.0
"""The temperature at which one answer is all there is."""


@dataclass(frozen=True)
class EvaluationConfig:
    """``evaluate``: who is asked, how often, and what must come of it."""

    models: dict[str, str] = field(default_factory=dict)
    """Models by name: a Hugging Face folder or hub name, a training checkpoint of this package
    (``.../checkpoints/checkpoint-200``), or a folder of checkpoints, all of which are evaluated in order. Empty: the
    model of ``actor_infer``. Models of one architecture and tokenizer share an engine start: weights are swapped."""
    num_samples: int | None = setting(None, ge=1)
    """Samples of every prompt, or episodes of every task; null: ``num_return_sequences`` of each set, or
    ``group_size``."""
    temperatures: list[float] = field(default_factory=list)
    """Answer every prompt at each of these; 0 is greedy, with one answer. Empty: as the sets' ``generating_args`` and
    ``greedy`` say."""
    correct_from: float = 1.0
    """A response with at least this score is correct; an episode, where its environment does not say itself whether it
    succeeded."""
    select_by: str = "score"
    """The number by which ``chosen@k`` chooses the best of k samples: ``score``, or another that the reward returns,
    such as the component of a reward model."""
    interval: Literal["wilson", "bootstrap"] = "wilson"
    """Intervals of 95% of accuracies: Wilson's, or percentiles of resampled prompts. Mean rewards, which have no
    bounds, always have the latter."""
    baseline: str | None = None
    """The model that the others are compared with, prompt by prompt; null: the first."""
    thresholds: dict[str, float] = field(default_factory=dict)
    """Least values of metrics, such as ``val_correct/all/mean: 0.8``; also of one model: ``trained/val_correct/...``.
    If a model stays below one, the exit status is 3."""
    against: str | None = None
    """A model that is served elsewhere and answers the same prompts by chats, under the name ``against``; the others
    are compared with it. Address of an OpenAI-compatible service up to and with its version, the model's name behind
    a ``#`` where it lists several: ``https://host/v1#model``."""
    against_api_key_env: str = setting("", read_if={"against": ()})
    """Environment variable with the token for ``against``."""
    resume: bool = True
    """Samples that an interrupted evaluation of the same models, sets and settings has written are taken up; false:
    begin anew."""


@dataclass(frozen=True)
class EvaluateConfig(RLVRConfig):
    """The keys of an evaluation: those of an RLVR file, of which ``actor_infer``, ``rewards`` and ``validation`` are
    read, and ``evaluate``."""

    evaluate: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Which models are asked, how often, and what must come of it."""


def temperature_problem(value: float) -> str | None:
    """Why samples cannot be drawn at a temperature; None: they can."""
    if value < 0 or 0 < value < LOWEST_TEMPERATURE:
        return f"must be 0 (greedy) or at least {LOWEST_TEMPERATURE:g}"
    return None
