"""A trained model in a checkpoint, read in one process: whole parameters, one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.checkpoint.contents import (
    STATE_NAME,
    CheckpointMismatchError,
    ModelContents,
    read_contents,
    read_trainer_state,
)
from roll.checkpoint.folders import CheckpointDamagedError
from roll.checkpoint.manager import CheckpointManager
from roll.checkpoint.tensors import WEIGHT, StoredTensors, stored_tensors
from roll.config.reading.errors import ConfigError, Problem
from roll.config.roles import ModelArguments
from roll.models.build import DTYPES, VALUE_HEAD, HeadName, build_model, checked_config, empty_model
from roll.models.gguf_reading import dequantised_path
from roll.models.loading import TensorFiles, persistent_tensors
from roll.models.lora import adapter_names, base_name, is_adapter, merged_weight
from roll.models.stored import StoredLayout, other_names, use_names_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedModel:
    """A role's folder of a checkpoint, and the model folder that its run began with."""

    folder: Path
    state: dict[str, Any]
    contents: ModelContents
    model: str

    @property
    def head(self) -> HeadName:
        """The head by its parameters: a critic's has a bias, a reward model's has none."""
        names = {base_name(name) for name in (*self.contents.trained, *self.contents.frozen)}
        if f"{VALUE_HEAD}weight" not in names:
            return "causal_lm"
        return "value" if f"{VALUE_HEAD}bias" in names else "score"

    @property
    def args(self) -> ModelArguments:
        return ModelArguments(model_name_or_path=self.model)

    @cached_property
    def trained(self) -> dict[str, str]:
        """Names in the checkpoint of the parameters that are trained whole, by their names in the plain model."""
        return {base_name(name): name for name in self.contents.trained if not is_adapter(name)}

    def read(self, stored: StoredTensors, name: str) -> Tensor:
        """float32, whole: a trained parameter, by its name in the checkpoint."""
        shape = torch.Size(self.contents.trained[name])
        return stored.read(WEIGHT, name, 0, shape.numel()).view(shape)

    def weight(self, stored: StoredTensors, name: str, base: Callable[[str], Tensor]) -> Tensor | None:
        """float32: a parameter of the plain model as it was trained, its adapter merged with ``base(name)``, the weight
        that it was trained on; None: it is as it was."""
        if name in self.trained:
            return self.read(stored, self.trained[name])
        if name not in self.contents.scalings:
            return None
        down, up = (self.read(stored, one) for one in adapter_names(name))
        # Rounded by the caller, at the end: added in bfloat16, a small B A would vanish in the weight.
        return merged_weight(base(name).float(), down, up, self.contents.scalings[name])

    def skeleton(self) -> PreTrainedModel:
        """The plain model, without weights."""
        return empty_model(checked_config(self.args, self.head), self.head)

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The plain model's tensors as a model folder names them, adapters merged, one by one."""
        skeleton, files = self.skeleton(), TensorFiles(self.model)
        use_names_of(skeleton, files)
        layout = StoredLayout(skeleton)
        persistent = skeleton.state_dict().keys()

        def base(name: str) -> Tensor:
            return layout.joined({part.name: layout.read(files, part.name) for part in layout.parts(name)})[name]

        with stored_tensors(self.folder) as stored:
            buffers = {base_name(name): buffer for name, buffer in stored.buffers().items()}
            for name, parameter in skeleton.named_parameters():
                whole = self.weight(stored, name, base)
                if whole is not None:
                    yield from ((key, part.contiguous()) for key, part in layout.split(name, whole.to(dtype)))
                else:
                    assert parameter.is_floating_point(), name
                    yield from ((part.name, layout.read(files, part.name).to(dtype)) for part in layout.parts(name))
            for name, _ in skeleton.named_buffers():
                if name in persistent:
                    yield name, buffers[name] if name in buffers else files.read_region(name, slice(None))
        if self.head == "causal_lm":
            yield from ((name, files.read_region(name, slice(None))) for name in other_names(skeleton, files))


def find_trained(path: Path, role: str | None, model: str | None) -> TrainedModel:
    """
    Args:
        path: a checkpoint, a folder of them, a run's output folder, or a role's folder in a checkpoint.
        role: needed where a checkpoint holds several.
        model: the model that the run began with, where it is not (any more) where the checkpoint says.

    Raises:
        ConfigError: nothing to export there.
    """
    try:
        folder = path
        if not (path / STATE_NAME).is_file():
            inner = path / "checkpoints"
            checkpoint = CheckpointManager.find(inner if inner.is_dir() else path)
            logger.info("exporting %s", checkpoint.path)
            if role is None:
                roles = sorted(file.parent.name for file in checkpoint.path.glob(f"*/{STATE_NAME}"))
                policies = [name for name in roles if name != "critic"]
                if len(policies) != 1:
                    rule = f"{checkpoint.path} holds {', '.join(roles) or 'no model'}; name one"
                    raise config_error("--role", None, rule, "actor_train")
                role = policies[0]
            folder = checkpoint.role(role)
        state = read_trainer_state(folder)
        contents = read_contents(state, folder)
    except (FileNotFoundError, CheckpointDamagedError, CheckpointMismatchError) as error:
        raise config_error("CKPT", str(path), str(error)) from error
    model = model or contents.path
    if model is None:
        rule = "the checkpoint does not say which model its run began with; name it"
        raise config_error("--model", None, rule, "models/Qwen2.5-7B")
    return TrainedModel(folder, state, contents, dequantised_path(model))


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


def config_error(key: str, value: str | None, rule: str, example: str | None = None) -> ConfigError:
    return ConfigError([Problem(key, value, rule, example, has_value=value is not None)])
