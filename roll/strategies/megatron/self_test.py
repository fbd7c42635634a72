"""Self-test of a Megatron role at its start: a small copy of its model, on the role's own ranks, against transformers.

The copy (:mod:`roll.models.small`) is written to a folder and read as the role's own weights are, so that its names,
fused matrices and shards are tested together with Megatron's layers. Every rank holds its part of the copy in the
role's own process groups (tensor, pipeline, context and expert parallel) and computes the three rows of
:func:`~roll.models.self_test_rows.rows_of` in the role's layout, in float32, without gradient.

All ranks take the same path, or one would wait for another's collective: what a rank does alone (writing the files,
building its part) comes first, and its outcome is agreed upon before a pass.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from roll.config.roles import ModelArguments, WorkerConfig
from roll.config.strategies.base import ParallelDims
from roll.config.strategies.megatron import OF_THE_LAYERS, MegatronStrategyConfig
from roll.models.build import quiet_transformers
from roll.models.self_test import agreed, difference_of, layouts_of, plain_values
from roll.models.self_test_rows import Rows, rows_of
from roll.models.small import Divided, small_model
from roll.platforms import current_platform
from roll.strategies.base import ModelHead, ModelStrategy, Output

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

Build = Callable[[WorkerConfig, MegatronStrategyConfig], ModelStrategy]
"""This rank's part of another model under other options, in the process groups that exist. Not collective."""
_Setting = tuple[WorkerConfig, MegatronStrategyConfig]
_Copy = tuple[dict[str, bytes], Rows, Tensor]
"""The folder that transformers writes, by file name; the rows; float32 (3, T), what transformers computes of them."""
_OTHERS = "use strategy_name: fsdp2_train (fsdp2_infer), or another family (Qwen, Llama, Mistral ...)"


class _Uncomputed(Exception):
    """The copy says nothing about the model."""


def check_megatron(
    role: WorkerConfig, head: ModelHead, config: PretrainedConfig, options: MegatronStrategyConfig, build: Build
) -> None:
    """Collective. Compare a small copy of the role's model, of ``config``, with transformers. Random states stay as
    they are. Raises ValueError: it is computed otherwise; the message says in which layout, by how much, and what would
    work."""
    begin = time.monotonic()
    where = f"{role.name}.model_args.model_name_or_path: {role.model_args.model_name_or_path}"
    device, tracker = current_platform().device(), get_cuda_rng_tracker()
    forked, states = [device] if device.type == "cuda" else [], tracker.get_states()
    try:
        with torch.random.fork_rng(devices=forked), tempfile.TemporaryDirectory(prefix="roll_self_test_") as folder:
            difference = _difference(role, head, config, options, build, Path(folder))
    except _Uncomputed as error:
        logger.warning("%s: not self-tested: %s", where, error)
        return
    finally:
        tracker.set_states(states)
    layout = layouts_of(role)[0]
    if difference is not None:
        raise ValueError(
            f"{where}: a small copy of this {config.model_type} model, computed by Megatron in {layout}, {difference}"
        )
    logger.info("%s: self-test of %s passed in %.2f s", where, layout, time.monotonic() - begin)


def _difference(
    role: WorkerConfig,
    head: ModelHead,
    config: PretrainedConfig,
    options: MegatronStrategyConfig,
    build: Build,
    folder: Path,
) -> str | None:
    """Collective. The copy's difference from transformers and its remedy, in words; None where there is none."""
    setting = _of_copy(role, options, str(folder))
    # Made on rank 0 alone and broadcast: save_pretrained writes nothing on other ranks.
    dims = options.parallel_dims(role, dist.get_world_size())
    made = [_small_copy(config, head, dims) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0)
    if (copied := made[0]) is None:
        raise _Uncomputed(f"no small copy of a {config.model_type} model works")
    if (fault := _fault(setting, build, copied, folder)) is None:
        return None
    remedy = _OTHERS
    for text, other in _other_settings(*setting):
        with suppress(_Uncomputed):
            if _fault(other, build, copied, folder) is None:
                remedy = text
                break
    return f"{fault}, compared with transformers row by row; {remedy}"


