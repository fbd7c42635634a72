"""The SFT pipeline: its configuration, checks and definition. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from roll.config.checks.base import Checks
from roll.config.loader import LoadedConfig
from roll.config.pipelines import TRAINS, Headline, Panel, Role
from roll.config.roles import DataArguments, WorkerConfig
from roll.config.run import RunConfig
from roll.methods.supervised import SupervisedConfig, SupervisedDefinition, SupervisedPlan

if TYPE_CHECKING:
    from roll.datasets.reading import SourceRow


@dataclass(frozen=True)
class SFTConfig(SupervisedConfig):
    """The keys of an SFT run. Loaded by :func:`roll.config.loader.load_config`; never changed afterwards."""

    pretrain: str = ""
    """Model to start from: a folder or a hub name."""
    system_key: str | None = None
    """Column of the system message of rows that have none in their ``messages``; null: ``data_args.system_prompt``."""
    prompt_key: str | None = None
    """Column of the instruction; null: ``messages`` or ``prompt`` of ``data_args``."""
    query_key: str | None = None
    """Column of further input, appended to the instruction."""
    response_key: str | None = None
    """Column of the response; null: ``data_args.response``."""
    train_on: Literal["last", "assistant"] = "last"
    """Turns of a conversation that carry the loss: the ``last`` response, or every turn of the ``assistant``, tool
    calls included, with tools from the column ``tools``."""
    sft_train: WorkerConfig = field(default_factory=WorkerConfig)
    """The model that learns; its ``data_args`` name the demonstrations."""


class SFT(SupervisedDefinition[SFTConfig]):
    """Supervised learning from demonstrations."""

    name = "sft"
    config_class = SFTConfig
    role = "sft_train"
    method_class = "roll.methods.sft.SFT"
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
    reference = (
        ("SFT, preferences, distillation, reward models (top level)", SupervisedConfig, (RunConfig,)),
        ("SFT (top level)", SFTConfig, (SupervisedConfig,)),
    )

    def training_data(self, config: SFTConfig) -> DataArguments:
        own = config.sft_train.data_args
        return replace(own, prompt=config.prompt_key or own.prompt, response=config.response_key or own.response)

    def first_row_readers(
        self, loaded: LoadedConfig[SFTConfig]
    ) -> Iterator[tuple[str, DataArguments, Callable[[Any], object]]]:
        from roll.datasets.columns import Columns
        from roll.datasets.sft import read_demonstration, read_dialogue

        plan = loaded.plan
        assert isinstance(plan, SupervisedPlan)
        reader = read_dialogue if loaded.config.train_on == "assistant" else read_demonstration

        def read(data_args: DataArguments, source: SourceRow) -> None:
            reader(Columns.of(data_args, source), source)

        for key, data_args in {"sft_train": plan.data_args, "validation": plan.val_data_args}.items():
            if data_args is not None:
                yield f"{key}.data_args", data_args, partial(read, data_args)

    def check_keys(self, config: SFTConfig, checks: Checks) -> None:
        if config.query_key is not None and config.prompt_key is None:
            checks.missing("prompt_key", "goes with query_key: the column that it is appended to", "instruction")
        if config.query_key is not None and config.train_on == "assistant":
            rule = "goes with train_on: last: conversations have no further input"
            checks.add("query_key", config.query_key, rule, "~")
        data_args = config.sft_train.data_args
        if data_args.streaming and config.max_steps is None:
            rule = "is needed with data_args.streaming: nobody knows how many rows there are"
            checks.missing("max_steps", rule, 1000)
        if data_args.streaming and data_args.curriculum is not None:
            rule = "goes with streaming: false: a stream does not know the difficulties of later rows"
            checks.add("sft_train.data_args.curriculum", data_args.curriculum.column, rule, "~")
