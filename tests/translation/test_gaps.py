"""What scripts leave open or give to others: empty values, nulls, servers of their own, services, other backends."""

from __future__ import annotations

from typing import Any

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
KL = "actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2"
OPTIONS = "actor_infer.strategy_args.strategy_config"
MODEL = "model_engine"


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


def test_a_section_that_is_null_is_empty(translated: Translate) -> None:
    text = (
        f"{SKYRL} generator.inference_engine.speculative_config=null generator.sampling_params.additional_kwargs=null"
    )
    assert translated(text).keys == translated(SKYRL).keys


@pytest.mark.parametrize(
    ("text", "option"),
    [
        (SKYRL, "generator.inference_engine.engine_init_kwargs.max_model_len"),
        (VERL, "+actor_rollout_ref.rollout.engine_kwargs.vllm.max_model_len"),
    ],
)
def test_a_length_among_the_options_of_the_engine_leaves_room_for_a_response(
    text: str, option: str, translated: Translate
) -> None:
    translation = translated(f"{text} {option}=512")
    assert translation.keys[f"{OPTIONS}.max_model_len"] == 512 and translation.keys["prompt_length"] == 511
    load(translation, QUICKSTART)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (f"{VERL} actor_rollout_ref.rollout.use_fire_sampling=True", "has no translation"),
        (f"{VERL} +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer=muon", "AdamW only"),
        (f"{SKYRL} trainer.update_ref_every_epoch=true", "the reference stays as it is"),
        (f"{SKYRL} trainer.policy.model.lora.exclude_modules=[q_proj]", "has no translation"),
        (f"{SKYRL} trainer.policy.megatron_config.freeze_moe_router=true", "routers learn with the rest"),
        (f"{SKYRL} trainer.algorithm.enable_sample_support_replay=true", "of the whole vocabulary"),
    ],
)
def test_values_that_would_change_the_run_are_not_passed_over(text: str, rule: str, translated: Translate) -> None:
    with pytest.raises(ConfigError, match=rule):
        translated(text)


def test_options_of_the_optimizer_that_have_a_key(translated: Translate) -> None:
    verl = translated(f"{VERL} +actor_rollout_ref.actor.optim.override_optimizer_config.adam_beta2=0.95")
    skyrl = translated(f"{SKYRL} trainer.policy.megatron_config.optimizer_config_kwargs.adam_beta2=0.95")
    key = "actor_train.training_args.adam_beta2"
    assert verl.keys[key] == skyrl.keys[key] == 0.95


def test_without_flash_attention_the_model_chooses(translated: Translate) -> None:
    """gpt-oss has no sdpa."""
    assert translated(f"{SKYRL} trainer.flash_attn=false").keys["actor_train.model_args.attn_implementation"] is None


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


TITAN = f"{VERL} model_engine=torchtitan actor_rollout_ref.actor.torchtitan.data_parallel_shard_size=8 "


def test_fsdp2_takes_the_place_of_torchtitan(translated: Translate) -> None:
    """Its learning rate falls to 0 by a formula of its own, unless it is kept constant."""
    constant = translated(f"{TITAN} actor_rollout_ref.actor.optim.min_lr_factor=1.0")
    assert constant.keys["actor_train.strategy_args.strategy_name"] == "fsdp2_train"
    assert constant.keys["actor_train.training_args.lr_scheduler_type"] == "constant"
    load(constant, QUICKSTART)
    with pytest.raises(ConfigError, match=r"min_lr_factor=1\.0 keeps it constant"):
        translated(TITAN)
    with pytest.raises(ConfigError, match="has no translation; known: 1"):
        translated(f"{TITAN} actor_rollout_ref.actor.optim.min_lr_factor=0.1")


