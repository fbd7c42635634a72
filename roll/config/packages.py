"""Optional packages that a run needs: looked for before anything starts, and never imported for that."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from roll.config.errors import ConfigError, Problem
from roll.config.loader import LoadedConfig
from roll.config.sources import shown

PACKAGES = {
    "deepspeed": ("deepspeed", "pip install 'roll-rl[deepspeed]'"),
    "megatron": ("megatron.core", "pip install 'roll-rl[megatron]'"),
    "sglang": ("sglang", "on GPUs pip install 'roll-rl[sglang]'; see docs/sglang.md"),
    "vllm": (
        "vllm",
        "on GPUs pip install 'roll-rl[vllm]', on a CPU make install-vllm; see docs/installation.md",
    ),
}
"""By the first word of a strategy's name: the module it needs, and how that is installed."""


TRACKERS = {"wandb": "wandb", "swanlab": "swanlab"}
"""By tracker: its package, of the same name at the index."""


def require_packages(loaded: LoadedConfig[Any]) -> None:
    """Check that the package of every strategy is installed.

    Raises:
        ConfigError: naming each role whose strategy has no package, and the command that installs it.
    """
    problems = []
    for name, role in loaded.plan.roles.items():
        package = PACKAGES.get((role.strategy_name or "").partition("_")[0])
        if package is not None and not is_installed(package[0]):
            key, rule = f"{name}.strategy_args.strategy_name", f"needs a package that is not installed: {package[1]}"
            problems.append(Problem(key, role.strategy_name, rule, source=shown(loaded.source)))
    if problems:
        raise ConfigError(problems)


def require_trackers(loaded: LoadedConfig[Any]) -> None:
    """Check that the packages of the trackers are installed.

    Raises:
        ConfigError: naming the tracker, and the command that installs it.
    """
    names = loaded.config.track_with
    missing = [
        name for name in ([names] if isinstance(names, str) else names) if not is_installed(TRACKERS.get(name, "sys"))
    ]
    if missing:
        rule = f"needs a package that is not installed: pip install {TRACKERS[missing[0]]}"
        raise ConfigError([Problem("track_with", missing[0], rule, "tensorboard", shown(loaded.source))])


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package that is missing
        return False
