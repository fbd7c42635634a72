"""``fsdp2_infer``: a model sharded by PyTorch's ``fully_shard`` that computes log-probs, entropies or values."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from roll.config.roles import WorkerConfig
from roll.config.strategy import Fsdp2StrategyConfig, typed_strategy_config
from roll.models.build import build_model, has_tied_embeddings
from roll.models.layouts import TokenLayout, row_layout, shared_prompt_layout
from roll.models.response_model import ResponseModel
from roll.models.shared_prompt import use_shared_prompt_attention
from roll.platforms import current_platform
from roll.strategies.base import ModelHead, ModelStrategy, Output, RankInfo, StateKind, TensorBatch
from roll.strategies.fsdp2.mesh import build_mesh
from roll.strategies.fsdp2.sharding import compute_dtype, shard_model
from roll.strategies.micro_batches import micro_batch, num_micro_batches

logger = logging.getLogger(__name__)


class Fsdp2InferStrategy(ModelStrategy):
    """Forward passes only: parameters are held sharded in the compute dtype and never change."""

    def __init__(self, role: WorkerConfig, head: ModelHead = ModelHead.CAUSAL_LM, seed: int = 42) -> None:
        super().__init__(role, head, seed)
        config = typed_strategy_config(role.strategy_args)
        assert isinstance(config, Fsdp2StrategyConfig), config
        self.config = config
        self.compute_dtype = compute_dtype(role.model_args, config)
        self.platform = current_platform()
        self.platform.set_device()
        self.device = self.platform.device()

    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. Build and shard the model.

        Raises:
            ValueError: optimizer steps asked of a forward-only strategy; see also :func:`build_model`, ``build_mesh``.
        """
        if num_training_steps:
            raise ValueError(
                f"{self.role.name}.strategy_args.strategy_name: {self.role.strategy_args.strategy_name} cannot train; "
                "use fsdp2_train"
            )
        self._build(storage_dtype=self.compute_dtype)
        self.model.requires_grad_(False)
        self.model.eval()

    def _build(self, storage_dtype: torch.dtype) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        seed = self.role.training_args.seed
        torch.manual_seed((self.seed if seed is None else seed) + self.rank)
        self.mesh = build_mesh(self.device.type, self.world_size, self.config.fsdp_size)
        language_model = build_model(self.role.model_args, self.head.value, storage_dtype)
        if self.role.use_prefix_sharing:
            use_shared_prompt_attention(language_model, "use_prefix_sharing")
        self.model = ResponseModel(language_model)
        self.root = shard_model(self.model, self.mesh, self.role.model_args, self.config)

    @property
    def rank_info(self) -> RankInfo:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return RankInfo(rank=rank, world_size=world_size, dp_rank=rank, dp_size=world_size)

    @torch.no_grad()
    def forward(self, batch: TensorBatch, outputs: Collection[Output], temperature: float = 1.0) -> TensorBatch:
        self._check_outputs(outputs)
        was_training = self.model.training
        self.model.eval()
        shape = batch["input_ids"].shape
        device = batch["input_ids"].device
        results = {name: torch.zeros(shape, dtype=torch.float32, device=device) for name in map(str, outputs)}
        rows = self.role.infer_batch_size
        for index in range(self._max_over_ranks(num_micro_batches(batch, rows))):
            part = micro_batch(batch, index, rows)
            layout = self._layout(part)
            computed = self.model(layout.to(self.device), results.keys(), temperature)
            start = index * rows
            if start < shape[0]:
                cut = part["input_ids"].shape
                for name, values in computed.items():
                    results[name][start : start + cut[0], : cut[1]] = layout.scatter(values.to(device), cut)
        self._reshard()
        self.model.train(was_training)
        return results

    def named_full_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Collective. Full tensors in the compute dtype (float32 master weights stay here); tied weights come once."""
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in self._named_tensors():
            num_bytes = tensor.numel() * self._wire_dtype(tensor).itemsize
            if bucket and size + num_bytes > bucket_bytes:
                yield bucket if self.rank == 0 else []
                bucket, size = [], 0
            full = self._gather(tensor)
            bucket.append((name, full if self.rank == 0 else full.new_empty(0)))
            size += num_bytes
        if bucket:
            yield bucket if self.rank == 0 else []

    def offload_states(self, include: Collection[StateKind]) -> None:
        """Move to host memory. Nothing to do on a CPU, or where ``offload_policy`` keeps everything there already."""
        if self._moves_states() and StateKind.MODEL_PARAMS in include:
            self._reshard()
            self.model.to("cpu")
            self.platform.empty_cache()

    def load_states(self, include: Collection[StateKind]) -> None:
        if self._moves_states() and StateKind.MODEL_PARAMS in include:
            self.model.to(self.device)

    def save_hf(self, path: Path) -> None:
        """Collective. Weights are written in the compute dtype."""
        weights = {name: self._gather(tensor, to_cpu=True) for name, tensor in self._named_tensors()}
        if self.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            self._write_hf(path, weights)
        dist.barrier()

    def _write_hf(self, path: Path, weights: dict[str, torch.Tensor]) -> None:
        language_model = self.model.language_model
        if has_tied_embeddings(language_model):
            names = {id(parameter): name for name, parameter in language_model.named_parameters()}
            embeddings = names[id(language_model.get_input_embeddings().weight)]
            for name, parameter in language_model.named_parameters(remove_duplicate=False):
                if names[id(parameter)] == embeddings:
                    weights[name] = weights[embeddings]
        language_model.save_pretrained(path, state_dict=weights)
        # The model wrote the type of the weights it holds (float32 master weights), not of those it was given.
        language_model.config.dtype = self.compute_dtype
        language_model.config.save_pretrained(path)

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, tied ones once, then persistent buffers, under their Hugging Face names."""
        self._reshard()
        language_model = self.model.language_model
        yield from language_model.named_parameters()
        persistent = language_model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in language_model.named_buffers() if name in persistent)

    def _reshard(self) -> None:
        """A root stays gathered after a forward pass without a backward pass; what comes next expects shards."""
        if self.root is not None:
            self.root.reshard()

    def _wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self.compute_dtype if tensor.is_floating_point() else tensor.dtype

    def _gather(self, tensor: torch.Tensor, to_cpu: bool = False) -> torch.Tensor:
        tensor = tensor.detach().to(self.device, self._wire_dtype(tensor))
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if to_cpu:
            tensor = tensor.cpu() if self.rank == 0 else tensor.new_empty(0)
        return tensor

    def _layout(self, part: TensorBatch) -> TokenLayout:
        layout = shared_prompt_layout if self.role.use_prefix_sharing else row_layout
        return layout(part["input_ids"], part["response_mask"])

    def _check_outputs(self, outputs: Collection[Output]) -> None:
        wants_values = Output.VALUES in outputs
        assert wants_values == (self.head is ModelHead.VALUE) or not outputs, (self.head, outputs)

    def _max_over_ranks(self, count: int) -> int:
        """The number of passes that every rank must make, so that none waits for another's collective."""
        if self.world_size == 1:
            return count
        largest = torch.tensor(count, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def _moves_states(self) -> bool:
        return self.device.type != "cpu" and not self.config.offload_policy