def test_the_type_of_the_weights_that_are_updated(translated: Translate) -> None:
    key = "actor_train.strategy_args.strategy_config.master_dtype"
    text = f"{VERL} actor_rollout_ref.actor.fsdp_config.model_dtype="
    for strategy in ("fsdp", "fsdp2"):
        bf16 = translated(f"{text}bfloat16 actor_rollout_ref.actor.strategy={strategy}")
        assert bf16.keys[key] == "bf16"
        load(bf16, QUICKSTART)
    assert key not in translated(f"{text}fp32").keys
    frozen = translated(f"{VERL} {KL} actor_rollout_ref.ref.fsdp_config.model_dtype=bfloat16")
    assert not any(name.endswith("master_dtype") for name in frozen.keys)
    assert any("does not learn" in note.text for note in frozen.notes)
    megatron = translated(f"{text}bfloat16 --config-name=ppo_megatron_trainer")
    assert key not in megatron.keys and any("no effect under megatron" in note.text for note in megatron.notes)


def test_nodes_of_the_engines_alone_in_their_own_section(translated: Translate) -> None:
    pool = "actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=4"
    apart = f"{VERL} actor_rollout_ref.hybrid_engine=false"
    translation = translated(f"{apart} {pool}")
    assert translation.keys == translated(f"{apart} rollout.nnodes=1 rollout.n_gpus_per_node=4").keys
    assert translation.keys["actor_infer.device_mapping"] == "list(range(8,12))"
    load(translation, QUICKSTART)
    assert translated(f"{VERL} actor_rollout_ref.rollout.nnodes=0").keys == translated(VERL).keys
    with pytest.raises(ConfigError, match=r"goes with .*hybrid_engine=false"):
        translated(f"{VERL} {pool}")


def test_routes_come_from_an_engine_that_returns_them(translated: Translate) -> None:
    text = VERL.replace("rollout.name=vllm", "rollout.name=sglang").replace("model.path=m", "model.path=Qwen3-30B-A3B")
    routes = "actor_rollout_ref.actor.megatron.router_replay.mode=R3 --config-name=ppo_megatron_trainer"
    translation = translated(f"{text} {routes} actor_rollout_ref.rollout.enable_rollout_routing_replay=True")
    assert translation.keys["actor_infer.strategy_args.strategy_name"] == "vllm"
    assert any("sglang returns no routes here" in note.text for note in translation.notes)
    nameless = translated(f"{text} {routes} actor_rollout_ref.model.path=")  # the family is not known
    assert nameless.keys["actor_infer.strategy_args.strategy_name"] == "vllm"
    load(nameless, QUICKSTART)
    load(translation, QUICKSTART)
    assert translated(text).keys["actor_infer.strategy_args.strategy_name"] == "sglang"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{VERL} trainer.logger=['console','mlflow','file']", {"track_with": ["stdout", "mlflow", "jsonl"]}),
        (f"{VERL} trainer.logger=[vemlp_wandb]", {"track_with": ["wandb"]}),
        (f"{VERL} reward.reward_manager.name=gdpo", {}),
        (f"{VERL} actor_rollout_ref.model.enable_activation_offloading=true", {}),
        (f"{VERL} actor_rollout_ref.actor.megatron.use_megatron_fsdp=true", {}),
        (f"{VERL} actor_rollout_ref.actor.qat.mode=w4a16 actor_rollout_ref.actor.checkpoint.strict=true", {}),
        (f"{VERL} actor_rollout_ref.rollout.disaggregation.enabled=true trainer.v1.trainer_mode=sync", {}),
        (f"{VERL} critic.model.mtp.enable=false skip.rollout.enable=false skip.rollout.action=cache", {}),
        (
            f"{SKYRL} trainer.eval.interval=7 trainer.eval.before_train=false trainer.eval.batch_size=64",
            {"eval_steps": 7, "validation.before_train": False, "val_batch_size": 64},
        ),
        (f"{SKYRL} generator.inference_engine.speculative_config={{method:mtp}}", {}),
        (
            f"{SKYRL} trainer.policy.model.fake_int4_qat.enabled=false trainer.policy.megatron_config.mtp_num_layers=0",
            {},
        ),
        (f"{SKYRL} trainer.mtp.enabled=true trainer.mtp.loss_weight=0.5", {}),
        (f"{SKYRL} trainer.policy.language_model_only=true generator.inference_engine.language_model_only=true", {}),
        (f"{SKYRL} generator.inference_engine.enable_pd=true generator.inference_engine.num_prefill=2", {}),
        (
            f"{SKYRL} generator.chat_template_kwargs={{enable_thinking:false}}",
            {
                "actor_train.data_args.chat_template_kwargs.enable_thinking": False,
                "validation.data_args.chat_template_kwargs.enable_thinking": False,
            },
        ),
        (f"{VERL} actor_rollout_ref.model.override_config={{}}", {}),
        (f"{VERL} +actor_rollout_ref.ref.override_config.attn_implementation=sdpa", {}),
    ],
)
def test_ways_to_compute_and_to_log_the_same(text: str, expected: dict[str, Any], translated: Translate) -> None:
    plain = translated(VERL if text.startswith(VERL) else SKYRL).keys
    assert translated(text).keys == {**plain, **expected}
    load(translated(text), QUICKSTART)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("actor_rollout_ref.actor.fsdp_config.qat.enable=true", "training for quantisation"),
        ("critic.model.mtp.enable=true", "has no translation"),
        ("skip.rollout.enable=true", "has no translation"),
        ("trainer.v1.trainer_mode=separate_async", "rollout.n_gpus_per_node"),
        ("data.function_tool_path=/x.py", "has no translation"),
        ("trainer.total_epochs=0", "must be 1 at least"),
        ("trainer.epochs=0", "must be 1 at least"),
        ("trainer.fully_async.simulate_training=true", "waits in place of training"),
        ("trainer.policy.megatron_config.mtp_detach_shared_output=false", "reaches the policy"),
        ("--config-name mine", "names a file of settings of theirs"),
    ],
)
def test_what_would_train_something_else_is_refused(key: str, message: str, translated: Translate) -> None:
    verls = key.startswith(("actor", "critic", "skip", "data", "trainer.v1", "trainer.total"))
    with pytest.raises(ConfigError, match=message):
        translated(f"{VERL if verls else SKYRL} {key}")


