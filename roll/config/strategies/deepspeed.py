"""DeepSpeed's options, resolved: which ZeRO stage and offload a role gets, and its numbers as DeepSpeed wants them.

Torch-free, and without DeepSpeed: ``roll check`` says what will happen on a machine that has neither."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from roll.config.installation import install_command
from roll.config.reading.errors import Problems, closest
from roll.config.reading.fields import setting
from roll.config.reading.schema import MOST_KEYS_LISTED
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import Backend, Package, StrategyConfig
from roll.config.strategies.deepspeed_keys import KEYS, REMOVED, VERSION


@dataclass(frozen=True)
class DeepSpeedStrategyConfig(StrategyConfig):
    """``deepspeed_train`` and ``deepspeed_infer``: shorthands for the usual choices, and DeepSpeed's own JSON keys."""

    zero_stage: int | None = setting(None, ge=0, le=3, example=2)
    """0: every rank holds everything; 1: optimizer states sharded; 2: gradients too; 3: parameters too. null:
    ``zero_optimization.stage``, else 3. Forward-only roles shard under 3 only."""
    offload: Literal["none", "cpu", "nvme", "auto"] | None = None
    """Keep optimizer states in host memory or on a disk (ZeRO-2 and 3). ``auto``: cpu where there is an accelerator."""
    offload_param: bool | None = None
    """With ZeRO-3 and ``offload``: parameters too. null: the variable ``VERL_ENABLE_PARAM_OFFLOAD``, else false."""
    nvme_path: str | None = setting(None, read_if={"offload": ("nvme",)})
    """Folder on the disk, with ``offload: nvme``."""
    fp32_grad_accumulation: bool | None = None
    """Sum gradients of micro-batches in float32 under bf16 (ZeRO-1 to 3). null: the variable
    ``VERL_DS_ZERO2_FP32_ACCUM_PATCH``, else true."""
    step_each_micro_batch: bool | None = None
    """Call the engine's step after every micro-batch instead of the last one only; same numbers. null: the variable
    ``VERL_DS_ZERO2_STEP_EACH_MICRO``, else false."""
    zero_optimization: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's section, passed through; numbers such as ``1e8`` reach DeepSpeed as the ints that it needs."""
    bf16: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's section, passed through except ``enabled``: ``model_args.dtype`` decides."""
    deepspeed_config: dict[str, Any] = field(default_factory=dict)
    """Further keys of DeepSpeed's JSON, passed through; names are checked. ``data_types.grad_accum_dtype`` goes before
    ``fp32_grad_accumulation``; ``activation_checkpointing`` may switch nothing on (see
    ``model_args.disable_gradient_checkpointing``). Accepted next to this section as well: ``aio``,
    ``activation_checkpointing``, ``data_types``, ``comms_logger``, ``flops_profiler``, ``communication_data_type``,
    ``wall_clock_breakdown``, ``steps_per_print``."""

    passes_through: ClassVar[tuple[str, Collection[str]]] = (
        "deepspeed_config",
        (
            *("activation_checkpointing", "aio", "data_types", "comms_logger", "flops_profiler"),
            *("communication_data_type", "wall_clock_breakdown", "steps_per_print"),
        ),
    )

    optimizers: ClassVar[Collection[str]] = ("adamw", "muon")

    def check(self, name: str, role: WorkerConfig, world_size: int, trains: bool, problems: Problems) -> None:
        path, environ = f"{name}.strategy_args.strategy_config", {**os.environ, **role.system_envs}
        _check_keys(path, self, role.strategy_args.strategy_config, problems)
        try:
            # As on the machine of the run: this one may have no accelerator.
            plan = plan_zero(self, environ, trains=trains, has_accelerator=True)
            switch(self, "fp32_grad_accumulation", environ)
            switch(self, "step_each_micro_batch", environ)
        except ValueError as error:
            problems.missing(path, str(error))
            return
        for key, text in plan.notices:
            problems.note(f"{path}.{key}", text)
        dtype = role.model_args.dtype
        if self.offload == "nvme":
            if plan.stage != 3:
                problems.add(f"{path}.offload", "nvme", f"needs ZeRO-3, and this is ZeRO-{plan.stage}", "cpu")
            elif self.nvme_path is None:
                problems.missing(
                    f"{path}.nvme_path", "is needed with offload: nvme: a folder on the disk", "/local_nvme"
                )
        if self.fp32_grad_accumulation and plan.stage == 0 and dtype == "bf16" and trains:
            problems.note(f"{path}.fp32_grad_accumulation", "has no effect under ZeRO-0: gradients are summed in bf16")
        if trains and role.training_args.optimizer.name == "muon":
            _check_muon(f"{path}.zero_optimization", self, problems)
        if self.bf16.get("enabled") in (True, False) and self.bf16["enabled"] != (dtype == "bf16"):
            problems.note(f"{path}.bf16.enabled", f"has no effect; model_args.dtype decides ({dtype})")
        if role.model_args.ulysses_size > 1:
            key = f"{name}.model_args.ulysses_size"
            problems.note(key, "is taken as 1: context parallelism is not available under DeepSpeed")


