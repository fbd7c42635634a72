"""Checks by the parts of a run, before anything starts: own functions, and how weights can travel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.config.policy import PolicyRunConfig, RouterConfig
from roll.config.reading.errors import ConfigError, Problem
from roll.config.reading.fields import DOTTED_PATH
from roll.config.reading.yaml_files import shown
from roll.pipelines.policy import actor_keys, pg_variant

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


def policy_functions(config: PolicyRunConfig) -> Iterator[tuple[str, Any, Callable[[], object]]]:
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


def _resolve(key: str, path: str) -> object:
    from roll.algorithms.registry import Registry

    return Registry(key).resolve(path)


def _loss_options(config: PolicyRunConfig) -> object:
    from roll.algorithms.losses import actor_loss_options

    return actor_loss_options(actor_keys(config))


def _build_router(section: RouterConfig) -> object:
    from roll.rollout.routing import build_router

    return build_router(section.router_name, section.router_config)


def build_own_filter(kind: str, arguments: dict[str, Any]) -> object:
    """The filter at a dotted path; raises ``ValueError``."""
    from roll.rollout.filters import build_filter

    return build_filter(kind, arguments)


def check_transport(loaded: LoadedConfig[Any]) -> None:
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
