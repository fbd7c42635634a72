"""SGLang's protocol of weight updates, from the side of its tokenizer manager."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers import io_struct
from sglang.srt.utils import MultiprocessingSerializer

from roll.strategies.sglang.held_weights import LOADER, REPORTER
from roll.weight_sync.encoding import WeightBucket


def check(method: str, answer: tuple[bool, str]) -> None:
    """SGLang answers whether it did something, and raises nothing.

    Raises:
        RuntimeError: it did not.
    """
    success, message = answer
    if not success:
        raise RuntimeError(f"sglang: {method} failed: {message}")


class WeightUpdates:
    """Updates of one engine. Samples that are running wait from :meth:`open` to :meth:`close`.

    Args:
        manager: SGLang's tokenizer manager.
        num_ranks: tensor-parallel ranks of the engine.
        keep_cache: running samples keep their keys and values; else they are computed again afterwards.
    """

    def __init__(self, manager: Any, num_ranks: int, keep_cache: bool) -> None:
        self._manager = manager
        self._num_ranks = num_ranks
        self._keep_cache = keep_cache

    async def open(self) -> None:
        mode = "in_place" if self._keep_cache else "retract"
        await self._manager.pause_generation(io_struct.PauseGenerationReqInput(mode=mode))
        check(
            "begin_weight_update",
            await self._manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(), None),
        )

    async def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Full tensors by Hugging Face name; at least one."""
        device = next(iter(tensors.values())).device
        # A copy in one piece: this may be read-only shared memory, and each piece costs a file handle.
        bucket = WeightBucket.pack(tensors.items(), device)
        await self._send(LOADER, list(bucket.tensors().items()))

    async def close(self, version: int) -> dict[str, int]:
        """Go on with the new weights; the checksum of every tensor of this and earlier updates of which each rank holds
        exactly its part.

        Raises:
            RuntimeError: SGLang refuses it, or its model could not load a tensor.
        """
        flush = not self._keep_cache
        with tempfile.TemporaryDirectory(prefix="roll-sglang-") as folder:
            question = [(folder, torch.zeros(1))]
            await self._send(REPORTER, question, flush_cache=flush, weight_version=str(version))
            reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).iterdir())]
        check("end_weight_update", await self._manager.end_weight_update(io_struct.EndWeightUpdateReqInput(), None))
        await self._manager.continue_generation(io_struct.ContinueGenerationReqInput())
        errors = [error for report in reports for error in report["errors"]]
        if errors or len(reports) != self._num_ranks:
            raise RuntimeError(f"sglang: the model did not load the weights: {'; '.join(errors) or 'a rank is silent'}")
        return agreed([report["held"] for report in reports])

    async def _send(
        self,
        load_format: str,
        tensors: list[tuple[str, torch.Tensor]],
        flush_cache: bool = False,
        weight_version: str | None = None,
    ) -> None:
        # Each rank takes its own handles: they are gone once they have been read.
        payloads = [MultiprocessingSerializer.serialize(tensors) for _ in range(self._num_ranks)]
        message = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads,
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=weight_version,
        )
        check("update_weights_from_tensor", await self._manager.update_weights_from_tensor(message, None))


def agreed(held_by_rank: list[dict[str, int]]) -> dict[str, int]:
    """One checksum a tensor, 0 where the ranks do not agree; none where a rank holds nothing of it."""
    first, *others = held_by_rank
    known = [name for name in first if all(name in held for held in others)]
    return {name: first[name] if all(held[name] == first[name] for held in others) else 0 for name in known}
