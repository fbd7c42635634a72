"""The arithmetic between keys, refusals, and the command itself."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll import cli
from roll.config.reading.compose import hydra_value, parse_override
from roll.config.reading.errors import ConfigError
from roll.translation.command import load
from roll.translation.engine import Translation
from roll.translation.verl import TOOL_TEMPLATE
from tests.agents.templates import published
from tests.translation import commands
from tests.translation.conftest import QUICKSTART, Translate

VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm actor_rollout_ref.model.path=m "
SKYRL = "python -m skyrl_train.entrypoints.main_base trainer.policy.model.path=m "


def refusal(translated: Translate, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        translated(text)
    return str(error.value)


def devices(translation: Translation) -> dict[str, Any]:
    return {key.partition(".")[0]: value for key, value in translation.keys.items() if key.endswith(".device_mapping")}


def test_an_unknown_key_is_refused_with_the_nearest(translated: Translate) -> None:
    message = refusal(translated, commands.VERL_GRPO + " actor_rollout_ref.rollout.gpu_memory_utilisation=0.5 zzz.q=1")
    assert "2 mistakes" in message
    assert "the nearest known one is actor_rollout_ref.rollout.gpu_memory_utilization" in message
    assert "VERL_ENABLE_PARAM_OFLOAD" in refusal(translated, f"VERL_ENABLE_PARAM_OFLOAD=1 {VERL}")


def test_a_scripts_own_variables_and_sections_in_json(translated: Translate) -> None:
    options = """generator.inference_engine.engine_init_kwargs='{"max_model_len": 4096, "a": {"b": 1}}'"""
    translation = translated(f"SKYRL_ROOT=/r {SKYRL} {options}")
    assert any("left out: SKYRL_ROOT is no variable" in remark for remark in translation.remarks)
    prefix = "actor_infer.strategy_args.strategy_config"
    assert translation.keys[f"{prefix}.max_model_len"] == 4096
    assert translation.keys[f"{prefix}.engine_args.a"] == {"b": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer.strategy=fsdp3", "known: deepspeed, fsdp, fsdp2, megatron; the nearest is fsdp"),
        ("algorithm.adv_estimator=grpoo", "the nearest is grpo"),
        ("trainer.use_sample_packing=true trainer.remove_microbatch_padding=false", "is another spelling of"),
        ("VERL_ENABLE_PARAM_OFFLOAD=yes actor_rollout_ref.actor.deepspeed.zero_stage=3", "must be 0 or 1"),
        ("trainer.logger=[mlfow]", "the nearest is mlflow"),
        ("generator.max_turns=5", "several turns, tools and agents have no translation"),
        (
            f"CUDA_VISIBLE_DEVICES=3 {VERL} trainer.n_gpus_per_node=2 "
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 critic.ppo_micro_batch_size_per_gpu=1",
            "names 1 devices, but a node is to have 2",
        ),
        (f"{VERL} algorithm.adv_estimator=grpo", "micro-batch of actor_train"),
        (f"{VERL} critic.enable=false actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "gae needs values"),
        (f"{SKYRL} generator.num_inference_engines=3", "take 3 devices, but the trainer they share has 4"),
        (f"{VERL} actor_rollout_ref.rollout.max_model_len=long", "max_model_len = 'long'"),
        (f"{VERL} data.val_batch_size=all data.seed=any", "2 mistakes"),
        (f"{VERL} algorithm.gdpo_reward_weights=[much]", "gdpo_reward_weights = ['much']"),
        (f"{VERL} algorithm.rollout_correction.rollout_is_threshold=low", "must be a number, or two as 0.5_5.0"),
        (
            f"{VERL} algorithm.rollout_correction.rollout_is=token "
            "algorithm.rollout_correction.rollout_is_threshold=null",
            "rollout_is_threshold = null: is needed with rollout_is",
        ),
        (f"{VERL} algorithm.rollout_correction.rollout_rs_threshold='2,low'", "must be a number, or two as 0.5_5.0"),
        *(
            (
                f"{VERL} actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 algorithm.adv_estimator=grpo "
                f"algorithm.rollout_correction.rollout_rs={name} "
                f"algorithm.rollout_correction.rollout_rs_threshold={bound}",
                f"must be greater than 0: {name} has bounds of ratios",
            )
            for name, bound in (("token_k1", "-1"), ("token_k1", "0_2"), ("sequence", "0"))
        ),
        (f"{VERL} algorithm.adv_estimator=[grpo]", "known: gae, grpo"),
    ],
)
def test_values_without_a_translation(translated: Translate, text: str, message: str) -> None:
    assert message in refusal(translated, text)


def test_bounds_of_weights_may_be_null_without_weights(translated: Translate) -> None:
    threshold = "algorithm.rollout_correction.rollout_is_threshold"
    assert translated(f"{threshold}=null").keys == {}
    assert translated(f"algorithm.rollout_correction.rollout_is=null {threshold}='null'").keys == {}


def test_the_recipe_counts_where_theirs_is_silent(translated: Translate) -> None:
    """The quickstart: 128 prompts x 8 samples, optimizer steps of 512 on 8 GPUs."""
    keys = translated("bash x.sh trainer.micro_train_batch_size_per_gpu=4").keys
    assert keys["actor_train.training_args.gradient_accumulation_steps"] == 16
    keys = translated("trainer.n_gpus_per_node=4").keys
    assert keys["actor_train.training_args.gradient_accumulation_steps"] == 16
    assert keys["reference.device_mapping"] == "list(range(0,4))"
    keys = translated("bash x.sh generator.n_samples_per_prompt=4 trainer.policy_mini_batch_size=32").keys
    assert keys["actor_train.training_args.gradient_accumulation_steps"] == 2


def test_roles_on_devices_of_their_own(translated: Translate) -> None:
    apart = " trainer.placement.colocate_all=false generator.num_inference_engines=4"
    assert devices(translated(SKYRL + apart)) == {
        "actor_train": "list(range(0,4))",
        "reference": "list(range(0,4))",
        "actor_infer": "list(range(4,8))",
    }
    apart += " trainer.placement.colocate_policy_ref=false trainer.placement.ref_num_gpus_per_node=2"
    assert devices(translated(SKYRL + apart)) == {
        "actor_train": "list(range(0,4))",
        "reference": "list(range(4,6))",
        "actor_infer": "list(range(6,10))",
    }
    nodes = "trainer.n_gpus_per_node=8 trainer.nnodes=2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    translation = translated(f"{VERL} {nodes} critic.ppo_micro_batch_size_per_gpu=1")
    assert set(devices(translation).values()) == {"list(range(0,16))"}
    assert translation.keys["num_gpus_per_node"] == 8


def test_parallel_ranks_leave_fewer_replicas(translated: Translate) -> None:
    sizes = "trainer.strategy=megatron trainer.policy.megatron_config.tensor_model_parallel_size=2"
    keys = translated(f"{SKYRL} {sizes} trainer.micro_train_batch_size_per_gpu=4").keys
    assert keys["actor_train.training_args.gradient_accumulation_steps"] == 256 * 5 // (4 * 2)
    assert keys["actor_train.strategy_args.strategy_config.tensor_model_parallel_size"] == 2
    keys = translated(f"{SKYRL} trainer.policy.sequence_parallel_size=2 trainer.micro_train_batch_size_per_gpu=4").keys
    assert keys["actor_train.training_args.gradient_accumulation_steps"] == 256 * 5 // (4 * 2)
    assert keys["actor_train.model_args.ulysses_size"] == 2


def test_options_of_one_strategy_go_with_it(translated: Translate) -> None:
    translation = translated(f"{SKYRL} trainer.strategy=deepspeed trainer.ref.fsdp_config.cpu_offload=true")
    assert not [name for name in translation.keys if name.startswith("reference.strategy_args.strategy_config")]
    assert "no effect under deepspeed" in next(note.text for note in translation.notes if "cpu_offload" in note.theirs)


def test_without_validation_data_there_is_no_validation(translated: Translate) -> None:
    keys = translated(f"{SKYRL} data.train_data=[gsm8k.parquet]").keys
    assert not [key for key in keys if key.startswith("validation.")]


def test_epochs_become_steps_where_the_rows_are_known(translated: Translate) -> None:
    text = f"{SKYRL} trainer.epochs=20 trainer.train_batch_size=64 trainer.policy_mini_batch_size=64"
    assert translated(text, train_rows=7473).keys["max_steps"] == 7473 // 64 * 20
    translation = translated(f"{SKYRL} trainer.epochs=20")
    assert "max_steps" not in translation.keys
    assert "--train-rows" in next(note.text for note in translation.notes if note.theirs == "trainer.epochs")


def test_a_reference_and_dynamic_batches(translated: Translate) -> None:
    actor = "actor_rollout_ref.actor"
    sizes = f"{actor}.use_dynamic_bsz=true {actor}.ppo_max_token_len_per_gpu=4096"
    keys = translated(f"{VERL} algorithm.adv_estimator=grpo {actor}.use_kl_loss=true {sizes}").keys
    assert keys["reference.strategy_args.strategy_name"] == "fsdp_infer"
    assert "target_kl" not in keys and "init_kl_coef" not in keys
    assert keys["actor_train.use_dynamic_batching_in_train"] is True
    assert keys["actor_train.max_tokens_per_microbatch_in_train"] == 4096
    assert keys["actor_train.training_args.per_device_train_batch_size"] == 1


def test_trackers_and_what_stays_in_the_environment(translated: Translate) -> None:
    text = "WANDB_API_KEY=secret bash x.sh trainer.logger=wandb trainer.project_name=mine"
    translation = translated(text)
    assert translation.keys["tracker_kwargs.project"] == "mine"
    assert translation.environment == {"WANDB_API_KEY": "secret"}
    assert "tracker_kwargs.project" not in translated("trainer.logger=console trainer.project_name=mine").keys


@pytest.mark.parametrize(
    "value",
    [
        *("fsdp2_train", "true", "null", "1e8", "a b", "it's", "~/x", "${oc.env:HOME}/x", ""),
        *("x\\", "c:\\d'e\\", r"^\d+$(", " a, b ", "1", "café"),
        *(True, None, 3, 0.1, 1e-6, ["a", "${oc.env:A}", 1], {"a": [1, "b"]}, [1, "b c", {"k": "v"}]),
    ],
)
def test_values_are_written_so_that_hydra_reads_the_same(value: Any) -> None:
    override = parse_override(f"key={hydra_value(value)}")
    assert override is not None and override.value() == value
    assert type(override.value()) is type(value)


def test_the_command_prints_keys_yaml_and_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["translate", "trainer.strategy=deepspeed"]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[0] == "actor_train.strategy_args.strategy_name=deepspeed_train"
    assert "trainer.strategy=deepspeed" in output.err
    file = tmp_path / "theirs.yaml"
    file.write_text("trainer.micro_train_batch_size_per_gpu: 4\n")
    assert cli.main(["translate", "--yaml", "--quiet", str(file)]) == 0
    output = capsys.readouterr()
    assert yaml.safe_load(output.out)["actor_train"]["training_args"]["gradient_accumulation_steps"] == 16
    assert output.err == ""
    monkeypatch.setattr(sys, "stdin", io.StringIO("trainer.n_gpus_per_node=4"))
    assert cli.main(["translate", "-"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert "actor_train.device_mapping='list(range(0,4))'" in words


def test_the_command_tells_what_it_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    text = "set -x\npython examples/gsm8k/gsm8k_dataset.py\nNCCL_DEBUG=INFO bash a.sh trainer.ckpt_path=$HOME/x ..."
    assert cli.main(["translate", text]) == 0
    output = capsys.readouterr()
    assert output.out == "'output_dir='\"'\"'${oc.env:HOME}/x'\"'\"''\n"
    assert "stays in the environment: NCCL_DEBUG=INFO" in output.err
    assert "must be in the environment: HOME" in output.err
    assert "passed over: set -x" in output.err and "passed over: ..." in output.err
    assert "gsm8k_dataset.py; data are prepared by examples/data/convert.py" in output.err


def test_the_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["translate", "trainer.strategy=fsdp3"]) == 2
    assert "trainer.strategy = 'fsdp3'" in capsys.readouterr().err
    assert cli.main(["translate", "nowhere.sh"]) == 2
    assert "no such file" in capsys.readouterr().err
    assert cli.main(["translate", "trainer.policy.optimizer_config.lr=-1"]) == 2
    assert "actor_train.training_args.learning_rate = -1" in capsys.readouterr().err


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from roll.cli import main; status = main(['translate', '--quiet', 'trainer.strategy=fsdp2']);"
        "sys.exit(status or bool({'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_secrets_are_masked_in_the_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["translate", "WANDB_API_KEY=very-secret trainer.strategy=fsdp2"]) == 0
    assert "very-secret" not in capsys.readouterr().err


SCRIPT = """
set -x
gsm8k=$HOME/data/gsm8k/train.parquet
files="['$gsm8k', '/data/math/train.parquet']"
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_trainer.yaml' \\
    data.train_files="$files" data.train_batch_size=4096 trainer.n_gpus_per_node=8 \\
    actor_rollout_ref.model.path=m actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.actor.ppo_mini_batch_size=512 actor_rollout_ref.actor.ppo_micro_batch_size=128 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size=256 \\
    critic.ppo_micro_batch_size=256 trainer.logger=['console','wandb'] $@
