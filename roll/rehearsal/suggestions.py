"""Changes of a recipe that does not fit, each of them rehearsed before it is proposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.config.loader import LoadedConfig, load_config
from roll.config.reading.errors import ConfigError
from roll.config.strategies.deepspeed import DeepSpeedStrategyConfig
from roll.config.strategies.engines import SglangStrategyConfig, VllmStrategyConfig
from roll.config.strategies.fsdp import ShardedStrategyConfig
from roll.config.strategies.megatron import MegatronStrategyConfig
from roll.config.strategies.registry import typed_strategy_config
from roll.rehearsal.recipe import Rehearsal, rehearse_recipe
from roll.rehearsal.simulate import RoleRun
from roll.rehearsal.tracker import Kind

if TYPE_CHECKING:
    from roll.config.plan.plan import Plan, RolePlan, TrainingPlan

MOST_TRIED, MOST_SHOWN = 8, 3


@dataclass(frozen=True)
class Suggestion:
    """Overrides with which the recipe fits."""

    overrides: tuple[str, ...]
    peak: float
    seconds: float


def suggest(
    loaded: LoadedConfig[Any],
    report: Rehearsal,
    given: Mapping[str, Path],
    say: Callable[[str], None] = lambda text: None,
    known: dict[Any, RoleRun] | None = None,
) -> list[Suggestion]:
    """Changes that make the recipe fit, the fastest first: single changes, then two together. ``known``: of
    :func:`roll.rehearsal.recipe.rehearse_recipe`: roles that a change leaves alone are not run again."""
    found: list[Suggestion] = []
    nearest: list[tuple[float, tuple[str, ...]]] = []

    def changes() -> Iterator[tuple[str, ...]]:
        yield from islice(candidates(loaded, report), MOST_TRIED)
        # By now the single changes have been tried; where none fits, those that come nearest in pairs.
        for (_, one), (_, other) in () if found else combinations(sorted(nearest)[:3], 2):
            change = (*one, *other)
            if len({override.partition("=")[0] for override in change}) == len(change):
                yield change

    for change in changes():
        try:
            overrides = (*loaded.overrides, *change)
            changed: LoadedConfig[Any] = load_config(None, loaded.source, None, overrides, check_files=False)
            say(f"trying {' '.join(change)}")
            result = rehearse_recipe(changed, report.hardware, given, say, known)
        except (ConfigError, ValueError, AssertionError):
            continue  # not a recipe
        if result.fits:
            found.append(Suggestion(change, result.peak, result.seconds))
        elif result.peak < report.peak:
            nearest.append((result.peak, change))
    return sorted(found, key=lambda one: one.seconds)[:MOST_SHOWN]


def candidates(loaded: LoadedConfig[Any], report: Rehearsal) -> Iterator[tuple[str, ...]]:
    """Changes that lower the peak of the fullest devices, the cheapest in time first."""
    plan = loaded.plan
    if not report.devices:
        return
    use = max(report.devices, key=lambda device: device.peak.total)
    capacity = report.hardware.gpu.memory
    for name in (name for name in use.roles if name in report.engines):
        role = plan.roles[name]
        options = typed_strategy_config(role.section.strategy_args)
        path = f"{role.key}.strategy_args.strategy_config"
        if not isinstance(options, VllmStrategyConfig | SglangStrategyConfig):
            continue
        if report.engines[name].problem:
            yield (f"++{path}.{options.tensor_size_key}={2 * max(1, role.num_gpus_per_worker)}",)
            continue
        others = sum(n for (owner, kind), n in use.peak.parts.items() if owner != name or kind == "context")
        # In steps of 0.02, rounded down: rounded up, the share would not fit.
        share = int((capacity - others) / capacity * 50) / 50
        if 0.1 < share < (options.gpu_memory_utilization or 0.9):
            # In the file's own spelling: the other beside it would be a mistake.
            written = role.section.strategy_args.strategy_config
            key = "mem_fraction_static" if "mem_fraction_static" in written else "gpu_memory_utilization"
            yield (f"++{path}.{key}={share:g}",)
    if loaded.config.is_offload_states is False and use.peak_without_offload.total > use.peak.total:
        yield ("++is_offload_states=true",)
    holders = {owner for (owner, kind), number in use.peak.parts.items() if kind != "context" and number}
    for name in use.roles:
        if name in report.runs and name in holders:
            yield from _of_role(plan, name, use.peak.parts.get((name, Kind.OPTIMIZER), 0.0) > 0)


def _of_role(plan: Plan, name: str, has_moments: bool) -> Iterator[tuple[str, ...]]:
    """Changes of one role; ``has_moments``: its optimizer's states are on the device at the peak."""
    role = plan.roles[name]
    section, key, training = role.section, role.key, plan.training.get(name)
    options = typed_strategy_config(section.strategy_args)
    path = f"{key}.strategy_args.strategy_config"
    if training is not None and section.model_args.disable_gradient_checkpointing:
        yield (f"++{key}.model_args.disable_gradient_checkpointing=false",)
    if isinstance(options, ShardedStrategyConfig) and 1 < options.fsdp_size < role.world_size:
        yield (f"++{path}.fsdp_size=1",)
    if training is not None:
        yield from _smaller_micro_batches(role, training)
    if isinstance(options, MegatronStrategyConfig):
        if not options.use_distributed_optimizer and training is not None:
            yield (f"++{path}.use_distributed_optimizer=true",)
        if not options.sequence_parallel and options.tensor_model_parallel_size > 1:
            yield (f"++{path}.sequence_parallel=true",)
        if training is not None and options.tensor_model_parallel_size < 8:
            doubled = 2 * options.tensor_model_parallel_size
            accumulation = 2 * training.gradient_accumulation_steps
            yield (
                f"++{path}.tensor_model_parallel_size={doubled}",
                f"++{key}.training_args.gradient_accumulation_steps={accumulation}",
            )
    if isinstance(options, DeepSpeedStrategyConfig):
        if (options.zero_stage or 3) < 3:
            yield (f"++{path}.zero_stage=3",)
        if options.offload in (None, "none"):
            yield (f"++{path}.offload=cpu",)
    yield from _of_states(role, training is not None, has_moments)
    alone = training is not None and len(role.device_mapping) == plan.num_devices
    if training is not None and alone and training.gradient_accumulation_steps % 2 == 0:
        # Twice the devices for the role alone; its batch stays what it is.
        yield (
            f"++{key}.device_mapping=list(range(0,{2 * len(role.device_mapping)}))",
            f"++{key}.training_args.gradient_accumulation_steps={training.gradient_accumulation_steps // 2}",
        )


