"""What scripts leave open or give to others: empty values, nulls, servers of their own, services, other backends."""

from __future__ import annotations

import pytest

from roll.config.reading.errors import ConfigError
from roll.datasets.columns import DomainRouter
from roll.translation.command import load
from tests.translation.conftest import QUICKSTART, Translate

VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=m "
    "data.train_files=[gsm8k.parquet] data.val_files=[gsm8k.parquet] data.train_batch_size=64 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 "
    "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 trainer.n_gpus_per_node=8 "
)
SKYRL = (
    "python -m skyrl.train.entrypoints.main_base trainer.policy.model.path=m data.train_data=[gsm8k.parquet] "
    "data.val_data=[gsm8k.parquet] trainer.placement.policy_num_gpus_per_node=4 trainer.train_batch_size=64 "
    "trainer.placement.ref_num_gpus_per_node=4 trainer.policy_mini_batch_size=64 environment.env_class=gsm8k "
)
REMOTE = f"{SKYRL} generator.inference_engine.run_engines_locally=false "
OPTIONS = "actor_infer.strategy_args.strategy_config"


def test_what_is_left_empty_is_a_variable(translated: Translate) -> None:
    text = f"{VERL} actor_rollout_ref.model.path= data.train_files= data.val_files="
    translation = translated(text)
    assert translation.keys["pretrain"] == "${oc.env:MODEL_PATH}"
    assert translation.keys["actor_train.data_args.file_name"] == ["${oc.env:TRAIN_FILES}"]
    assert translation.unset == ("MODEL_PATH", "TRAIN_FILES", "VAL_FILES")
    load(translation, QUICKSTART)


def test_null_is_as_if_it_were_not_written(translated: Translate) -> None:
    text = f"{VERL} actor_rollout_ref.actor.ppo_micro_batch_size=null trainer.total_training_steps=null"
    assert translated(text).keys == translated(VERL).keys
    steps = translated(f"{VERL} trainer.total_epochs=null trainer.total_training_steps=7").keys
    assert steps["max_steps"] == 7


def test_servers_of_skyrl_become_engines_of_the_run(translated: Translate) -> None:
    servers = "generator.inference_engine.external_server_urls=['http://a:1','http://b:1'] "
    text = f"{REMOTE}{servers} trainer.placement.colocate_all=false generator.inference_engine.tensor_parallel_size=2"
    translation = translated(text)
    assert translation.keys["actor_train.device_mapping"] == "list(range(0,4))"
    assert translation.keys["actor_infer.device_mapping"] == "list(range(4,8))"
    assert translation.keys["actor_infer.num_gpus_per_worker"] == 2
    assert any("starts these engines itself" in note.text for note in translation.notes)
    load(translation, QUICKSTART)
    one = translated(
        f"{REMOTE} trainer.placement.colocate_all=false generator.inference_engine.external_proxy_url=http://a"
    )
    assert one.keys["actor_infer.device_mapping"] == "list(range(4,5))"
    with pytest.raises(ConfigError, match="share no devices with the trainer"):
        translated(f"{REMOTE}{servers}")


def test_programs_scored_by_a_service_are_run_here(translated: Translate) -> None:
    for section in ("reward_model.", "reward.", ""):
        translation = translated(f"{VERL} {section}sandbox_fusion.url=http://x/run_code")
        loaded = load(translation, QUICKSTART)
        rewards = {name: reward.tag_included for name, reward in loaded.config.rewards.items()}
        assert list(rewards) == ["gsm8k_rule", "math_rule", "code_sandbox"]
        assert loaded.config.rewards["code_sandbox"].reward_kwargs == {"partial": True}
        assert "taco" in (rewards["code_sandbox"] or ()) and "numina_olympiads" in (rewards["math_rule"] or ())
        DomainRouter(rewards)  # no source has two rules
    own = translated(f"{VERL} custom_reward_function.path=/x/f.py reward_model.sandbox_fusion.url=http://x")
    assert [key for key in own.keys if key.endswith("worker_cls")] == ["rewards.custom.worker_cls"]


@pytest.mark.parametrize(
    "text",
    [
        f"{VERL} actor_rollout_ref.rollout.pipeline_model_parallel_size=2",
        f"{SKYRL} generator.inference_engine.num_engines=2 generator.inference_engine.pipeline_parallel_size=2",
    ],
)
def test_stages_of_an_engine(text: str, translated: Translate) -> None:
    translation = translated(text)
    tensor = translation.keys.get(f"{OPTIONS}.tensor_parallel_size", 1)
    assert translation.keys[f"{OPTIONS}.pipeline_parallel_size"] == 2
    assert translation.keys["actor_infer.num_gpus_per_worker"] == 2 * tensor
    load(translation, QUICKSTART)


def test_stages_of_another_engine_are_refused(translated: Translate) -> None:
    text = VERL.replace("rollout.name=vllm", "rollout.name=sglang")
    with pytest.raises(ConfigError, match="needs the engine vllm"):
        translated(f"{text} actor_rollout_ref.rollout.pipeline_model_parallel_size=2")


def test_fsdp2_takes_the_place_of_another_backend(translated: Translate) -> None:
    """VeOmni's sharding; a family with experts that FSDP1 is not tested with."""
    name = "actor_train.strategy_args.strategy_name"
    sharded = translated(f"{VERL} model_engine=veomni actor_rollout_ref.actor.veomni.ulysses_parallel_size=2")
    assert sharded.keys[name] == "fsdp2_train" and sharded.keys["actor_train.model_args.ulysses_size"] == 2
    load(sharded, QUICKSTART)
    experts = translated(f"{VERL} actor_rollout_ref.model.path=openai/gpt-oss-20b")
    assert experts.keys[name] == "fsdp2_train" and translated(VERL).keys[name] == "fsdp_train"
    assert any("fsdp2 computes the same" in note.text for note in experts.notes)
    load(experts, QUICKSTART)


def test_an_option_of_fsdp2_under_fsdp1(translated: Translate) -> None:
    text = f"{VERL} actor_rollout_ref.actor.fsdp_config.offload_policy=true"
    load(translated(text), QUICKSTART)
    key = "actor_train.strategy_args.strategy_config.offload_policy"
    assert key not in translated(text).keys
    assert translated(f"{text} actor_rollout_ref.actor.strategy=fsdp2").keys[key] is True


def test_an_option_of_the_engine_with_a_key_of_its_own(translated: Translate) -> None:
    text = f"{VERL} +actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt.image=4"
    assert translated(text).keys[f"{OPTIONS}.limit_mm_per_prompt.image"] == 4
    load(translated(text), QUICKSTART)


def test_an_engine_over_two_nodes_is_refused_with_the_largest_that_fits(translated: Translate) -> None:
    wide = f"{VERL} trainer.nnodes=2 actor_rollout_ref.rollout.tensor_model_parallel_size="
    with pytest.raises(ConfigError, match=r"would span two nodes of 8: .*tensor_model_parallel_size: 8"):
        translated(f"{wide}16")
    load(translated(f"{wide}8"), QUICKSTART)
