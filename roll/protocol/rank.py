"""Coordinates of a rank in every parallel dimension."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """Coordinates of a rank in every parallel dimension (data, tensor, pipeline, context)."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    @property
    def is_pipeline_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def is_data_source(self) -> bool:
        """True on the one rank of a data-parallel replica whose results are collected."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.is_pipeline_last_stage

    @property
    def is_first_of_replica(self) -> bool:
        """True on the one rank of a data-parallel replica that is handed data when it passes them on itself."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.pp_rank == 0