def _of_states(role: RolePlan, learns: bool, has_moments: bool) -> Iterator[tuple[str, ...]]:
    """Other memory, or fewer bits, for a role's states."""
    key, options = role.key, typed_strategy_config(role.section.strategy_args)
    path = f"{key}.strategy_args.strategy_config"
    is_adamw = learns and role.section.training_args.optimizer.name == "adamw"
    stays = isinstance(options, ShardedStrategyConfig) and not (options.offload_policy or options.optimizer_cpu_offload)
    if stays and is_adamw:
        yield (f"++{path}.optimizer_cpu_offload=true",)
    if is_adamw and has_moments and "adamw_8bit" in options.optimizers:
        yield (f"++{key}.training_args.optimizer=adamw_8bit",)
    if stays:
        yield (f"++{path}.offload_policy=true",)


def _smaller_micro_batches(role: RolePlan, training: TrainingPlan) -> Iterator[tuple[str, ...]]:
    section, key, rule = role.section, role.key, training.rule
    if rule is not None and rule.max_tokens is not None:
        own = "sequence_packing_args.max_packed_sequence_length_train"
        own = own if rule.balances else "max_tokens_per_microbatch_in_train"
        smaller = max(role.sequence_length, rule.max_tokens // 2)
        for tokens, larger in ((smaller, rule.max_tokens), (role.sequence_length, smaller)):
            if tokens < larger:
                yield (f"++{key}.{own}={tokens}",)
        return
    rows = section.training_args.per_device_train_batch_size
    for smaller in dict.fromkeys((rows // 2, 1)):
        if smaller and smaller < rows and rows % smaller == 0:
            accumulation = section.training_args.gradient_accumulation_steps * (rows // smaller)
            yield (
                f"++{key}.training_args.per_device_train_batch_size={smaller}",
                f"++{key}.training_args.gradient_accumulation_steps={accumulation}",
            )
