"""The strategies and layouts of the parity table."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roll.config.roles import WorkerConfig
from tests.strategies.samples import make_role

LEARNING_RATE, ADAM_EPSILON = 1e-3, 1e-3
"""Five such steps change log-probs by a tenth, and rounding errors grow little in them.  With AdamW's usual epsilon of
1e-8 an element whose gradient is rounding noise moves as far as any other, in either direction: correct runs differ."""


@dataclass(frozen=True)
class Layout:
    """One way to compute the same optimizer steps."""

    strategy: str
    """Without ``_train``."""
    name: str
    ranks: int
    config: dict[str, Any] = field(default_factory=dict)
    """``strategy_config``."""
    batch: str = "padded"
    role: dict[str, Any] = field(default_factory=dict)
    """Further keys of the role."""
    package: str | None = None
    """An optional package that it needs."""

    def worker(self, model: Path, dtype: str) -> WorkerConfig:
        training = {"learning_rate": LEARNING_RATE, "adam_epsilon": ADAM_EPSILON}
        options = {"dtype": dtype, "training": training, "config": dict(self.config), **self.role}
        return make_role(model, f"{self.strategy}_train", **options)

    @property
    def title(self) -> str:
        return f"{self.strategy} {self.name}, {self.batch}"


# Small enough that ZeRO-3 really partitions the matrices of the tiny model.
_PARTITION = {"zero_optimization": {"stage3_param_persistence_threshold": 40}}
_OFFLOAD_ALL = {"offload": "cpu", "offload_param": True}


def _zero(stage: int, name: str, **config: Any) -> Layout:
    section = _PARTITION if stage == 3 else {}
    return Layout("deepspeed", name, 2, {"zero_stage": stage, **section, **config}, package="deepspeed")


def _megatron(name: str, ranks: int, tensor: int = 1, pipeline: int = 1, context: int = 1, **config: Any) -> Layout:
    sizes = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
    }
    return Layout("megatron", name, ranks, {**sizes, **config}, package="megatron.core")


PACKED = {"use_sequence_packing": True}

PADDED = [
    Layout("fsdp2", "1 rank", 1),
    Layout("fsdp2", "2 ranks", 2),
    Layout("fsdp2", "4 ranks", 4),
    Layout("fsdp2", "HSDP 2x2", 4, {"fsdp_size": 2}),
    Layout("fsdp2", "offload, 2 ranks", 2, {"offload_policy": True}),
    Layout("fsdp2", "Ulysses, 2 ranks", 2, role={"model_args": {"ulysses_size": 2}}),
    Layout("fsdp", "1 rank", 1),
    Layout("fsdp", "2 ranks", 2),
    Layout("fsdp", "HSDP 2x2", 4, {"fsdp_size": 2}),
    *(_zero(stage, f"ZeRO-{stage}, 2 ranks") for stage in range(4)),
    _zero(1, "ZeRO-1, offload asked for, 2 ranks", offload="cpu"),
    _zero(2, "ZeRO-2 offload, 2 ranks", offload="cpu"),
    _zero(3, "ZeRO-3 offload, 2 ranks", **_OFFLOAD_ALL),
    _megatron("TP2", 2, tensor=2),
    _megatron("PP2", 2, pipeline=2),
    _megatron("TP2 x PP2", 4, tensor=2, pipeline=2),
    _megatron("DP2, distributed optimizer", 2, use_distributed_optimizer=True),
    _megatron("CP2", 2, context=2),
    _megatron("PP2, VPP2", 2, pipeline=2, virtual_pipeline_model_parallel_size=2),
]

LAYOUTS = [
    *PADDED,
    *(replace(layout, batch="packed", role=layout.role | PACKED) for layout in PADDED),
]