"""


def test_an_older_script(translated: Translate) -> None:
    """Sizes for all devices together, variables in small letters, token budgets that roles have from the actor."""
    translation = translated(SCRIPT)
    keys = translation.keys
    assert keys["actor_train.data_args.file_name"] == [
        "${oc.env:HOME}/data/gsm8k/train.parquet",
        "/data/math/train.parquet",
    ]
    assert keys["actor_train.training_args.per_device_train_batch_size"] == 16
    assert keys["actor_train.training_args.gradient_accumulation_steps"] == 512 // (16 * 8)
    assert keys["critic.training_args.per_device_train_batch_size"] == 32
    assert keys["actor_train.infer_batch_size"] == 32
    budgets = {key: value for key, value in keys.items() if "max_tokens_per_microbatch" in key}
    assert budgets == {
        "actor_train.max_tokens_per_microbatch_in_train": 16384,
        "actor_train.max_tokens_per_microbatch_in_infer": 16384,
        "critic.max_tokens_per_microbatch_in_train": 32768,
        "critic.max_tokens_per_microbatch_in_infer": 32768,
        "reference.max_tokens_per_microbatch_in_infer": 16384,
    }
    assert keys["rewards.math_rule.worker_cls"] == "math_rule"
    assert "assumed for every row" in next(note.text for note in translation.notes if note.theirs == "data.train_files")
    assert keys["track_with"] == ["stdout", "wandb"]


def test_engines_of_sglang(translated: Translate) -> None:
    rollout = "actor_rollout_ref.rollout."
    options = f"{rollout}tensor_model_parallel_size=2 {rollout}engine_kwargs.sglang.schedule_policy=fcfs"
    keys = translated(f"{commands.VERL_GRPO} {rollout}name=sglang {options}").keys
    engine = "actor_infer.strategy_args"
    assert keys[f"{engine}.strategy_name"] == "sglang" and keys["actor_infer.num_gpus_per_worker"] == 2
    assert keys[f"{engine}.strategy_config.tp_size"] == 2
    assert keys[f"{engine}.strategy_config.engine_args.schedule_policy"] == "fcfs"


ON_8 = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 algorithm.adv_estimator=grpo "
MEGATRON = "--config-name=ppo_megatron_trainer actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
EXPERTS = f"{VERL}{ON_8}{MEGATRON}actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B "
OPTIONS = "actor_train.strategy_args.strategy_config"


def test_experts_over_ranks(translated: Translate) -> None:
    """Expert parallelism takes its ranks from the others, so the batches are those without it; with tensor parallelism
    a mixture of experts needs sequence parallelism here."""
    keys = translated(
        f"{EXPERTS} actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 "
        "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 "
        "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=flex "
        "actor_rollout_ref.rollout.data_parallel_size=4 actor_rollout_ref.rollout.expert_parallel_size=4 "
        "actor_rollout_ref.actor.router_replay.mode=R2"
    ).keys
    assert keys["actor_train.strategy_args.strategy_name"] == "megatron_train"
    assert keys[f"{OPTIONS}.expert_model_parallel_size"] == 8
    assert keys[f"{OPTIONS}.expert_tensor_parallel_size"] == 1
    assert keys[f"{OPTIONS}.sequence_parallel"] is True
    assert keys[f"{OPTIONS}.moe_token_dispatcher_type"] == "alltoall"
    assert keys["actor_train.training_args.gradient_accumulation_steps"] == 256 // 4
    engine = "actor_infer.strategy_args.strategy_config"
    assert keys[f"{engine}.tensor_parallel_size"] == keys["actor_infer.num_gpus_per_worker"] == 4
    assert keys[f"{engine}.engine_args.enable_expert_parallel"] is True
    assert keys["actor_train.router_replay.mode"] == "R2" and keys["enable_old_logprobs_recompute"] is True


def test_a_model_of_images_that_is_trained_on_text(translated: Translate) -> None:
    """Qwen3.5 without its vision tower; the tower of a family that sees is frozen."""
    text = f"{SKYRL}trainer.policy.language_model_only=true generator.inference_engine.language_model_only=true "
    for model, frozen in (("Qwen/Qwen3.5-0.8B", None), ("Qwen/Qwen3-VL-4B-Instruct", "vision_model")):
        for backend in ("fsdp2", "megatron"):
            keys = translated(f"{text}trainer.policy.model.path={model} trainer.strategy={backend}").keys
            assert keys["actor_train.strategy_args.strategy_name"] == "fsdp2_train"
            assert keys.get("actor_train.model_args.freeze_module_prefix") == frozen


@pytest.mark.parametrize("model", ["Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-35B-A3B"])
def test_images_of_a_family_that_is_trained_on_text_alone(translated: Translate, model: str) -> None:
    text = f"{VERL}{ON_8}actor_rollout_ref.model.path={model} "
    assert translated(text).keys["pretrain"] == model
    with pytest.raises(ConfigError, match="without its vision tower here, on text alone"):
        translated(f"{text}data.image_key=pictures")


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-VL-7B-Instruct", "/models/Qwen3-VL-8B-Instruct"])
def test_images_and_a_backend_that_does_not_see(translated: Translate, model: str) -> None:
    """Megatron has no vision tower here: FSDP2 takes its place, with all ranks for different samples."""
    text = f"{VERL}{ON_8}{MEGATRON}actor_rollout_ref.model.path={model} data.image_key=pictures data.video_key=clips "
    translation = translated(f"{text} actor_rollout_ref.actor.freeze_vision_tower=true")
    keys = translation.keys
    assert keys["actor_train.strategy_args.strategy_name"] == "fsdp2_train"
    assert f"{OPTIONS}.tensor_model_parallel_size" not in keys
    assert keys["actor_train.training_args.gradient_accumulation_steps"] == 256 // 8
    assert keys["actor_train.data_args.images"] == "pictures"
    assert keys["actor_train.data_args.videos"] == "clips"
    assert keys["actor_train.model_args.freeze_module_prefix"] == "vision_model"
    assert any("fsdp2 computes the same" in note.text for note in translation.notes)


EPISODES = (
    f"{SKYRL}data.train_data=[train.parquet] data.val_data=[val.parquet] environment.env_class=search "
    "environment.skyrl_gym.search.topk=5 environment.skyrl_gym.text2sql.db_path=/d generator.max_turns=4 "
    "generator.max_input_length=2048 generator.sampling_params.max_generate_length=500 trainer.train_batch_size=64 "
    "trainer.policy_mini_batch_size=64 "
    "trainer.algorithm.dynamic_sampling.type=filter trainer.algorithm.loss_reduction=seq_mean_token_sum_norm "
)

NEWER = EPISODES.replace("skyrl_train.", "skyrl.train.")
ROWS = "generator.step_wise_trajectories=true generator.use_conversation_multi_turn=true"


def test_turns_of_skyrl_become_rows(translated: Translate) -> None:
    """A turn's prompt is the whole conversation before it, rendered anew, and only sampled tokens are learnt from."""
    text = f"{NEWER} {ROWS} trainer.algorithm.loss_reduction=token_mean trainer.algorithm.use_kl_loss=false"
    translation = translated(text)
    assert translation.keys["custom_envs.search.context"] == "last"
    assert translation.keys["custom_envs.search.history_length"] == 4
    assert translation.keys["custom_envs.search.thinking"] == "new_sample"
    plan = load(translation, QUICKSTART).plan
    assert plan.entries["search"].samples == "step"


