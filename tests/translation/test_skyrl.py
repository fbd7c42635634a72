"""SkyRL's meaning of what a script leaves open, of scores, of data's names, and of families that nothing computes."""

from __future__ import annotations

import pytest

from roll.config.reading.errors import ConfigError
from roll.translation.command import load
from tests.translation.conftest import QUICKSTART, Translate
from tests.translation.test_gaps import OPTIONS, SKYRL, VERL

EVALUATION = "generator.eval_sampling_params"
GENERATING = "validation.generating_args"


def test_a_section_that_is_written_in_part_has_its_own_defaults(translated: Translate) -> None:
    """Without ``eval_sampling_params`` validation is greedy and as long as training; with a key of it, neither."""
    text = f"{SKYRL} generator.sampling_params.max_generate_length=4096 "
    whole, part = translated(text).keys, translated(f"{text} {EVALUATION}.top_p=0.7").keys
    assert whole[f"{GENERATING}.temperature"] == 0.0 and f"{GENERATING}.max_new_tokens" not in whole
    assert part[f"{GENERATING}.temperature"] == 1.0 and part[f"{GENERATING}.max_new_tokens"] == 1024
    assert translated(f"{text} {EVALUATION}={{top_p:0.7}}").keys == part
    assert translated(f"{text} {EVALUATION}=null").keys == whole
    own = translated(f"{text} {EVALUATION}={{temperature:0.3,max_generate_length:64}}").keys
    assert own[f"{GENERATING}.temperature"] == 0.3 and own[f"{GENERATING}.max_new_tokens"] == 64
    older = text.replace("skyrl.train", "skyrl_train").replace("inference_engine.", "")
    assert translated(f"{older} {EVALUATION}.top_p=0.7").keys[f"{GENERATING}.temperature"] == 0.0
    assert translated(f"{EVALUATION}.top_p=0.7", "skyrl").keys == {f"{GENERATING}.top_p": 0.7}


def test_defaults_of_the_newer_package(translated: Translate) -> None:
    text = SKYRL.replace("trainer.placement.policy_num_gpus_per_node=4", "")
    newer, older = translated(text).keys, translated(text.replace("skyrl.train", "skyrl_train")).keys
    assert newer["actor_train.device_mapping"] == "list(range(0,1))"
    assert older["actor_train.device_mapping"] == "list(range(0,4))"
    offload = "reference.strategy_args.strategy_config.offload_policy"
    assert newer[offload] is False and older[offload] is True


def test_tokens_of_a_micro_batch_are_the_same_for_every_role(translated: Translate) -> None:
    sizes = "trainer.strategy=megatron trainer.policy.megatron_config.context_parallel_size=2"
    keys = translated(f"{SKYRL} {sizes} trainer.max_tokens_per_microbatch=8000").keys
    budgets = {key: value for key, value in keys.items() if "max_tokens_per_microbatch" in key}
    assert len(budgets) == 3 and set(budgets.values()) == {8000}


def test_one_turn_of_an_environment_with_a_score_for_the_format(translated: Translate) -> None:
    text = SKYRL.replace("env_class=gsm8k", "env_class=gsm8k_multi_turn")
    translation = translated(text)
    loaded = load(translation, QUICKSTART)
    assert loaded.config.rewards["gsm8k_rule"].reward_kwargs == {"format_score": 0.2}
    assert "rewards.gsm8k_rule.reward_kwargs.format_score" not in translated(SKYRL).keys
    with pytest.raises(ConfigError, match="two or more scores of 0 and 1"):
        translated(f"{text} trainer.algorithm.zero_variance_filter=true")


@pytest.mark.parametrize(
    ("more", "score", "penalty"),
    [
        ("trainer.algorithm.advantage_estimator=grpo", None, 0.5),
        ("trainer.algorithm.advantage_estimator=grpo trainer.algorithm.grpo_norm_by_std=false", 2.0, 1.0),
        ("trainer.algorithm.advantage_estimator=rloo", 2.0, 1.0),
        ("trainer.algorithm.advantage_estimator=reinforce++", None, 0.5),
        (
            "trainer.algorithm.advantage_estimator=reinforce++ trainer.algorithm.use_kl_loss=false "
            "trainer.algorithm.use_kl_in_reward=true",
            2.0,
            1.0,
        ),
    ],
)
def test_scores_of_minus_one_and_one(more: str, score: float | None, penalty: float, translated: Translate) -> None:
    """0 and 1 give the same advantages where they are divided by a spread; elsewhere 0 and 2 do."""
    text = SKYRL.replace("env_class=gsm8k", "env_class=aime").replace(
        "skyrl.train.entrypoints.main_base", "examples.train.algorithms.dapo.main_dapo"
    )
    keys = translated(f"{text} {more}").keys
    assert keys.get("rewards.math_rule.reward_kwargs.score") == score and keys["overlong_penalty_factor"] == penalty
    load(translated(f"{text} {more}"), QUICKSTART)


