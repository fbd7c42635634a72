"""A role's section: model, training, generation and strategy arguments; data arguments are in ``data.py``.

Torch-free; a loaded configuration is frozen.  The text under each field is the user documentation of its key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.config.data import DataArguments as DataArguments
from roll.config.reading.fields import (
    parse_device_mapping,
    parse_dotted_path,
    parse_dtype,
    parse_temperature,
    rules,
    setting,
)

# Hugging Face's schedules that are a function of the step alone, each with its `lr_scheduler_kwargs`.
LR_SCHEDULER_OPTIONS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "constant": (),
    "constant_with_warmup": (),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": ("num_decay_steps", "num_stable_steps", "decay_type", "min_lr_ratio", "num_cycles"),
}
DECAY_TYPES = ("cosine", "linear", "1-sqrt")  # decay types of `warmup_stable_decay`
# Those that read `min_lr_ratio`.
DECAYING_SCHEDULERS = tuple(name for name in LR_SCHEDULER_OPTIONS if not name.startswith("constant"))
ATTENTION = ("sdpa", "eager", "fa2", "flash_attention_2", "auto")
# Set by the plan for roles of a run with `strict_on_policy`; see `roll.models.invariant`.
INVARIANT_ATTENTION = "roll_invariant"
KERNELS = ("use_liger_kernel", "compile")  # keys of `model_args` that compute the same by other kernels


@dataclass(frozen=True)
class ModelArguments:
    """``<role>.model_args``: which model, and how it is built."""

    model_name_or_path: str | None = None
    """Folder, GGUF file or hub name; null: the pipeline's ``pretrain`` (``reward_pretrain`` for the critic, if that is
    set)."""
    adapter_name_or_path: str | None = None
    """Folder or hub name of a LoRA adapter in peft's format to start from; it decides target, rank and scale."""
    attn_implementation: str | None = setting(None, choices=ATTENTION, aliases=("flash_attn",))
    """``sdpa``, ``eager``, ``fa2`` (flash_attention_2), ``auto`` or null (``sdpa``)."""
    moe_aux_loss_coef: float | None = setting(None, ge=0)
    """Weight of a mixture-of-experts model's load-balancing loss, in every kind of training; null: what the model's own
    config says (``router_aux_loss_coef`` where ``output_router_logits`` is true, else 0)."""
    moe_aux_loss_scope: Literal["global", "micro_batch"] = "global"
    """Tokens over which the balance loss is taken: the whole batch of an optimizer step (with several micro-batches a
    rank one more forward pass), or each micro-batch by itself, as in transformers."""
    disable_gradient_checkpointing: bool = False
    """Keep all activations instead of recomputing them in the backward pass: faster, more memory."""
    gradient_checkpointing_use_reentrant: bool = False
    """Use PyTorch's reentrant form of gradient checkpointing."""
    use_liger_kernel: bool = False
    """Compute norms, rotary embeddings and MLP layers by Liger's Triton kernels, on GPUs (package ``liger-kernel``)."""
    compile: bool = False
    """Compile each decoder layer by ``torch.compile``; dense models."""
    dtype: Literal["bf16", "fp16", "fp32"] = setting("bf16", parse=parse_dtype)
    """Compute type. Trained parameters are kept in float32 whatever is written here."""
    model_type: str | None = setting(
        None, choices=("auto_sequence_classification", "auto_token_classification", "trl"), example="trl"
    )
    """Head of a critic or reward model; ``trl`` is a scalar value head on a causal language model. null: the role's
    own."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Overrides of entries of the model's ``config.json``, passed through as written."""
    freeze_module_prefix: str | list[str] | None = None
    """Parameters whose name starts with one of these prefixes (a list, or with commas) are not trained.
    ``vision_model``, ``visual`` and ``model.visual`` mean the vision tower."""
    ulysses_size: int = setting(1, ge=1)
    """Ranks that share long sequences (Ulysses), under ``fsdp2_*`` and ``fsdp_*``. Divides the role's ranks and the
    attention heads; for models whose layers are all causal attention, full or in a window."""
    lora_target: str | list[str] | None = None
    """Linear layers that get a LoRA adapter: ``all-linear`` (all but the output matrix), names (a list, or with
    commas), or a regular expression of whole module names; null: no LoRA."""
    lora_rank: int = setting(8, ge=1, read_if={"lora_target": ()})
    """Rank of the adapters; used with ``lora_target``."""
    lora_alpha: int | None = setting(None, ge=1, read_if={"lora_target": ()})
    """Scale of the adapters, divided by ``lora_rank``; null: twice ``lora_rank``."""
    lora_dropout: float = setting(0.0, ge=0, lt=1, read_if={"lora_target": ()})
    """Dropout on the adapters' input; in supervised training only."""
    additional_target: str | list[str] | None = None
    """Further modules trained in full in addition to the adapters (a list, or with commas). A critic's head always
    is."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Only for sources you trust."""