def test_adapters_on_experts_that_parallel_sizes_state(translated: Translate) -> None:
    sizes = "trainer.strategy=megatron trainer.policy.megatron_config.expert_model_parallel_size=2"
    text = f"{SKYRL} {sizes} trainer.policy.model.lora.rank=8"
    target, named = "actor_train.model_args.lora_target", " trainer.policy.model.lora.target_modules="
    assert translated(text).keys[target] == "all-linear,experts"
    whole = "[linear_qkv,linear_proj,linear_fc1,linear_fc2]"
    assert translated(f"{text}{named}{whole}").keys[target] == "all-linear,experts"
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert translated(f"{text}{named}[linear_qkv,linear_proj]").keys[target] == attention
    with pytest.raises(ConfigError, match="puts adapters on a part of the experts"):
        translated(f"{text}{named}[linear_proj,linear_fc1]")


def test_files_of_the_recipe_dapo(translated: Translate) -> None:
    buffer = "reward_model.overlong_buffer.enable=true reward_model.overlong_buffer.len=4"
    text = VERL.replace("verl.trainer.main_ppo", "recipe.dapo.main_dapo --config-name=dapo_megatron_trainer")
    keys = translated(f"{text} {buffer}").keys
    assert keys["actor_train.strategy_args.strategy_name"] == "megatron_train"
    assert keys["overlong_buffer_length"] == 4
    own = translated(f"{VERL.replace('verl.trainer.main_ppo', 'recipe.dapo.main_dapo')} {buffer}").keys
    assert own["overlong_buffer_length"] == 4 and own["actor_train.strategy_args.strategy_name"] == "fsdp_train"


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


