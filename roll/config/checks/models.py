"""Checks of a role's model, from what lies on disk of it: its family, and its sizes against the ranks that share it.

Torch-free, and without network: a hub name that is not in the local cache is looked up when the run starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.config import model_files
from roll.config.model_files import (
    CONFIG,
    HUB_NAME,
    OFFLINE,
    is_offline,
    looks_like_folder,
    model_folder,
    model_number,
    read_model_config,
)
from roll.config.rewards import CLASSIFIER, JUDGE_ROLE, OWN_PREFIX
from roll.config.strategies.registry import (
    StrategyConfig,
    is_sized_engine,
)

if TYPE_CHECKING:
    from roll.config.checks.base import Checks
    from roll.config.roles import WorkerConfig
    from roll.config.run import RunConfig


def check_model(
    config: RunConfig, name: str, role: WorkerConfig, options: StrategyConfig | None, checks: Checks
) -> None:
    """The model is given and there, of a family that the role's strategy has, and of a shape that its ranks can share.

    Args:
        name: of the role.
        options: the strategy's; None where they have a mistake.
    """
    key, named = checks.pipeline.model(config, name, role)
    if named is None:
        checks.missing("pretrain", "is needed: the folder or hub name of the model to start from", "Qwen/Qwen2.5-0.5B")
        return
    path = named
    if not checks.check_files:
        return
    if looks_like_folder(path):
        folder = Path(path).expanduser()
        if not folder.is_dir():
            checks.add(key, path, "no such folder")
        elif not (folder / CONFIG).is_file():
            checks.add(key, path, f"is not a model folder: it has no {CONFIG}")
    elif HUB_NAME.fullmatch(path) is None:
        checks.add(key, path, "is neither a folder nor a hub name", "Qwen/Qwen2.5-0.5B")
    elif model_folder(path) is None and is_offline():
        rule = f"is not in the local cache, and {' or '.join(OFFLINE)} is set: give a folder, or download it beforehand"
        checks.add(key, path, rule)
    try:
        found = read_model_config(path)
    except ValueError as error:
        checks.add(key, path, f"is not a model folder: {error}")
        return
    if found is None or checks.broken(key):
        return
    lacking = family_problem(found, name, role)
    if lacking is not None:
        checks.add(key, path, lacking)
        return
    section = checks.pipeline.section_key(name)
    for wrong, value, rule, example in options.shape_problems(section, role, found) if options is not None else ():
        checks.add(wrong, value, f"{rule} ({path})", example)


def family_problem(config: Mapping[str, Any], name: str, role: WorkerConfig) -> str | None:
    """Why a role cannot have this model; None: it can."""
    strategy = role.strategy_args.strategy_name
    is_judge = name == JUDGE_ROLE or name.startswith(OWN_PREFIX)
    if is_judge and role.model_args.model_type != CLASSIFIER and is_sized_engine(role):
        return None  # The engine computes it, and nothing here has to agree with it.
    lacking = model_files.missing(config, strategy)
    if lacking:
        rule = f"{model_files.describe(config, lacking)} is not available yet under {strategy}"
        if model_files.VISION in lacking and strategy.startswith("megatron"):
            trainer = strategy.replace("megatron", "fsdp2")
            rule += f": Megatron Core has no vision tower of these families; strategy_name: {trainer} has"
        return rule
    return None


def note_positions(key: str, path: str | None, length: int, checks: Checks) -> None:
    """A sequence longer than what the model was made for."""
    positions = model_number(path, "max_position_embeddings")
    if positions is not None and length > positions:
        checks.note(key, f"sequences of {length} tokens are longer than the model's {positions} positions ({path})")
