"""Checks of asynchronous rollout."""

from __future__ import annotations

from roll.config.checks import Checks
from roll.config.planning import shares_devices
from roll.config.rlvr import RLVRConfig
from roll.pipelines.rlvr.planning import (
    engine_log_probs_as_old,
    is_async,
    needs_greedy_baseline,
    started_roles,
    trainer_is_old,
)

KEY = "async_generation_ratio"


def check_async(config: RLVRConfig, checks: Checks) -> None:
    """What generation beside training needs, and what it means for the algorithm."""
    if checks.broken(KEY):
        return
    if not is_async(config):
        return
    check_engine_devices(config, checks)
    if needs_greedy_baseline(config):
        rule = f"must be 0 with adv_estimator {config.adv_estimator}: its greedy answers need the engines between steps"
        checks.add(KEY, config.async_generation_ratio, rule, 0)
    if trainer_is_old(config) and not config.train_infer_correction and not engine_log_probs_as_old(config):
        checks.note(
            KEY,
            "samples come from older weights, which nothing corrects for: ratios are taken against the trainer before "
            "the update; train_infer_correction: decoupled weighs them against the engine",
        )


def check_engine_devices(config: RLVRConfig, checks: Checks) -> None:
    """Engines that finish all they begin have their devices to themselves; only partial rollout takes turns."""
    key, engines = "actor_infer.device_mapping", config.actor_infer
    if checks.broken(key) or config.partial_rollout:
        return
    others = {name: role for name, role in started_roles(config).items() if name != "actor_infer"}
    sharing = [name for name, role in others.items() if shares_devices(engines, role)]
    if sharing:
        taken = {device for role in others.values() for device in role.device_mapping or ()}
        free = [device for device in range(len(taken) + len(engines.device_mapping or ())) if device not in taken]
        rule = (
            f"must share no device with {', '.join(sharing)}: with {KEY} {config.async_generation_ratio:g} and "
            "partial_rollout: false engines generate while they compute (partial_rollout: true lets them take turns)"
        )
        checks.add(key, engines.device_mapping, rule, free[: len(engines.device_mapping or ())])