@pytest.mark.parametrize("sizes", ["tensor_parallel_size=16", "tensor_parallel_size=8 {}.pipeline_parallel_size=2"])
def test_an_engine_over_two_nodes_becomes_two_engines(sizes: str, translated: Translate) -> None:
    engine = "generator.inference_engine"
    nodes = " ".join(f"trainer.placement.{role}_num_{what}" for role in ("policy", "ref") for what in ("nodes=2",))
    gpus = " ".join(f"trainer.placement.{role}_num_gpus_per_node=8" for role in ("policy", "ref"))
    text = f"{SKYRL} {nodes} {gpus} {engine}.num_engines=1 {engine}.{sizes.format(engine)}"
    translation = translated(text)
    assert translation.keys[f"{OPTIONS}.tensor_parallel_size"] == 8
    assert translation.keys["actor_infer.num_gpus_per_worker"] == 8
    assert translation.keys["actor_infer.device_mapping"] == "list(range(0,16))"
    assert any("2 times as many engines of 8" in note.text for note in translation.notes)
    load(translation, QUICKSTART)


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [("m", 12, "for example tensor_model_parallel_size: 8"), ("o/Big-671B-Instruct", 16, "168 GB of weights a device")],
)
def test_an_engine_that_fits_no_node_is_refused(model: str, size: int, message: str, translated: Translate) -> None:
    text = VERL.replace("path=m ", f"path={model} ")
    with pytest.raises(ConfigError, match=f"would span two nodes of 8: .*{message}"):
        translated(f"{text} trainer.nnodes=3 actor_rollout_ref.rollout.tensor_model_parallel_size={size}")


