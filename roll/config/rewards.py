"""``rewards.<name>``: a reward domain, its rule and the rows that are routed to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.config.names import FILTER_ARGUMENTS
from roll.config.reading.fields import setting
from roll.config.roles import WorkerConfig


@dataclass(frozen=True)
class FilterConfig:
    """``query_filter_config`` and ``response_filter_config``: which groups of samples are kept for training."""

    type: str = setting("no_filter", choices=tuple(FILTER_ARGUMENTS), dotted_path=True)
    """``no_filter``; ``mean_filter`` keeps groups whose mean score lies between ``threshold_down`` and
    ``threshold_up``; ``std_filter`` keeps groups whose scores spread more than ``std_threshold``."""
    filter_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the filter: ``threshold_up``, ``threshold_down``; ``std_threshold``."""


@dataclass(frozen=True)
class RewardComponentConfig:
    """``rewards.<name>.components.<component>``: one of several rewards that make up a domain's score."""

    worker_cls: str | None = None
    """Which reward: as ``rewards.<name>.worker_cls``; null: the reward of the component's own name."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reward; checked by the reward itself."""
    weight: float = 1.0
    """Factor of its score in the domain's score, which is the sum over the components; 0: only logged."""
    gate: bool = False
    """Multiply the sum by this score (0 to 1) instead of adding it: a response without it earns nothing."""
    gate_threshold: float | None = setting(None, read_if={"gate": (True,)})
    """With ``gate``: the factor is 1 from this score on and 0 below; null: the score itself."""
    timeout: float | None = setting(None, gt=0)
    """Seconds that scoring one sample may take; null: the domain's ``timeout``."""
    error_value: float | None = None
    """Score of this component where it failed; null: the sample has failed, and the domain's ``on_error`` decides."""


@dataclass(frozen=True)
class RewardConfig(WorkerConfig):
    """A reward domain. Rows whose tag is in ``tag_included`` are scored by it."""

    components: dict[str, RewardComponentConfig] = field(default_factory=dict)
    """Several rewards in place of ``worker_cls``, by name: the score is their weighted sum, times every gate. Each is
    logged as ``reward/<domain>/<component>/score``."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reward, such as ``method`` or ``format_score``; checked by the reward itself."""
    on_error: Literal["raise", "mask", "value"] = "mask"
    """What becomes of a sample whose reward failed: end the run, leave it out of the loss, or use ``error_value``."""
    error_value: float = setting(0.0, read_if={"on_error": ("value",)})
    """Score of a failed sample with ``on_error: value``."""
    timeout: float = setting(30.0, gt=0)
    """Seconds that scoring one sample may take."""
    concurrency: int = setting(32, ge=1)
    """Samples that one worker scores at a time where the reward waits for others (an async function, a service)."""
    query_filter_config: FilterConfig = field(default_factory=FilterConfig)
    """Which groups of samples are kept for training."""
    response_filter_config: FilterConfig = field(default_factory=FilterConfig)
    """Which single responses the loss uses, each judged as a group of one; the others still count in the baseline of
    their group."""
    format_pattern: str | None = None
    """Regular expression of the format that a response must have."""
    reward_type: str | None = None
    """``crossthinkqa``: ``loose``, ``soft`` or ``strict``; no other reward has it."""
    response_length_penalty_coef: float | None = setting(None, ge=0)
    """``crossthinkqa``: weight of its length term; other rewards have none, and a component ``length_penalty``."""
    use_local: bool = True
    """``code_sandbox``: run programs on this host; false: by the service at ``code_url``."""
    code_url: str | None = setting(None, read_if={"use_local": (False,)})
    """``code_sandbox``: address of ``python -m roll.rewards.service code_sandbox`` on another host."""
    judge_prompt: str | None = None
    """``llm_judge``: ``correctness``, ``score_1_to_10``, ``yes_or_no``, a file with a Jinja template, or its text."""
    judge_model_type: str | None = setting(None, choices=("api", "inference", "cluster"))
    """``llm_judge``: ``api`` (also null), a service at ``judge_api_url``; ``cluster``, the role ``reward_model``;
    ``inference``, engines of this section alone: its model, strategy, devices and ``generating_args``."""
    judge_model_name: str | None = None
    """``llm_judge``: the model's name at the service."""
    judge_api_url: str | None = None
    """``llm_judge``: address of the service up to and with ``/v1``."""
    judge_api_key: str | None = None
    """``llm_judge``: its key. Write ``${oc.env:NAME}``; it is masked wherever the configuration is shown."""
    reward_manager_config: dict[str, Any] = field(default_factory=dict)
    """Options of a remote reward system."""
