"""Workers that run a model on a batch: the reference policy, and the base of actor and critic."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from roll.distributed import Dispatch, Worker, register
from roll.protocol import DataProto
from roll.protocol.rank import RankInfo
from roll.strategies.base import ModelHead, ModelStrategy, Output, StateKind
from roll.strategies.factory import create_strategy

MODEL_COLUMNS = ("input_ids", "attention_mask", "response_mask")


class ModelWorker(Worker):
    """A forward-only model on one rank (the reference policy)."""

    head = ModelHead.CAUSAL_LM
    strategy: ModelStrategy

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self, num_training_steps: int = 0) -> None:
        """Collective. Join the process group, build and load the model, and its optimizer where it is to be trained."""
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        self.init_process_group()
        self.strategy = create_strategy(
            self.context.role,
            head=self.head,
            seed=self.context.seed,
            max_grad_norm=self.context.extra.get("max_grad_norm"),
        )
        self.strategy.initialize(num_training_steps)

    @property
    def rank_info(self) -> RankInfo:
        return self.strategy.rank_info if hasattr(self, "strategy") else super().rank_info

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS)
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """Log-prob of every response token, float32 (B, L); also what ``meta_info["outputs"]`` names.

        With ``meta_info["without_adapters"]`` they are those of the base of a LoRA model.
        """
        wanted = [Output.LOG_PROBS, *map(Output, batch.meta_info.get("outputs", ()))]
        temperature = float(batch.meta_info.get("temperature", 1.0))
        base_only = bool(batch.meta_info.get("without_adapters"))
        with self.strategy.without_adapters() if base_only else nullcontext():
            return DataProto.from_dict(self.strategy.forward(batch.batch, wanted, temperature))

    @register(Dispatch.ONE_TO_ALL)
    def offload_states(self, include: list[StateKind]) -> None:
        self.strategy.offload_states(include)

    @register(Dispatch.ONE_TO_ALL)
    def load_states(self, include: list[StateKind]) -> None:
        self.strategy.load_states(include)

    @register(Dispatch.ONE_TO_ALL)
    def save_hf(self, path: str) -> None:
        """Collective. Write the model in Hugging Face format to ``path``."""
        self.strategy.save_hf(Path(path))
