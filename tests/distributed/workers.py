"""Workers with tensors, imported by Ray's workers under their dotted path."""

from __future__ import annotations

import logging
import os
import time

import torch
import torch.distributed as dist

from roll.distributed import Dispatch, Worker, register
from roll.protocol import DataProto
from roll.protocol.metrics import Max, Mean, Metrics, RankInfo


class CollectiveWorker(Worker):
    """Ranks that meet in a collective, except for one that goes astray."""

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self) -> None:
        self.init_process_group()

    @register(Dispatch.ONE_TO_ALL)
    def rank_sum(self) -> float:
        total = torch.tensor([self.context.rank + 1.0])
        dist.all_reduce(total)
        return total.item()

    @register(Dispatch.ONE_TO_ALL)
    def meet(self, astray: int, how: str) -> None:
        if self.context.rank == astray:
            getattr(self, f"_{how}")()
        dist.all_reduce(torch.zeros(4))

    def _die(self) -> None:
        logging.getLogger("test").error("these are my last words")
        os.kill(os.getpid(), 9)

    def _exit(self) -> None:
        os._exit(3)

    def _fail(self) -> None:
        raise ValueError("the batch has no column 'scores'")

    def _hang(self) -> None:
        time.sleep(600)


class DataWorker(Worker):
    """Pure arithmetic on a batch, so that a call through the cluster can be compared with a call in the driver."""

    @register(Dispatch.DP_MP_COMPUTE, columns=("input_ids", "response_mask"))
    def double(self, batch: DataProto, factor: int = 2) -> DataProto:
        assert "unread" not in batch.batch
        return DataProto.from_dict({"doubled": batch.batch["input_ids"] * factor, "mask": batch.batch["response_mask"]})

    @register(Dispatch.DP_MP_COMPUTE)
    def measure(self, batch: DataProto) -> tuple[Metrics, list[int]]:
        tokens = int(batch.batch["response_mask"].sum())
        total = float((batch.batch["input_ids"] * batch.batch["response_mask"]).sum())
        return {"mean": Mean(total, tokens), "longest": Max(float(tokens))}, batch.batch["input_ids"][:, 0].tolist()

    @register(Dispatch.DP_MP_COMPUTE)
    def rows(self, batch: DataProto) -> tuple[int, int]:
        return self.context.rank, len(batch)

    @register(Dispatch.ONE_TO_ALL)
    def all_rows(self, batch: DataProto) -> int:
        return len(batch)

    @register(Dispatch.DP_MP_DISPATCH_FIRST)
    def columns_here(self, batch: DataProto) -> DataProto:
        self.seen = sorted(batch.batch.keys())
        assert batch.meta_info["note"] == 7
        return DataProto.from_dict({"ids": batch.batch["input_ids"]}) if "input_ids" in self.seen else DataProto()

    @register(Dispatch.ONE_TO_ALL)
    def last_seen(self) -> list[str]:
        return self.seen


class GridWorker(DataWorker):
    """Two data-parallel replicas of two ranks each: ranks 0 and 1 are replica 0."""

    @property
    def rank_info(self) -> RankInfo:
        rank = self.context.rank
        return RankInfo(rank=rank, world_size=4, dp_rank=rank // 2, dp_size=2, tp_rank=rank % 2, tp_size=2)