def test_turns_of_skyrl_become_episodes(translated: Translate) -> None:
    """A group of episodes is a prompt's samples; the algorithm is that of a single turn, with the longer sequence."""
    translation = translated(EPISODES)
    keys = translation.keys
    assert keys["pipeline"] == "agentic" and keys["rollout_batch_size"] == 64 * 5
    assert keys["sequence_length"] == keys["loss_norm_length"] == 2048 + 500
    entry = {key.removeprefix("custom_envs.search."): value for key, value in keys.items() if ".search." in key}
    assert entry == {
        "env_type": "skyrl:search",
        "env_config.extras.max_turns": 4,
        "env_config.env_config.topk": 5,
        "max_steps": 4,
        "max_tokens_per_step": 500,
        "data_args.file_name": ["train.parquet"],
    }
    assert keys["custom_envs.search_val.data_args.file_name"] == ["val.parquet"]
    one_message = translated(f"{EPISODES} generator.use_conversation_multi_turn=false")
    added = {"custom_envs.search.context": "response", "custom_envs.search_val.context": "response"}
    assert one_message.keys == keys | added
    assert load(one_message, QUICKSTART).plan.entries["search"].samples == "trajectory"  # type: ignore[attr-defined]
    unasked = translated(f"{EPISODES} trainer.eval_before_train=false")
    assert "val_before_train" not in keys and unasked.keys == keys | {"val_before_train": False}
    assert not load(unasked, QUICKSTART).config.val_before_train  # type: ignore[attr-defined]
    plan = load(translation, QUICKSTART).plan
    assert plan.train.groups == 64 and plan.train.group_size == 5  # type: ignore[attr-defined]
    assert keys["train_env_manager.group_filter_config.type"] == "std_filter"
    single = EPISODES.replace("=search ", "=gsm8k ").replace("max_turns=4", "max_turns=1")
    alone = translated(single).keys
    assert alone["pipeline"] == "rlvr"
    changed = ("data_args", "rewards.", "validation.", "custom_envs.", "env_manager", "length", "batch_size", "num_ret")
    for key in alone.keys() | keys.keys():
        assert any(part in key for part in (*changed, "pipeline")) or alone.get(key) == keys.get(key), key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{NEWER} {ROWS} trainer.algorithm.use_kl_loss=false", "token_mean is the same"),
        (f"{NEWER} {ROWS} trainer.algorithm.loss_reduction=token_mean", "is a mean over rows"),
        (f"{EPISODES} {ROWS}", "mini-batches of turns there"),
        (f"{SKYRL} environment.env_class=search", "data.train_data"),
        ("bash x.sh generator.max_turns=4", "have no translation"),
    ],
)
def test_turns_that_differ_are_refused(translated: Translate, text: str, message: str) -> None:
    assert message in refusal(translated, text)