@pytest.mark.parametrize(
    ("program", "words", "expected"),
    [
        ("async.main_async", "", {"async_generation_ratio": 1, "partial_rollout": False}),
        (
            "fully_async.main_fully_async",
            "trainer.fully_async.max_staleness_steps=3",
            {"async_generation_ratio": 3, "partial_rollout": True},
        ),
        (
            "algorithms.dapo.main_dapo",
            "trainer.placement.colocate_all=true trainer.algorithm.overlong_buffer_len=64 environment.env_class=aime",
            {"overlong_buffer_length": 64, "overlong_penalty_factor": 0.5},
        ),
    ],
)
def test_programs_of_skyrls_examples(program: str, words: str, expected: dict[str, Any], translated: Translate) -> None:
    text = SKYRL.replace("skyrl.train.entrypoints.main_base", f"examples.train.{program}")
    translation = translated(
        f"{text} trainer.placement.colocate_all=false generator.inference_engine.num_engines=4 {words}"
    )
    assert expected.items() <= translation.keys.items()
    load(translation, QUICKSTART)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("skyrl.train.entrypoints.main_generate", "roll evaluate"),
        ("verl.trainer.main_generation", "roll evaluate"),
        ("examples.train.llm_as_a_judge.main_llm_judge", "package `skyrl`$"),
    ],
)
def test_other_programs_are_refused_without_a_word_about_their_keys(
    module: str, message: str, translated: Translate
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        translated(f"python -m {module} data.train_data=[x.parquet] data.output_path=y")
    assert "1 mistake" in str(error.value)


def test_hydras_deletions_take_back_what_came_before(translated: Translate) -> None:
    text = f"{VERL} actor_rollout_ref.rollout.val_kwargs.n=4 ~actor_rollout_ref.rollout.val_kwargs ~critic"
    assert translated(text).keys.items() == translated(VERL).keys.items()


def test_a_filter_of_groups_without_spread(translated: Translate) -> None:
    text = f"{SKYRL} generator.n_samples_per_prompt=4 trainer.algorithm.zero_variance_filter=true"
    assert translated(text).keys["difficulty_mask"] is True
    load(translated(text), QUICKSTART)


def test_the_embedded_engine_takes_the_place_of_one_that_lacks_the_family(translated: Translate) -> None:
    """It holds the model on one device: SkyRL's two engines of two ranks become four."""
    text = (
        f"{SKYRL} trainer.policy.model.path=/m/moonlight16b generator.inference_engine.backend=sglang "
        "generator.inference_engine.tensor_parallel_size=2 generator.inference_engine.num_engines=2 "
        "generator.inference_engine.engine_init_kwargs.max_logprobs=8"
    )
    translation = translated(text)
    assert translation.keys["actor_infer.strategy_args.strategy_name"] == "hf_infer"
    assert translation.keys["actor_infer.device_mapping"] == "list(range(0,4))"
    assert not [key for key in translation.keys if "num_gpus_per_worker" in key or "engine_args" in key]
    assert any("hf_infer samples from the same model, more slowly" in note.text for note in translation.notes)
    load(translation, QUICKSTART)
    for name in ("deepseek-ai/DeepSeek-V3-671B", "deepseek-ai/DeepSeek-V3"):  # too large for a device, or unknown
        with pytest.raises(ConfigError, match="vllm is tested with none of this family"):
            translated(f"{SKYRL} trainer.policy.model.path={name} generator.inference_engine.tensor_parallel_size=1")


def test_mindspeed_is_megatron(translated: Translate) -> None:
    sizes = "actor_rollout_ref.actor.{0}.tensor_model_parallel_size=4 actor_rollout_ref.actor.{0}.use_mbridge=true "
    theirs = translated(
        f"{VERL} model_engine=mindspeed {sizes.format('mindspeed')}"
        "actor_rollout_ref.actor.mindspeed.llm_kwargs.recompute_granularity=full"
    )
    assert theirs.keys == translated(f"{VERL} model_engine=megatron {sizes.format('megatron')}").keys
    assert theirs.keys["actor_train.strategy_args.strategy_name"] == "megatron_train"


def test_older_names_and_what_only_hydra_reads(translated: Translate) -> None:
    sglang = f"{VERL} actor_rollout_ref.rollout.name=sglang"
    assert translated(f"{VERL} actor_rollout_ref.rollout.name=sglang_async").keys == translated(sglang).keys
    assert translated(f"{VERL} hydra.run.dir=/tmp hydra.searchpath=[file:///x]").keys == translated(VERL).keys
    older, correction = "bypass_old_logprob_for_rollout=true", f"{VERL} algorithm.rollout_correction."
    assert translated(f"{correction}{older}").keys == translated(f"{correction}bypass_mode=true").keys
    assert translated(f"{VERL} reward_model.reward_manager.name=naive").keys == translated(VERL).keys
    rmpad = "actor_rollout_ref.model.use_rmpad=false trainer.strategy=fsdp2"
    assert translated(f"{VERL} {rmpad}").keys["actor_train.use_remove_padding"] is False
    with pytest.raises(ConfigError, match="FlashRL quantises the engine"):
        translated(f"{VERL} actor_rollout_ref.rollout.load_format=flash_rl")
    with pytest.raises(ConfigError, match="training in FP8 is not available"):
        translated(f"{SKYRL} trainer.policy.megatron_config.fp8=e4m3")


def test_v1_trainers_of_verl_run_ahead(translated: Translate) -> None:
    """``num_warmup_batches`` are in flight, on the trainer's devices or on those of ``rollout.nnodes``."""
    mode = f"{VERL} trainer.use_v1=true trainer.v1.trainer_mode="
    shared = translated(f"{mode}colocate_async trainer.v1.colocate_async.num_warmup_batches=0.5").keys
    assert (shared["async_generation_ratio"], shared["partial_rollout"]) == (0.5, True)
    assert shared["actor_infer.device_mapping"] == shared["actor_train.device_mapping"] == "list(range(0,8))"
    pool = "actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=4"
    apart = translated(f"{mode}separate_async trainer.v1.separate_async.parameter_sync_step=2 {pool}")
    assert apart.keys["async_generation_ratio"] == 1 and apart.keys["enable_old_logprobs_recompute"]
    assert apart.keys["actor_infer.device_mapping"] == "list(range(8,12))"
    load(apart, QUICKSTART)
    bypass = translated(f"{mode}colocate_async algorithm.rollout_correction.bypass_mode=true")
    assert "enable_old_logprobs_recompute" not in bypass.keys
    load(bypass, QUICKSTART)
    assert "async_generation_ratio" not in translated(f"{mode}sync").keys


def test_one_step_off_has_files_of_its_own(translated: Translate) -> None:
    """Those of ``verl.experimental`` take the engine's log-probs for the old ones; the recipe's do not."""
    pool = "actor_rollout_ref.hybrid_engine=false rollout.nnodes=1 rollout.n_gpus_per_node=4"
    newer = VERL.replace("verl.trainer.", "verl.experimental.one_step_off_policy.")
    keys = translated(f"{newer} {pool} --config-name=one_step_off_ppo_megatron_trainer").keys
    assert keys["force_disable_old_logprobs_recompute"] and "enable_old_logprobs_recompute" not in keys
    assert keys["actor_train.strategy_args.strategy_name"] == "megatron_train"
    explicit = translated(f"{newer} {pool} algorithm.rollout_correction.bypass_mode=false").keys
    older = translated(f"{VERL.replace('verl.trainer.', 'recipe.one_step_off_policy.')} {pool}").keys
    assert explicit == older and older["enable_old_logprobs_recompute"]


def test_the_reference_has_the_parallel_sizes_of_the_actor(translated: Translate) -> None:
    text = f"{VERL} {KL} model_engine=megatron actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 "
    name = f"reference.strategy_args.{OPTIONS.rpartition('.')[2]}.tensor_model_parallel_size"
    assert translated(text).keys[name] == 4
    assert translated(f"{text} actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2").keys[name] == 2


def test_scripts_from_before_the_engine_had_to_be_named_run_vllm(translated: Translate) -> None:
    options = (
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.7"
    )
    named, unnamed = (
        translated(f"{text} {options}").keys for text in (VERL, VERL.replace("rollout.name=vllm", "rollout.seed=0"))
    )
    kept = {key: value for key, value in unnamed.items() if key.startswith("actor_infer.strategy_args.")}
    assert kept == {key: value for key, value in named.items() if key.startswith("actor_infer.strategy_args.")}
    assert unnamed[f"{OPTIONS}.tensor_parallel_size"] == 2


@pytest.mark.parametrize(("written", "mode"), [("true", None), ("false", "token-mean")])
def test_the_older_name_of_the_loss_mode_is_of_the_policy_alone(
    written: str, mode: str | None, translated: Translate
) -> None:
    keys = translated(f"{VERL} {KL} actor_rollout_ref.actor.use_token_level_loss={written}").keys
    assert keys["loss_agg_mode"] == ("seq-mean-token-mean" if mode else "token-mean")
    assert keys.get("kl_loss_agg_mode") == mode


def test_the_over_long_buffer_under_its_first_name(translated: Translate) -> None:
    buffer = "custom_reward_function.overlong_buffer"
    text = f"{VERL} reward_model.reward_manager=dapo {buffer}.enable=True {buffer}.len=512 {buffer}.penalty_factor=0.5"
    keys = translated(text).keys
    assert (keys["overlong_buffer_length"], keys["overlong_penalty_factor"]) == (512, 0.5)


def test_loop_is_rloo(translated: Translate) -> None:
    loop, rloo = (translated(f"{SKYRL} trainer.algorithm.advantage_estimator={name}").keys for name in ("loop", "rloo"))
    assert loop == rloo


def test_a_folder_of_settings_is_named_by_its_missing_file(translated: Translate) -> None:
    with pytest.raises(ConfigError, match="names a file of settings of theirs that is not here") as caught:
        translated(f"{VERL} --config-dir /recipes/config --config-name own.yaml")
    assert "must be key=value" not in str(caught.value)


def test_steps_of_critic_warmup_count_from_one_there(translated: Translate) -> None:
    gae = VERL.replace(
        "adv_estimator=grpo", "adv_estimator=gae critic.model.path=m critic.ppo_micro_batch_size_per_gpu=2"
    )
    for written, ours in ((0, 0), (1, 0), (20, 19)):
        assert translated(f"{gae} trainer.critic_warmup={written}").keys["critic_warmup"] == ours
    alone = translated(f"{VERL} trainer.critic_warmup=20")
    assert "critic_warmup" not in alone.keys
    assert any("the first 19 steps train nothing" in note.text for note in alone.notes)


def test_keys_of_a_fork_that_measure_are_left_out(translated: Translate) -> None:
    own = "reward_model.prime_num_processes=32 trainer.val_generations_to_log_to_txt=9 wandb_config.project=p"
    translation = translated(f"{VERL} {own}")
    assert translation.keys == translated(VERL).keys
    left_out = [note.theirs for note in translation.notes if "its name says what is logged" in note.text]
    assert left_out == [word.partition("=")[0] for word in own.split()]
    for key in ("actor_rollout_ref.actor.log_ratio_cap", "algorithm.log_prob_floor", "trainer.save_start_step"):
        with pytest.raises(ConfigError, match="no translation is known"):
            translated(f"{VERL} {key}=1")


def test_a_section_of_a_fork_that_is_switched_off_is_left_out(translated: Translate) -> None:
    off = translated(f"{VERL} algorithm.curiosity.enable=False algorithm.curiosity.scale=0.1")
    assert off.keys == translated(VERL).keys
    notes = {note.theirs: note.text for note in off.notes}
    assert notes["algorithm.curiosity.scale"] == "left out: its section is switched off there"
    with pytest.raises(ConfigError, match=r"curiosity\.scale"):
        translated(f"{VERL} algorithm.curiosity.enable=True algorithm.curiosity.scale=0.1")


def test_weights_of_the_mismatch_under_their_older_names(translated: Translate) -> None:
    weights = "algorithm.rollout_is=True algorithm.rollout_is_threshold=2.0 algorithm.rollout_is_level=sequence"
    new = "algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_is_threshold=2.0"
    assert translated(f"{VERL} {weights} algorithm.rollout_is_mode=truncate").keys == translated(f"{VERL} {new}").keys
    assert translated(f"{VERL} {weights.replace('True', 'False')}").keys == translated(VERL).keys
    for other in ("rollout_is_mode=mask", "rollout_is_veto_threshold=1e-4", "rollout_is_level=geometric"):
        with pytest.raises(ConfigError, match=other.partition("=")[0]):
            translated(f"{VERL} {weights} algorithm.{other}")


def test_a_mini_batch_of_more_prompts_than_a_step_is_refused_in_their_words(translated: Translate) -> None:
    with pytest.raises(ConfigError, match=r"ppo_mini_batch_size = 256: must be at most the prompts of a step, 64"):
        translated(f"{VERL} actor_rollout_ref.actor.ppo_mini_batch_size=256")


def test_environments_of_skyrl_end_their_episodes_there(translated: Translate) -> None:
    played = translated(f"{SKYRL} environment.env_class=babyai")
    assert any("ends an episode there" in note.text for note in played.notes if note.theirs == "environment.env_class")


def test_validation_has_sampling_of_its_own_in_verl(translated: Translate) -> None:
    """What ``val_kwargs`` leave out is verl's default, not the sampling of training; no prompt is asked twice."""
    sampled = "actor_rollout_ref.rollout.top_p=0.9 actor_rollout_ref.rollout.top_k=20 "
    loaded = load(translated(f"{VERL} {sampled} actor_rollout_ref.rollout.val_kwargs.temperature=0.6"), QUICKSTART)
    assert loaded.config.validation is not None and not loaded.config.validation.greedy
    asked = loaded.config.validation.generating_args
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.6, 1.0, -1)


