"""Supervised fine-tuning: imitation of demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from roll.datasets import DataError, SftDataset, SftRow
from roll.datasets.images import ImageReader
from roll.datasets.preparation import StreamedEpochs
from roll.datasets.sft import SftMaker
from roll.datasets.templates import Renderer, TemplateChoice
from roll.datasets.vision_model import VisionModel
from roll.methods.base import Loss, Totals
from roll.methods.rows import RowMethod, demonstration_batch
from roll.methods.sft_keys import SFTConfig
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.strategies.base import Output, TensorBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SftLoss(Loss):
    """The mean of -log pi(y_t | y_<t) over the response tokens of all ranks."""

    prefix: str = field(default="sft_train/", kw_only=True)

    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        mask = batch["response_mask"]
        nll = -(outputs[Output.LOG_PROBS] * mask).sum()
        # At least 1: a batch without a response token has loss 0, not 0 / 0.
        loss = nll / max(float(totals["tokens"]), 1.0)
        return loss, {f"{self.prefix}loss": Mean(float(nll.detach()), float(mask.sum()))}


class SFT(RowMethod[SFTConfig, SftRow]):
    """Imitation of demonstrations, two steps in flight at a time."""

    stream = "sft"
    state_key = "demonstrations"
    samples = "demonstrations"
    evaluates_at_end = False
    steps_in_flight = 2
    loss = SftLoss()

    @classmethod
    def data_set(cls, config: SFTConfig) -> Callable[..., SftDataset]:
        query_key, system_key = config.query_key, config.system_key
        return partial(SftDataset.build, query_key=query_key, system_key=system_key, train_on=config.train_on)

    def stream_of_rows(self, tokenizer: PreTrainedTokenizerBase) -> StreamedEpochs | None:
        config, data_args = self.config, self.plan.data_args
        if not data_args.streaming:
            return None
        path = str(self.plan.roles[self.role].model_path)
        if VisionModel.load(path, tokenizer, config.sft_train.model_args.trust_remote_code) is not None:
            raise DataError(
                "sft_train.data_args.streaming: true: rows with images are prepared at the start; set it false"
            )
        renderer = Renderer(tokenizer, TemplateChoice.of_settings(data_args, config.global_template, None))
        limit, images = config.sequence_length, ImageReader.of(data_args, None)
        maker = SftMaker(data_args, renderer, limit, images, config.train_on, config.query_key, config.system_key)
        return StreamedEpochs(maker, config.seed, self.stream)

    def lengths(self, rows: Sequence[SftRow]) -> list[int]:
        return [len(row.input_ids) for row in rows]

    def batch(self, rows: Sequence[SftRow], pad: int, ranks: int = 1) -> DataProto:
        return demonstration_batch(rows, pad)