def _small_copy(config: PretrainedConfig, head: ModelHead, dims: ParallelDims) -> _Copy | None:
    heads, experts = dims.tp * dims.cp, dims.ep * dims.etp
    # The copy has 4 heads, 2 of keys, and 4 experts for each unit of its width.
    widths = (width for width in count(1) if not (4 * width % heads or 2 * width % dims.tp or 4 * width % experts))
    divided = Divided(next(widths), max(2, dims.pp * dims.vpp))
    try:
        if (model := small_model(config, head.value, None, divided=divided)) is None:
            return None
        rows = rows_of(model)
        wanted, _ = plain_values(model, rows, head.value)
        with tempfile.TemporaryDirectory(prefix="roll_self_test_") as folder, quiet_transformers():
            model.save_pretrained(folder)
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    except Exception as error:  # whatever a family's own code makes of sizes that it has never seen
        logger.debug("self-test: no copy of %s: %r", config.model_type, error)
        return None
    return files, rows, wanted


def _of_copy(role: WorkerConfig, options: MegatronStrategyConfig, folder: str) -> _Setting:
    """Role and options for the copy: float32, all rows in one micro-batch, nothing that names layers of the model."""
    args = ModelArguments(
        model_name_or_path=folder,
        dtype="fp32",
        disable_gradient_checkpointing=role.model_args.disable_gradient_checkpointing,
        attn_implementation=role.model_args.attn_implementation,
    )
    packing = replace(
        role.sequence_packing_args, max_packed_sequence_length_forward=1024, min_num_micro_batches_forward=1
    )
    role = replace(
        role, model_args=args, infer_batch_size=8, use_dynamic_batching_in_infer=False, sequence_packing_args=packing
    )
    own = {name: value for name, value in options.additional_configs.items() if name not in OF_THE_LAYERS}
    return role, replace(options, pipeline_model_parallel_layout=None, additional_configs=own)


def _fault(setting: _Setting, build: Build, copied: _Copy, folder: Path) -> str | None:
    """Collective. Difference of the copy's outputs under a setting, in words; None: they are right on every rank."""
    (files, rows, wanted), part, problem, fault = copied, None, None, None
    try:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        part = build(*setting)
    except Exception as error:  # of Megatron's own checks, in many types, or of a full disk
        problem = f"no part of a small copy can be built: {error!r}"
    # Agreed upon before the pass, whose collectives would wait for a rank that has no part.
    if not agreed(part is not None, dist.group.WORLD) or part is None:
        raise _Uncomputed(problem or "another rank cannot build its part of a small copy")
    output = Output.VALUES if part.head is ModelHead.VALUE else Output.LOG_PROBS
    batch = {"input_ids": rows.ids, "attention_mask": rows.attended, "response_mask": rows.mask}
    try:
        fault = difference_of(part.forward(batch, [output])[output], wanted, str(output))
    except Exception as error:  # of kernels (some want half precision) and of Megatron's own checks, in many types
        problem = repr(error)
    if not agreed(problem is None, dist.group.WORLD):
        raise _Uncomputed(f"a small copy cannot be computed: {problem or 'on another rank'}")
    return None if agreed(fault is None, dist.group.WORLD) else fault or f"gives other {output} on another rank"


def _other_settings(role: WorkerConfig, options: MegatronStrategyConfig) -> Iterator[tuple[str, _Setting]]:
    """Remedies that can be tried in the same process groups, in words, nearest first."""
    key = "strategy_config.additional_configs"
    for name in options.additional_configs:
        rest = {other: value for other, value in options.additional_configs.items() if other != name}
        yield f"leave {name} out of {key}", (role, replace(options, additional_configs=rest))
    if len(options.additional_configs) > 1:
        yield f"leave {key} out", (role, replace(options, additional_configs={}))
    keys = [key for key in ("use_prefix_sharing", "use_sequence_packing", "use_remove_padding") if getattr(role, key)]
    if keys:
        text = " and ".join(f"{key}: false" for key in keys)
        unpacked = replace(role, use_prefix_sharing=False, use_sequence_packing=False, use_remove_padding=False)
        yield f"set {text}", (unpacked, options)