TOOLS = (
    f"{VERL}{ON_8}data.train_files=[train.parquet] data.val_files=[val.parquet] data.max_prompt_length=100 "
    "data.max_response_length=300 data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64 "
    "actor_rollout_ref.rollout.n=8 data.filter_overlong_prompts=True actor_rollout_ref.rollout.val_kwargs.n=4 "
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm "
)
TURN = "actor_rollout_ref.rollout.multi_turn."


def test_tools_of_verl_become_episodes(translated: Translate) -> None:
    """A group of episodes is a prompt's samples; every key of the algorithm is that of a single turn."""
    text = f"{TOOLS}{TURN}tool_config_path=tools.yaml {TURN}max_user_turns=3 {TURN}max_parallel_calls=2 "
    translation = translated(f"{text}{TURN}format=qwen3_coder data.shuffle=False")
    keys = translation.keys
    assert keys["pipeline"] == "agentic" and keys["rollout_batch_size"] == 64 * 8 and keys["sequence_length"] == 400
    assert {key.removeprefix("custom_envs.tools."): value for key, value in keys.items() if ".tools." in key} == {
        "agent": "verl",
        "agent_config.tool_config_path": "tools.yaml",
        "agent_config.max_user_turns": 3,
        "agent_config.max_parallel_calls": 2,
        "agent_config.response_length": 300,
        "agent_config.filter_overlong_prompts": True,
        "agent_config.prompt_length": 100,
        "verifier.worker_cls": "math_rule",
        "max_steps": 4,
        "max_tokens_per_step": 300,
        "tool_format": "qwen_xml",
        "data_args.file_name": ["train.parquet"],
        "data_args.shuffle": False,
    }
    assert keys["custom_envs.tools_val.data_args.file_name"] == ["val.parquet"]
    assert keys["val_env_manager.group_size"] == 4 and keys["loss_norm_length"] == 300
    loaded = load(translation, QUICKSTART)
    assert loaded.plan.train.groups == 64 and loaded.plan.train.group_size == 8  # type: ignore[attr-defined]
    assert [str(warning) for warning in loaded.warnings if "no effect" in warning.text] == []
    single = translated(f"{TOOLS}data.shuffle=False")
    assert any("one turn" in note.text for note in translated(f"{TOOLS}{TURN}max_user_turns=3").notes)
    own = ("data_args", "rewards.", "validation.", "custom_envs.", "env_manager", "length", "batch_size", "num_ret")
    for key in single.keys.keys() | keys.keys():
        assert any(part in key for part in (*own, "pipeline")) or single.keys.get(key) == keys.get(key), key


