"""Options of the ``sglang`` strategy, and what a plan and the checks need to know of it. Needs no SGLang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from roll.config.reading.fields import rules, setting
from roll.config.strategies.base import Backend, Package, ShapeProblem, StrategyConfig, check_engine_args, head_problems

if TYPE_CHECKING:
    from roll.config.reading.errors import Problems
    from roll.config.roles import WorkerConfig


OWN_ENGINE_ARGS = {
    "model_path": "model_args.model_name_or_path",
    "tokenizer_path": "model_args.model_name_or_path",
    "dtype": "model_args.dtype",
    "trust_remote_code": "model_args.trust_remote_code",
    "random_seed": "the run's seed",
    "device": "the host",
    "skip_tokenizer_init": "the strategy (token ids go in and out)",
    "sampling_backend": "the strategy (its own sampler)",
    "custom_weight_loader": "the weight transfer",
}
"""Server arguments that the strategy fills in, and what decides about them."""


@dataclass(frozen=True)
class SglangStrategyConfig(StrategyConfig):
    """``sglang``: generation by SGLang, on GPUs or on a CPU."""

    max_num_seqs: int = field(default=256, metadata=rules(ge=1, aliases=("max_running_requests",)))
    """Samples that are generated at the same time; further ones wait."""
    max_model_len: int | None = field(default=None, metadata=rules(ge=2, aliases=("context_length",)))
    """Longest prompt plus response; responses end there. null: the pipeline's longest sequence."""
    max_total_tokens: int | None = setting(None, ge=1)
    """Tokens of the KV cache. null: on a GPU what ``mem_fraction_static`` leaves; on a CPU room for ``max_num_seqs``
    samples of ``max_model_len`` tokens, at most 4 GiB."""
    chunked_prefill_size: int | None = setting(None, ge=1)
    """Longest piece of a prompt that is computed in one step; null: SGLang's choice."""
    tp_size: int = field(default=1, metadata=rules(ge=1, aliases=("tensor_parallel_size",)))
    """Ranks over which every matrix is sharded; a worker takes so many devices. Left out: ``num_gpus_per_worker``."""
    pp_size: int = setting(1, ge=1)
    """Stages into which the layers are divided."""
    dp_size: int = setting(1, ge=1)
    """Copies inside one engine. Leave it at 1: every worker of the role is an engine of its own."""
    mem_fraction_static: float | None = field(
        default=None, metadata=rules(gt=0, lt=1, example=0.8, aliases=("gpu_memory_utilization",))
    )
    """Share of a GPU's memory for weights and KV cache together; null: SGLang's choice. No effect on a CPU."""
    enable_prefix_caching: bool = True
    """Keep what was computed of prompts for later ones that begin alike. Emptied at every weight update."""
    attention_backend: str | None = None
    """SGLang's attention kernels; null: its choice on a GPU, ``torch_native`` on a CPU."""
    disable_cuda_graph: bool | None = field(default=None, metadata=rules(aliases=("enforce_eager",)))
    """No graph capture. null: true on a CPU."""
    load_format: Literal["auto", "dummy"] = "auto"
    """``dummy``: random weights, for an engine that gets its weights from a trainer before it is used."""
    in_flight_update: Literal["recompute", "keep"] = "recompute"
    """The KV cache of samples in flight when new weights arrive: computed again with them, or
    kept as the old weights left it, which costs nothing and makes the next tokens those of a mixture of both."""
    enable_memory_saver: bool = True
    """Release the memory of a GPU while other roles use it. No effect on a CPU."""
    sleep_level: int = setting(1, ge=1, le=2)
    """While other roles use the GPU: 1 moves the weights to host memory, 2 drops them (the next weight update brings
    them back). The KV cache is dropped either way. No effect on a CPU."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Any further argument of SGLang's ``ServerArgs``, passed through."""
    allow_untested_version: bool = False
    """Run with an SGLang outside the tested versions."""

    @property
    def devices_per_worker(self) -> int:
        """Ranks of an engine."""
        return self.tp_size

    def check(self, name: str, role: WorkerConfig, world_size: int, trains: bool, problems: Problems) -> None:
        """Report server arguments that have a key of their own, and ranks that do not fit the role's devices."""
        path = f"{name}.strategy_args.strategy_config"
        check_engine_args(path, self, OWN_ENGINE_ARGS, problems)
        several = {
            "pp_size": "pipeline parallelism of an engine",
            "dp_size": "copies inside an engine; every worker of the role is an engine of its own",
        }
        for key, feature in several.items():
            if getattr(self, key) > 1:
                problems.not_available(f"{path}.{key}", getattr(self, key), feature, 1)
        if role.num_gpus_per_worker not in (1, self.tp_size):
            rule = f"must be the devices of one engine, {path}.tp_size ({self.tp_size}): leave one of them out"
            problems.add(f"{name}.num_gpus_per_worker", role.num_gpus_per_worker, rule, self.tp_size)

    def shape_problems(self, name: str, role: WorkerConfig, model: Mapping[str, Any]) -> Iterator[ShapeProblem]:
        key = f"{name}.strategy_args.strategy_config.tp_size"
        yield from head_problems(key, self.tp_size, model)


SGLANG = Backend(
    "sglang",
    SglangStrategyConfig,
    generates="roll.strategies.sglang.SglangStrategy",
    package=Package(
        "sglang",
        "on GPUs pip install 'roll-rl[sglang]'; see docs/sglang.md",
        title="SGLang",
        tested=("0.5.23", "0.5.24"),
    ),
    size_keys=("tp_size", "tensor_parallel_size"),
    updates=("full", "trained"),
)
