"""The keys at the top of a configuration: run control, which every pipeline shares, and those of every run that trains
a policy on its own samples, with the way of its weights to the engines (``weight_sync``). Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from roll.config.algorithm import PPOConfig
from roll.config.reading.fields import rules, setting
from roll.config.roles import GenerationWorkerConfig, ReferenceWorkerConfig, WorkerConfig
from roll.config.strategies.base import UpdateMode
from roll.config.strategies.registry import backend_of

RESOLVED_CONFIG = "config.yaml"  # file in `output_dir` with every setting of the run
# Those of `roll.tracking.trackers`.
TRACKERS = ("tensorboard", "stdout", "jsonl", "prometheus", "wandb", "swanlab", "trackio", "mlflow", "ml_tracker")
# Trackers of ROLL's files that are not public, and what writes the metrics in their place.
UNPUBLISHED_TRACKERS = {"ml_tracker": "tensorboard"}


@dataclass(frozen=True)
class CheckpointConfig:
    """``checkpoint_config``: where checkpoints go in addition to ``output_dir``."""

    output_dir: str | None = None
    """Folder, or URL of object storage (``s3://bucket/runs``, ``gs://`` ... by fsspec), that every finished checkpoint
    is copied to; null: checkpoints stay under ``output_dir`` only."""
    storage_options: dict[str, Any] = field(default_factory=dict, metadata=rules(read_if={"output_dir": ()}))
    """Options of fsspec's file system for a URL, such as ``endpoint_url``. Keys come from the environment."""
    async_upload: bool = setting(True, read_if={"output_dir": ()})
    """Copy in the background while training goes on."""
    keep_local_file: bool = setting(True, read_if={"output_dir": ()})
    """Keep the local checkpoint after the copy."""
    keep_best_metric: str | None = None
    """Name of a metric in the logs, such as ``val_correct/all/mean``: the checkpoint with its best value is kept as
    well, and the link ``best`` leads there. null: none is best."""
    keep_best_mode: Literal["max", "min"] = setting("max", read_if={"keep_best_metric": ()})
    """Which value is best."""


@dataclass(frozen=True)
class RolloutMockConfig:
    """``rollout_mock``: write rollouts to disk, or train on written ones, to debug the training half alone.

    The file of a step is ``rollout_step_000000.safetensors`` and so on: the batch as it comes from the rewards.
    """

    enable: bool = False
    """Switch it on."""
    mode: Literal["dump", "mock"] = setting("dump", read_if={"enable": (True,)})
    """``dump`` writes the batch of every step, ``mock`` reads it back: nothing is generated and nothing is scored."""
    dump_dir: str | None = setting(None, read_if={"enable": (True,)})
    """Folder of the batches; null: ``rollouts`` under ``output_dir``."""


@dataclass(frozen=True)
class SampleLogConfig:
    """``sample_log``: the record of samples that ``roll report`` and ``roll diagnose`` read."""

    # Keep samples in `record` under `output_dir`: text, tokens with log-probs and advantages, rewards.
    enabled: bool = True
    # Samples of a step that are kept, in whole groups, each with its first 4,096 tokens; of a validation as many.
    max_samples_per_step: int = setting(256, ge=1, read_if={"enabled": (True,)})
    # Steps between those whose tokens get the trainer's log-probs, by a forward pass of its own where no other pass
    # computes them before the update; 0: none. For policies (`rlvr`, `agentic`).
    mismatch_steps: int = setting(0, ge=0, read_if={"enabled": (True,)})


@dataclass(frozen=True)
class RunConfig:
    """Keys at the top of every pipeline's configuration."""

    pipeline: str | None = None
    """``rlvr``, ``agentic``, ``sft``, ``dpo``, ``distill``, ``opd``, or the dotted path of a pipeline of your own;
    null: determined by the file's sections."""
    exp_name: str = ""
    """Name of the experiment, used in folder names; empty: the name of the file."""
    seed: int = setting(42, ge=0)
    """Seed of data order, initialisation and sampling."""
    output_dir: str = "./output"
    """Folder of checkpoints and results, used as written; the default ``./output`` becomes ``./output/<exp_name>``."""
    logging_dir: str = "./output/logs"
    """Folder of logs, used as written; the default becomes ``<output_dir>/logs`` where ``output_dir`` is written, else
    ``./output/logs/<exp_name>``."""
    rollout_dump_dir: str | None = None
    """Folder for the sampled texts of every step; null: none are written."""
    sample_log: SampleLogConfig = field(default_factory=SampleLogConfig)
    """The record of samples that ``roll report`` and ``roll diagnose`` read."""
    track_with: str | list[str] = setting(
        "tensorboard", choices=TRACKERS, dotted_path=True, plugins="trackers", example="tensorboard"
    )
    """Tracker or list of trackers: ``tensorboard`` (also ROLL's ``ml_tracker``), ``stdout``, ``jsonl``, ``prometheus``,
    ``wandb``, ``swanlab``, ``trackio``, ``mlflow``, or the dotted path of your own subclass of
    ``roll.tracking.Tracker``."""
    tracker_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the tracker, such as ``log_dir`` or ``project``. Keys and tokens come from the environment."""
    save_steps: int = setting(50, ge=-1)
    """Steps between checkpoints; 0 or -1: none."""
    logging_steps: int = setting(1, ge=1)
    """Steps between log lines."""
    eval_steps: int = setting(10, ge=-1)
    """Steps between validations; 0 or -1: none."""
    memory_steps: int = setting(10, ge=0)
    """Steps between measurements of each phase's peak memory; 0: none."""
    max_ckpt_to_keep: int = setting(0, ge=0)
    """Newest checkpoints to keep; 0: all."""
    resume_from_checkpoint: bool | str = False
    """true: continue from the newest whole checkpoint of this run, if there is one; a path: from that one."""
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Where checkpoints go in addition to ``output_dir``."""
    rpc_timeout: float = setting(3600.0, gt=0)
    """Seconds that a remote call may take before the run ends with a diagnosis."""
    interrupt_timeout: float = setting(300.0, ge=0)
    """Seconds after the first SIGINT (Ctrl-C), SIGTERM, SIGHUP or SIGUSR1 within which the training step in flight may
    end and a checkpoint be written; then the run ends without. 0: none is written."""
    max_restarts: int = setting(0, ge=0)
    """Times that the run goes on by itself from its newest checkpoint after a worker, a node, its own process or the
    last engine has died or hangs. It ends for good when it dies twice in the same place."""
    restart_backoff: float = setting(10.0, ge=0, read_if={"max_restarts": ()})
    """Seconds before the first restart, doubled before each further one from the same checkpoint, at most 600."""
    on_nonfinite: Literal["skip", "stop", "rewind"] = "skip"
    """Reaction to a loss or gradient that is not finite, which no model learns from, and whose batch is written into
    ``batches`` under ``output_dir``. ``skip``: the run goes on; ``stop``: it ends; ``rewind``: it goes back to its
    newest checkpoint and on without that batch."""
    dump_batches: int = setting(0, ge=0)
    """Steps between batches that are written with their metrics into ``batches`` under ``output_dir``, for ``roll
    replay``; 0: none."""
    system_envs: dict[str, str] = field(default_factory=dict)
    """Environment variables of all workers."""
    model_update_buffer_size_mb: int = setting(1024, ge=1)
    """MiB of weights that a trainer sends to an engine at a time: one bucket."""
    num_gpus_per_node: int = setting(8, ge=1)
    """Devices of one node (CPU slots on a host without accelerators)."""
    max_grad_norm: float | None = setting(1.0, gt=0)
    """Gradients are clipped to this global norm; null: not clipped."""
    is_offload_states: bool | None = None
    """Between phases, move the states of roles that share devices to host memory. null: on accelerators; true: on a CPU
    host too (which frees only the KV caches there); false: everything stays."""
    is_offload_optimizer_states_in_train_step: bool = False
    """Also move optimizer states to host memory for the forward and backward passes, which takes two copies a step; on
    a CPU host it frees nothing."""
    profiler_timeline: bool = False
    """Write PyTorch timelines of what the workers of the training roles, the reference and the critic compute."""
    profiler_memory: bool = False
    """Write what their operators allocate; on an accelerator snapshots of its allocator, too."""
    profiler_output_dir: str | None = None
    """Folder of the profiler's files; null: ``profiler`` in the run's log folder."""
    rollout_mock: RolloutMockConfig = field(default_factory=RolloutMockConfig)
    """Write rollouts to disk, or train on written ones."""


TransportName = Literal["shared_memory", "object_store", "broadcast", "safetensors", "cuda_ipc"]
QuantizationFormat = Literal["fp8", "int8", "nvfp4"]


@dataclass(frozen=True)
class WeightSyncConfig:
    """``weight_sync``: how the trainer's weights get to the engines."""

    transport: Literal["auto", TransportName] = "auto"
    """``shared_memory``: memory that the processes of a host share. ``object_store``: Ray's, which takes its place to
    engines on other hosts. ``broadcast``: a process group of the sending rank and the engines (NCCL on GPUs that they
    do not share, gloo on CPU). ``safetensors``: files in ``weight_sync`` under ``output_dir``, deleted when the engines
    have them. ``cuda_ipc``: the trainer's GPU memory, read by an engine on that GPU. ``auto``: ``broadcast`` between
    GPUs that roles do not share, else ``shared_memory``."""
    mode: Literal["auto", UpdateMode] = "auto"
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