def test_episodes_of_a_critic_are_not_continued_by_its_values(translated: Translate) -> None:
    """Neither verl nor SkyRL bootstraps an episode that a limit ends."""
    text = TOOLS.replace("adv_estimator=grpo", "adv_estimator=gae") + " critic.ppo_micro_batch_size_per_gpu=1 "
    assert translated(f"{text}{TURN}enable=True").keys["bootstrap_truncated"] is False
    sky = EPISODES.replace("dynamic_sampling.type=filter", "advantage_estimator=gae")
    assert translated(f"{sky} trainer.critic_mini_batch_size=64").keys["bootstrap_truncated"] is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"bash x.sh {TURN}tool_config_path=t.yaml", "have no translation"),
        (f"{TOOLS}{TURN}enable=True {TURN}completion_callback=x", "is no key of multi_turn"),
        (f"{TOOLS}{TURN}enable=True data.tool_config_path=t.yaml", "must be that of multi_turn.tool_config_path"),
        (f"{TOOLS}{TURN}enable=True {TURN}use_inference_chat_template=True", "lose thoughts again"),
        (f"{TOOLS}{TURN}enable=True {TURN}format=llama3_json", "llama3_json"),
        (f"{TOOLS}{TURN}enable=True reward_model.enable=True reward_model.model.path=rm", "a reward function scores"),
        (f"{TOOLS}--config-name=retool_grpo", "is not here: start where --config-path leads"),
    ],
)
def test_tools_that_differ_are_refused(translated: Translate, text: str, message: str) -> None:
    assert message in refusal(translated, text)