def test_the_backend_of_a_role_may_stand_among_its_fsdp_options(translated: Translate) -> None:
    name = "actor_train.strategy_args.strategy_name"
    assert translated(f"{VERL} actor_rollout_ref.actor.fsdp_config.strategy=fsdp2").keys[name] == "fsdp2_train"
    both = "actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.strategy"
    assert translated(f"{VERL} {both}=fsdp2").keys[name] == "fsdp2_train"
    with pytest.raises(ConfigError, match="keep one"):
        translated(f"{VERL} {both}=fsdp")


def test_notes_on_columns_and_tokenizers_say_what_becomes_of_them(translated: Translate) -> None:
    model = "reward_model.enable=true reward_model.model.path=rm reward_model.model.input_tokenizer"
    for written, read in (("m", "chat"), ("null", "tokens")):
        translation = translated(f"{VERL} data.prompt_key=question {model}={written}")
        assert translation.keys["rewards.reward_model.reward_kwargs.input"] == read
        assert translation.keys["actor_train.data_args.messages"] == "question"
        notes = {note.theirs: note.text for note in translation.notes}
        assert not any("left out" in notes[key] for key in ("data.prompt_key", "reward_model.model.input_tokenizer"))


def test_the_older_name_of_the_gpg_loss(translated: Translate) -> None:
    older = "actor_rollout_ref.actor.use_gpg_loss"
    newer = translated(f"{VERL} actor_rollout_ref.actor.policy_loss.loss_mode=gpg")
    assert translated(f"{VERL} {older}=True").keys == newer.keys != translated(VERL).keys
    assert translated(f"{VERL} {older}=False").keys == translated(VERL).keys


