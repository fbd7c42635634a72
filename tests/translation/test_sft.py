"""Supervised runs of verl and SkyRL: the same batches, steps, schedules and columns here."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.reading.errors import ConfigError
from roll.translation.command import load
from tests.translation.conftest import QUICKSTART, Translate

VERL = (
    "torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=t.parquet "
    "data.val_files=v.parquet model.path=Qwen/Qwen3-8B trainer.logger=console "
)
OLD_VERL = (
    "torchrun --standalone --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer data.train_files=t.parquet "
    "data.val_files=v.parquet model.partial_pretrain=Qwen/Qwen3-4B "
)
SKYRL = (
    "uv run --isolated --extra fsdp -m skyrl.train.main_sft model.path=Qwen/Qwen2.5-0.5B-Instruct max_length=512 "
    "placement.num_gpus_per_node=4 logger=console dataset_name=yahma/alpaca-cleaned "
)
ARGUMENTS, OPTIONS = "sft_train.training_args", "sft_train.strategy_args.strategy_config"
CASES: list[tuple[str, dict[str, Any]]] = [
    (  # their defaults: 256 rows in micro-batches of 4 on 8 ranks, 8192 tokens a device
        VERL,
        {
            "pipeline": "sft",
            "train_on": "assistant",
            "sequence_length": 1024,
            "sft_train.strategy_args.strategy_name": "fsdp_train",
            "sft_train.device_mapping": "list(range(0,8))",
            f"{ARGUMENTS}.learning_rate": 1e-3,
            f"{ARGUMENTS}.per_device_train_batch_size": 4,
            f"{ARGUMENTS}.gradient_accumulation_steps": 8,
            f"{ARGUMENTS}.num_train_epochs": 4.0,
            "sft_train.max_tokens_per_microbatch_in_train": 8192,
            "sft_train.data_args.messages": "messages",
            "validation.data_args.file_name": ["v.parquet"],
        },
    ),
    (  # half the ranks share sequences
        f"{VERL} engine.ulysses_sequence_parallel_size=2 engine.strategy=fsdp2 optim=fsdp optim.lr=1e-5 "
        "optim.betas=[0.9,0.95] optim.lr_scheduler_type=cosine optim.min_lr_ratio=0.1 trainer.total_training_steps=20 "
        "model.lora_rank=32 model.lora_alpha=16",
        {
            "max_steps": 20,
            "sft_train.strategy_args.strategy_name": "fsdp2_train",
            "sft_train.model_args.ulysses_size": 2,
            f"{ARGUMENTS}.gradient_accumulation_steps": 16,
            "sft_train.max_tokens_per_microbatch_in_train": 16384,
            f"{ARGUMENTS}.adam_beta2": 0.95,
            f"{ARGUMENTS}.min_lr_ratio": 0.1,
            "sft_train.model_args.lora_rank": 32,
        },
    ),
    (
        f"{VERL} engine=megatron engine.tensor_model_parallel_size=2 engine.pipeline_model_parallel_size=2 "
        "optim.lr=2e-5 "
        "optim.min_lr=2e-6 optim.lr_decay_style=cosine data.train_batch_size=64 data.use_dynamic_bsz=False",
        {
            "sft_train.strategy_args.strategy_name": "megatron_train",
            f"{OPTIONS}.tensor_model_parallel_size": 2,
            f"{ARGUMENTS}.gradient_accumulation_steps": 8,
            f"{ARGUMENTS}.min_lr_ratio": 0.1,
        },
    ),
    (
        "python -m verl.trainer.sft_trainer_ray trainer.n_gpus_per_node=2 trainer.nnodes=2 data.train_files=t.parquet "
        "model.path=m engine=veomni engine.ulysses_parallel_size=2",
        {
            "sft_train.strategy_args.strategy_name": "fsdp2_train",
            "sft_train.device_mapping": "list(range(0,4))",
            "sft_train.model_args.ulysses_size": 2,
        },
    ),
    (  # the older trainer's defaults, and a question and its answer in entries of one column
        f"VERL_LOGGING_LEVEL=INFO VERL_HOME=/v {OLD_VERL} data.prompt_key=extra_info data.response_key=extra_info "
        "+data.prompt_dict_keys=[question] +data.response_dict_keys=[answer] data.micro_batch_size=8",
        {
            "sft_train.data_args.prompt": "extra_info.question",
            "validation.data_args.response": "extra_info.answer",
            "sft_train.data_args.messages": None,
            "sft_train.strategy_args.strategy_name": "fsdp2_train",
            f"{ARGUMENTS}.learning_rate": 1e-5,
            f"{ARGUMENTS}.adam_beta2": 0.95,
            f"{ARGUMENTS}.warmup_ratio": 0.1,
            f"{ARGUMENTS}.lr_scheduler_type": "cosine",
            f"{ARGUMENTS}.per_device_train_batch_size": 2,
            f"{ARGUMENTS}.gradient_accumulation_steps": 32,
            "sft_train.use_remove_padding": False,
        },
    ),
    (
        f"{OLD_VERL} data.multiturn.enable=true data.multiturn.messages_key=turns ulysses_sequence_parallel_size=2 "
        "use_remove_padding=True model.fsdp_config.model_dtype=bf16 optim.warmup_steps_ratio=0.2 model.lora_rank=8",
        {
            "sft_train.data_args.messages": "turns",
            "sft_train.data_args.prompt": None,
            "sft_train.model_args.ulysses_size": 2,
            "sft_train.model_args.lora_rank": 8,
            f"{OPTIONS}.master_dtype": "bf16",
            f"{ARGUMENTS}.warmup_ratio": 0.2,
            "train_on": "assistant",
        },
    ),
    (  # their defaults: Megatron on 2 x 2 ranks, which leaves one
        SKYRL,
        {
            "train_on": "last",
            "sequence_length": 512,
            "sft_train.strategy_args.strategy_name": "megatron_train",
            f"{OPTIONS}.pipeline_model_parallel_size": 2,
            f"{ARGUMENTS}.per_device_train_batch_size": 2,
            f"{ARGUMENTS}.gradient_accumulation_steps": 2,
            f"{ARGUMENTS}.num_train_epochs": 1.0,
            "sft_train.data_args.file_name": ["hub:yahma/alpaca-cleaned:train[:100]"],
            "save_steps": 0,
        },
    ),
    (
        f"{SKYRL} strategy=fsdp batch_size=24 micro_train_batch_size_per_gpu=6 num_steps=40 ckpt_path=/c "
        "resume_from=latest "
        '"eval_datasets=[a/b]" "eval_dataset_splits=[train[-500:]]" train_on_what=all_assistant_messages '
        "optimizer_config.lr=1e-6 model.lora.rank=16 fsdp_config.cpu_offload=true",
        {
            "train_on": "assistant",
            "max_steps": 40,
            "output_dir": "/c",
            "resume_from_checkpoint": True,
            "sft_train.strategy_args.strategy_name": "fsdp2_train",
            f"{OPTIONS}.offload_policy": True,
            f"{ARGUMENTS}.gradient_accumulation_steps": 1,
            "validation.data_args.file_name": ["hub:a/b:train[-500:]"],
            "sft_train.model_args.lora_rank": 16,
        },
    ),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_supervised_runs(text: str, expected: dict[str, Any], translated: Translate) -> None:
    translation = translated(text)
    assert {key: translation.keys.get(key) for key in expected} == expected
    assert not any(key.startswith(("actor_", "rewards", "reference")) for key in translation.keys)
    assert not any("actor_train" in word for note in translation.notes for word in note.ours)
    load(translation, QUICKSTART)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{VERL} data.train_batch_size=100", "do not divide into micro-batches of"),
        (
            f"{VERL} engine.fsdp_sise=2",
            "no translation is known for this key of SFT of verl; the nearest known one is engine",
        ),
        (f"{VERL} data.custom_cls.path=mine.py", "code of theirs that runs inside their trainer"),
        (f"{VERL} trainer.test_freq=sometimes", "must be a whole number or after_each_epoch"),
        (SKYRL.replace("max_length=512", ""), "max_length: is needed"),
        (f"{SKYRL} dummy_run_full_ctx=true", "trains on made-up rows"),
    ],
)
def test_what_has_no_translation_is_refused(text: str, reason: str, translated: Translate) -> None:
    with pytest.raises(ConfigError, match=reason):
        translated(text)


def test_an_epoch_becomes_steps_where_the_rows_are_known(translated: Translate) -> None:
    found = translated(f"{VERL} trainer.test_freq=after_each_epoch trainer.save_freq=100", train_rows=2600)
    assert (found.keys["eval_steps"], found.keys["save_steps"]) == (10, 100)


@pytest.mark.parametrize("processes", ["gpu", ""])
def test_processes_that_are_not_counted_take_a_node(processes: str, translated: Translate) -> None:
    text = VERL.replace("--nproc_per_node=8", f"--nproc_per_node={processes}")
    assert translated(text).keys == translated(VERL).keys
