"""A role by its strategy: FSDP and ``hf_infer`` by running the model, DeepSpeed and Megatron in part by arithmetic.

The latter two compute the same layers as the other strategies (:mod:`roll.strategies.training.data_parallel` and
:mod:`roll.models`, Megatron with layers of its own of the same shapes), so activations, FLOPs and micro-batches come
from running the model unsharded on fake tensors; of Megatron, the slice of it that one rank holds.  What ZeRO's
optimizers and Megatron's keep cannot be run without their kernels; docs/rehearsal.md compares these sums with measured
runs.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.config.lora import uses_lora
from roll.config.losses import RANKS, is_unpaired
from roll.config.pipelines import SCORES
from roll.config.plan.plan import RolePlan
from roll.config.roles import INVARIANT_ATTENTION, WorkerConfig
from roll.config.run import PolicyRunConfig
from roll.config.strategies.base import ParallelDims
from roll.config.strategies.deepspeed import DeepSpeedStrategyConfig, numbers, plan_zero
from roll.config.strategies.engines import HfInferStrategyConfig
from roll.config.strategies.fsdp import Fsdp1StrategyConfig, Fsdp2StrategyConfig, frees_gathered
from roll.config.strategies.megatron import MegatronStrategyConfig
from roll.config.strategies.registry import typed_strategy_config
from roll.models.build import DTYPES
from roll.rehearsal.catalog import Hardware
from roll.rehearsal.formulas import BYTES, ModelShape, megatron_share, megatron_states, model_shape
from roll.rehearsal.simulate import RoleRun, Task, Work, rehearse
from roll.rehearsal.tracker import Collective, Kind, Operation
from roll.strategies.base import ModelHead, Output, StateKind

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig

BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's `reduce_bucket_size` where nothing is written
PREFETCH_ELEMENTS = 50_000_000  # its `stage3_prefetch_bucket_size`


def role_task(
    loaded: LoadedConfig[Any], name: str, hardware: Hardware, lengths: tuple[int, int] | None, shape: ModelShape | None
) -> Task:
    """The work of a role in a step, of samples of these ``lengths`` (prompt, response), else of full length."""
    plan, config, role = loaded.plan, loaded.config, loaded.plan.roles[name]
    is_rm, training = plan.pipeline == "rm", plan.training.get(name)
    learner = training or next(iter(plan.training.values()))
    # Rows of what a batch size counts: a pair has two.
    compares = config.loss_type in RANKS if is_rm else plan.pipeline == "dpo" and not is_unpaired(config)
    units = 2 if compares else 1
    response = min(getattr(plan, "max_new_tokens", role.sequence_length - 1), role.sequence_length - 1)
    prompt, response = lengths or (role.sequence_length - response, response)
    looks = name == "critic" or (training is None and name != "actor_train")
    if name == "actor_train" and training is not None:
        # The policy computes log-probs before it learns: its own old ones, or under LoRA those of the reference.
        reference = getattr(plan, "needs_reference", False) and "reference" not in plan.roles
        looks = bool(getattr(plan, "needs_old_log_probs", False) or reference)
    scores = is_rm or loaded.pipeline.task_of(role.key, role.section) is SCORES
    compared, given = loaded.pipeline.distributions(config, name)
    outputs: tuple[Output, ...] = ()
    if name == "actor_train" and isinstance(config, PolicyRunConfig):
        outputs = (Output.ENTROPY,) if config.log_entropy or config.entropy_loss_coef else ()
    # An operation is counted whatever kernel computes it.
    args = replace(role.section.model_args, use_liger_kernel=False, compile=False)
    if args.attn_implementation == INVARIANT_ATTENTION:  # of CPUs; accelerators run their own kernels
        args = replace(args, attn_implementation=None)
    here = hardware.clock is not None
    memory = hardware.gpu.memory // (role.world_size if here else 1)  # ranks share the memory of a host
    return Task(
        role=with_reshard_settled(replace(role.section, model_args=args), shape, memory),
        world_size=role.world_size,
        dp_size=role.dp_size,
        prompt=prompt,
        response=response,
        group_size=getattr(plan, "group_size", units),
        rows_per_update=0 if training is None else training.mini_batch_size // training.dp_size * units,
        updates=0 if training is None else training.optimizer_steps_per_step,
        forward_rows=-(-learner.samples_per_step // role.dp_size) * units if looks else 0,
        sends=name == "actor_train" and "actor_infer" in plan.roles,
        bucket_bytes=config.model_update_buffer_size_mb * 2**20,
        head=ModelHead.VALUE if name == "critic" else ModelHead.SCORE if scores else ModelHead.CAUSAL_LM,
        units=units,
        more_outputs=outputs,
        compared_tokens=compared,
        top_tokens=given,
        cache=hardware.gpu.cache,
        on_cpu=here,
        on_host=here,
    )


def with_reshard_settled(section: WorkerConfig, shape: ModelShape | None, memory: int) -> WorkerConfig:
    """Replace ``reshard_after_forward: auto`` by what it means on devices of so much memory."""
    arguments = section.strategy_args
    options = typed_strategy_config(arguments)
    if shape is None or not isinstance(options, Fsdp2StrategyConfig) or options.reshard_after_forward != "auto":
        return section
    compute = str(arguments.strategy_config.get("param_dtype") or section.model_args.dtype)
    frees = frees_gathered(shape.total * DTYPES[compute].itemsize, memory)
    config = {**arguments.strategy_config, "reshard_after_forward": frees}
    return replace(section, strategy_args=replace(arguments, strategy_config=config))


def rehearse_role(role: RolePlan, task: Task, config: Mapping[str, Any]) -> RoleRun:
    """One role by its strategy, with the ``config.json`` of its model: executed, or with what its backend keeps by
    arithmetic."""
    shape, options = model_shape(config), typed_strategy_config(role.section.strategy_args)
    if isinstance(options, MegatronStrategyConfig):
        assert shape is not None, "Megatron's models are of the usual build"
        config = _slice_of(config, shape, options.parallel_dims(role.section, task.world_size))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        args = replace(role.section.model_args, model_name_or_path=folder, adapter_name_or_path=None)
        if role.section.model_args.adapter_name_or_path and not uses_lora(args):
            args = replace(args, lora_target="all-linear")
        task, method = replace(task, role=replace(task.role, model_args=args)), "executed"
        if isinstance(options, DeepSpeedStrategyConfig):
            return deepspeed_run(role, options, shape, task)
        if isinstance(options, MegatronStrategyConfig):
            assert shape is not None
            return megatron_run(role, options, shape, task)
        if isinstance(options, HfInferStrategyConfig):
            return rehearse(task, execute_sharded=False)
        if isinstance(options, Fsdp1StrategyConfig):
            # FSDP1 shards the same units over the same ranks: run as FSDP2, with the options that both have.
            own, arguments = {item.name for item in fields(Fsdp2StrategyConfig)}, task.role.strategy_args
            common = {key: value for key, value in arguments.strategy_config.items() if key in own}
            name = "fsdp2_train" if task.updates else "fsdp2_infer"
            arguments = replace(arguments, strategy_name=name, strategy_config=common)
            task, method = replace(task, role=replace(task.role, strategy_args=arguments)), "as fsdp2"
        return replace(rehearse(task), method=method)


def deepspeed_run(role: RolePlan, options: DeepSpeedStrategyConfig, shape: ModelShape | None, task: Task) -> RoleRun:
    """ZeRO's states over the activations of the unsharded model (of stage 3: and of what is gathered for a layer).

    =====  ==========  =====================  ==============================  ===================================
    stage  parameters  gradients              optimizer                       collectives of an optimizer step
    =====  ==========  =====================  ==============================  ===================================
    0      all         all                    all                             all-reduce
    1      all         all                    master weights, moments / n     reduce-scatter, all-gather
    2      all         1/n, and two buckets   the same                        reduce-scatter a micro-batch, all-gather
    3      1/n         1/n, and two buckets   the same                        all-gather twice and reduce-scatter a
                                                                              micro-batch
    =====  ==========  =====================  ==============================  ===================================
    """
    run, learns = rehearse(task, execute_sharded=False), task.updates > 0
    environ = {**os.environ, **role.section.system_envs}
    plan = plan_zero(options, environ, trains=learns, has_accelerator=not task.on_cpu)
    ranks, compute = task.world_size, BYTES[role.section.model_args.dtype]
    whole = run.states[StateKind.MODEL_PARAMS]
    weights = whole / compute
    with_adapters = uses_lora(role.section.model_args) and "train" in run.works
    trained = run.works["train"].peak[Kind.GRADIENTS] / compute if with_adapters else weights
    stage, masters, shard = plan.stage, 4 if compute < 4 else 0, ranks if plan.stage else 1
    parameters = whole / ranks if stage == 3 else whole
    # Without master weights the optimizer updates the parameters: under ZeRO 1 and 2 a float32 copy of its share.
    copies = 4 / ranks if compute == 4 and stage in (1, 2) else 0.0
    optimizer = learns * (trained * (8 + masters) / shard + trained * copies)
    accumulated = (4 if stage and options.fp32_grad_accumulation is not False else compute) * trained
    section = numbers(options.zero_optimization)
    bucket = min(trained, float(section.get("reduce_bucket_size", BUCKET_ELEMENTS))) * compute
    overlap = 2 if section.get("overlap_comm", stage == 3) else 1
    gathered = 0.0
    if stage == 3 and shape is not None:
        prefetch = min(weights, float(section.get("stage3_prefetch_bucket_size", PREFETCH_ELEMENTS)))
        gathered = shape.layer + shape.embeddings / (1 if shape.embeddings == shape.vocabulary * shape.hidden else 2)
        gathered = min(weights, gathered + prefetch) * compute
    run.states = {
        StateKind.MODEL_PARAMS: 0 if plan.offload_param != "none" else int(parameters),
        StateKind.OPTIMIZER_STATES: 0 if plan.offload_optimizer != "none" else int(optimizer),
    }
    run.host = int((plan.offload_param != "none") * parameters + (plan.offload_optimizer != "none") * optimizer)
    run.method = f"activations executed, states of ZeRO-{stage} by arithmetic"
    group = tuple(range(ranks))
    for name, work in run.works.items():
        if stage == 3:
            work.peak[Kind.GATHERED] = int(gathered)
            passes = {"train": 2, "forward": 1}.get(name, 0) * work.micro_batches
            work.collectives[Collective("all_gather", group, int(whole))] += passes
        if name == "train":
            if stage or compute < 4:
                # ZeRO-0 in float32 is torch's optimizer on the model's own gradients, as executed.
                work.peak[Kind.GRADIENTS] = int(accumulated / (ranks if stage >= 2 else 1))
            work.peak[Kind.COMMUNICATION] = int(bucket * overlap) if stage else 0
            if task.on_cpu and stage in (1, 2):
                # A CPU's memory is taken when it is written to: the bucket's, and where no earlier micro-batch has left
                # gradients theirs, while the backward pass frees activations. A GPU's allocator holds both throughout.
                room = work.peak[Kind.ACTIVATIONS]
                for kind in (Kind.COMMUNICATION, Kind.GRADIENTS)[: 1 if work.micro_batches > task.updates else 2]:
                    taken = min(room, work.peak[kind])
                    work.peak[kind] -= taken
                    room -= taken
            if plan.offload_optimizer != "none":
                work.peak[Kind.GRADIENTS] = 0
            gradient = Collective("reduce_scatter" if stage else "all_reduce", group, int(trained * compute))
            work.collectives[gradient] += work.micro_batches if stage >= 2 else task.updates
            if stage in (1, 2):
                work.collectives[Collective("all_gather", group, int(trained * compute))] += task.updates
        elif name == "send" and stage == 3:
            work.peak[Kind.COMMUNICATION] = 2 * min(task.bucket_bytes, int(whole))
            work.collectives[Collective("gather", group, int(whole))] += 1
    return run


def megatron_run(role: RolePlan, options: MegatronStrategyConfig, shape: ModelShape, task: Task) -> RoleRun:
    """The first pipeline stage of the first rank, as the slice of the model that it holds, whose folder the task names.

    Heads, key-value heads, the MLP and the vocabulary are divided by the tensor-parallel size, layers by the stages;
    hidden states are whole, and with ``sequence_parallel`` divided too.  A pipeline holds as many micro-batches' inputs
    as it has stages.
    """
    dims = options.parallel_dims(role.section, task.world_size)
    run = rehearse(replace(task, world_size=1, sends=False), execute_sharded=False)
    compute = BYTES[role.section.model_args.dtype]
    in_place = replace(options, optimizer_cpu_offload=False)
    states, whole = (megatron_states(role, one, shape, learns=task.updates > 0) for one in (options, in_place))
    run.host = int(whole.optimizer - states.optimizer)
    run.states = {
        StateKind.MODEL_PARAMS: int(states.parameters),
        StateKind.OPTIMIZER_STATES: int(states.optimizer),
        # Megatron's buffer of gradients outlives a step.
        StateKind.OTHER_PARAMS: int(states.gradients),
    }
    run.method = "activations of a rank's slice executed, states by arithmetic"
    for name, work in run.works.items():
        work.peak[Kind.GRADIENTS] = 0
        # Context-parallel ranks each compute a part of every sequence.
        operations = Counter[Operation]()
        work.peak[Kind.ACTIVATIONS] //= dims.cp
        for operation, count in work.operations.items():
            part = replace(operation, flops=operation.flops // dims.cp, num_bytes=operation.num_bytes // dims.cp)
            operations[part] += count
        work.operations = operations
        if name == "train":
            _add_megatron_traffic(work, options, dims, shape, task, compute)
            recomputes = not task.role.model_args.disable_gradient_checkpointing
            layers, tokens = -(-shape.layers // dims.pp), work.tokens // dims.cp
            # Numbers of a token that a layer of Megatron keeps for its backward pass and the slice's layer does not.
            # Queries, keys and values are one product: a view of the values keeps it, when the rotated queries and keys
            # have been made of it. So are both halves of the gated MLP: the second, to which an offset is added, is
            # there twice unless the activation is one kernel. And what attention gives is copied into the order
            # (length, batch).
            mlp = 0 if options.bias_activation_fusion and not task.on_cpu else shape.intermediate
            fused = mlp + (2 * shape.heads + shape.kv_heads) * shape.head_dim
            own = fused // dims.tp * tokens * compute
            work.peak[Kind.ACTIVATIONS] += own * (1 if recomputes else layers)
            hidden = tokens * shape.hidden * compute // (dims.tp if dims.sequence_parallel else 1)
            in_flight = min(dims.pp, work.micro_batches // max(1, task.updates))
            kept = layers * hidden if recomputes else work.peak[Kind.ACTIVATIONS]
            work.peak[Kind.ACTIVATIONS] += int(kept) * (in_flight - 1)
    if task.sends:
        bucket = min(task.bucket_bytes, int(shape.total * compute))
        run.works["send"] = Work(peak={Kind.COMMUNICATION: 2 * bucket})
        flow = Collective("gather", tuple(range(dims.tp * dims.pp)), int(shape.total * compute))
        run.works["send"].collectives[flow] += 1
    return run


def _slice_of(config: Mapping[str, Any], shape: ModelShape, dims: ParallelDims) -> dict[str, Any]:
    """The ``config.json`` of what one rank of the first stage computes with."""
    heads, kv_heads = max(1, shape.heads // dims.tp), max(1, shape.kv_heads // dims.tp)
    sliced = {
        **config,
        "num_hidden_layers": -(-shape.layers // dims.pp),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if heads % kv_heads == 0 else heads,
        "head_dim": shape.head_dim,
        "vocab_size": -(-shape.vocabulary // dims.tp),
        "intermediate_size": max(1, int(config.get("intermediate_size", shape.intermediate)) // dims.tp),
    }
    sliced.pop("layer_types", None)
    if shape.experts:
        # Tokens are dealt out evenly: as many as a rank has come to its experts.
        sliced["num_experts"] = max(shape.top_k, shape.experts // (dims.ep * dims.etp))
    return sliced


def _add_megatron_traffic(
    work: Work, options: MegatronStrategyConfig, dims: ParallelDims, shape: ModelShape, task: Task, compute: int
) -> None:
    hidden = work.tokens // dims.cp * shape.hidden * compute
    if dims.tp > 1:
        # Two in the forward pass of a layer, two in its backward pass, two where it is computed again.
        recomputes = not task.role.model_args.disable_gradient_checkpointing
        flow = Collective("all_reduce", tuple(range(dims.tp)), hidden)
        work.collectives[flow] += (6 if recomputes else 4) * -(-shape.layers // dims.pp) * work.micro_batches
    if dims.pp > 1:
        peers = (0, dims.stage)
        work.collectives[Collective("receive", peers, hidden)] += 2 * work.micro_batches
    if dims.dp_replicate > 1:
        weights, group = megatron_share(dims, shape), tuple(range(0, dims.stage, dims.tp))
        if options.use_distributed_optimizer:
            work.collectives[Collective("reduce_scatter", group, int(weights * 4))] += task.updates
            work.collectives[Collective("all_gather", group, int(weights * compute))] += task.updates
        else:
            work.collectives[Collective("all_reduce", group, int(weights * 4))] += task.updates
