"""Whole texts of several parts, and the command itself; single keys are rows of ``cases.yaml``."""

from __future__ import annotations

import io
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll import cli
from roll.config.reading.compose import hydra_value, parse_override
from roll.config.reading.errors import ConfigError
from roll.datasets.columns import DomainRouter
from roll.translation.command import load
from roll.translation.verl import TOOL_TEMPLATE
from tests.agents.templates import published
from tests.translation import commands
from tests.translation.conftest import QUICKSTART, Translate
from tests.translation.test_cases import text_of

VERL, SKYRL = text_of("$BARE_VERL "), text_of("$BARE_SKYRL ")


def refusal(translated: Translate, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        translated(text)
    return str(error.value)


def test_an_unknown_key_is_refused_with_the_nearest(translated: Translate) -> None:
    message = refusal(translated, commands.VERL_GRPO + " actor_rollout_ref.rollout.gpu_memory_utilisation=0.5 zzz.q=1")
    assert "2 mistakes" in message
    assert "the nearest known one is actor_rollout_ref.rollout.gpu_memory_utilization" in message


def test_a_scripts_own_variables_and_sections_in_json(translated: Translate) -> None:
    options = """generator.inference_engine.engine_init_kwargs='{"max_model_len": 4096, "a": {"b": 1}}'"""
    translation = translated(f"SKYRL_ROOT=/r {SKYRL} {options}")
    assert any("left out: SKYRL_ROOT is no variable" in remark for remark in translation.remarks)
    prefix = "actor_infer.strategy_args.strategy_config"
    assert translation.keys[f"{prefix}.max_model_len"] == 4096
    assert translation.keys[f"{prefix}.engine_args.a"] == {"b": 1}


def test_trackers_and_what_stays_in_the_environment(translated: Translate) -> None:
    text = "WANDB_API_KEY=secret bash x.sh trainer.logger=wandb trainer.project_name=mine"
    translation = translated(text)
    assert translation.keys["tracker_kwargs.project"] == "mine"
    assert translation.environment == {"WANDB_API_KEY": "secret"}


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


ON_8 = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 algorithm.adv_estimator=grpo "


EPISODES = text_of("$EPISODES ")


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


TOOLS = text_of("$TOOLS ")
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
    unused = "left out: nothing in this run uses it"
    assert any(unused in note.text for note in translated(f"{TOOLS}{TURN}max_user_turns=3").notes)
    own = ("data_args", "rewards.", "validation.", "custom_envs.", "env_manager", "length", "batch_size", "num_ret")
    for key in single.keys.keys() | keys.keys():
        assert any(part in key for part in (*own, "pipeline")) or single.keys.get(key) == keys.get(key), key


def test_settings_of_a_file(translated: Translate, tmp_path: Path) -> None:
    """A file of verl's that is here is read; it stands below the command."""
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


WHOLE = text_of("$VERL")
SKYRL_GLM = text_of("$SKYRL").replace("model.path=m", "model.path=zai-org/{}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            f"{SKYRL_GLM.format('GLM-5.3')} trainer.policy.model.lora.rank=8 "
            "trainer.policy.model.lora.target_modules=[linear_q_down_proj]",
            "tested with none of this family",
        ),
        (
            f"{SKYRL_GLM.format('GLM-4.7-Flash')} trainer.strategy=megatron "
            "trainer.policy.megatron_config.moe_router_enable_expert_bias=true",
            "tested with none of this family",
        ),
        (
            f"{SKYRL_GLM.format('m')} trainer.override_entrypoint=others.entry trainer.others.stage=3 "
            "environment.env_class=own",
            "its keys are its own too",
        ),
    ],
    ids=["adapters", "bias of routers", "program"],
)
def test_the_only_reason_is_said_alone(text: str, words: str, translated: Translate) -> None:
    """Of a family that nothing computes, and of another program."""
    message = refusal(translated, text)
    assert words in message and message.count("\n") == 1


def test_what_is_left_empty_is_a_variable(translated: Translate) -> None:
    translation = translated(f"{WHOLE} actor_rollout_ref.model.path= data.train_files= data.val_files=")
    assert translation.keys["pretrain"] == "${oc.env:MODEL_PATH}"
    assert translation.keys["actor_train.data_args.file_name"] == ["${oc.env:TRAIN_FILES}"]
    assert translation.unset == ("MODEL_PATH", "TRAIN_FILES", "VAL_FILES")
    load(translation, QUICKSTART)


@pytest.mark.long
def test_programs_scored_by_a_service_are_run_here(translated: Translate) -> None:
    for section in ("reward_model.", "reward.", ""):
        loaded = load(translated(f"{WHOLE} {section}sandbox_fusion.url=http://x/run_code"), QUICKSTART)
        rewards = {name: reward.tag_included for name, reward in loaded.config.rewards.items()}
        assert list(rewards) == ["gsm8k_rule", "math_rule", "code_sandbox"]
        assert loaded.config.rewards["code_sandbox"].reward_kwargs == {"partial": True}
        assert "taco" in (rewards["code_sandbox"] or ()) and "numina_olympiads" in (rewards["math_rule"] or ())
        DomainRouter(rewards)  # no source has two rules
    own = translated(f"{WHOLE} custom_reward_function.path=/x/f.py reward_model.sandbox_fusion.url=http://x")
    assert [key for key in own.keys if key.endswith("worker_cls")] == ["rewards.custom.worker_cls"]


def test_the_note_of_a_backend_names_what_decided(translated: Translate) -> None:
    key = "actor_train.strategy_args.strategy_name"
    notes = translated(f"{WHOLE} model_engine=megatron").notes
    assert [note.theirs for note in notes if f"{key}=megatron_train" in note.ours] == ["model_engine"]
