"""The sub-sections that every role shares: model, training and generation arguments; data arguments are in ``data.py``.

Torch-free; a loaded configuration is frozen.  The text under each field is the user documentation of its key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.config.fields import parse_dtype, parse_temperature, setting
from roll.config.names import ATTENTION, DECAYING_SCHEDULERS, LR_SCHEDULERS


@dataclass(frozen=True)
class ModelArguments:
    """``<role>.model_args``: which model, and how it is built."""

    model_name_or_path: str | None = None
    """Folder or hub name; null: the pipeline's ``pretrain`` (``reward_pretrain`` for the critic, if that is set)."""
    adapter_name_or_path: str | None = None
    """Folder or hub name of a LoRA adapter in peft's format to start from; it decides target, rank and scale."""
    attn_implementation: str | None = setting(None, choices=ATTENTION, aliases=("flash_attn",))
    """``sdpa``, ``eager``, ``fa2`` (flash_attention_2), ``auto`` or null (``sdpa``)."""
    moe_aux_loss_coef: float | None = setting(None, ge=0)
    """Weight of a mixture-of-experts model's load-balancing loss; null: what the model's own config says."""
    disable_gradient_checkpointing: bool = False
    """Keep all activations instead of recomputing them in the backward pass: faster, more memory."""
    gradient_checkpointing_use_reentrant: bool = False
    """Use PyTorch's reentrant form of gradient checkpointing."""
    device_map: str = setting("balanced", inert="device_mapping decides")
    """Accepted for older files."""
    dtype: Literal["bf16", "fp16", "fp32"] = setting("bf16", parse=parse_dtype)
    """Compute type. Trained parameters are kept in float32 whatever stands here."""
    model_type: str | None = setting(
        None, choices=("auto_sequence_classification", "auto_token_classification", "trl"), example="trl"
    )
    """Head of a critic or reward model; ``trl`` is a scalar value head on a causal language model. null: the role's
    own."""
    num_labels: int = setting(1, ge=1)
    """Outputs of a classification head."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Overrides of entries of the model's ``config.json``, passed through as written."""
    freeze_module_prefix: str | None = None
    """Parameters whose name starts with this prefix (comma-separated list) are not trained."""
    ulysses_size: int = setting(1, ge=1)
    """Ranks that share each sequence (Ulysses context parallelism), under ``fsdp2_*`` and ``fsdp_*``. Divides the
    role's ranks and the model's attention heads; for models whose layers are all full attention."""
    lora_target: str | list[str] | None = None
    """Linear layers that get a LoRA adapter: ``all-linear`` (all but the output matrix), names (a list, or with
    commas), or a regular expression of whole module names; null: no LoRA."""
    lora_rank: int = setting(8, ge=1)
    """Rank of the adapters; used with ``lora_target``."""
    lora_alpha: int | None = setting(None, ge=1)
    """Scale of the adapters, divided by ``lora_rank``; null: twice ``lora_rank``."""
    lora_dropout: float = setting(0.0, ge=0, lt=1)
    """Dropout on the adapters' input; in supervised training only."""
    additional_target: str | list[str] | None = None
    """Further modules trained in full in addition to the adapters (a list, or with commas). A critic's head always
    is."""
    autocast_adapter_dtype: bool = setting(True, inert="adapters are trained in the type of master weights")
    """Accepted for older files."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Only for sources you trust."""


@dataclass(frozen=True)
class TrainingArguments:
    """``<role>.training_args``: optimizer, schedule and batch sizes of a trained role."""

    learning_rate: float = setting(5.0e-5, ge=0, example=1.0e-6)
    """Peak learning rate of AdamW."""
    lr_scheduler_type: str = setting("linear", choices=LR_SCHEDULERS)
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
    max_steps: int | None = setting(None, ge=1, inert="the run's max_steps and the batch sizes decide")
    """Optimizer steps of the learning-rate schedule; null: all that the run makes."""
    num_train_epochs: float = setting(1.0, gt=0)
    """Passes over the data in supervised training (fractions allowed); has no effect in RLVR."""
    max_grad_norm: float | None = setting(None, gt=0)
    """Gradients are clipped to this global norm; null: the pipeline's ``max_grad_norm``."""
    seed: int | None = setting(None, ge=0, inert="the run's seed decides")
    """null: the run's ``seed``."""
    fp16: bool | None = setting(None, inert="model_args.dtype decides")
    """Accepted for older files."""
    bf16: bool | None = setting(None, inert="model_args.dtype decides")
    """Accepted for older files."""
    save_hf_model: bool = False
    """Write the trained model in Hugging Face format to ``output_dir/model`` at the end."""
    dataloader_num_workers: int = setting(0, ge=0, inert="the driver reads the data")
    """Accepted for older files."""


@dataclass(frozen=True)
class GeneratingArguments:
    """``<role>.generating_args``: how responses are sampled."""

    do_sample: bool = True
    """false: greedy decoding."""
    temperature: float = setting(0.95, ge=0, le=1e4, parse=parse_temperature, read_if={"do_sample": (True,)})
    """Softmax temperature; 0 is greedy. The trainer's log-probs use the same temperature."""
    top_p: float = setting(0.7, gt=0, le=1, read_if={"do_sample": (True,)})
    """Nucleus sampling; 1 is off. Training log-probs are not comparable with sampled ones below 1."""
    top_k: int = setting(50, ge=-1, lt=2**31, read_if={"do_sample": (True,)})
    """Sample from the k most probable tokens; -1 or 0 is off. Training log-probs are not comparable when it is on."""
    min_p: float = setting(0.0, ge=0, le=1, read_if={"do_sample": (True,)})
    """Drop tokens less likely than this share of the most probable one; 0 is off."""
    num_beams: int = setting(1, ge=1)
    """Beams of a beam search; 1 is none."""
    max_new_tokens: int | None = setting(None, ge=1)
    """Most tokens of a response. The pipeline's ``response_length`` (or sequence minus prompt) counts where it is
    smaller; null: exactly that."""
    min_new_tokens: int = setting(0, ge=0)
    """Tokens before which a response may not stop."""
    repetition_penalty: float = setting(1.0, ge=0.01, le=100)
    """Penalty on tokens already seen; 1 is off."""
    length_penalty: float = setting(1.0, inert="it belongs to beam search")
    """Accepted for older files."""
    num_return_sequences: int | None = setting(None, ge=1)
    """Samples of a prompt. In training ``num_return_sequences_in_group`` counts; in validation this key."""
    stop_strings: list[str] | None = None
    """A response ends where one of these appears."""
    stop_token_ids: list[int] | None = None
    """A response ends with one of these tokens, in addition to the model's own end-of-sequence tokens."""
    include_stop_str_in_output: bool = setting(False, read_if={"stop_strings": ()})
    """Keep the stop string at the end of the response."""
    logprobs: int = setting(0, ge=0, inert="the log-prob of each sampled token always comes with it")
    """Accepted for older files."""
    seed: int | None = setting(None, ge=0, inert="the run's seed decides")
    """Seed of the sampling streams; null: the run's ``seed``."""
