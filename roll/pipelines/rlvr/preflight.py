"""What only the parts of an RLVR run can check, before anything starts: rewards, own functions, transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.config.pipelines import find_own_modules
from roll.config.policy import RouterConfig
from roll.config.reading.errors import ConfigError, Problem
from roll.config.reading.fields import DOTTED_PATH
from roll.config.reading.masking import masked
from roll.config.reading.yaml_files import shown
from roll.pipelines.policy import actor_keys, pg_variant
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.plan import RLVRPlan

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig

OWN_FUNCTION_KEYS = (
    "adv_estimator",
    "entropy_loss_agg_mode",
    "kl_loss_agg_mode",
    "kl_loss_type",
    "kl_penalty",
    "loss_agg_mode",
    "sample_weighting",
    "train_infer_correction",
    "value_loss_agg_mode",
    "value_loss_type",
)
"""Keys at the top that take the dotted path of a function; ``pg_variant`` and filters bring options along."""


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


def check_transport(loaded: LoadedConfig[RLVRConfig]) -> None:
    """Weights can only travel through memory that there is.

    Raises:
        ConfigError: ``cuda_ipc`` on a host without CUDA.
    """
    if loaded.config.weight_sync.transport != "cuda_ipc":
        return
    from roll.platforms import current_platform

    device_type = current_platform().device_type
    if device_type != "cuda":
        rule = f"needs CUDA devices, this host's are of type {device_type}; object_store works everywhere"
        source = shown(loaded.source)
        raise ConfigError([Problem("weight_sync.transport", "cuda_ipc", rule, source=source, has_value=True)])


def unknown_numbers(domain: str, reward: object, loaded: LoadedConfig[RLVRConfig]) -> list[Problem]:
    """A mistake where ``reward_weights`` names what a rule is known not to return."""
    known = getattr(reward, "numbers", ())
    for number in loaded.config.reward_weights:
        if known and number not in (*known, "score"):
            rule = f"rewards.{domain} returns no such number; it returns {', '.join((*known, 'score'))}"
            return [Problem(f"reward_weights.{number}", None, rule, source=shown(loaded.source), has_value=False)]
    return []


def own_functions(config: RLVRConfig) -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """(key, value, look-up) of what a user may have written a function for; nothing is imported for the known names."""
    for key in OWN_FUNCTION_KEYS:
        value = getattr(config, key)
        if isinstance(value, str) and DOTTED_PATH.fullmatch(value):
            yield key, value, partial(_resolve, key, value)
    variant = pg_variant(config)
    if config.pg_variant_args or DOTTED_PATH.fullmatch(variant):
        yield "pg_variant_args" if config.pg_variant_args else "pg_variant", variant, partial(_loss_options, config)
    router = config.router_args
    if router.router_config or DOTTED_PATH.fullmatch(router.router_name or ""):
        key = "router_config" if router.router_config else "router_name"
        yield f"router_args.{key}", getattr(router, key), partial(_build_router, router)
    for name, section in config.rewards.items():
        for key in ("query_filter_config", "response_filter_config"):
            own = getattr(section, key)
            if DOTTED_PATH.fullmatch(own.type):
                yield f"rewards.{name}.{key}", own.type, partial(_build_filter, own.type, own.filter_args)


def samples_ahead_problems(
    loaded: LoadedConfig[RLVRConfig], checkpoint: str, state: Mapping[str, Any]
) -> Iterator[tuple[str, Any, str]]:
    """A synchronous run would lose the samples that a checkpoint holds for later steps."""
    assert isinstance(loaded.plan, RLVRPlan)
    ahead = state.get("rollout", {}).get("ahead", {})
    if not loaded.plan.is_async and (ahead.get("unfinished") or ahead.get("complete")):
        rule = f"{checkpoint} holds samples that were generated ahead, which a synchronous run has no use for"
        yield "async_generation_ratio", loaded.config.async_generation_ratio, rule


def _resolve(key: str, path: str) -> object:
    from roll.algorithms.registry import Registry

    return Registry(key).resolve(path)


def _loss_options(config: RLVRConfig) -> object:
    from roll.algorithms.losses import actor_loss_options

    return actor_loss_options(actor_keys(config))


def _build_filter(kind: str, arguments: dict[str, Any]) -> object:
    from roll.rollout.filters import build_filter

    return build_filter(kind, arguments)


def _build_router(section: RouterConfig) -> object:
    from roll.rollout.routing import build_router

    return build_router(section.router_name, section.router_config)
