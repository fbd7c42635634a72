"""The sections of a role: one dataclass a YAML section. Torch-free; a loaded config is frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ModelArguments:
    """``<role>.model_args``."""

    model_name_or_path: str | None = None
    """Folder or hub name; null: the pipeline's ``pretrain`` (``reward_pretrain`` for critic and reward model)."""
    adapter_name_or_path: str | None = None
    attn_implementation: str | None = None
    """``sdpa``, ``eager``, ``fa2`` (flash_attention_2) or null (``sdpa``)."""
    moe_aux_loss_coef: float | None = None
    disable_gradient_checkpointing: bool = False
    gradient_checkpointing_use_reentrant: bool = False
    device_map: str = "balanced"
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    model_type: str | None = None
    num_labels: int = 1
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    freeze_module_prefix: str | None = None
    ulysses_size: int = 1
    lora_target: str | None = None
    lora_rank: int = 8
    lora_alpha: int | None = None
    lora_dropout: float = 0.0
    additional_target: str | None = None
    autocast_adapter_dtype: bool = True
    trust_remote_code: bool = False


@dataclass(frozen=True)
class TrainingArguments:
    """``<role>.training_args``."""

    learning_rate: float = 5.0e-5
    lr_scheduler_type: str = "linear"
    """``linear``, ``cosine``, ``constant`` (each after the warm-up)."""
    min_lr_ratio: float = 0.0
    """The learning rate at the end of a decaying schedule, as a share of ``learning_rate``."""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1.0e-8
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    max_steps: int | None = None
    num_train_epochs: float = 1.0
    max_grad_norm: float | None = None
    """null: the pipeline's ``max_grad_norm``."""
    seed: int | None = None
    fp16: bool | None = None
    bf16: bool | None = None
    save_hf_model: bool = False
    dataloader_num_workers: int = 0


@dataclass(frozen=True)
class DataArguments:
    """``<role>.data_args``."""

    template: str = "native"
    file_name: str | list[str] | None = None
    eval_file_name: str | list[str] | None = None
    dataset_dir: str | None = None
    dataset_type: str = "json"
    domain_interleave_probs: dict[str, float] | None = None
    preprocessing_num_workers: int | None = None
    tag: str = "tag"
    id: str = "id"
    prompt: str | None = None
    response: str = "solution"
    messages: str | None = None


@dataclass(frozen=True)
class GeneratingArguments:
    """``<role>.generating_args``."""

    do_sample: bool = True
    temperature: float = 0.95
    top_p: float = 0.7
    top_k: int = 50
    num_beams: int = 1
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    length_penalty: float = 1.0
    num_return_sequences: int | None = None
    stop_strings: list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int = 0
    seed: int | None = None


@dataclass(frozen=True)
class StrategyArguments:
    """``<role>.strategy_args``: how the role's model is computed."""

    strategy_name: str = "fsdp2_train"
    strategy_config: dict[str, Any] = field(default_factory=dict)
    """As written; :func:`roll.config.strategy.typed_strategy_config` gives the checked dataclass of the strategy."""


@dataclass(frozen=True)
class WorkerConfig:
    """A role section: ``actor_train``, ``actor_infer``, ``reference``, ``critic``, ``reward_model`` ..."""

    name: str = ""
    worker_cls: str | None = None
    pg_variant: str | None = None
    model_args: ModelArguments = field(default_factory=ModelArguments)
    training_args: TrainingArguments = field(default_factory=TrainingArguments)
    data_args: DataArguments = field(default_factory=DataArguments)
    generating_args: GeneratingArguments = field(default_factory=GeneratingArguments)
    strategy_args: StrategyArguments = field(default_factory=StrategyArguments)
    world_size: int | None = None
    """Workers of a role without devices (CPU-only roles such as rewards)."""
    device_mapping: list[int] | None = None
    """Logical device ids, in order; null: a CPU-only role."""
    num_gpus_per_worker: int = 1
    model_update_frequency: int = 1
    infer_batch_size: int = 16
    backend_timeout: float = 30
    """Minutes that a collective may take."""
    system_envs: dict[str, str] = field(default_factory=dict)
    max_concurrency: int | None = None