def test_settings_of_a_file(translated: Translate, tmp_path: Path) -> None:
    """A file of verl's that is here is read, one that is known has its settings; both stand below the command."""
    known = translated(f"{TOOLS}--config-name=gsm8k_multiturn_megatron_grpo {TURN}max_assistant_turns=2").keys
    assert known["actor_train.strategy_args.strategy_name"] == "megatron_train" and known["sequence_length"] == 400
    assert known["custom_envs.tools.max_steps"] == 2
    for words in ("model_engine=megatron", "--config-name=ppo_trainer model_engine=megatron"):
        assert translated(f"{TOOLS}{words}").keys == translated(f"{TOOLS}--config-name=ppo_megatron_trainer").keys
    assert "torchtitan" in refusal(translated, f"{TOOLS}model_engine=torchtitan")
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [x]}\ndefaults: [ppo_trainer, _self_]\ndata: {max_prompt_length: 7, seed: 5}\n"
        "actor_rollout_ref: {rollout: {multi_turn: {enable: true, max_assistant_turns: 6}}}\n",
        encoding="utf-8",
    )
    read = translated(f"{TOOLS}--config-path={tmp_path} --config-name=mine").keys
    assert (read["seed"], read["custom_envs.tools.max_steps"], read["sequence_length"]) == (5, 6, 400)
    (tmp_path / "mine.yaml").write_text("defaults: [others]\ndata: {seed: 5}\n", encoding="utf-8")
    assert "is not here" in refusal(translated, f"{TOOLS}--config-path={tmp_path} --config-name=mine")


