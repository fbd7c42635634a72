"""Damaged configurations: each gives its own message, names the key, and nothing else is blamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.loader import load_config
from roll.config.reading.errors import ConfigError
from tests.config.good import GONE, GOOD, GOOD_SFT, changed, load, mistakes

TRAIN = "actor_train.training_args"
INFER = "actor_infer.generating_args"
FSDP = "actor_train.strategy_args.strategy_config"
PARTS = {
    "rewards.math.worker_cls": GONE,
    "rewards.math.components.math_rule.weight": 1,
    "rewards.math.components.format.gate": True,
}
FORMAT = "rewards.math.components.format"
SHARES = "actor_train.data_args.domain_interleave_probs"

# (changes, key that is blamed, part of the message)
DAMAGES: list[tuple[dict[str, Any], str, str]] = [
    # unknown keys
    ({"max_step": 10}, "max_step", "the nearest known one is max_steps"),
    ({"rollout_batchsize": 10}, "rollout_batchsize", "the nearest known one is rollout_batch_size"),
    ({"learning_rate": 1e-6}, "learning_rate", "it belongs at actor_train.training_args.learning_rate"),
    ({"actor_train.learning_rate": 1e-6}, "actor_train.learning_rate", "belongs at actor_train.training_args"),
    ({"device_mapping": [0]}, "device_mapping", "it belongs at actor_train.device_mapping"),
    ({f"{TRAIN}.lr": 1e-6}, f"{TRAIN}.lr", "unknown key"),
    ({f"{TRAIN}.leaning_rate": 1}, f"{TRAIN}.leaning_rate", "the nearest known one is learning_rate"),
    ({f"{INFER}.temprature": 1}, f"{INFER}.temprature", "the nearest known one is temperature"),
    ({"actor_train.model_args.dtpye": "bf16"}, "actor_train.model_args.dtpye", "nearest known one is dtype"),
    ({"actor_trian": {}}, "actor_trian", "the nearest known one is actor_train"),
    ({"rewards.math.tag_include": ["x"]}, "rewards.math.tag_include", "nearest known one is tag_included"),
    ({f"{FSDP}.fsdp_siz": 2}, f"{FSDP}.fsdp_siz", "the nearest known one is fsdp_size"),
    ({f"{FSDP}.wrap_policy": {"wrap_embedding": True}}, f"{FSDP}.wrap_policy.wrap_embedding", "wrap_embeddings"),
    (
        {"actor_infer.strategy_args.strategy_config.max_num_seq": 2},
        "actor_infer.strategy_args.strategy_config.max_num_seq",
        "the nearest known one is max_num_seqs",
    ),
    ({"checkpoint_config.outptu_dir": "x"}, "checkpoint_config.outptu_dir", "nearest known one is output_dir"),
    ({"validation.data_args.filename": "x"}, "validation.data_args.filename", "nearest known one is file_name"),
    ({"actor_infer.model_args.dtype": "fp32"}, "actor_infer.model_args.dtype", "must be actor_train's"),
    # wrong types
    ({"max_steps": "many"}, "max_steps", "must be a whole number"),
    ({"max_steps": 1.5}, "max_steps", "must be a whole number"),
    ({"max_steps": True}, "max_steps", "must be a whole number"),
    ({"max_steps": [10]}, "max_steps", "must be a whole number"),
    ({"max_steps": None}, "max_steps", "must be a whole number"),
    ({f"{TRAIN}.learning_rate": "fast"}, f"{TRAIN}.learning_rate", "must be a number"),
    ({f"{TRAIN}.learning_rate": float("nan")}, f"{TRAIN}.learning_rate", "must be a finite number"),
    ({f"{TRAIN}.learning_rate": float("inf")}, f"{TRAIN}.learning_rate", "must be a finite number"),
    ({"use_kl_loss": 1}, "use_kl_loss", "must be true or false"),
    ({"use_kl_loss": "yes please"}, "use_kl_loss", "must be true or false"),
    ({"exp_name": 1.5}, "exp_name", "quote it"),
    ({"exp_name": True}, "exp_name", "quote it"),
    ({"actor_train": 3}, "actor_train", "must be a section of keys"),
    ({TRAIN: "x"}, TRAIN, "must be a section of keys"),
    ({"rewards": ["math"]}, "rewards", "must map names to sections"),
    ({"rewards.math": "math_rule"}, "rewards.math", "must be a section of keys"),
    ({"rewards.math.tag_included": "math"}, "rewards.math.tag_included", "must be a list; for example"),
    ({"system_envs": ["A=1"]}, "system_envs", "must be a section of keys"),
    ({"system_envs.A": True}, "system_envs", "quote it"),
    ({f"{INFER}.stop_token_ids": ["x"]}, f"{INFER}.stop_token_ids", "must be a whole number"),
    ({"resume_from_checkpoint": 3.5}, "resume_from_checkpoint", "must be true or false, or must be text"),
    # bounds
    ({"max_steps": 0}, "max_steps", "must be at least 1"),
    ({"rollout_batch_size": -4}, "rollout_batch_size", "must be at least 1"),
    ({"num_return_sequences_in_group": 0}, "num_return_sequences_in_group", "must be at least 1"),
    ({"ppo_epochs": 0}, "ppo_epochs", "must be at least 1"),
    ({"gamma": 1.1}, "gamma", "must be at least 0 and at most 1"),
    ({"lambd": -0.1}, "lambd", "must be at least 0"),
    ({"pg_clip": -0.2}, "pg_clip", "must be at least 0"),
    ({"seed": -1}, "seed", "must be at least 0"),
    ({"rpc_timeout": 0}, "rpc_timeout", "must be greater than 0"),
    ({"value_clip": 0}, "value_clip", "must be greater than 0"),
    ({f"{TRAIN}.learning_rate": -1e-6}, f"{TRAIN}.learning_rate", "must be at least 0"),
    ({f"{TRAIN}.adam_beta1": 1.0}, f"{TRAIN}.adam_beta1", "less than 1"),
    ({f"{TRAIN}.warmup_ratio": 2}, f"{TRAIN}.warmup_ratio", "at most 1"),
    ({f"{TRAIN}.per_device_train_batch_size": 0}, f"{TRAIN}.per_device_train_batch_size", "at least 1"),
    ({f"{INFER}.temperature": -1}, f"{INFER}.temperature", "must be at least 0"),
    ({f"{INFER}.top_p": 0}, f"{INFER}.top_p", "must be greater than 0 and at most 1"),
    ({f"{INFER}.top_p": 1.5}, f"{INFER}.top_p", "must be greater than 0 and at most 1"),
    ({f"{INFER}.top_k": -2}, f"{INFER}.top_k", "must be at least -1"),
    ({"num_gpus_per_node": 0}, "num_gpus_per_node", "must be at least 1"),
    ({"actor_infer.num_gpus_per_worker": 0}, "actor_infer.num_gpus_per_worker", "must be at least 1"),
    # names
    ({"estimator": "gropo"}, "estimator", "for example estimator: grpo"),
    ({"pg_variant": "pppo"}, "pg_variant", "for example pg_variant: ppo"),
    ({"kl_penalty": "k9"}, "kl_penalty", "must be one of kl, k1, k2, k3"),
    ({"loss_agg_mode": "token_mean"}, "loss_agg_mode", "for example loss_agg_mode: token-mean"),
    ({"norm_mean_type": "bach"}, "norm_mean_type", "for example norm_mean_type: batch"),
    ({"importance_sampling": "sequence"}, "importance_sampling", "for example importance_sampling: seq"),
    ({"track_with": "tensorbord"}, "track_with", "for example track_with: tensorboard"),
    ({"track_with": ["stdout", "tensorbord"]}, "track_with", "must be one of tensorboard"),
    ({"actor_train.model_args.dtype": "bf61"}, "actor_train.model_args.dtype", "must be one of bf16"),
    ({f"{TRAIN}.lr_scheduler_type": "cosin"}, f"{TRAIN}.lr_scheduler_type", "lr_scheduler_type: cosine"),
    ({"actor_train.data_args.template": "qwen25"}, "actor_train.data_args.template", "for example template: qwen2_5"),
    ({"rewards.math.worker_cls": "math_rul"}, "rewards.math.worker_cls", "for example worker_cls: math_rule"),
    ({"rewards.math.worker_cls": GONE}, "rewards.math.worker_cls", "is needed"),
    ({"rewards.math.worker_cls": "my module.f"}, "rewards.math.worker_cls", "dotted path"),
    ({"rewards.math.on_error": "ignore"}, "rewards.math.on_error", "must be one of raise, mask, value"),
    ({"pipeline": "rlvrr"}, "pipeline", "for example pipeline: rlvr"),
    ({"train_infer_correction": "ices"}, "train_infer_correction", "must be one of the presets"),
    ({"train_infer_correction": {"is_weigth": {}}}, "train_infer_correction", "the nearest known one is is_weight"),
    ({"train_infer_correction": {"filters": [{"agg": "token"}]}}, "train_infer_correction", "filters[0].agg"),
    ({"train_infer_correction": [{"level": "word"}]}, "train_infer_correction", "must be one of token"),
    ({"train_infer_correction": [{"policy": "new"}]}, "train_infer_correction", "must be one of old, current"),
    ({"train_infer_correction": [{"metric": "k1"}]}, "train_infer_correction", "needs action: mask"),
    ({"train_infer_correction": [{"low": 2, "high": 1}]}, "train_infer_correction", "must not be greater than high 1"),
    ({"overlong_buffer_length": 200}, "overlong_buffer_length", "at most the length limit of a response, 128 tokens"),
    ({"overlong_buffer_length": 0}, "overlong_buffer_length", "at least 1"),
    ({"top_entropy_quantile": 0}, "top_entropy_quantile", "greater than 0"),
    ({"estimator": "gdpo"}, "estimator", "needs weights: the numbers"),
    ({"estimator": "remax", "norm_std_type": "batch"}, "norm_std_type", "must be null with remax"),
    (
        {"force_disable_old_logprobs_recompute": True, "top_entropy_quantile": 0.2},
        "force_disable_old_logprobs_recompute",
        "leaves no entropies for top_entropy_quantile 0.2",
    ),
    (
        {"force_disable_old_logprobs_recompute": True, "estimator": "optimal_token_baseline"},
        "force_disable_old_logprobs_recompute",
        "leaves no sums of squared probabilities for estimator: optimal_token_baseline",
    ),
    (
        {"force_disable_old_logprobs_recompute": True, "train_infer_correction": [{"action": "reject", "high": 2}]},
        "force_disable_old_logprobs_recompute",
        "leaves no log-probs of the trainer before the update",
    ),
    # devices and strategies
    ({"actor_infer.device_mapping": None}, "actor_infer.device_mapping", "is needed"),
    ({"actor_train.device_mapping": []}, "actor_train.device_mapping", "at least one device"),
    ({"actor_train.device_mapping": [0, 0]}, "actor_train.device_mapping", "device 0 more than once"),
    ({"actor_train.device_mapping": [-1, 0]}, "actor_train.device_mapping", "-1 is negative"),
    ({"actor_train.device_mapping": [0, 0.5]}, "actor_train.device_mapping", "0.5 is not a whole number"),
    ({"actor_train.device_mapping": "range(0, 2"}, "actor_train.device_mapping", "must be a list of device ids"),
    ({"actor_train.device_mapping": "__import__('os')"}, "actor_train.device_mapping", "must be a list of device"),
    ({"actor_train.device_mapping": "[i for i in (0, 1)]"}, "actor_train.device_mapping", "must be a list of device"),
    ({"actor_train.device_mapping": {"a": 1}}, "actor_train.device_mapping", "must be a list of device ids"),
    ({"actor_train.num_gpus_per_worker": 2}, "actor_train.num_gpus_per_worker", "must be 1"),
    ({"actor_infer.num_gpus_per_worker": 3}, "actor_infer.num_gpus_per_worker", "must divide the 2 devices"),
    (
        {"actor_infer.num_gpus_per_worker": 2, "actor_infer.device_mapping": [7, 8]},
        "actor_infer.device_mapping",
        "would span two nodes",
    ),
    ({"actor_train.world_size": 4}, "actor_train.world_size", "device_mapping gives 2 workers"),
    (
        {"actor_train.strategy_args.strategy_name": "fsdp2_trian"},
        "actor_train.strategy_args.strategy_name",
        "for example strategy_name: fsdp2_train",
    ),
    (
        {"actor_train.strategy_args.strategy_name": "hf_infer"},
        "actor_train.strategy_args.strategy_name",
        "actor_train trains; that needs fsdp2_train",
    ),
    (
        {"actor_infer.strategy_args.strategy_name": "fsdp2_infer"},
        "actor_infer.strategy_args.strategy_name",
        "actor_infer generates; that needs hf_infer",
    ),
    ({f"{FSDP}.param_dtype": "int8"}, f"{FSDP}.param_dtype", "must be one of bf16"),
    ({f"{FSDP}.fsdp_size": "two"}, f"{FSDP}.fsdp_size", "must be a whole number"),
    (
        {"actor_train.device_mapping": [0, 1, 2, 3], f"{FSDP}.fsdp_size": 3, f"{TRAIN}.gradient_accumulation_steps": 4},
        f"{FSDP}.fsdp_size",
        "must divide the role's 4 ranks",
    ),
    (
        {"actor_infer.strategy_args.strategy_config.max_model_len": 128},
        "actor_infer.strategy_args.strategy_config.max_model_len",
        "leaves no room for a response",
    ),
    # models and data
    ({"pretrain": GONE}, "pretrain", "is needed"),
    ({"actor_train.data_args.file_name": GONE}, "actor_train.data_args.file_name", "is needed"),
    ({"actor_train.data_args.file_name": "train.xlsx"}, "actor_train.data_args.file_name", "kinds .json, .jsonl"),
    ({"actor_train.data_args.prompt": "prompt"}, "actor_train.data_args.prompt", "excludes"),
    ({"actor_train.data_args.file_name": "hub:gsm8k"}, "actor_train.data_args.file_name", "hub:OWNER/NAME"),
    ({"actor_train.data_args.file_name": "openai/gsm8k"}, "actor_train.data_args.file_name", "hub:openai/gsm8k"),
    ({"actor_train.data_args.template": "qwen2.5"}, "actor_train.data_args.template", "or a file (.jinja, .j2)"),
    ({"tag_to_template": {"math": "chatlm"}}, "tag_to_template.math", "for example math: chatml"),
    ({"actor_train.data_args.dataset_filter": "a b"}, "actor_train.data_args.dataset_filter", "{column: value"),
    ({"actor_train.data_args.dataset_filter": {"d": {"mni": 1}}}, "actor_train.data_args.dataset_filter", "min, max"),
    ({"actor_train.data_args.truncation": "top"}, "actor_train.data_args.truncation", "one of error, left"),
    ({"actor_train.data_args.curriculum": {"bands": 0}}, "actor_train.data_args.curriculum.bands", "at least 1"),
    ({"validation.data_args.file_name": GONE}, "validation.data_args.file_name", "is needed"),
    ({"validation.sets": {"a/b": {"data_args": {"file_name": "a.jsonl"}}}}, "validation.sets.a/b", "letters, digits"),
    ({"validation.sets": {"a": {}}}, "validation.sets.a.data_args.file_name", "is needed"),
    (
        {"validation.sets": {"a": {"data_args": {"file_name": "a.jsonl"}, "prompt_length": 9}}},
        "validation.sets.a.sequence_length",
        "set both or none",
    ),
    # lengths
    ({"response_length": GONE}, "response_length", "is needed (or sequence_length)"),
    ({"response_length": GONE, "sequence_length": 128}, "sequence_length", "greater than prompt_length 128"),
    ({"sequence_length": 300}, "sequence_length", "prompt_length 128 + response_length 128"),
    ({"val_prompt_length": 64}, "val_sequence_length", "set both or none"),
    ({"val_sequence_length": 64}, "val_prompt_length", "set both or none"),
    ({"val_prompt_length": 64, "val_sequence_length": 64}, "val_sequence_length", "greater than val_prompt_length"),
    # batches
    (
        {f"{TRAIN}.gradient_accumulation_steps": 3},
        f"{TRAIN}.gradient_accumulation_steps",
        "64 prompts x 4 = 256 samples do not divide into optimizer steps of 48",
    ),
    (
        {"actor_train.device_mapping": [0, 1, 2]},
        f"{TRAIN}.gradient_accumulation_steps",
        "optimizer steps of 192 (8 per micro-batch x 8 micro-batches x 3 ranks)",
    ),
    ({"rollout_batch_size": 8}, f"{TRAIN}.gradient_accumulation_steps", "gradient_accumulation_steps: 2, or"),
    (
        {"estimator": "gae", "critic": {"device_mapping": [0], "training_args": {"x": 1}}},
        "critic.training_args.x",
        "unknown key",
    ),
    (
        {
            "estimator": "gae",
            "critic": {"device_mapping": [0], "training_args": {"per_device_train_batch_size": 3}},
        },
        "critic.training_args.gradient_accumulation_steps",
        "do not divide into optimizer steps of 3",
    ),
    # algorithm
    ({"estimator": "gae"}, "critic", "is needed by estimator: gae"),
    ({"use_kl_loss": True, "kl_loss_coef": 0.1, "reference": GONE}, "reference", "is needed"),
    ({"add_token_level_kl": True, "reference": GONE}, "reference", "is needed"),
    (
        {"estimator": "rloo", "num_return_sequences_in_group": 1, f"{TRAIN}.gradient_accumulation_steps": 4},
        "num_return_sequences_in_group",
        "must be at least 2 with rloo",
    ),
    ({"difficulty_low_threshold": 0.9, "difficulty_high_threshold": 0.1}, "difficulty_low_threshold", "not be greater"),
    (
        {"enable_old_logprobs_recompute": True, "force_disable_old_logprobs_recompute": True},
        "force_disable_old_logprobs_recompute",
        "contradicts",
    ),
    (
        {
            "estimator": "gae",
            "critic_warmup": 10,
            "critic": {"device_mapping": [0], "training_args": {"per_device_train_batch_size": 8}},
        },
        "critic_warmup",
        "must be less than max_steps 10",
    ),
    # rewards
    ({"rewards": {}}, "rewards", "at least one reward domain"),
    (
        {"rewards.math.response_filter_config.type": "std_filter"},
        "rewards.math.response_filter_config.type",
        "has no meaning for a single response",
    ),
    ({"rewards.math.components": {"format": {}}}, "rewards.math.worker_cls", "does not go with components"),
    ({**PARTS, f"{FORMAT}.gatee": True}, f"{FORMAT}.gatee", "nearest known one is gate"),
    ({**PARTS, f"{FORMAT}.weight": 2}, f"{FORMAT}.weight", "has no meaning for a gate"),
    ({**PARTS, f"{FORMAT}.worker_cls": "formt"}, f"{FORMAT}.worker_cls", "for example worker_cls: format"),
    ({**PARTS, "rewards.math.components.own": {}}, "rewards.math.components.own.worker_cls", "is needed"),
    ({**PARTS, "rewards.math.components.a/b": {"worker_cls": "f1"}}, "rewards.math.components.a/b", "a slash"),
    ({**PARTS, "rewards.math.components.math_rule.gate": True}, f"{FORMAT}.gate", "at least one component"),
    ({**PARTS, "rewards.math.reward_kwargs": {"score": 1}}, "rewards.math.reward_kwargs", "each to its own"),
    ({"rewards.choice.tag_included": GONE}, "rewards.choice.tag_included", "is needed with several rewards"),
    ({"rewards.choice.tag_included": ["gsm8k"]}, "rewards.choice.tag_included", "belongs to rewards.math already"),
    ({SHARES: {"math": 0.5, "choise": 0.5}}, f"{SHARES}.choise", "the nearest is choice"),
    ({SHARES: {"math": 0, "choice": 0}}, SHARES, "no domain has a share above 0"),
    ({SHARES: {"math": 1.5, "choice": -0.5}}, f"{SHARES}.choice", "must be at least 0"),
    (
        {"rewards.math.query_filter_config": {"type": "mean_filtr"}},
        "rewards.math.query_filter_config.type",
        "for example type: mean_filter",
    ),
    (
        {"rewards.math.query_filter_config": {"type": "mean_filter", "filter_args": {"threshold_upp": 1}}},
        "rewards.math.query_filter_config.filter_args.threshold_upp",
        "the nearest known one is threshold_up",
    ),
    (
        {"rewards.math.query_filter_config": {"type": "mean_filter", "filter_args": {"threshold_down": 1}}},
        "rewards.math.query_filter_config.filter_args.threshold_down",
        "must be less than threshold_up",
    ),
    (
        {"rewards.math.query_filter_config": {"type": "std_filter", "filter_args": {"std_threshold": "low"}}},
        "rewards.math.query_filter_config.filter_args.std_threshold",
        "must be a number",
    ),
    # interpolation
    ({"exp_name": "${nam}"}, "exp_name", "refers to nam, which is not set"),
    ({"exp_name": "${pretrian}"}, "exp_name", "the nearest key is pretrain"),
    ({"exp_name": "???"}, "exp_name", "must be given"),
    ({"exp_name": "${oc.env:ROLL_TEST_NOT_THERE}"}, "exp_name", "cannot be resolved"),
]


def test_the_good_ones_are_good(tmp_path: Path) -> None:
    assert mistakes(tmp_path, GOOD) == ()
    assert mistakes(tmp_path, GOOD_SFT) == ()


@pytest.mark.parametrize(("changes", "key", "fragment"), DAMAGES)
def test_damage_is_named(tmp_path: Path, changes: dict[str, Any], key: str, fragment: str) -> None:
    problems = mistakes(tmp_path, changed(changes))
    assert [problem.key for problem in problems] == [key]
    assert fragment in str(problems[0])
    assert "config.yaml" in problems[0].source


SFT_DAMAGES: list[tuple[dict[str, Any], str, str]] = [
    ({"sft_train.device_mapping": GONE}, "sft_train.device_mapping", "is needed"),
    ({"sft_train.data_args.file_name": GONE}, "sft_train.data_args.file_name", "is needed"),
    ({"pretrain": GONE}, "pretrain", "is needed"),
    ({"sequence_length": 1}, "sequence_length", "must be at least 2"),
    ({"query_key": "input"}, "prompt_key", "goes with query_key"),
    ({"rollout_batch_size": 8}, "rollout_batch_size", "unknown key"),
    (
        {"sft_train.strategy_args.strategy_name": "hf_infer"},
        "sft_train.strategy_args.strategy_name",
        "sft_train trains",
    ),
    ({"validation": {}}, "validation.data_args.file_name", "is needed"),
]


@pytest.mark.parametrize(("changes", "key", "fragment"), SFT_DAMAGES)
def test_sft_damage_is_named(tmp_path: Path, changes: dict[str, Any], key: str, fragment: str) -> None:
    problems = mistakes(tmp_path, changed(changes, GOOD_SFT))
    assert [problem.key for problem in problems] == [key]
    assert fragment in str(problems[0])


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    changes = {"max_stepps": 1, "gamma": 3, "pretrain": "${nope}", "rewards.math.worker_cls": "nothing", TRAIN: "x"}
    problems = mistakes(tmp_path, changed(changes), "lambd=7", "no-equals-sign")
    assert {problem.key for problem in problems} == {
        "max_stepps",
        "gamma",
        "pretrain",
        "rewards.math.worker_cls",
        TRAIN,
        "lambd",
        "(command line)",
    }


def test_place_of_a_mistake(tmp_path: Path) -> None:
    problems = mistakes(tmp_path, changed({f"{TRAIN}.learning_rate": "x"}), "gamma=2")
    places = {problem.key: problem.source for problem in problems}
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "learning_rate" in text)
    assert places[f"{TRAIN}.learning_rate"].endswith(f"config.yaml:{line}")
    assert places["gamma"] == "command line"


def test_missing_files_and_models(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    changes = {
        "pretrain": str(tmp_path / "model"),
        "actor_train.data_args.file_name": [str(tmp_path / "no.jsonl")],
        "validation.data_args.file_name": str(tmp_path / "none.parquet"),
        "resume_from_checkpoint": str(tmp_path / "checkpoint-3"),
    }
    text = "\n".join(map(str, mistakes(tmp_path, changed(changes), check_files=True)))
    assert "has no config.json" in text
    assert text.count("no such file") == 2
    assert "no such checkpoint folder" in text
    assert mistakes(tmp_path, changed(changes), check_files=False) == ()


def test_sequences_longer_than_the_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"max_position_embeddings": 200}')
    changes = {"pretrain": str(tmp_path / "model")}
    told = [notice.text for notice in load(tmp_path, changed(changes)).warnings if notice.key == "pretrain"]
    assert len(told) == 1 and "256 tokens are longer than the model's 200 positions" in told[0]
    told = [notice.text for notice in load(tmp_path, changed(changes, GOOD_SFT)).warnings]
    assert any("longer than the model's 200" in text for text in told)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text("a: 1")
    with pytest.raises(ConfigError, match=r"must be a file that ends in \.yaml"):
        load_config(None, tmp_path / "config.yml")


def test_broken_yaml_and_duplicate_keys(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    for text, fragment in (("a: [1, 2", "not valid YAML"), ("a: 1\na: 2\n", "duplicate key"), ("", "is empty")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=fragment):
            load_config(None, file)


def test_missing_file_lists_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "grpo_config.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match=r"there is .*grpo_config\.yaml.*nearest: grpo_config"):
        load_config(None, tmp_path, "grpo_confg")