EIGHT_BIT_BLOCK = 256
"""Values of a moment that share a scale under ``adamw_8bit``, as in bitsandbytes; the paper's blocks have 2,048."""


@dataclass(frozen=True)
class OptimizerConfig:
    """``training_args.optimizer``: which optimizer, by its name alone (``optimizer: muon``) or with its options."""

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """``adamw_8bit``: AdamW's moments take 2.03 bytes a weight in place of 8. ``muon``: matrices of hidden layers are
    updated by Muon, everything else by AdamW with the same learning rate."""
    scaling: Literal["match_adamw_rms", "original"] = setting("match_adamw_rms", read_if={"name": ("muon",)})
    """Factor of Muon's update of an A x B matrix: ``match_adamw_rms`` 0.2 sqrt(max(A, B)), for AdamW's learning rates;
    ``original`` sqrt(max(1, A / B)), for those of Muon's authors."""

    @property
    def moments(self) -> str:
        """The optimizer whose moments a checkpoint holds; those of ``adamw_8bit`` are written as AdamW's."""
        return "muon" if self.name == "muon" else "adamw"


@dataclass(frozen=True)
class TrainingArguments:
    """``<role>.training_args``: optimizer, schedule and batch sizes of a trained role."""

    learning_rate: float = setting(5.0e-5, ge=0, example=1.0e-6)
    """Peak learning rate of the optimizer."""
    optimizer: OptimizerConfig = field(
        default_factory=OptimizerConfig,
        metadata=rules(parse=lambda value: {"name": value} if isinstance(value, str) else value),
    )
    """``adamw``, ``adamw_8bit`` or ``muon``, or a section with ``name`` and options."""
    lr_scheduler_type: str = setting("linear", choices=tuple(LR_SCHEDULER_OPTIONS))
    """Schedule after the warm-up, by Hugging Face's name: ``linear``, ``cosine``, ``constant``,
    ``constant_with_warmup`` (the same), ``cosine_with_restarts``, ``cosine_with_min_lr``, ``polynomial``,
    ``inverse_sqrt`` or ``warmup_stable_decay``."""
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the schedule: ``num_cycles`` (cosine), ``min_lr`` or ``min_lr_rate`` (cosine_with_min_lr), ``lr_end``
    and ``power`` (polynomial), ``timescale`` (inverse_sqrt), ``num_decay_steps``, ``num_stable_steps`` and
    ``decay_type`` (warmup_stable_decay)."""
    min_lr_ratio: float = setting(0.0, ge=0, le=1, read_if={"lr_scheduler_type": DECAYING_SCHEDULERS})
    """The learning rate at the end of a decaying schedule, as a share of ``learning_rate``."""
    weight_decay: float = setting(0.0, ge=0)
    """Decoupled weight decay."""
    adam_beta1: float = setting(0.9, ge=0, lt=1)
    """AdamW's first-moment decay."""
    adam_beta2: float = setting(0.999, ge=0, lt=1)
    """AdamW's second-moment decay."""
    adam_epsilon: float = setting(1.0e-8, gt=0)
    """AdamW's denominator term."""
    per_device_train_batch_size: int = setting(8, ge=1)
    """Samples of one micro-batch on one data-parallel rank."""
    gradient_accumulation_steps: int = setting(1, ge=1)
    """Micro-batches of one optimizer step. Samples of an optimizer step = ``per_device_train_batch_size`` x
    ``gradient_accumulation_steps`` x data-parallel ranks."""
    warmup_steps: int = setting(0, ge=0)
    """Optimizer steps of linear warm-up; 0: ``warmup_ratio`` counts."""
    warmup_ratio: float = setting(0.0, ge=0, le=1)
    """Warm-up as a share of all optimizer steps."""
    num_train_epochs: float = setting(1.0, gt=0, read_if={"max_steps": (None,)})
    """Passes over the data in supervised training (fractions allowed); has no effect in RLVR."""
    max_grad_norm: float | None = setting(None, gt=0)
    """Gradients are clipped to this global norm; null: the pipeline's ``max_grad_norm``."""
    save_hf_model: bool = False
    """Write the trained model in Hugging Face format to ``output_dir/model`` at the end."""


