"""A worker that sends the weights of model folders and training checkpoints to engines, as a trainer sends its own.

So one engine start serves many models: what a folder or checkpoint holds is read on the host, converted to the type
that the engines compute in, and travels by :mod:`roll.weight_sync`, verified tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.checkpoint.contents import CheckpointMismatchError, read_contents, read_trainer_state
from roll.checkpoint.tensors import stored_tensors
from roll.checkpoint.trained_model import TrainedModel
from roll.distributed import Dispatch, Worker, register
from roll.models.build import DTYPES, build_model
from roll.models.loading import persistent_tensors
from roll.models.lora import base_name
from roll.models.stored import StoredLayout
from roll.weight_sync.encoding import LostEngines, SyncOptions, SyncReport, Update, iter_buckets
from roll.weight_sync.sender import RayEngines, WeightSender, build_transport

if TYPE_CHECKING:
    from roll.config.roles import ModelArguments


class StoredWeightsWorker(Worker):
    """Stands in for a trainer: :meth:`open` chooses whose weights :meth:`send_weights` sends."""

    _sender: WeightSender | None = None
    _weights: Mapping[str, Tensor]

    @register(Dispatch.ONE_TO_ALL)
    def open(self, base: str, checkpoint: str | None) -> None:
        """Read a model.

        Args:
            base: its folder or hub name.
            checkpoint: the role's folder of a training checkpoint; what was trained replaces what ``base`` has.

        Raises:
            OSError: no such model. CheckpointMismatchError, CheckpointDamagedError: the checkpoint cannot be read.
        """
        arguments = self.context.role.model_args
        plain = replace(arguments, model_name_or_path=base, lora_target=None, adapter_name_or_path=None)
        self._weights = read_weights(plain, None if checkpoint is None else Path(checkpoint))

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(
        self, engines: dict[int, Any], version: int, base_version: int | None, options: SyncOptions
    ) -> SyncReport | LostEngines:
        """Like :meth:`roll.workers.model.TrainWorker.send_weights`."""
        if self._sender is None:
            transport = build_transport(options.transport, options.directory, "gloo", self.context.master_addr)
            self._sender = WeightSender(transport, options.bucket_bytes)
        buckets = iter_buckets(self._weights.items(), options.bucket_bytes)
        update = Update(version, options.deadline, base_version, patience=options.patience)
        return self._sender.try_send(buckets, RayEngines(engines), update)


@torch.no_grad()
def read_weights(arguments: ModelArguments, checkpoint: Path | None) -> dict[str, Tensor]:
    """Tensors of a model (``arguments`` without adapters, and what ``checkpoint`` has in their place) as they travel to
    engines, in the compute type; tied ones once."""
    dtype = DTYPES[arguments.dtype]
    # With a checkpoint in float32: adapters are merged before anything is rounded.
    model = build_model(arguments, "causal_lm", dtype=dtype if checkpoint is None else torch.float32)
    tensors = persistent_tensors(model)
    layout = StoredLayout(model, {name: tensor.shape for name, tensor in tensors.items()}).on_the_way()
    stored = dict(item for name, tensor in tensors.items() for item in layout.split(name, tensor.detach()))
    if checkpoint is not None:
        state = read_trainer_state(checkpoint)
        path = str(arguments.model_name_or_path)
        trained = TrainedModel(checkpoint, state, read_contents(state, checkpoint), path)

        def base(name: str) -> Tensor:
            return layout.joined({part.name: stored[part.name] for part in layout.parts(name)})[name]

        with stored_tensors(trained.folder) as held:
            buffers = {base_name(name): buffer for name, buffer in held.buffers().items()}
            unknown = {*trained.trained, *trained.contents.scalings, *buffers} - tensors.keys()
            if unknown:
                raise CheckpointMismatchError(
                    f"{checkpoint} holds {min(unknown)}, which the model {path} does not have: set pretrain to the "
                    "model that it was trained from"
                )
            for name in tensors:
                whole = buffers.get(name) if name in buffers else trained.weight(held, name, base)
                stored |= {} if whole is None else dict(layout.split(name, whole))
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in stored.items()
    }
