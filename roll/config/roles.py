"""The role sections of a configuration (``actor_train``, ``actor_infer``, ``reference``, ``critic`` ...).

Torch-free; a loaded configuration is frozen.  The text under each field is the user documentation of its key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.config.data import CurriculumArguments, DataArguments
from roll.config.devices import parse_device_mapping
from roll.config.fields import rules, setting
from roll.config.names import PG_VARIANTS
from roll.config.sections import GeneratingArguments, ModelArguments, TrainingArguments

__all__ = [
    "CurriculumArguments",
    "DataArguments",
    "GeneratingArguments",
    "ModelArguments",
    "RouterReplayArguments",
    "SequencePackingArguments",
    "StrategyArguments",
    "TrainingArguments",
    "WorkerConfig",
]


@dataclass(frozen=True)
class StrategyArguments:
    """``<role>.strategy_args``: how the role's model is computed."""

    strategy_name: str = "fsdp2_train"
    """``fsdp2_train`` (training), ``fsdp2_infer`` (log-probs without training), ``hf_infer``, ``vllm`` or ``sglang``
    (generation), and the other backends' names."""
    strategy_config: dict[str, Any] = field(default_factory=dict)
    """Options of the strategy; each strategy has its own checked set of keys (see the strategies' own tables)."""


@dataclass(frozen=True)
class SequencePackingArguments:
    """``<role>.sequence_packing_args``; used with ``use_sequence_packing``."""

    algorithm: Literal["none", "load_balance"] = "none"
    """``none``: the rows of each micro-batch are packed. ``load_balance``: micro-batches are formed anew from all rows
    of a rank, with as many tokens as the lengths below allow and nearly the same work in each."""
    max_packed_sequence_length_forward: int | None = setting(None, ge=1)
    """``load_balance``: most tokens of a packed row in a forward pass; null: the pipeline's sequence length."""
    max_packed_sequence_length_train: int | None = setting(None, ge=1)
    """``load_balance``: most tokens of a packed row in training; null: the pipeline's sequence length."""
    min_num_micro_batches_forward: int = setting(1, ge=1)
    """``load_balance``: fewest micro-batches of a forward pass."""
    min_num_micro_batches_train: int = setting(1, ge=1)
    """``load_balance``: fewest micro-batches of an optimizer step."""


@dataclass(frozen=True)
class RouterReplayArguments:
    """``<role>.router_replay``: replay the engine's expert choices in training (mixture-of-experts models)."""

    mode: Literal["disabled", "R2", "R3"] = "disabled"
    """``R2``: choices of the old log-prob pass; ``R3``: choices of the generation engine."""


