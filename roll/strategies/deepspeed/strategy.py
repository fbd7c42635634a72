"""``deepspeed_train`` and ``deepspeed_infer``: a DeepSpeed engine, its parameters sharded under ZeRO-3."""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from roll.checkpoint.tensors import MOMENTS, WEIGHT, Piece, resumed, save_training
from roll.config.installation import install_command
from roll.config.strategies.deepspeed import DeepSpeedStrategyConfig, numbers, plan_zero, switch
from roll.models.build import DTYPES, enable_gradient_checkpointing
from roll.models.loading import MetaModel, ModuleReader
from roll.models.log_probs import run_head_when_called
from roll.platforms import Platform
from roll.strategies.base import StateKind
from roll.strategies.deepspeed.states import MasterStates, Run, full_shape, is_partitioned, set_masters
from roll.strategies.training.adamw import adamw
from roll.strategies.training.data_parallel import DataParallelStrategy
from roll.strategies.training.gather import Pieces
from roll.strategies.training.muon import MuonAndAdamW, hidden_matrices, muon_groups
from roll.strategies.training.optimizer import INITIAL_SCALE, TrainingProgress, decay_groups

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class DeepSpeedStrategy(DataParallelStrategy):
    """Parameters in the compute dtype; where it trains, float32 master weights and AdamW moments.

    ZeRO-3 shards parameters, also of forward-only roles; any other stage leaves the whole model on each rank.
    """

    config: DeepSpeedStrategyConfig

    def _configure(self) -> None:
        # Float32 weights are read apart, into DeepSpeed's masters.
        self.compute_dtype = self._meta_dtype = DTYPES[self.role.model_args.dtype]
        self.environ = {**os.environ, **self.role.system_envs}
        self._clips_at, self._sums_in_fp32 = 0.0, False
        self.steps_each_micro_batch = self.trains and switch(self.config, "step_each_micro_batch", self.environ)

    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. Build the model, and under ZeRO-3 partition it; see :meth:`ModelStrategy.initialize`. Raises
        ImportError: DeepSpeed is not installed."""
        self._refuse_steps(num_training_steps)
        on_device = self.platform.device_type != "cpu"
        self.plan = plan_zero(self.config, self.environ, trains=num_training_steps > 0, has_accelerator=on_device)
        self.divides_state = self.plan.stage > 0
        if not num_training_steps:
            self._load_model(self.compute_dtype)
            self._read_model()
            self.model.requires_grad_(False)
            self.model.eval()
            if self.plan.stage == 3:
                self.engine = self._start_engine(None)
            else:
                self.model.to(self.device)
            return
        self._clips_at = float(self.max_grad_norm or 0.0)
        self._sums_in_fp32 = switch(self.config, "fp32_grad_accumulation", self.environ)
        self._load_model(torch.float32)
        meta = self._read_model()
        enable_gradient_checkpointing(self.model.language_model, self.role.model_args)
        self.progress = TrainingProgress(self.role.training_args, num_training_steps, self.compute_dtype)
        rounds = self.compute_dtype is not torch.float32
        # DeepSpeed makes its float32 masters from weights that it has rounded first: the exact ones are kept for them.
        loaded: dict[str, torch.Tensor] = {}
        if rounds and meta is None:
            named = self.model.language_model.named_parameters()
            loaded = {name: p.data for name, p in named if p.requires_grad}
        args = self.role.training_args

        def num_dims(parameter: torch.Tensor) -> int:
            # What ZeRO-3 has partitioned is flat: the whole shape says whether it is a matrix.
            return len(full_shape(parameter))

        groups = decay_groups(self.model, args.weight_decay, num_dims)
        if args.optimizer.name == "muon":
            matrices = hidden_matrices(self.model.language_model, self.sparse_layers, num_dims)
            muon = MuonAndAdamW(adamw(muon_groups(groups, matrices), args), args.optimizer.scaling, self.device)
            self.engine = self._start_engine(muon)
            muon.matrices = MasterStates(self.engine).matrices(matrices)
        else:
            self.engine = self._start_engine(adamw(groups, args))
        self.optimizer = self.engine.basic_optimizer
        if rounds and meta is not None:
            set_masters(self.engine, meta.elements)
        elif rounds:
            set_masters(self.engine, lambda name, shape, begin, end: loaded[name].flatten()[begin:end])
        loaded.clear()
        self._watch_balance()
        self.model.train()

    def _read_model(self) -> MetaModel | None:
        """Collective. Read the weights of a model without any; what they were read from. None: it was loaded whole."""
        meta, self._meta = self._meta, None
        if meta is None:
            return None
        if self.plan.stage < 3:
            meta.read(self.model, self.device)
            return meta
        deepspeed = join_process_group(self.platform)
        reader = ModuleReader(meta, self.device)
        partitioned: Any = None
        for module in meta.language_model.modules():
            reader(module)
            whole = [one for one in module.parameters(recurse=False) if not is_partitioned(one)]
            if partitioned is not None:
                # Every partitioned parameter has this method, with the options of the `Init` that made it.
                partitioned.convert_to_zero_parameters(param_list=whole)
            elif whole:
                holder = torch.nn.ParameterList(whole)
                offload = self.plan.offload_param
                deepspeed.zero.Init(
                    module=holder,
                    config_dict_or_path=self._options(),
                    dtype=self.compute_dtype,
                    remote_device=None if offload == "none" else offload,
                    pin_memory=self.platform.pin_memory and offload != "none",
                )
                partitioned = whole[0]
        return meta

    def _options(self) -> dict[str, Any]:
        config, dtype = self.config, self.compute_dtype
        options: dict[str, Any] = numbers(config.deepspeed_config)
        plan, pin_memory = self.plan, self.platform.pin_memory
        section: dict[str, Any] = {}
        for name, device in (("offload_optimizer", plan.offload_optimizer), ("offload_param", plan.offload_param)):
            if device != "none":
                section[name] = {"device": device, "pin_memory": pin_memory}
                if device == "nvme":
                    section[name]["nvme_path"] = self.config.nvme_path
        section |= numbers(self.config.zero_optimization)
        for name in ("offload_optimizer", "offload_param"):
            if not pin_memory and isinstance(section.get(name), dict):
                section[name] = {**section[name], "pin_memory": False}
        options |= {
            # Nominal: the strategy says which micro-batch is the last of a step, since their number may change.
            "train_micro_batch_size_per_gpu": self.role.training_args.per_device_train_batch_size,
            # DeepSpeed leaves accumulation out for 1.
            "gradient_accumulation_steps": 2,
            "gradient_clipping": self._clips_at,
            # DeepSpeed takes the step modulo this number, so "never" cannot be 0.
            "steps_per_print": options.get("steps_per_print") or sys.maxsize,
            "zero_optimization": (section | {"stage": plan.stage}),
            # AdamW's fused CPU kernel comes with torch: nothing to compile for offload.
            "zero_force_ds_cpu_optimizer": False,
            # DeepSpeed's list of tested ones has its own Muon only, which makes gradients orthogonal before it clips.
            "zero_allow_untested_optimizer": True,
        }
        if dtype is torch.bfloat16:
            options["bf16"] = {"check_grad_overflow": True, **numbers(config.bf16), "enabled": True}
        if dtype is torch.float16:
            # Any value but 0 makes the scale static for DeepSpeed: the strategy moves it, as under every other backend.
            options["fp16"] = {"enabled": True, "loss_scale": INITIAL_SCALE}
        accumulates = self._sums_in_fp32 and self.plan.stage > 0 and dtype is torch.bfloat16
        data_types = ({"grad_accum_dtype": "fp32"} if accumulates else {}) | (options.get("data_types") or {})
        if data_types:
            options["data_types"] = data_types
        return options

    def _start_engine(self, optimizer: torch.optim.Optimizer | None) -> DeepSpeedEngine:
        deepspeed = join_process_group(self.platform)
        if self.plan.stage == 3:
            # DeepSpeed gathers what a module is about to use when that is called: for each small module of a layer that
            # would be a dozen gathers, so a decoder layer's parameters come together, and the output matrix when used.
            language_model = self.model.language_model
            run_head_when_called(language_model)
            if self.trains and self.adapters is not None and self.adapters.adapt_experts:
                # Where adapters of experts are all there is, nothing in front of the first needs a gradient, and
                # DeepSpeed would free what wraps it before its backward pass.
                language_model.enable_input_require_grads()
            # After frozen modules a layer's input needs no gradient, and DeepSpeed would free it before its backward.
            is_mixed = len({parameter.requires_grad for parameter in language_model.parameters()}) > 1
            names = set(getattr(language_model, "_no_split_modules", None) or ())
            layers = {type(module) for module in language_model.modules() if type(module).__name__ in names}
            if layers and not is_mixed and "leaf_module" not in self.config.zero_optimization:
                deepspeed.utils.set_z3_leaf_modules(language_model, list(layers))
        self.called, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=self._options())
        return self.called

    def _begin_micro_batch(self, last: bool) -> None:
        self._is_last = last
        self.engine.set_gradient_accumulation_boundary(last)
        if self.progress.loss_scale is not None:
            self.engine.optimizer.loss_scale = self.progress.scale

    def _differentiate(self, loss: torch.Tensor) -> None:
        """DeepSpeed averages over ranks, but the loss is this rank's share of a sum: hence the factor."""
        share = loss * self.world_size
        if self.progress.loss_scale is not None and self.plan.stage == 0:
            share = share * self.progress.scale  # the higher stages' optimizers multiply by it themselves
        # Not divided by the accumulation steps, a nominal 2: the loss is already divided by the whole step's tokens.
        self.engine.backward(share, scale_wrt_gas=False)
        if self.steps_each_micro_batch and not self._is_last:
            self.engine.step()

    def _clip_and_step(self, learning_rate: float) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.engine.optimizer is self.optimizer:
            # ZeRO-0 in float32: DeepSpeed sums the gradients, and torch's optimizer does the rest.
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            if math.isfinite(norm):
                self.engine.step()
            else:
                self.engine.zero_grad()
            return norm
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        # ZeRO-0 gives the norm of the scaled gradient.
        return norm / self.progress.scale if self.plan.stage == 0 else norm

    def save(self, path: Path) -> None:
        masters = MasterStates(self.engine)
        updates = masters.updates
        # Under ZeRO-0 all ranks have all of it.
        runs = masters.runs() if self.plan.stage > 0 or self.rank == 0 else []

        def piece(run: Run) -> Piece:
            moments = {kind: masters.get(run, kind) for kind in masters.moments(run)}
            counted = updates if MOMENTS[0] in moments else 0
            return Piece(run.name, {WEIGHT: masters.get(run, None), **moments}, run.start, updates=counted)

        pieces = (piece(run) for run in runs if run.length)
        save_training(path, self.contents, pieces, {**self.progress.state(), "updates": updates}, self._buffers())

    def load(self, path: Path) -> None:
        masters = MasterStates(self.engine)
        if self.plan.stage == 3:
            # A pass leaves small parameters gathered; later passes would use those.
            self.engine.optimizer.empty_partition_cache()
        with resumed(path, self.contents, self._buffers()) as (state, stored):
            runs = masters.runs()
            # DeepSpeed's optimizers step all parameters together.
            updates = max((stored.updates(run.name) for run in runs if stored.has(MOMENTS[0], run.name)), default=0)
            if any(stored.moments(run.name) for run in runs):
                masters.make_moments(updates)
            for run in runs:
                # A parameter that is whole on this rank is its master rounded, also where another keeps the master.
                begin, end = run.start, run.start + run.length
                if not is_partitioned(run.parameter):
                    begin, end = 0, run.parameter.numel()
                masters.set_weight(run, stored.read(WEIGHT, run.name, begin, end))
                for moment in stored.moments(run.name):
                    masters.set_moment(run, moment, stored.read(moment, run.name, run.start, run.start + run.length))
        self.progress.restore(state)

    def _sharded(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Pieces] | None:
        # Rank r holds the r-th part of a flattened parameter in `ds_tensor`, the last part padded.
        if not is_partitioned(tensor):
            return None
        shape, size = full_shape(tensor), tensor.ds_tensor.numel()
        sizes = tuple(max(0, min(size, shape.numel() - rank * size)) for rank in range(self.world_size))
        return tensor.ds_tensor, Pieces(shape, sizes)

    def _shard_group(self) -> ProcessGroup | None:
        return dist.group.WORLD

    def _device_tensors(self, kind: StateKind) -> list[torch.Tensor]:
        held = super()._device_tensors(kind)
        if kind is StateKind.MODEL_PARAMS:
            held += self._on_device([one.ds_tensor for one in self.model.parameters() if is_partitioned(one)])
        elif kind is StateKind.OPTIMIZER_STATES and self.optimizer is not None:
            held += self._on_device([one for group in self.optimizer.param_groups for one in group["params"]])
            # Under ZeRO-3 the groups are filled during a step only.
            held += self._on_device(getattr(self.engine.optimizer, "fp32_partitioned_groups_flat", []))
        return held


def join_process_group(platform: Platform) -> ModuleType:
    """Collective. The ``deepspeed`` module, quiet, for the devices of ``platform``, in torch's default process group,
    which must exist. Raises ImportError: DeepSpeed is not installed; the message names the extra."""
    if platform.device_type == "cpu":
        # Read while the package is imported; without it DeepSpeed guesses from whatever tools the host has.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Its collectives call torch's by names that torch 2.13 has renamed, one warning a call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    try:
        import deepspeed
    except ImportError as error:
        raise ImportError(
            f"the deepspeed strategies need DeepSpeed, an optional package: {install_command('deepspeed')}"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed reads the index of this rank's device here; a worker sees only its own.
    os.environ.setdefault("LOCAL_RANK", "0")
    if platform.device_type == "cpu":
        # A shared-memory reduction for inference kernels, compiled for most of a minute on first use (and not at all on
        # a host without a C++ compiler). Nothing here calls it.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend=platform.collective_backend, auto_mpi_discovery=False, verbose=False)
    return deepspeed
