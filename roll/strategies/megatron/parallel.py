"""The parallel dimensions of a Megatron role: their sizes, their process groups, and where a rank stands.

| dimension | what is cut                                  | ranks next to each other |
|-----------|----------------------------------------------|--------------------------|
| tensor    | every matrix, by rows or columns             | 1st (rank 0, 1, ...)     |
| context   | the sequence, in contiguous chunks           | 2nd                      |
| data      | the rows of the batch                        | 3rd                      |
| pipeline  | the layers, in stages                        | last                     |

The world is their product.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from roll.config.strategies.registry import MegatronStrategyConfig
from roll.platforms import current_platform
from roll.protocol.rank import RankInfo


@dataclass(frozen=True)
class ParallelSizes:
    """Ranks of each dimension; ``virtual`` is the number of model chunks that a pipeline rank holds."""

    tensor: int
    pipeline: int
    context: int
    virtual: int
    sequence_parallel: bool

    @classmethod
    def from_config(cls, config: MegatronStrategyConfig) -> ParallelSizes:
        return cls(
            tensor=config.tensor_model_parallel_size,
            pipeline=config.pipeline_model_parallel_size,
            context=config.context_parallel_size,
            virtual=config.virtual_pipeline_model_parallel_size or 1,
            # With one tensor-parallel rank there is nothing to spread the sequence over.
            sequence_parallel=config.sequence_parallel and config.tensor_model_parallel_size > 1,
        )

    @property
    def model(self) -> int:
        """Ranks of one replica of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def sequence_divisor(self) -> int:
        """What the padded length of a micro-batch must divide by."""
        return self.context * (self.tensor if self.sequence_parallel else 1)

    def check_world(self, world_size: int) -> None:
        """
        Raises:
            ValueError: the ranks do not make whole replicas, or there are virtual stages without a pipeline.
        """
        if world_size % self.model:
            raise ValueError(
                f"strategy_config: tensor_model_parallel_size {self.tensor} x pipeline_model_parallel_size "
                f"{self.pipeline} x context_parallel_size {self.context} = {self.model} does not divide the role's "
                f"{world_size} ranks; use sizes whose product does, e.g. all 1"
            )
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(
                f"strategy_config.virtual_pipeline_model_parallel_size: {self.virtual} needs "
                "pipeline_model_parallel_size of at least 2; set it to null"
            )


def create_groups(sizes: ParallelSizes, seed: int) -> None:
    """Collective. The process groups of all dimensions, and Megatron's random states."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed)
    current_platform().synchronize()


def rank_info(rank: int, world_size: int, sizes: ParallelSizes) -> RankInfo:
    replicas = world_size // sizes.model
    rest, tensor = divmod(rank, sizes.tensor)
    rest, context = divmod(rest, sizes.context)
    pipeline, data = divmod(rest, replicas)
    return RankInfo(
        rank=rank,
        world_size=world_size,
        dp_rank=data,
        dp_size=replicas,
        tp_rank=tensor,
        tp_size=sizes.tensor,
        pp_rank=pipeline,
        pp_size=sizes.pipeline,
        cp_rank=context,
        cp_size=sizes.context,
    )
