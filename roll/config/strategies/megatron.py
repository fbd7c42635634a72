"""Options of ``megatron_train`` and ``megatron_infer``. Torch-free, and without Megatron."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from roll.config.installation import install_command
from roll.config.reading.errors import Problems
from roll.config.reading.fields import parse_names, setting
from roll.config.roles import WorkerConfig
from roll.config.strategies.base import (
    Backend,
    HostStatesConfig,
    Package,
    ParallelDims,
    ShapeProblem,
    largest_divisor,
    model_size,
)

_KEYS = {
    degree: f"strategy_args.strategy_config.{key}"
    for degree, key in {
        "tp": "tensor_model_parallel_size",
        "cp": "context_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
    }.items()
}


# Fields of `TransformerConfig` that count the embeddings and the output matrix as a layer each.
_ENDS_OF_PIPELINE = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
OF_WHOLE_LAYERS = ("recompute_method", "recompute_num_layers")  # those that go with `recompute_granularity: full`
OF_THE_LAYERS = (*_ENDS_OF_PIPELINE, "recompute_num_layers")  # those that fit the number of layers of one model


@dataclass(frozen=True)
class MegatronStrategyConfig(HostStatesConfig):
    """``megatron_train`` and ``megatron_infer``: Megatron Core, for tensor- and pipeline-parallel models."""

    passes_through: ClassVar[tuple[str, Collection[str]]] = (
        "additional_configs",
        (*OF_WHOLE_LAYERS, *_ENDS_OF_PIPELINE),
    )
    optimizers: ClassVar[Collection[str]] = ("adamw", "adamw_8bit", "muon")

    tensor_model_parallel_size: int = setting(1, ge=1)
    """Ranks over which every matrix is sharded."""
    pipeline_model_parallel_size: int = setting(1, ge=1)
    """Stages into which the layers are divided."""
    virtual_pipeline_model_parallel_size: int | None = setting(None, ge=1)
    """Chunks of layers on each pipeline rank, taken in turn (shorter pipeline bubbles); null: one."""
    context_parallel_size: int = setting(1, ge=1)
    """Ranks over which the sequence is sharded, in attention and everywhere else."""
    sequence_parallel: bool = False
    """Spread norms and residuals over the tensor-parallel ranks too, along the sequence (less memory)."""
    use_distributed_optimizer: bool = False
    """Shard float32 weights and moments over data-parallel ranks (ZeRO stage 1)."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel ranks while the backward pass still runs."""
    ddp_bucket_size: int | None = setting(None, ge=1, read_if={"overlap_grad_reduce": (True,)})
    """Elements of gradient summed at once with ``overlap_grad_reduce``; null: Megatron's choice."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Compute activations again in the backward pass: whole layers or ``recompute_modules``. null: whole layers,
    unless ``model_args.disable_gradient_checkpointing``."""
    recompute_modules: list[str] | None = setting(
        None, parse=parse_names, read_if={"recompute_granularity": ("selective",)}
    )
    """With ``selective``: Megatron's names (``core_attn``, ``mlp``, ``layernorm``, ``moe``), a list or with commas;
    null: ``core_attn``."""
    pipeline_model_parallel_layout: str | None = None
    """Megatron's own description of which layers are on which stage, such as ``Et*3|t*3L``."""
    bias_activation_fusion: bool = False
    """Fused activation kernel, on CUDA."""
    additional_configs: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's ``TransformerConfig``, passed through. ``recompute_method``,
    ``recompute_num_layers``, ``account_for_embedding_in_pipeline_split`` and ``account_for_loss_in_pipeline_split`` may
    also be keys of ``strategy_config``."""
    expert_model_parallel_size: int = setting(1, ge=1)
    """Ranks over which the experts of a mixture-of-experts layer are dealt out; they are ranks of other dimensions."""
    expert_tensor_parallel_size: int | None = setting(None, ge=1)
    """Ranks over which every matrix of an expert is sharded; null: ``tensor_model_parallel_size``."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """Way of tokens to the ranks of their experts: each to those ranks only, or all to all ranks."""
    moe_aux_loss_coeff: float | None = setting(None, ge=0)
    """Coefficient of Megatron's own load-balancing loss, a sum over layers, averaged over micro-batches and replicas;
    null: 0."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = setting(
        "aux_loss", read_if={"moe_aux_loss_coeff": ()}
    )
    """That loss over all tokens of a micro-batch, or for each sequence."""

    def _expert_problems(self, path: str, model: Mapping[str, Any]) -> Iterator[ShapeProblem]:
        experts = model_size(model, "num_experts") or model_size(model, "num_local_experts") or 0
        size = self.expert_model_parallel_size
        if experts <= 1:
            if size > 1:
                yield f"{path}.expert_model_parallel_size", size, "is for mixture-of-experts models", 1
            return
        if experts % size:
            rule = f"must divide the model's {experts} experts"
            yield f"{path}.expert_model_parallel_size", size, rule, largest_divisor(size, experts)
        if self.tensor_model_parallel_size > 1 and not self.sequence_parallel:
            rule = "must be true for a mixture-of-experts model with tensor_model_parallel_size above 1"
            yield f"{path}.sequence_parallel", False, rule, True
        if self.moe_token_dispatcher_type == "allgather" and self.pipeline_model_parallel_size > 1:
            rule = "takes micro-batches of one shape only, which pipeline stages do not have; use alltoall"
            yield f"{path}.moe_token_dispatcher_type", "allgather", rule, "alltoall"

    def parallel_dims(self, role: WorkerConfig, world_size: int) -> ParallelDims:
        tensor = self.tensor_model_parallel_size
        return ParallelDims(
            world_size,
            cp=self.context_parallel_size,
            tp=tensor,
            pp=self.pipeline_model_parallel_size,
            vpp=self.virtual_pipeline_model_parallel_size or 1,
            ep=self.expert_model_parallel_size,
            etp=self.expert_tensor_parallel_size or tensor,
            # With one tensor-parallel rank there is nothing to spread the sequence over.
            sequence_parallel=self.sequence_parallel and tensor > 1,
            keys=_KEYS,
        )

    def check(self, name: str, role: WorkerConfig, world_size: int, trains: bool, problems: Problems) -> None:
        super().check(name, role, world_size, trains, problems)
        if self.moe_token_dispatcher_type == "flex":
            key = f"{name}.strategy_args.strategy_config.moe_token_dispatcher_type"
            problems.add(key, "flex", "needs DeepEP, which is not supported", "alltoall")

    def shape_problems(self, name: str, role: WorkerConfig, model: Mapping[str, Any]) -> Iterator[ShapeProblem]:
        path = f"{name}.strategy_args.strategy_config"
        tensor, context = self.tensor_model_parallel_size, self.context_parallel_size
        yield from self._expert_problems(path, model)
        heads, layers = model_size(model, "num_attention_heads"), model_size(model, "num_hidden_layers")
        groups = model_size(model, "num_key_value_heads") or heads
        for count, what in ((groups, "key-value heads"), (model_size(model, "intermediate_size"), "intermediate_size")):
            if count and count % tensor:
                yield (
                    f"{path}.tensor_model_parallel_size",
                    tensor,
                    f"must divide the model's {count} {what}",
                    largest_divisor(tensor, count),
                )
                return
        if heads and heads % (tensor * context):
            rule = f"x tensor_model_parallel_size {tensor} must divide the model's {heads} attention heads"
            yield f"{path}.context_parallel_size", context, rule, largest_divisor(context, heads // tensor or 1)
        if not layers or self.pipeline_model_parallel_layout is not None:
            return
        virtual = self.virtual_pipeline_model_parallel_size or 1
        stages = self.pipeline_model_parallel_size * virtual
        shares = layers + sum(bool(self.additional_configs.get(name)) for name in _ENDS_OF_PIPELINE)
        if shares % stages:
            times = f" x virtual_pipeline_model_parallel_size {virtual}" if virtual > 1 else ""
            counted = f"{layers} layers" if shares == layers else f"{layers} layers and {shares - layers} for its ends"
            rule = f"{times.lstrip()}{' ' if times else ''}must divide the model's {counted}"
            pipeline = self.pipeline_model_parallel_size
            example = largest_divisor(pipeline, 1 if shares % virtual else shares // virtual)
            yield f"{path}.pipeline_model_parallel_size", pipeline, rule, example


MEGATRON = Backend(
    "megatron",
    MegatronStrategyConfig,
    computes="roll.strategies.megatron.MegatronStrategy",
    trains=True,
    checkpoints="pieces",
    only_plain_adapters=True,
    package=Package("megatron.core", install_command("megatron")),
)
