"""A worker that sends the weights of model folders and training checkpoints to engines, as a trainer sends its own.

So one engine start serves many models: what a folder or checkpoint holds is read on the host, converted to the type
that the engines compute in, and travels by :mod:`roll.weight_sync`, verified tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.checkpoint.contents import CheckpointMismatchError, read_contents, read_trainer_state
from roll.checkpoint.tensors import WEIGHT, stored_tensors
from roll.distributed import Dispatch, Worker, register
from roll.models.build import DTYPES, build_model
from roll.models.lora import adapter_names, base_name, merged_weight
from roll.models.stored import StoredLayout
from roll.weight_sync.encoding import LostEngines, SyncOptions, SyncReport, WeightSyncError, iter_buckets
from roll.weight_sync.sender import RayEngines, Update, WeightSender, build_transport

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
        """Like :meth:`roll.workers.training.TrainWorker.send_weights`."""
        if self._sender is None:
            transport = build_transport(options.transport, options.directory, "gloo", self.context.master_addr)
            self._sender = WeightSender(transport, options.bucket_bytes)
        buckets = iter_buckets(self._weights.items(), options.bucket_bytes)
        update = Update(version, options.deadline, base_version, patience=options.patience)
        try:
            return self._sender.send(buckets, RayEngines(engines), update)
        except WeightSyncError as error:
            if error.lost:
                return LostEngines(error.lost, str(error))
            raise


@torch.no_grad()
def read_weights(arguments: ModelArguments, checkpoint: Path | None) -> dict[str, Tensor]:
    """Tensors of a model as they travel to engines, in the compute type; tied ones once.

    Args:
        arguments: ``model_args`` of the model's folder, without adapters.
        checkpoint: see :meth:`StoredWeightsWorker.open`.
    """
    dtype = DTYPES[arguments.dtype]
    # With a checkpoint in float32: adapters are merged before anything is rounded.
    model = build_model(arguments, "causal_lm", dtype=dtype if checkpoint is None else torch.float32)
    # Engines compute the other buffers themselves, such as rotary frequencies.
    persistent = model.state_dict().keys()
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    layout = StoredLayout(model, {name: tensor.shape for name, tensor in tensors.items()}).on_the_way()
    stored = dict(item for name, tensor in tensors.items() for item in layout.split(name, tensor.detach()))
    if checkpoint is not None:
        for name, tensor in trained_weights(checkpoint, stored, layout):
            parts = dict(layout.split(name, tensor)) if name in tensors else {name: tensor}
            unknown = parts.keys() - stored.keys()
            if unknown:
                rule = f"holds {min(unknown)}, which the model {arguments.model_name_or_path} does not have"
                raise CheckpointMismatchError(
                    f"{checkpoint} {rule}: set pretrain to the model that it was trained from"
                )
            stored |= parts
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in stored.items()
    }


def trained_weights(folder: Path, base: Mapping[str, Tensor], layout: StoredLayout) -> Iterator[tuple[str, Tensor]]:
    """The float32 weights that a checkpoint of any strategy holds, adapters merged into those of ``base``.

    Args:
        base: stored tensors of the model that ``layout`` is of.

    Raises:
        CheckpointMismatchError, CheckpointDamagedError: it cannot be read.
    """
    contents = read_contents(read_trainer_state(folder), folder)
    with stored_tensors(folder) as stored:
        trained = {
            name: stored.read(WEIGHT, name, 0, prod(shape)).view(*shape) for name, shape in contents.trained.items()
        }
        trained |= stored.buffers()
    adapted = {name for weight in contents.scalings for name in adapter_names(weight)}
    for name, tensor in trained.items():
        if name not in adapted:
            yield base_name(name), tensor
    for weight, scaling in contents.scalings.items():
        down, up = (trained[name] for name in adapter_names(weight))
        whole = layout.joined({part.name: base[part.name] for part in layout.parts(weight)})
        yield weight, merged_weight(whole[weight], down, up, scaling)