@dataclass(frozen=True)
class GeneratingArguments:
    """``<role>.generating_args``: how responses are sampled."""

    do_sample: bool = True
    """false: greedy decoding."""
    temperature: float = setting(
        0.95, ge=0, le=1e4, parse=parse_temperature, example=1.0, read_if={"do_sample": (True,)}
    )
    """Softmax temperature; 0 is greedy. The trainer's log-probs use the same temperature."""
    top_p: float = setting(0.7, gt=0, le=1, read_if={"do_sample": (True,)})
    """Nucleus sampling; 1 is off. Training log-probs are not comparable with sampled ones below 1."""
    top_k: int = setting(50, ge=-1, lt=2**31, read_if={"do_sample": (True,)})
    """Sample from the k most probable tokens; -1 or 0 is off. Training log-probs are not comparable when it is on."""
    min_p: float = setting(0.0, ge=0, le=1, read_if={"do_sample": (True,)})
    """Drop tokens less likely than this share of the most probable one; 0 is off."""
    max_new_tokens: int | None = setting(None, ge=1)
    """Most tokens of a response. The pipeline's ``response_length`` (or sequence minus prompt) counts where it is
    smaller; null: exactly that."""
    min_new_tokens: int = setting(0, ge=0)
    """Tokens before which a response may not stop."""
    repetition_penalty: float = setting(1.0, ge=0.01, le=100)
    """Penalty on tokens already seen; 1 is off."""
    num_return_sequences: int | None = setting(None, ge=1)
    """Samples of a prompt. In training ``num_return_sequences_in_group`` counts; in validation this key."""
    stop_strings: list[str] | None = None
    """A response ends where one of these appears."""
    stop_token_ids: list[int] | None = None
    """A response ends with one of these tokens, in addition to the model's own end-of-sequence tokens."""
    include_stop_str_in_output: bool = setting(False, read_if={"stop_strings": ()})
    """Keep the stop string at the end of the response."""


@dataclass(frozen=True)
class StrategyArguments:
    """``<role>.strategy_args``: how the role's model is computed."""

    strategy_name: str = "fsdp2_train"
    """``fsdp2_train`` (training), ``fsdp2_infer`` (log-probs without training), ``hf_infer``, ``vllm`` or ``sglang``
    (generation), and the other backends' names."""
    strategy_config: dict[str, Any] = field(default_factory=dict)
    """Options of the strategy; each strategy has its own checked set of keys (see the strategies' own tables)."""


@dataclass(frozen=True)
class SequencePackingArguments:
    """``<role>.sequence_packing_args``; used with ``use_sequence_packing``."""

    algorithm: Literal["none", "load_balance"] = "none"
    """``none``: the rows of each micro-batch are packed. ``load_balance``: micro-batches are formed from all rows of
    a rank, with as many tokens as the lengths below allow and nearly the same work in each."""
    max_packed_sequence_length_forward: int | None = setting(None, ge=1)
    """``load_balance``: most tokens of a packed row in a forward pass; null: the pipeline's sequence length."""
    max_packed_sequence_length_train: int | None = setting(None, ge=1)
    """``load_balance``: most tokens of a packed row in training; null: the pipeline's sequence length."""
    min_num_micro_batches_forward: int = setting(1, ge=1)
    """``load_balance``: fewest micro-batches of a forward pass."""
    min_num_micro_batches_train: int = setting(1, ge=1)
    """``load_balance``: fewest micro-batches of an optimizer step."""


@dataclass(frozen=True)
class RouterReplayArguments:
    """``<role>.router_replay``: replay the engine's expert choices in training (mixture-of-experts models)."""

    mode: Literal["disabled", "R2", "R3"] = "disabled"
    """``R2``: choices of the old log-prob pass; ``R3``: choices of the generation engine."""