@dataclass(frozen=True)
class WorkerConfig:
    """A role section: where its workers run, which model they hold and how it is computed."""

    name: str = ""
    """Name in logs and metrics; empty: the section's own name."""
    worker_cls: str | None = None
    """Worker class or reward: a short name, a dotted path of your own, or one of ROLL's published paths."""
    pg_variant: str | None = setting(None, choices=PG_VARIANTS, dotted_path=True)
    """Policy loss of this actor; null: the pipeline's ``pg_variant``."""
    model_args: ModelArguments = field(default_factory=ModelArguments)
    """Which model, and how it is built."""
    training_args: TrainingArguments = field(default_factory=TrainingArguments)
    """Optimizer, schedule and batch sizes (trained roles)."""
    data_args: DataArguments = field(default_factory=DataArguments)
    """Files, columns and templates."""
    generating_args: GeneratingArguments = field(default_factory=GeneratingArguments)
    """How responses are sampled (generating roles)."""
    strategy_args: StrategyArguments = field(default_factory=StrategyArguments)
    """How the model is computed."""
    world_size: int | None = setting(None, ge=1)
    """Workers of a role without devices (rewards); null: 1. A role with devices has one worker per
    ``num_gpus_per_worker`` devices."""
    device_mapping: list[int] | None = field(
        default=None, metadata=rules(parse=parse_device_mapping, example="list(range(0, 2))")
    )
    """Logical device ids in order: a list, or a string such as ``list(range(0, 8))``. Roles that name the same device
    share it in time. On a host without accelerators an id is a CPU slot. null: a role without devices."""
    num_gpus_per_worker: int = setting(1, ge=1)
    """Devices of one worker. A training strategy uses 1. For ``vllm`` and ``sglang`` the tensor-parallel size of an
    engine, where ``strategy_config`` does not say it."""
    model_update_frequency: int = setting(1, ge=1)
    """Steps between two weight transfers to this role."""
    infer_batch_size: int = setting(16, ge=1)
    """Samples of one micro-batch in passes without gradient, where no token budget forms the micro-batches."""
    backend_timeout: float = setting(30.0, gt=0)
    """Minutes that a collective operation may take."""
    system_envs: dict[str, str] = field(default_factory=dict)
    """Environment variables of this role's workers, over the run's ``system_envs``."""
    max_concurrency: int | None = setting(None, ge=1)
    """Calls that one worker handles at a time; null: the role's own default."""
    topr_positive_weight: float | None = setting(None, ge=0)
    """TOPR: null: the pipeline's ``topr_positive_weight``."""
    topr_negative_weight: float | None = setting(None, ge=0)
    """TOPR: null: the pipeline's ``topr_negative_weight``."""
    use_prefix_sharing: bool = False
    """Compute the prompt that the samples of a group share once per micro-batch, in training and log-prob passes.
    Same numbers, fewer tokens; for models whose layers are all full attention."""
    use_remove_padding: bool = False
    """Compute real tokens only: the rows of each micro-batch lie behind one another in one row without padding. Same
    numbers; for models whose layers are all full attention."""
    use_dynamic_batching_in_train: bool = False
    """Form micro-batches from rows of like lengths, by tokens instead of samples, in training."""
    use_dynamic_batching_in_infer: bool = False
    """Form micro-batches from rows of like lengths, by tokens instead of samples, in passes without gradient."""
    max_tokens_per_microbatch_in_train: int | None = setting(None, ge=1)
    """Most tokens of a micro-batch, padding included, with ``use_dynamic_batching_in_train``."""
    max_tokens_per_microbatch_in_infer: int | None = setting(None, ge=1)
    """Most tokens of a micro-batch, padding included, with ``use_dynamic_batching_in_infer``."""
    sequence_length_round_in_train: int = setting(8, ge=1)
    """Widths of micro-batches with padding are rounded up to a multiple of this, in training with dynamic batching."""
    sequence_length_round_in_infer: int = setting(8, ge=1)
    """Widths of micro-batches with padding are rounded up to a multiple of this, in passes without gradient with
    dynamic batching."""
    use_sequence_packing: bool = False
    """Lay several sequences into one row without padding; ``sequence_packing_args.algorithm`` says which."""
    sequence_packing_args: SequencePackingArguments = field(default_factory=SequencePackingArguments)
    """Which sequences are packed together."""
    logits_in_fp32: bool = setting(True, inert="softmax arithmetic is always float32")
    """Accepted for older files."""
    apply_loss_scale: bool = setting(True, inert="loss denominators are always global")
    """Accepted for older files."""
    offload_nccl: bool = setting(False, inert="")
    """Accepted for older files."""
    router_replay: RouterReplayArguments = field(default_factory=RouterReplayArguments)
    """Expert choices replayed in training."""
    mtp_training_mode: str = setting("disabled", choices=("disabled", "joint", "detach"))
    """Training of multi-token-prediction layers."""
    opd_kl_coef: float | None = setting(None, ge=0)
    """On-policy distillation: weight of this teacher's KL."""
    tag_included: list[str] | None = None
    """Rows with one of these tags are routed here (rewards and teachers)."""