DEFAULT_STAGE = 3  # everything sharded, as under FSDP2: a change of strategy does not change what fits

# Switches that published scripts set in the environment; the key counts where it is written.
ENVIRONMENT = {
    "offload_param": "VERL_ENABLE_PARAM_OFFLOAD",
    "fp32_grad_accumulation": "VERL_DS_ZERO2_FP32_ACCUM_PATCH",
    "step_each_micro_batch": "VERL_DS_ZERO2_STEP_EACH_MICRO",
}

_SWITCH_DEFAULTS = {"offload_param": False, "fp32_grad_accumulation": True, "step_each_micro_batch": False}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class ZeroPlan:
    """Stage and offload of one role under ZeRO."""

    stage: int
    # `none`, `cpu` or `nvme`; what the shorthand keys ask for (`zero_optimization` may say more).
    offload_optimizer: str = "none"
    offload_param: str = "none"
    notices: tuple[tuple[str, str], ...] = ()  # key and text of what was asked for and is not done


def switch(config: DeepSpeedStrategyConfig, name: str, environ: Mapping[str, str]) -> bool:
    """The value of a key of :data:`ENVIRONMENT`: as written, else of its environment variable, else the default.

    Raises:
        ValueError: a variable that is neither 0 nor 1.
    """
    written = getattr(config, name)
    if written is not None:
        return bool(written)
    text = environ.get(ENVIRONMENT[name], "").strip().lower()
    if not text:
        return _SWITCH_DEFAULTS[name]
    if text not in ("0", "1", "false", "true"):
        raise ValueError(f"{ENVIRONMENT[name]}={text!r} in the environment: must be 0 or 1, like 1")
    return text in ("1", "true")


def requested_stage(config: DeepSpeedStrategyConfig) -> int:
    """``zero_stage``, else ``zero_optimization.stage``, else :data:`DEFAULT_STAGE`."""
    if config.zero_stage is not None:
        return config.zero_stage
    written = numbers(config.zero_optimization).get("stage", DEFAULT_STAGE)
    return written if isinstance(written, int) else DEFAULT_STAGE


def plan_zero(
    config: DeepSpeedStrategyConfig, environ: Mapping[str, str], *, trains: bool, has_accelerator: bool
) -> ZeroPlan:
    """Stage and offload of a role, with the requests that have no effect.

    | stage | ``offload: cpu`` in training                            | in forward-only roles          |
    |-------|---------------------------------------------------------|--------------------------------|
    | 0, 1  | none                                                    | none (stage 1 and 2 are 0)     |
    | 2     | optimizer                                               | none                           |
    | 3     | optimizer; parameters too with ``offload_param: true``  | parameters                     |
    """
    stage, notices = requested_stage(config), []
    if not trains and stage in (1, 2):
        notices.append(("zero_stage", f"ZeRO-{stage} shards what only training has: a forward-only role runs as 0"))
        stage = 0
    target = config.offload or "none"
    if target == "auto":
        target = "cpu" if has_accelerator and stage >= 2 else "none"
    if target != "none" and stage < 2:
        notices.append(("offload", f"ZeRO-{stage} offloads nothing: {target} is taken as none (ZeRO-2 and 3 offload)"))
        target = "none"
    wants_param = switch(config, "offload_param", environ)
    if wants_param and config.offload_param and (stage < 3 or target == "none") and trains:
        notices.append(("offload_param", "has no effect: parameters are offloaded under ZeRO-3 with offload: cpu"))
    if not trains:
        return ZeroPlan(stage, offload_param=target, notices=tuple(notices))
    if stage == 3 and target != "none" and not wants_param:
        notices.append(("offload", "moves optimizer states; offload_param: true moves parameters too"))
    return ZeroPlan(stage, target, target if stage == 3 and wants_param else "none", tuple(notices))