@dataclass(frozen=True)
class WorkerConfig:
    """A role section: where its workers run, which model they hold and how it is computed."""

    name: str = ""
    """Name in logs and metrics; empty: the section's own name."""
    worker_cls: str | None = setting(None, parse=parse_dotted_path, example="my_module.MyWorker")
    """Worker class: a dotted path of your own, or one of ROLL's published paths. In ``rewards`` the reward, which may
    have a short name (``math_rule``)."""
    model_args: ModelArguments = field(default_factory=ModelArguments)
    """Which model, and how it is built."""
    training_args: TrainingArguments = field(default_factory=TrainingArguments)
    """Optimizer, schedule and batch sizes (trained roles)."""
    data_args: DataArguments = field(default_factory=DataArguments)
    """Files, columns and templates."""
    generating_args: GeneratingArguments = field(default_factory=GeneratingArguments)
    """Sampling of responses (generating roles)."""
    strategy_args: StrategyArguments = field(default_factory=StrategyArguments)
    """Strategy that computes the model."""
    world_size: int | None = setting(None, ge=1)
    """Workers of a role without devices (rewards); null: 1. A role with devices has one worker per
    ``num_gpus_per_worker`` devices."""
    device_mapping: list[int] | None = setting(None, parse=parse_device_mapping, example="list(range(0, 2))")
    """Logical device ids in order: a list, or a string such as ``list(range(0, 8))``. Roles that name the same device
    take turns. Without accelerators an id is a CPU slot. null: a role without devices."""
    num_gpus_per_worker: int = setting(1, ge=1)
    """Devices of one worker. A training strategy uses 1. For ``vllm`` and ``sglang`` the tensor-parallel size of an
    engine, where ``strategy_config`` does not say it."""
    infer_batch_size: int = setting(16, ge=1)
    """Samples of one micro-batch in passes without gradient, where no token budget forms the micro-batches."""
    backend_timeout: float = setting(30.0, gt=0)
    """Minutes that a collective operation may take."""
    system_envs: dict[str, str] = field(default_factory=dict)
    """Environment variables of this role's workers, over the run's ``system_envs``."""
    max_concurrency: int | None = setting(None, ge=1)
    """Calls that one worker handles at a time; null: the role's own default."""
    use_prefix_sharing: bool = False
    """Compute what rows have in common once per micro-batch: the prompt of a group, the history of an episode's turns,
    other beginnings of 64 tokens or more. Same numbers, fewer tokens; for models whose layers are all causal
    attention, full or in a window."""
    use_remove_padding: bool = False
    """Compute real tokens only: the rows of each micro-batch become one without padding. Same numbers; for models whose
    layers are all causal attention, full or in a window."""
    use_dynamic_batching_in_train: bool = False
    """Form micro-batches from rows of like lengths, by tokens instead of samples, in training."""
    use_dynamic_batching_in_infer: bool = False
    """Form micro-batches from rows of like lengths, by tokens instead of samples, in passes without gradient."""
    max_tokens_per_microbatch_in_train: int | None = setting(
        None, ge=1, read_if={"use_dynamic_batching_in_train": (True,)}
    )
    """Most tokens of a micro-batch, padding included, with ``use_dynamic_batching_in_train``."""
    max_tokens_per_microbatch_in_infer: int | None = setting(
        None, ge=1, read_if={"use_dynamic_batching_in_infer": (True,)}
    )
    """Most tokens of a micro-batch, padding included, with ``use_dynamic_batching_in_infer``."""
    sequence_length_round_in_train: int = setting(8, ge=1)
    """Widths of micro-batches with padding are rounded up to a multiple of this, in training with dynamic batching."""
    sequence_length_round_in_infer: int = setting(8, ge=1)
    """Widths of micro-batches with padding are rounded up to a multiple of this, in passes without gradient with
    dynamic batching."""
    use_sequence_packing: bool = False
    """Lay several sequences into one row without padding; ``sequence_packing_args.algorithm`` says which."""
    sequence_packing_args: SequencePackingArguments = field(default_factory=SequencePackingArguments)
    """Which sequences are packed together."""
    router_replay: RouterReplayArguments = field(default_factory=RouterReplayArguments)
    """Expert choices replayed in training."""
    tag_included: list[str] | None = None
    """Rows with one of these tags are routed here."""


@dataclass(frozen=True)
class ReferenceWorkerConfig(WorkerConfig):
    """A role that computes log-probs and never learns."""

    strategy_args: StrategyArguments = field(default_factory=lambda: StrategyArguments("fsdp2_infer"))
    """Strategy that computes the model."""


@dataclass(frozen=True)
class GenerationWorkerConfig(WorkerConfig):
    """A role that generates."""

    # Which engine generates.
    strategy_args: StrategyArguments = field(default_factory=lambda: StrategyArguments("hf_infer"))
    # Number of restarts of each engine that is lost, while the others do its work; it takes part from the next weight
    # update on. Engines that share devices with other roles are not started again.
    max_restarts: int = setting(1, ge=0)
    # Seconds without an answer after which an engine is taken for lost and killed: in generation, where it answers
    # about twice a second or after its next token, whichever is later; and in a weight update, where it answers every
    # bucket. An engine compiles kernels and reads the longest prompts within this time.
    engine_timeout: float = setting(600.0, gt=0)
