"""The definition of the SFT pipeline. Torch-free."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from roll.config.checks.base import Checks
from roll.config.pipelines import TRAINS, Headline, Panel, PipelineDefinition, ReadableSet, Role, Written
from roll.config.run import RunConfig
from roll.pipelines.sft.config import SFTConfig, SFTPlan, check_sft, plan_sft

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig
    from roll.config.roles import DataArguments
    from roll.datasets import SftDataset
    from roll.pipelines.batches import RecordedBatch


class SFT(PipelineDefinition):
    """Supervised learning from demonstrations."""

    name = "sft"
    config_class = SFTConfig
    roles = (Role("sft_train", TRAINS),)
    headlines = (
        Headline("sft_train/loss", "loss", "{:.4f}"),
        Headline("val/loss", "validation loss", "{:.4f}"),
        Headline("sft_train/lr", "lr", "{:.2e}"),
        Headline("system/tps", "tok/s", "{:,.0f}"),
    )
    panels = (
        Panel("Loss", ("sft_train/loss",), smooth=True),
        Panel("Validation loss", ("val/loss",)),
        Panel("Learning rate", ("sft_train/lr",)),
        Panel("Gradient norm", ("sft_train/grad_norm",), smooth=True),
    )
    published_workers = ("SFTWorker",)
    reference = (("SFT (top level)", SFTConfig, (RunConfig,)),)

    def check(self, config: SFTConfig, checks: Checks) -> None:
        check_sft(config, checks)

    def plan(self, config: SFTConfig, exp_name: str, written: Written) -> SFTPlan:
        return plan_sft(self, config, exp_name, written)

    def run(self, loaded: LoadedConfig[SFTConfig]) -> None:
        from roll.pipelines.sft.pipeline import SFTPipeline

        SFTPipeline(loaded).run()

    def replay(self, loaded: LoadedConfig[SFTConfig], recorded: RecordedBatch) -> tuple[int, dict[str, float]]:
        from roll.pipelines.sft.pipeline import SFTPipeline

        return SFTPipeline(loaded).replay(recorded)

    def readable_sets(self, loaded: LoadedConfig[SFTConfig]) -> dict[str, ReadableSet]:
        from roll.pipelines.sft.pipeline import read_demonstrations

        def read(data_args: DataArguments, tokenizer: Any) -> SftDataset:
            assert isinstance(loaded.plan, SFTPlan)
            return read_demonstrations(loaded.config, loaded.plan, data_args, tokenizer)

        assert isinstance(loaded.plan, SFTPlan)
        sets = {"train": loaded.plan.data_args, "validation": loaded.plan.val_data_args}
        limit = loaded.config.sequence_length
        return {
            name: ReadableSet(name, data_args, limit, partial(read, data_args))
            for name, data_args in sets.items()
            if data_args is not None
        }
