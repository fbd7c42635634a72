"""Options of the strategies that shard a model by FSDP: ``fsdp2_*`` (``fully_shard``) and ``fsdp_*`` (FSDP1)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from roll.config.model_files import EXPERTS, layer_classes, needed, num_experts
from roll.config.reading.errors import Problems
from roll.config.reading.fields import parse_dtype, setting
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import (
    Backend,
    HostStatesConfig,
    ParallelDims,
    ShapeProblem,
    largest_divisor,
    model_size,
)

Dtype = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class WrapPolicy:
    """``strategy_config.wrap_policy``: which modules become FSDP units of their own."""

    transformer_layer_cls_to_wrap: list[str] | None = None
    """Class names of the layers to wrap; null: the model's own ``_no_split_modules``."""
    wrap_embeddings: bool = False
    """Wrap the input embeddings apart."""
    wrap_lm_output: bool = False
    """Wrap the output head apart."""
    moe_experts: list[str] | None = None
    """Class names of experts, wrapped separately from the rest of their layer. A name that no module inside a sparse
    layer has, such as ``Qwen3MoeMLP``, means the fused experts."""


@dataclass(frozen=True)
class ShardedStrategyConfig(HostStatesConfig):
    """Options of both FSDP1 and FSDP2."""

    optimizers: ClassVar[Collection[str]] = ("adamw", "adamw_8bit", "muon")

    fsdp_size: int = 1
    """Ranks over which parameters are sharded. 1 or less, or at least the role's ranks: all of them; between: replicas
    of fsdp_size shards (HSDP)."""
    param_dtype: Dtype | None = setting(None, parse=parse_dtype, example="bf16")
    """Compute type of gathered parameters; null: ``model_args.dtype``. Master weights are float32 all the same."""
    master_dtype: Literal["fp32", "bf16"] = setting("fp32", parse=parse_dtype, example="fp32")
    """Type of the weights that the optimizer updates, and of its moments. ``bf16`` (with bf16 computation) halves their
    memory and loses updates of less than 1/256 of a weight, which is most of them in reinforcement learning."""
    reduce_dtype: Dtype = setting("fp32", parse=parse_dtype, example="fp32")
    """Type in which gradients are summed over ranks; fp16 with fp16 computation only."""
    offload_policy: bool = setting(False, aliases=("cpu_offload",))
    """Keep parameters (in training also gradients and optimizer states) in host memory. Under FSDP1 for forward-only
    roles."""
    wrap_policy: WrapPolicy = field(default_factory=WrapPolicy)
    """Which modules become FSDP units of their own."""
    moe_use_grouped_mm: bool | None = None
    """Compute fused experts by one grouped matrix product (true) or one by one (false); null: as the model does."""
    reduce_scatter_during_grad_accumulation: bool = True
    """Sum gradients over ranks at every micro-batch (less memory) instead of at the last one (less traffic)."""
    async_save_ckpt: bool = True
    """Copy a checkpoint to host memory and write it from there while training goes on."""
    save_only_model: bool = False
    """Leave optimizer states out of checkpoints (such a checkpoint cannot be continued exactly)."""

    def compute_type(self, role: WorkerConfig) -> str:
        """``bf16``, ``fp16`` or ``fp32``: the type in which a role's model is computed."""
        return self.param_dtype or role.model_args.dtype

    def check(self, name: str, role: WorkerConfig, world_size: int, trains: bool, problems: Problems) -> None:
        super().check(name, role, world_size, trains, problems)
        path = f"{name}.strategy_args.strategy_config"
        if trains and self.reduce_dtype == "fp16" and self.compute_type(role) != "fp16":
            rule = f"goes with fp16 computation, which scales the loss; this role computes in {self.compute_type(role)}"
            problems.add(f"{path}.reduce_dtype", "fp16", rule, "fp32")
        if self.master_dtype == "bf16" and self.compute_type(role) != "bf16":
            rule = f"goes with bf16 computation; this role computes in {self.compute_type(role)}"
            problems.add(f"{path}.master_dtype", "bf16", rule, "fp32")
        if trains and self.optimizer_cpu_offload and self.offload_policy:
            rule = "is part of offload_policy: true, which moves parameters and gradients as well; keep one of them"
            problems.add(f"{path}.optimizer_cpu_offload", True, rule, False)

    def parallel_dims(self, role: WorkerConfig, world_size: int) -> ParallelDims:
        # Sequences are shared by ranks that hold shards too: a second view of the same ranks.
        shard = self.fsdp_size if 1 < self.fsdp_size < world_size else world_size
        path = "strategy_args.strategy_config"
        keys = {"dp_shard": f"{path}.fsdp_size", "cp": "model_args.ulysses_size", "ep": f"{path}.ep_size"}
        return ParallelDims(world_size, dp_shard=shard, cp=role.model_args.ulysses_size, keys=keys)

    def shape_problems(self, name: str, role: WorkerConfig, model: Mapping[str, Any]) -> Iterator[ShapeProblem]:
        size, heads = role.model_args.ulysses_size, model_size(model, "num_attention_heads")
        if size > 1 and heads and heads % size:
            rule = f"must divide the model's {heads} attention heads"
            yield f"{name}.model_args.ulysses_size", size, rule, largest_divisor(size, heads)
        args = role.model_args
        reentrant = args.gradient_checkpointing_use_reentrant and not args.disable_gradient_checkpointing
        if args.moe_aux_loss_coef and reentrant:
            rule = "must be false with moe_aux_loss_coef: the reentrant form gives routers no gradient of that loss"
            yield f"{name}.model_args.gradient_checkpointing_use_reentrant", True, rule, False
        path = f"{name}.strategy_args.strategy_config"
        classes = frozenset[str]() if model.get("auto_map") else layer_classes(str(model.get("model_type", "")))
        if self.wrap_policy.moe_experts and EXPERTS not in needed(model):
            rule = f"names the experts of a mixture of experts, which model_type {model.get('model_type', '?')} is not"
            yield f"{path}.wrap_policy.moe_experts", self.wrap_policy.moe_experts, rule, "~"
            return
        for key in ("transformer_layer_cls_to_wrap", "moe_experts"):
            for written in getattr(self.wrap_policy, key) or () if classes else ():
                if written not in classes:
                    layers = sorted(one for one in classes if one.endswith(("Layer", "Block")))
                    rule = f"is no class of model_type {model['model_type']}; its layers are {', '.join(layers)}"
                    yield f"{path}.wrap_policy.{key}", written, rule, f"[{layers[0]}]" if layers else None


