"""Configuration of every run that trains a policy on its own samples, wherever they come from; how its
weights get to the engines (``weight_sync``). Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from roll.config.algorithm import PPOConfig
from roll.config.reading.fields import setting
from roll.config.roles import GenerationWorkerConfig, ReferenceWorkerConfig, WorkerConfig
from roll.config.run import RunConfig
from roll.config.strategies.base import UpdateMode as UpdateMode
from roll.config.strategies.registry import backend_of

TransportName = Literal["shared_memory", "object_store", "broadcast", "safetensors", "cuda_ipc"]


QuantizationFormat = Literal["fp8", "int8", "nvfp4"]


@dataclass(frozen=True)
class WeightSyncConfig:
    """``weight_sync``: how the trainer's weights get to the engines."""

    transport: Literal["auto", "shared_memory", "object_store", "broadcast", "safetensors", "cuda_ipc"] = "auto"
    """``shared_memory``: memory that the processes of a host share. ``object_store``: Ray's, which takes its place to
    engines on other hosts. ``broadcast``: a process group of the sending rank and the engines (NCCL on GPUs that they
    do not share, gloo on CPU). ``safetensors``: files in ``weight_sync`` under ``output_dir``, deleted when the engines
    have them. ``cuda_ipc``: the trainer's GPU memory, read by an engine on that GPU. ``auto``: ``broadcast`` between
    GPUs that roles do not share, else ``shared_memory``."""
    mode: Literal["auto", "full", "trained", "delta"] = "auto"
    """Contents of an update once the engines hold everything. ``full``: everything again; ``trained``: what training
    changes; ``delta``: of that, the elements whose bits differ. ``auto``: ``trained`` to ``hf_infer``, else ``full``.
    ``vllm`` takes ``full`` only, ``sglang`` also ``trained``."""
    lora: Literal["merged", "adapter"] = "merged"
    """Updates of a LoRA model: ``merged``: whole weights; ``adapter``: A and B, which ``hf_infer`` and ``sglang`` merge
    into a copy of the base and ``vllm`` applies separately."""
    quantization: QuantizationFormat | None = None
    """Round the weights that engines get (matrices of layers; with ``lora: adapter`` those of the base) to a
    low-precision format, though they compute in their own dtype. ``fp8``: E4M3, a scale for each block of 128 x 128;
    ``int8``: a scale for each output; ``nvfp4``: E2M1, a scale for each 16 inputs. null: none."""


def update_mode(options: WeightSyncConfig, engine: str) -> UpdateMode:
    """The mode of updates to an engine of this strategy."""
    if options.mode != "auto":
        return options.mode
    return "trained" if options.lora == "adapter" else backend_of(engine).updates[0]


def transport_name(
    options: WeightSyncConfig, train_devices: Collection[int], infer_devices: Collection[int], device_type: str
) -> TransportName:
    """The transport that a run uses; ``device_type`` (``cpu``, ``cuda`` ...) says what a device id means."""
    if options.transport != "auto":
        return options.transport
    apart = set(train_devices).isdisjoint(infer_devices)
    return "broadcast" if apart and device_type != "cpu" else "shared_memory"


@dataclass(frozen=True)
class RouterConfig:
    """``router_args``: how requests are spread over generation engines."""

    router_name: str | None = setting(
        None, choices=("PromptAffinityRouter", "EnvAffinityRouter", "SglangRouter"), dotted_path=True
    )
    """null: ``PromptAffinityRouter`` (least-loaded engine first, all samples of a prompt on one)."""
    router_config: dict[str, Any] = field(default_factory=dict)
    """Options of a router of your own, given to its class as keywords."""


@dataclass(frozen=True)
class PolicyRunConfig(PPOConfig, RunConfig):
    """Keys at the top of every configuration whose policy learns from its own samples."""

    group_key: ClassVar[str]
    """The key that says how many samples are compared with one another."""

    max_steps: int = setting(500, ge=1)
    """Training steps of the run."""
    actor_train: WorkerConfig = field(default_factory=WorkerConfig)
    """The policy that learns."""
    actor_infer: GenerationWorkerConfig = field(default_factory=GenerationWorkerConfig)
    """The engines that generate."""
    reference: ReferenceWorkerConfig | None = None
    """The policy that KL is measured against; runs only when a KL is used."""
    critic: WorkerConfig | None = None
    """The value model; needed by ``estimator: gae`` and ``turn_gae``."""
    max_running_requests: int = setting(128, ge=1)
    """Prompts that one engine works on at a time."""
    router_args: RouterConfig = field(default_factory=RouterConfig)
    """Routing of requests over generation engines."""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    """Weight sync from the trainer to the engines."""
    strict_on_policy: bool = False
    """On a CPU, ``hf_infer`` and the trainer compute every token to the same bits, so that ratios of samples of the
    current weights are exactly 1. The first token that differs ends the run; ``strict_on_policy.json`` in
    ``output_dir`` says what was compared."""
    async_generation_ratio: float = setting(0.0, ge=0)
    """Steps that generation may run ahead of training, fractions meant exactly; 0: synchronous. Engines with devices of
    their own generate all the time; on shared ones (``partial_rollout`` only) a step stops them when it has its
    samples, and partial responses go on in the next."""
    partial_rollout: bool = setting(True, read_if={"async_generation_ratio": ()})
    """Asynchronous rollout: weights are updated while samples are in flight, which go on with the new ones. false:
    updates wait until the samples in flight are finished."""

    @property
    @abstractmethod
    def group_size(self) -> int:
        """Samples, or episodes, that are compared with one another."""

    @property
    @abstractmethod
    def samples_per_step(self) -> int:
        """Samples, or episodes, of one step."""

    @property
    @abstractmethod
    def longest_sequence(self) -> int:
        """Tokens of the longest row that a model computes in training."""