def test_data_sets_of_the_hub(translated: Translate) -> None:
    files = "data.train_data=['owner/data','owner/data:extra','/data/folder','a.parquet'] data.val_data=[owner/data]"
    keys = translated(f"{SKYRL} {files}").keys
    expected = ["hub:owner/data", "hub:owner/data:extra", "/data/folder/", "a.parquet"]
    assert keys["actor_train.data_args.file_name"] == expected
    verl = translated(f"{VERL} data.train_files=[owner/data]").keys
    assert verl["actor_train.data_args.file_name"] == ["owner/data/"]


def test_options_of_engines_that_only_decode(translated: Translate) -> None:
    section = "generator.inference_engine"
    text = f"{SKYRL} {section}.enable_pd=true {section}.prefill_init_kwargs.max_model_len=9 "
    keys = translated(f"{text} {section}.decode_init_kwargs={{max_model_len:2000,seed:1}}").keys
    assert keys[f"{OPTIONS}.max_model_len"] == 2000 and keys[f"{OPTIONS}.engine_args.seed"] == 1


def test_servers_whose_addresses_are_not_set(translated: Translate) -> None:
    section = "generator.inference_engine"
    text = f"{SKYRL} trainer.placement.colocate_all=false {section}.run_engines_locally=false "
    translation = translated(f"{text} {section}.external_server_urls=$SERVERS")
    assert translation.keys["actor_infer.device_mapping"] == "list(range(4,5))"
    assert any("SERVERS is not set, and one engine is taken" in note.text for note in translation.notes)
    two = translated(f"SERVERS=['http://a:1','http://b:1']\n{text} {section}.external_server_urls=$SERVERS")
    assert two.keys["actor_infer.device_mapping"] == "list(range(4,6))"
    assert not any("is not set" in note.text for note in two.notes)


def test_options_of_an_option_that_need_nothing_here(translated: Translate) -> None:
    """Also where they are written as one value: how engines pass caches on and give memory back is decided here."""
    options = "generator.inference_engine.engine_init_kwargs"
    for text in (
        f"{options}.kv_transfer_config.kv_connector=x",
        f"{options}={{kv_transfer_config:{{kv_connector:x}}}}",
        f"{options}.enable_sleep_mode=false",
    ):
        assert translated(f"{SKYRL} {text}").keys == translated(SKYRL).keys


def test_a_family_that_nothing_computes_is_the_only_reason(translated: Translate) -> None:
    """Its adapters, whose layers have other names, say nothing more."""
    adapters = "trainer.policy.model.lora.rank=8 trainer.policy.model.lora.target_modules=[linear_q_down_proj]"
    with pytest.raises(ConfigError, match="tested with none of this family") as refused:
        translated(f"{SKYRL.replace('model.path=m', 'model.path=zai-org/GLM-5.3')} {adapters}")
    assert str(refused.value).count("\n") == 1


def test_programs_beside_the_examples_are_of_the_newer_package(translated: Translate) -> None:
    text = SKYRL.replace("skyrl.train.entrypoints.main_base", "examples.train_integrations.games.main_games")
    with pytest.raises(ConfigError, match="not in keys of SkyRL, package `skyrl`"):
        translated(text)


def test_another_program_is_the_only_reason(translated: Translate) -> None:
    with pytest.raises(ConfigError, match=r"override_entrypoint.*its keys are its own too") as refused:
        translated(f"{SKYRL} trainer.override_entrypoint=others.entry trainer.others.stage=3 environment.env_class=own")
    assert str(refused.value).count("\n") == 1
    assert translated(f"{SKYRL} trainer.override_entrypoint=null").keys == translated(SKYRL).keys


def test_images_of_environments_have_another_way(translated: Translate) -> None:
    with pytest.raises(ConfigError, match="an environment of your own may return pictures"):
        translated(f"{SKYRL} generator.vision_language_generator=true")


def test_the_bias_of_routers(translated: Translate) -> None:
    """Refused where it moves; another reason stands alone where nothing here computes the family."""
    bias = "trainer.strategy=megatron trainer.policy.megatron_config.moe_router_enable_expert_bias=true"
    with pytest.raises(ConfigError, match="moves the bias of the routers"):
        translated(f"{SKYRL} {bias}")
    with pytest.raises(ConfigError, match="tested with none of this family") as refused:
        translated(f"{SKYRL.replace('model.path=m', 'model.path=zai-org/GLM-4.7-Flash')} {bias}")
    assert "moves the bias" not in str(refused.value)
    moving = translated(f"{SKYRL.replace('model.path=m', 'model.path=Moonlight-16B-A3B')} trainer.strategy=megatron")
    assert any("moves the bias" in note.text for note in moving.notes)
