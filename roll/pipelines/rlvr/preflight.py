"""Checks by the parts of an RLVR run, before anything starts: rewards, own functions, transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.config.pipelines import find_own_modules
from roll.config.reading.errors import ConfigError, Problem
from roll.config.reading.fields import DOTTED_PATH
from roll.config.reading.masking import masked
from roll.config.reading.yaml_files import shown
from roll.pipelines.policy_preflight import build_own_filter, policy_functions
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.plan import RLVRPlan

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig


def check_rewards(loaded: LoadedConfig[RLVRConfig]) -> None:
    """Build each domain's reward once: a wrong ``reward_kwargs``, or a host that gives too little, is found early.

    Raises:
        ConfigError: a reward that cannot be built, an option that it does not have, or numbers in ``reward_weights``
            that it does not return.
    """
    find_own_modules()
    from roll.rewards import RewardOptionError, build_section

    problems = []
    for name, section in loaded.config.rewards.items():
        try:
            reward = build_section(name, section)
            reward.check_host()
            reward.close()
            problems += unknown_numbers(name, reward, loaded)
        except RewardOptionError as error:
            inside = f"components.{error.component}." if error.component is not None else ""
            part = section if error.component is None else section.components[error.component]
            key, value = f"rewards.{name}.{inside}{error.key}", getattr(part, error.key)
            rule = str(error).removeprefix(f"worker_cls {value!r}: ")
            problems.append(Problem(key, masked(value), rule, source=shown(loaded.source), has_value=bool(value)))
    if problems:
        raise ConfigError(problems)


def check_harness_is_there(loaded: LoadedConfig[RLVRConfig]) -> None:
    """
    Raises:
        ConfigError: the program of ``validation.harness`` is not installed.
    """
    from roll.serving.harness import HARNESSES

    validation = loaded.config.validation
    if validation is not None and validation.harness is not None:
        HARNESSES[validation.harness.name].require("validation.harness.name", shown(loaded.source))


def unknown_numbers(domain: str, reward: object, loaded: LoadedConfig[RLVRConfig]) -> list[Problem]:
    """A mistake where ``reward_weights`` names what a rule is known not to return."""
    known = getattr(reward, "numbers", ())
    for number in loaded.config.reward_weights:
        if known and number not in (*known, "score"):
            rule = f"rewards.{domain} returns no such number; it returns {', '.join((*known, 'score'))}"
            return [Problem(f"reward_weights.{number}", None, rule, source=shown(loaded.source), has_value=False)]
    return []


def own_functions(config: RLVRConfig) -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """As :func:`~roll.pipelines.policy_preflight.policy_functions`, and the filters of reward domains."""
    yield from policy_functions(config)
    for name, section in config.rewards.items():
        for key in ("query_filter_config", "response_filter_config"):
            own = getattr(section, key)
            if DOTTED_PATH.fullmatch(own.type):
                yield f"rewards.{name}.{key}", own.type, partial(build_own_filter, own.type, own.filter_args)


def samples_ahead_problems(
    loaded: LoadedConfig[RLVRConfig], checkpoint: str, state: Mapping[str, Any]
) -> Iterator[tuple[str, Any, str]]:
    """A synchronous run would lose the samples that a checkpoint holds for later steps."""
    assert isinstance(loaded.plan, RLVRPlan)
    ahead = state.get("rollout", {}).get("ahead", {})
    if not loaded.plan.is_async and (ahead.get("unfinished") or ahead.get("complete")):
        rule = f"{checkpoint} holds samples that were generated ahead, which a synchronous run has no use for"
        yield "async_generation_ratio", loaded.config.async_generation_ratio, rule