def test_a_folder_of_settings_beside_the_module(
    translated: Translate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As hydra resolves a relative ``--config-path``; one of the working folder comes second."""
    text = TOOLS.replace("verl.trainer.main_ppo", "recipe.dapo.main_dapo") + "--config-path=config --config-name=mine"
    monkeypatch.chdir(tmp_path)
    for place, seed in (("config", 5), ("recipe/dapo/config", 6)):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "mine.yaml").write_text(f"defaults: [ppo_trainer, _self_]\ndata: {{seed: {seed}}}\n")
        assert translated(text).keys["seed"] == seed


def test_tools_of_a_model_that_sees(translated: Translate) -> None:
    """verl's files for Geometry3K come with a template, as the model's own has no tools."""
    text = f"{TOOLS}--config-name=geo3k_multiturn_grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-3B-Instruct "
    keys = translated(f"{text} {TURN}tool_config_path=tools.yaml data.image_key=pictures").keys
    assert keys["custom_envs.tools.agent_config.image_key"] == "pictures" and keys["custom_envs.tools.max_steps"] == 5
    assert keys["actor_train.data_args.chat_template_kwargs.chat_template"] == TOOL_TEMPLATE
    own = translated(f"{TOOLS}actor_rollout_ref.model.custom_chat_template='{{{{ messages[0].content }}}}'").keys
    for section in ("actor_train", "validation"):
        assert own[f"{section}.data_args.chat_template_kwargs.chat_template"] == "{{ messages[0].content }}"
    assert not any("chat_template" in key for key in translated(TOOLS).keys)


def test_the_template_with_tools_and_images() -> None:
    """Conversations of text as Qwen2.5's template renders them; an image is its placeholder."""
    family = next((one for one in published() if one.name == "qwen2_5"), None)
    if family is None:
        pytest.skip("TRL, which has the published template, is not installed")
    tokenizer = family.tokenizer()
    call = {"type": "function", "function": {"name": "look", "arguments": {"x": 1, "y": "ä"}}}
    tools = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "So:", "tool_calls": [call, call]},
        {"role": "tool", "content": "left"},
        {"role": "tool", "content": "right"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "up"},
        {"role": "assistant", "content": "Up."},
        {"role": "user", "content": "Sure?"},
    ]
    for shown, offered, prompted in ((messages, tools, True), (messages[:6], tools, False), (messages[:2], None, True)):
        options = {"tools": offered, "tokenize": False, "add_generation_prompt": prompted}
        theirs = tokenizer.apply_chat_template(shown, **options)
        assert tokenizer.apply_chat_template(shown, chat_template=TOOL_TEMPLATE, **options) == theirs
    seen = [{"role": "user", "content": [{"type": "image", "image": "x"}, {"type": "text", "text": "Where?"}]}]
    rendered = tokenizer.apply_chat_template(seen, chat_template=TOOL_TEMPLATE, tokenize=False)
    user = "user\n<|vision_start|><|image_pad|><|vision_end|>Where?"
    assert rendered == f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>{user}<|im_end|>\n"


def test_orders_of_rows(translated: Translate) -> None:
    own = "data.sampler.class_name=Mine data.sampler.class_path=mine.py"
    random = "data.sampler.class_name=RandomCurriculumSampler data.sampler.class_path="
    path = "pkg://tests.utils.dataset.test_create_rl_sampler_on_cpu"
    assert translated(f"{TOOLS}{random}{path}").keys == translated(TOOLS).keys
    for text in (own, f"{random}mine.py"):
        assert "names code of theirs" in refusal(translated, f"{TOOLS}{text}")