def numbers(value: object) -> Any:
    """The tree with every number as DeepSpeed wants it: ``1e8`` (text or float) becomes the int 100000000. Entries with
    the value ``auto`` are left out: DeepSpeed's own default takes their place."""
    if isinstance(value, Mapping):
        return {key: numbers(entry) for key, entry in value.items() if entry != "auto"}
    if isinstance(value, list):
        return [numbers(entry) for entry in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        # Digits alone go to int(), since a float would round large ones.
        value = float(value) if not value.strip().lstrip("+-").isdigit() else int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _check_muon(path: str, config: DeepSpeedStrategyConfig, problems: Problems) -> None:
    """Options with which DeepSpeed steps by an AdamW of its own."""
    section = numbers(config.zero_optimization)
    states = section.get("offload_optimizer")
    states = states if isinstance(states, Mapping) else {}
    for key, value, without in (
        ("zenflow", section.get("zenflow"), None),
        ("offload_optimizer.super_offload", states.get("super_offload"), False),
        ("offload_optimizer.ratio", states.get("ratio"), 1),
    ):
        if value not in (None, without):
            problems.add(f"{path}.{key}", value, "is for training_args.optimizer: adamw; this role has muon", without)


# Values that DeepSpeed would refuse only in the workers: a test, the rule, and a value that works.
_SCALARS: dict[str, tuple[Callable[[object], bool], str, object]] = {
    "steps_per_print": (lambda one: one is None or (type(one) is int and one >= 1), "must be at least 1, or ~", 10),
    "wall_clock_breakdown": (lambda one: isinstance(one, bool), "must be true or false", False),
    "communication_data_type": (lambda one: one is None or isinstance(one, str), "must be a type's name, or ~", "fp32"),
}


def _check_keys(path: str, config: DeepSpeedStrategyConfig, written: Mapping[str, Any], problems: Problems) -> None:
    """Every key that is passed through is one of DeepSpeed's, and one that does something; none contradicts a shorthand
    or repeats it."""
    for name in ("zero_optimization", "bf16"):
        _check_section(f"{path}.{name}", name, getattr(config, name), problems)
    own = {item.name for item in fields(config)}
    for name, value in config.deepspeed_config.items():
        key = f"{path}.{name}" if name in written else f"{path}.deepspeed_config.{name}"
        if name in own:
            problems.add(key, value, f"belongs one level up, at {path}.{name}")
        elif name in REMOVED:
            problems.add(key, value, f"{REMOVED[name]} (DeepSpeed {VERSION}); leave it out")
        elif name not in KEYS[""]:
            problems.add(key, value, _unknown("DeepSpeed", str(name), KEYS[""]))
        elif name in _SCALARS and not _SCALARS[name][0](value):
            problems.add(key, value, *_SCALARS[name][1:])
        else:
            _check_section(key, name, value, problems)
    section, key = numbers(config.zero_optimization), f"{path}.zero_optimization"
    stage = section.get("stage")
    if stage is not None and stage not in (0, 1, 2, 3):
        problems.add(f"{key}.stage", stage, "must be one of 0, 1, 2, 3", 2)
    elif stage is not None and config.zero_stage not in (None, stage):
        problems.add(f"{path}.zero_stage", config.zero_stage, f"disagrees with {key}.stage ({stage}); keep one", stage)
    for name in ("offload_optimizer", "offload_param") if config.offload not in (None, "none") else ():
        if name in section:
            rule = f"means the same as {key}.{name}, which is there too; keep one of them"
            problems.add(f"{path}.offload", config.offload, rule)


def _check_section(path: str, section: str, data: object, problems: Problems) -> None:
    known = KEYS.get(section)
    if known is None or data is None:
        return
    if not isinstance(data, Mapping):
        problems.add(path, data, "must be a section of keys, not a single value", "{}")
        return
    for name, value in data.items():
        if name not in known:
            problems.add(f"{path}.{name}", value, _unknown(f"DeepSpeed's {section}", str(name), known))
        elif section == "activation_checkpointing" and value not in (None, False):
            rule = (
                "does nothing for models of transformers, whose layers PyTorch checkpoints "
                "(model_args.disable_gradient_checkpointing: false); leave it out"
            )
            problems.add(f"{path}.{name}", value, rule, "~")
        else:
            _check_section(f"{path}.{name}", f"{section}.{name}", value, problems)


def _unknown(owner: str, name: str, known: Sequence[str]) -> str:
    nearest = closest(name, known)
    listed = f"; its keys are {', '.join(known)}" if len(known) <= MOST_KEYS_LISTED else ""
    return f"is no key of {owner}" + (f"; the nearest is {nearest}" if nearest else listed)


DEEPSPEED = Backend(
    "deepspeed",
    DeepSpeedStrategyConfig,
    computes="roll.strategies.deepspeed.strategy.DeepSpeedStrategy",
    trains=True,
    checkpoints="pieces",
    ulysses=True,
    package=Package("deepspeed", install_command("deepspeed")),
)