def test_the_engine_of_the_actor_is_that_of_all_roles(translated: Translate) -> None:
    """verl's examples write ``model_engine`` within the actor's section, too; the note names what decided."""
    inner, outer = (
        translated(f"{VERL} {KL} {key}=megatron") for key in ("actor_rollout_ref.actor.model_engine", MODEL)
    )
    assert inner.keys == outer.keys
    name = "actor_train.strategy_args.strategy_name=megatron_train"
    assert [note.theirs for note in outer.notes if name in note.ours] == [MODEL]


def test_drafts_of_further_tokens_are_no_reason_unless_their_loss_is_learnt(translated: Translate) -> None:
    section = "actor_rollout_ref.model.mtp"
    drafts = f"{VERL} {section}.enable=True {section}.enable_rollout=True {section}.num_speculative_tokens=2"
    assert translated(drafts).keys == translated(VERL).keys
    with pytest.raises(ConfigError, match=r"mtp\.enable_train = true: is not available"):
        translated(f"{drafts} {section}.enable_train=True")


def test_lora_has_a_scale_of_its_own_under_megatron(translated: Translate) -> None:
    alpha = "actor_train.model_args.lora_alpha"
    model = "actor_rollout_ref.model"
    assert translated(f"{VERL} {model}.lora_rank=8").keys[alpha] == 16
    assert translated(f"{VERL} model_engine=megatron {model}.lora.rank=8").keys[alpha] == 32
    assert translated(f"{VERL} model_engine=megatron {model}.lora.rank=8 {model}.lora.alpha=64").keys[alpha] == 64