def test_a_switch_that_is_not_set_is_false(translated: Translate) -> None:
    """bash leaves an empty text, which verl takes for false; a number stays an error."""
    policy = "actor_rollout_ref.actor."
    text = f"{TOOLS}{policy}use_kl_loss=${{oc.env:NOT_SET_HERE}} "
    translation = translated(text)
    assert translation.keys["use_kl_loss"] is False and "reference.device_mapping" not in translation.keys
    note = next(note for note in translation.notes if "NOT_SET_HERE is not set" in note.text)
    assert "roll translate NOT_SET_HERE=true" in note.text
    assert "NOT_SET_HERE" in refusal(translated, f"{TOOLS}{policy}ppo_epochs=${{oc.env:NOT_SET_HERE}}")
    sky = f"{SKYRL}trainer.algorithm.use_kl_loss=${{oc.env:NOT_SET_HERE}}"
    assert "NOT_SET_HERE" in refusal(translated, sky)


def test_mini_batches_of_skyrl_are_whole_samples_of_a_rank(translated: Translate) -> None:
    """4 prompts x 5 samples on 8 ranks: 2 each, so that a batch of 80 has five optimizer steps, as there."""
    text = (
        f"{SKYRL}data.train_data=[d.parquet] environment.env_class=gsm8k trainer.placement.policy_num_gpus_per_node=8 "
        "trainer.placement.ref_num_gpus_per_node=8 generator.num_inference_engines=8 trainer.train_batch_size=16 "
        "generator.n_samples_per_prompt=5 trainer.policy_mini_batch_size=4 trainer.micro_train_batch_size_per_gpu="
    )
    translation = translated(f"{text}2")
    assert translation.keys["actor_train.training_args.gradient_accumulation_steps"] == 1
    assert any("of which 2 go to each of 8 ranks there: 16" in note.text for note in translation.notes)
    plan = load(translation, QUICKSTART).plan
    assert plan.training["actor_train"].mini_batch_size == 16  # type: ignore[attr-defined]
    assert translated(f"{text}3").keys == translation.keys  # a rank has 2


def test_a_micro_batch_that_does_not_divide_becomes_a_smaller_one(translated: Translate) -> None:
    text = "trainer.micro_train_batch_size_per_gpu=7"
    translation = translated(text)
    prefix = "actor_train.training_args"
    assert translation.keys[f"{prefix}.per_device_train_batch_size"] == 4
    assert any("a rank, which larger micro-batches do not divide" in note.text for note in translation.notes)
    text = f"{text} trainer.algorithm.loss_reduction=token_mean_legacy"
    assert "do not divide into micro-batches of 7" in refusal(translated, text)


def test_images_and_an_engine_that_is_not_tested_with_them(translated: Translate) -> None:
    text = VERL.replace("rollout.name=vllm", "rollout.name=sglang") + ON_8
    vision = f"{text} actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct "
    keys = translated(f"{vision} +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3").keys
    assert keys["actor_infer.strategy_args.strategy_name"] == "vllm"
    assert not any("engine_args" in key for key in keys)
    assert translated(text).keys["actor_infer.strategy_args.strategy_name"] == "sglang"


def test_adapters_of_attention_in_a_model_with_experts(translated: Translate) -> None:
    text = f"{EXPERTS} actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.target_modules="
    keys = translated(f"{text}[linear_qkv,linear_proj]").keys
    assert keys["actor_train.model_args.lora_target"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert "a part of the experts" in refusal(translated, f"{text}[linear_qkv,linear_fc1]")


def test_adapters_of_experts(translated: Translate) -> None:
    translation = translated(f"{EXPERTS} data.train_files=a.parquet actor_rollout_ref.model.lora_rank=8")
    assert translation.keys["actor_train.model_args.lora_target"] == "all-linear,experts"
    note = next(note for note in translation.notes if note.theirs.endswith("lora_rank"))
    assert "every expert has adapters, as there, of another form" in note.text
    load(translation, QUICKSTART)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{VERL}{ON_8} actor_rollout_ref.model.path=zai-org/GLM-4.1V-9B-Thinking", "of another family than"),
        (f"{VERL}{ON_8} actor_rollout_ref.model.path=deepseek-ai/DeepSeek-V3", "vllm is tested with none of this"),
        (
            f"{VERL}{ON_8}{MEGATRON}actor_rollout_ref.model.path=gpt-oss-20b actor_rollout_ref.model.lora.rank=8",
            "those of gpt-oss take none",
        ),
        (
            f"{VERL}{ON_8} actor_rollout_ref.model.path=Qwen2.5-VL-3B actor_rollout_ref.model.lora_rank=8",
            "exclude_modules='.*visual.*' is the same",
        ),
        (
            f"{EXPERTS} +actor_rollout_ref.actor.megatron.override_transformer_config"
            ".moe_router_load_balancing_type=aux_loss",
            "balance loss",
        ),
        (f"{VERL}{ON_8} data.audio_key=sounds", "sounds are not available"),
    ],
)
def test_what_no_backend_computes_is_refused(translated: Translate, text: str, message: str) -> None:
    assert message in refusal(translated, text)