def frees_gathered(size: int, memory: int) -> bool:
    """``reshard_after_forward: auto``, for a model of ``size`` bytes in the compute type on devices of ``memory``."""
    return 10 * size > memory


@dataclass(frozen=True)
class Fsdp2StrategyConfig(ShardedStrategyConfig):
    """``fsdp2_train`` and ``fsdp2_infer``: PyTorch's ``fully_shard``."""

    reshard_after_forward: bool | int | Literal["auto"] = "auto"
    """Free gathered parameters after the forward pass; false: keep them until the step's last backward pass (one gather
    and cast a step in place of two a micro-batch); ``auto``: keep them where they take at most a tenth of a device; a
    number: reshard to groups of that many ranks."""
    apply_tiled_mlp: bool = False
    """Compute MLP layers a tile of tokens at a time, and again in the backward pass: less memory (Qwen2, Qwen3,
    Llama)."""
    tiled_num_shards: int = setting(4, ge=1, read_if={"apply_tiled_mlp": (True,)})
    """Tiles with ``apply_tiled_mlp``: so many times less memory for what is as wide as ``intermediate_size``."""
    ep_size: int = setting(1, ge=1)
    """Ranks over which the experts of a layer are divided; it divides the role's ranks and the model's experts."""

    def parallel_dims(self, role: WorkerConfig, world_size: int) -> ParallelDims:
        return replace(super().parallel_dims(role, world_size), ep=self.ep_size)

    def check(self, name: str, role: WorkerConfig, world_size: int, trains: bool, problems: Problems) -> None:
        super().check(name, role, world_size, trains, problems)
        path, size = f"{name}.strategy_args.strategy_config", self.ep_size
        if size == 1:
            return
        if 1 < self.fsdp_size < world_size:
            rule = "must be 1 with ep_size (everything is sharded over all ranks)"
            problems.add(f"{path}.fsdp_size", self.fsdp_size, rule, 1)
        if isinstance(self.reshard_after_forward, int) and not isinstance(self.reshard_after_forward, bool):
            rule = "must be true or false with ep_size: experts and other layers are sharded over different ranks"
            problems.add(f"{path}.reshard_after_forward", self.reshard_after_forward, rule, True)

    def shape_problems(self, name: str, role: WorkerConfig, model: Mapping[str, Any]) -> Iterator[ShapeProblem]:
        yield from super().shape_problems(name, role, model)
        if self.ep_size == 1:
            return
        path, experts = f"{name}.strategy_args.strategy_config.ep_size", num_experts(model)
        if not experts:
            rule = (
                f"divides the experts of a mixture of experts, which model_type {model.get('model_type', '?')} is not"
            )
            yield path, self.ep_size, rule, 1
        elif experts % self.ep_size:
            rule = f"must divide the model's {experts} experts"
            yield path, self.ep_size, rule, largest_divisor(self.ep_size, experts)


@dataclass(frozen=True)
class Fsdp1StrategyConfig(ShardedStrategyConfig):
    """``fsdp_train`` and ``fsdp_infer``: PyTorch's first FSDP, ``FullyShardedDataParallel``."""

    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass (less memory, one more gather) or keep them until the backward
    pass: ``FULL_SHARD`` and ``SHARD_GRAD_OP``, with replicas ``HYBRID_SHARD`` and its variant."""

    def check(self, name: str, role: WorkerConfig, world_size: int, trains: bool, problems: Problems) -> None:
        super().check(name, role, world_size, trains, problems)
        path = f"{name}.strategy_args.strategy_config"
        if not trains:
            return
        if self.offload_policy:
            key = "cpu_offload" if "cpu_offload" in role.strategy_args.strategy_config else "offload_policy"
            rule = (
                "cannot be true for a role that trains: FSDP1 does not support gradient accumulation outside no_sync "
                "together with CPU offload (PyTorch's documentation of FullyShardedDataParallel, limitations); "
                "fsdp2_train does, and so does fsdp_infer, which only computes"
            )
            problems.add(f"{path}.{key}", True, rule, False)
        if not self.reduce_scatter_during_grad_accumulation and self.compute_type(role) != "fp32":
            key = f"{path}.reduce_scatter_during_grad_accumulation"
            problems.note(key, f"FSDP1 then sums the gradients of micro-batches in {self.compute_type(role)}")


FSDP2 = Backend(
    "fsdp2",
    Fsdp2StrategyConfig,
    computes="roll.strategies.fsdp.fsdp2.Fsdp2Strategy",
    trains=True,
    accumulates=True,
    checkpoints="pieces",
    ulysses=True,
)
FSDP1 = Backend(
    "fsdp",
    Fsdp1StrategyConfig,
    computes="roll.strategies.fsdp.fsdp1.FsdpStrategy",
    trains=True,
    accumulates=True,
    checkpoints="pieces",
    ulysses=True,
)