def test_a_step_has_the_prompts_that_are_generated_for_it(translated: Translate) -> None:
    """verl's loader reads ``gen_batch_size``; only where groups are filtered do fewer remain."""
    more = f"{VERL} +data.gen_batch_size=128"
    assert translated(more).keys["rollout_batch_size"] == 128
    filtered = translated(f"{more} algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc")
    assert filtered.keys["rollout_batch_size"] == 64
    fewer = f"{VERL} data.gen_batch_size=16"
    with pytest.raises(ConfigError, match="must be at most the prompts of a step, 16"):
        translated(fewer)


def test_what_comes_first_ends_the_run(translated: Translate) -> None:
    text = f"{VERL} trainer.total_training_steps=500 trainer.total_epochs=2"
    for rows, steps in ((640, 2 * (640 // 64)), (64_000, 500)):
        assert translated(text, train_rows=rows).keys["max_steps"] == steps
    open_end = translated(text)
    assert open_end.keys["max_steps"] == 500
    assert any("if that is sooner" in note.text for note in open_end.notes if note.theirs == "trainer.total_epochs")


def test_the_validation_before_a_run_that_never_validates_is_told(translated: Translate) -> None:
    for before, told in (("", True), ("trainer.val_before_train=False", False)):
        notes = {note.theirs: note.text for note in translated(f"{VERL} trainer.test_freq=-1 {before}").notes}
        assert ("nor before the first step" in notes["trainer.test_freq"]) is told


def test_switches_that_change_no_number_are_known(translated: Translate) -> None:
    rollout, reference = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
    text = f"{VERL} +{rollout}.moe_tp_size=2 {rollout}.use_preprocessed_multimodal_input=True"
    text += f" +{reference}.model.override_config.attn_implementation=eager trainer.balance_keep_minibatch=True"
    assert (
        translated(f"{text} {rollout}.max_batch_size=64").keys == translated(f"{VERL} {rollout}.max_num_seqs=64").keys
    )
