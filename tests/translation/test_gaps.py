"""What scripts leave open or give to others: empty values, nulls, servers of their own, services, other backends."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.reading.errors import ConfigError
from roll.datasets.columns import DomainRouter
from roll.translation.command import load
from roll.translation.engine import Translation
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
NAME, ENGINE_NAME = "actor_train.strategy_args.strategy_name", "actor_infer.strategy_args.strategy_name"
TARGET, ALPHA = "actor_train.model_args.lora_target", "actor_train.model_args.lora_alpha"
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ENGINE, MEGATRON = "generator.inference_engine", "trainer.policy.megatron_config"
CORRECTION, MTP, BUFFER = "algorithm.rollout_correction", f"{MODEL}.mtp", "custom_reward_function.overlong_buffer"
DRAFTS = f"{VERL} {MTP}.enable=True {MTP}.enable_rollout=True {MTP}.num_speculative_tokens=2"
WEIGHTS = "algorithm.rollout_is=True algorithm.rollout_is_threshold=2.0 algorithm.rollout_is_level=sequence"
SGLANG = VERL.replace("rollout.name=vllm", "rollout.name=sglang")
POOL = f"{ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=4"
ONE_STEP = f"{POOL.replace(ROLLOUT, 'rollout')} actor_rollout_ref.hybrid_engine=false"
EXPERIMENTAL = VERL.replace("verl.trainer.", "verl.experimental.one_step_off_policy.")
TITAN = f"{VERL} model_engine=torchtitan {ACTOR}.torchtitan.data_parallel_shard_size=8 "


def tells(translation: Translation, words: str, theirs: str = "") -> bool:
    """A note, of one of their keys if it is named, holds these words."""
    return any(words in note.text and theirs in note.theirs for note in translation.notes)


SAME = {
    "null": (f"{VERL} {ACTOR}.ppo_micro_batch_size=null trainer.total_training_steps=null", VERL),
    "section": (f"{SKYRL} {ENGINE}.speculative_config=null generator.sampling_params.additional_kwargs=null", SKYRL),
    "deletion": (f"{VERL} {ROLLOUT}.val_kwargs.n=4 ~{ROLLOUT}.val_kwargs ~critic", VERL),
    "no nodes of the engines": (f"{VERL} {ROLLOUT}.nnodes=0", VERL),
    "nodes in their own section": (
        f"{VERL} actor_rollout_ref.hybrid_engine=false {POOL}",
        f"{VERL} {ONE_STEP}",
    ),
    "mindspeed": (
        f"{VERL} model_engine=mindspeed {ACTOR}.mindspeed.tensor_model_parallel_size=4 "
        f"{ACTOR}.mindspeed.use_mbridge=true {ACTOR}.mindspeed.llm_kwargs.recompute_granularity=full",
        f"{VERL} model_engine=megatron {ACTOR}.megatron.tensor_model_parallel_size=4",
    ),
    "sglang_async": (f"{VERL} {ROLLOUT}.name=sglang_async", f"{VERL} {ROLLOUT}.name=sglang"),
    "hydra": (f"{VERL} hydra.run.dir=/tmp hydra.searchpath=[file:///x]", VERL),
    "bypass": (f"{VERL} {CORRECTION}.bypass_old_logprob_for_rollout=true", f"{VERL} {CORRECTION}.bypass_mode=true"),
    "naive": (f"{VERL} reward_model.reward_manager.name=naive", VERL),
    "loop": (
        f"{SKYRL} trainer.algorithm.advantage_estimator=loop",
        f"{SKYRL} trainer.algorithm.advantage_estimator=rloo",
    ),
    "weights": (
        f"{VERL} {WEIGHTS} algorithm.rollout_is_mode=truncate",
        f"{VERL} {CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_is_threshold=2.0",
    ),
    "no weights": (f"{VERL} {WEIGHTS.replace('True', 'False')}", VERL),
    "gpg": (f"{VERL} {ACTOR}.use_gpg_loss=True", f"{VERL} {ACTOR}.policy_loss.loss_mode=gpg"),
    "no gpg": (f"{VERL} {ACTOR}.use_gpg_loss=False", VERL),
    "drafts": (DRAFTS, VERL),
    "engine of the actor": (f"{VERL} {KL} {ACTOR}.model_engine=megatron", f"{VERL} {KL} model_engine=megatron"),
    "no numbers": (
        f"{VERL} +{ROLLOUT}.moe_tp_size=2 {ROLLOUT}.use_preprocessed_multimodal_input=True {ROLLOUT}.max_batch_size=64 "
        "+actor_rollout_ref.ref.model.override_config.attn_implementation=eager trainer.balance_keep_minibatch=True",
        f"{VERL} {ROLLOUT}.max_num_seqs=64",
    ),
    "experimental": (
        f"{EXPERIMENTAL} {ONE_STEP} {CORRECTION}.bypass_mode=false",
        f"{VERL.replace('verl.trainer.', 'recipe.one_step_off_policy.')} {ONE_STEP}",
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_two_ways_to_say_the_same(name: str, translated: Translate) -> None:
    one, other = SAME[name]
    assert translated(one).keys.items() == translated(other).keys.items()


REFUSED = [
    (f"{VERL} {ROLLOUT}.use_fire_sampling=True", "has no translation"),
    (f"{VERL} +{ACTOR}.optim.override_optimizer_config.optimizer=muon", "AdamW only"),
    (f"{SKYRL} trainer.update_ref_every_epoch=true", "the reference stays as it is"),
    (f"{SKYRL} trainer.policy.model.lora.exclude_modules=[q_proj]", "has no translation"),
    (f"{SKYRL} {MEGATRON}.freeze_moe_router=true", "routers learn with the rest"),
    (f"{SKYRL} trainer.algorithm.enable_sample_support_replay=true", "of the whole vocabulary"),
    (f"{VERL} {ACTOR}.fsdp_config.qat.enable=true", "training for quantisation"),
    (f"{VERL} critic.model.mtp.enable=true", "has no translation"),
    (f"{VERL} skip.rollout.enable=true", "has no translation"),
    (f"{VERL} trainer.v1.trainer_mode=separate_async", "rollout.n_gpus_per_node"),
    (f"{VERL} data.function_tool_path=/x.py", "has no translation"),
    (f"{VERL} trainer.total_epochs=0", "must be 1 at least"),
    (f"{SKYRL} trainer.epochs=0", "must be 1 at least"),
    (f"{SKYRL} trainer.fully_async.simulate_training=true", "waits in place of training"),
    (f"{SKYRL} {MEGATRON}.mtp_detach_shared_output=false", "reaches the policy"),
    (f"{SKYRL} {MEGATRON}.fp8=e4m3", "training in FP8 is not available"),
    (f"{SKYRL} --config-name mine", "names a file of settings of theirs"),
    (f"{VERL} --config-dir /recipes/config --config-name own.yaml", "names a file of settings of theirs that is not"),
    (f"{VERL} {ROLLOUT}.load_format=flash_rl", "FlashRL quantises the engine"),
    (f"{DRAFTS} {MTP}.enable_train=True", r"mtp\.enable_train = true: is not available"),
    (f"{VERL} {POOL}", r"goes with .*hybrid_engine=false"),
    (f"{SGLANG} {ROLLOUT}.pipeline_model_parallel_size=2", "needs the engine vllm"),
    (f"{REMOTE} {ENGINE}.external_server_urls=['http://a:1']", "share no devices with the trainer"),
    (TITAN, r"min_lr_factor=1\.0 keeps it constant"),
    (f"{TITAN} {ACTOR}.optim.min_lr_factor=0.1", "has no translation; known: 1"),
    (f"{VERL} {ACTOR}.strategy=fsdp2 {ACTOR}.fsdp_config.strategy=fsdp", "keep one"),
    (f"{VERL} {ACTOR}.log_ratio_cap=1", "no translation is known"),
    (f"{VERL} trainer.save_start_step=1", "no translation is known"),
    (f"{VERL} algorithm.curiosity.enable=True algorithm.curiosity.scale=0.1", r"curiosity\.scale"),
    (f"{VERL} {WEIGHTS} algorithm.rollout_is_mode=mask", "rollout_is_mode"),
    (f"{VERL} {WEIGHTS} algorithm.rollout_is_veto_threshold=1e-4", "rollout_is_veto_threshold"),
    (f"{VERL} {WEIGHTS} algorithm.rollout_is_level=geometric", "rollout_is_level"),
    (f"{VERL} {ACTOR}.ppo_mini_batch_size=256", "ppo_mini_batch_size = 256: must be at most the prompts of a step, 64"),
    (f"{VERL} data.gen_batch_size=16", "must be at most the prompts of a step, 16"),
    (
        f"{VERL} trainer.nnodes=3 {ROLLOUT}.tensor_model_parallel_size=12",
        "would span two nodes of 8: .*for example tensor_model_parallel_size: 8",
    ),
    (
        f"{VERL} {MODEL}.path=o/Big-671B-Instruct trainer.nnodes=3 {ROLLOUT}.tensor_model_parallel_size=16",
        "would span two nodes of 8: .*168 GB of weights a device",
    ),
    *(
        (f"{SKYRL} trainer.policy.model.path=deepseek-ai/{name} {ENGINE}.tensor_parallel_size=1", "with none of this")
        for name in ("DeepSeek-V3-671B", "DeepSeek-V3")  # too large for a device, or of unknown size
    ),
    *(
        (f"python -m {module} data.train_data=[x.parquet] data.output_path=y", f"1 mistake.*\n.*{message}")
        for module, message in (
            ("skyrl.train.entrypoints.main_generate", "roll evaluate"),
            ("verl.trainer.main_generation", "roll evaluate"),
            ("examples.train.llm_as_a_judge.main_llm_judge", "package `skyrl`$"),
        )
    ),
]


@pytest.mark.parametrize(("text", "rule"), REFUSED)
def test_what_would_train_something_else_is_refused(text: str, rule: str, translated: Translate) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        translated(text)
    assert "must be key=value" not in str(caught.value)


KEYS: list[tuple[str, dict[str, Any]]] = [
    (f"{VERL} trainer.total_epochs=null trainer.total_training_steps=7", {"max_steps": 7}),
    (
        f"{VERL} +{ACTOR}.optim.override_optimizer_config.adam_beta2=0.95",
        {"actor_train.training_args.adam_beta2": 0.95},
    ),
    (
        f"{SKYRL} {MEGATRON}.optimizer_config_kwargs.adam_beta2=0.95",
        {"actor_train.training_args.adam_beta2": 0.95},
    ),
    # gpt-oss has no sdpa.
    (f"{SKYRL} trainer.flash_attn=false", {"actor_train.model_args.attn_implementation": None}),
    (f"{VERL} {MODEL}.use_rmpad=false trainer.strategy=fsdp2", {"actor_train.use_remove_padding": False}),
    (f"{VERL} {MODEL}.lora_rank=8", {ALPHA: 16}),
    (f"{VERL} model_engine=megatron {MODEL}.lora.rank=8", {ALPHA: 32}),
    (f"{VERL} model_engine=megatron {MODEL}.lora.rank=8 {MODEL}.lora.alpha=64", {ALPHA: 64}),
    # verl's loader reads gen_batch_size; only where groups are filtered do fewer remain.
    (f"{VERL} +data.gen_batch_size=128", {"rollout_batch_size": 128}),
    (
        f"{VERL} +data.gen_batch_size=128 algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc",
        {"rollout_batch_size": 64},
    ),
    (f"{VERL} {ACTOR}.fsdp_config.strategy=fsdp2", {NAME: "fsdp2_train"}),
    (f"{VERL} {ACTOR}.strategy=fsdp2 {ACTOR}.fsdp_config.strategy=fsdp2", {NAME: "fsdp2_train"}),
    (f"{VERL} {KL} {ACTOR}.use_token_level_loss=false",
     {"loss_agg_mode": "seq-mean-token-mean", "kl_loss_agg_mode": "token-mean"}),
    (f"{VERL} {KL} {ACTOR}.use_token_level_loss=true", {"loss_agg_mode": "token-mean", "kl_loss_agg_mode": ...}),
    (f"{VERL} {ACTOR}.fsdp_config.offload_policy=true",
     {"actor_train.strategy_args.strategy_config.offload_policy": ...}),
    (
        f"{VERL} reward_model.reward_manager=dapo {BUFFER}.enable=True {BUFFER}.len=512 {BUFFER}.penalty_factor=0.5",
        {"overlong_buffer_length": 512, "overlong_penalty_factor": 0.5},
    ),
    (f"{VERL} {ACTOR}.fsdp_config.offload_policy=true {ACTOR}.strategy=fsdp2",
     {"actor_train.strategy_args.strategy_config.offload_policy": True}),
    (
        f"{VERL.replace('verl.trainer.main_ppo', 'recipe.dapo.main_dapo')} --config-name=dapo_megatron_trainer "
        "reward_model.overlong_buffer.enable=true reward_model.overlong_buffer.len=4",
        {NAME: "megatron_train", "overlong_buffer_length": 4},
    ),
    (
        f"{VERL.replace('verl.trainer.main_ppo', 'recipe.dapo.main_dapo')} "
        "reward_model.overlong_buffer.enable=true reward_model.overlong_buffer.len=4",
        {NAME: "fsdp_train", "overlong_buffer_length": 4},
    ),
    (
        f"{EXPERIMENTAL} {ONE_STEP} --config-name=one_step_off_ppo_megatron_trainer",
        {NAME: "megatron_train", "force_disable_old_logprobs_recompute": True},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), KEYS)
def test_keys_that_a_text_becomes(text: str, expected: dict[str, Any], translated: Translate) -> None:
    keys = translated(text).keys
    assert {key: keys.get(key, ...) for key in expected} == expected


def test_what_is_left_empty_is_a_variable(translated: Translate) -> None:
    translation = translated(f"{VERL} {MODEL}.path= data.train_files= data.val_files=")
    assert translation.keys["pretrain"] == "${oc.env:MODEL_PATH}"
    assert translation.keys["actor_train.data_args.file_name"] == ["${oc.env:TRAIN_FILES}"]
    assert translation.unset == ("MODEL_PATH", "TRAIN_FILES", "VAL_FILES")
    load(translation, QUICKSTART)


@pytest.mark.parametrize(
    "text",
    [
        f"{SKYRL} {ENGINE}.engine_init_kwargs.max_model_len=512",
        f"{VERL} +{ROLLOUT}.engine_kwargs.vllm.max_model_len=512",
    ],
)
def test_a_length_among_the_options_of_the_engine_leaves_room_for_a_response(text: str, translated: Translate) -> None:
    translation = translated(text)
    assert translation.keys[f"{OPTIONS}.max_model_len"] == 512 and translation.keys["prompt_length"] == 511
    load(translation, QUICKSTART)


def test_servers_of_skyrl_become_engines_of_the_run(translated: Translate) -> None:
    servers = f"{ENGINE}.external_server_urls=['http://a:1','http://b:1'] "
    translation = translated(f"{REMOTE}{servers} trainer.placement.colocate_all=false {ENGINE}.tensor_parallel_size=2")
    assert translation.keys["actor_train.device_mapping"] == "list(range(0,4))"
    assert translation.keys["actor_infer.device_mapping"] == "list(range(4,8))"
    assert translation.keys["actor_infer.num_gpus_per_worker"] == 2
    assert tells(translation, "starts these engines itself")
    load(translation, QUICKSTART)
    one = translated(f"{REMOTE} trainer.placement.colocate_all=false {ENGINE}.external_proxy_url=http://a")
    assert one.keys["actor_infer.device_mapping"] == "list(range(4,5))"


def test_programs_scored_by_a_service_are_run_here(translated: Translate) -> None:
    for section in ("reward_model.", "reward.", ""):
        loaded = load(translated(f"{VERL} {section}sandbox_fusion.url=http://x/run_code"), QUICKSTART)
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
        f"{VERL} {ROLLOUT}.pipeline_model_parallel_size=2",
        f"{SKYRL} {ENGINE}.num_engines=2 {ENGINE}.pipeline_parallel_size=2",
    ],
)
def test_stages_of_an_engine(text: str, translated: Translate) -> None:
    translation = translated(text)
    tensor = translation.keys.get(f"{OPTIONS}.tensor_parallel_size", 1)
    assert translation.keys[f"{OPTIONS}.pipeline_parallel_size"] == 2
    assert translation.keys["actor_infer.num_gpus_per_worker"] == 2 * tensor
    load(translation, QUICKSTART)


def test_fsdp2_takes_the_place_of_another_backend(translated: Translate) -> None:
    """VeOmni's sharding; torchtitan's, with a constant learning rate; a family with experts that FSDP1 is not tested
    with."""
    sharded = translated(f"{VERL} model_engine=veomni {ACTOR}.veomni.ulysses_parallel_size=2")
    assert sharded.keys["actor_train.model_args.ulysses_size"] == 2
    titan = translated(f"{TITAN} {ACTOR}.optim.min_lr_factor=1.0")
    assert titan.keys["actor_train.training_args.lr_scheduler_type"] == "constant"
    experts = translated(f"{VERL} {MODEL}.path=openai/gpt-oss-20b")
    assert tells(experts, "fsdp2 computes the same")
    for translation in (sharded, titan, experts):
        assert translation.keys[NAME] == "fsdp2_train" != translated(VERL).keys[NAME]
        load(translation, QUICKSTART)


def test_the_type_of_the_weights_that_are_updated(translated: Translate) -> None:
    key = "actor_train.strategy_args.strategy_config.master_dtype"
    text = f"{VERL} {ACTOR}.fsdp_config.model_dtype="
    for strategy in ("fsdp", "fsdp2"):
        bf16 = translated(f"{text}bfloat16 {ACTOR}.strategy={strategy}")
        assert bf16.keys[key] == "bf16"
        load(bf16, QUICKSTART)
    assert key not in translated(f"{text}fp32").keys
    frozen = translated(f"{VERL} {KL} actor_rollout_ref.ref.fsdp_config.model_dtype=bfloat16")
    assert not any(name.endswith("master_dtype") for name in frozen.keys) and tells(frozen, "does not learn")
    megatron = translated(f"{text}bfloat16 --config-name=ppo_megatron_trainer")
    assert key not in megatron.keys and tells(megatron, "no effect under megatron")


def test_routes_come_from_an_engine_that_returns_them(translated: Translate) -> None:
    text = SGLANG.replace("model.path=m", "model.path=Qwen3-30B-A3B")
    routes = f"{ACTOR}.megatron.router_replay.mode=R3 --config-name=ppo_megatron_trainer"
    translation = translated(f"{text} {routes} {ROLLOUT}.enable_rollout_routing_replay=True")
    nameless = translated(f"{text} {routes} {MODEL}.path=")  # the family is not known
    assert tells(translation, "sglang returns no routes here")
    for one in (translation, nameless):
        assert one.keys[ENGINE_NAME] == "vllm"
        load(one, QUICKSTART)
    assert translated(text).keys[ENGINE_NAME] == "sglang"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{VERL} trainer.logger=['console','mlflow','file']", {"track_with": ["stdout", "mlflow", "jsonl"]}),
        (f"{VERL} trainer.logger=[vemlp_wandb]", {"track_with": ["wandb"]}),
        (f"{VERL} reward.reward_manager.name=gdpo", {}),
        (f"{VERL} {MODEL}.enable_activation_offloading=true", {}),
        (f"{VERL} {ACTOR}.megatron.use_megatron_fsdp=true", {}),
        (f"{VERL} {ACTOR}.qat.mode=w4a16 {ACTOR}.checkpoint.strict=true", {}),
        (f"{VERL} {ROLLOUT}.disaggregation.enabled=true trainer.v1.trainer_mode=sync", {}),
        (f"{VERL} critic.model.mtp.enable=false skip.rollout.enable=false skip.rollout.action=cache", {}),
        (
            f"{SKYRL} trainer.eval.interval=7 trainer.eval.before_train=false trainer.eval.batch_size=64",
            {"eval_steps": 7, "validation.before_train": False, "val_batch_size": 64},
        ),
        (f"{SKYRL} {ENGINE}.speculative_config={{method:mtp}}", {}),
        (f"{SKYRL} trainer.policy.model.fake_int4_qat.enabled=false {MEGATRON}.mtp_num_layers=0", {}),
        (f"{SKYRL} trainer.mtp.enabled=true trainer.mtp.loss_weight=0.5", {}),
        (f"{SKYRL} trainer.policy.language_model_only=true {ENGINE}.language_model_only=true", {}),
        (f"{SKYRL} {ENGINE}.enable_pd=true {ENGINE}.num_prefill=2", {}),
        (
            f"{SKYRL} generator.chat_template_kwargs={{enable_thinking:false}}",
            {f"{role}.data_args.chat_template_kwargs.enable_thinking": False for role in ("actor_train", "validation")},
        ),
        (f"{VERL} {MODEL}.override_config={{}}", {}),
        (f"{VERL} +actor_rollout_ref.ref.override_config.attn_implementation=sdpa", {}),
        (f"{SKYRL} generator.n_samples_per_prompt=5 trainer.algorithm.zero_variance_filter=true",
         {"difficulty_mask": True}),
        (f"{VERL} +{ROLLOUT}.engine_kwargs.vllm.limit_mm_per_prompt.image=4",
         {f"{OPTIONS}.limit_mm_per_prompt.image": 4}),
    ],
)  # fmt: skip
def test_ways_to_compute_and_to_log_the_same(text: str, expected: dict[str, Any], translated: Translate) -> None:
    plain = translated(VERL if text.startswith(VERL) else SKYRL).keys
    assert translated(text).keys == {**plain, **expected}
    load(translated(text), QUICKSTART)


def test_adapters_on_experts_that_parallel_sizes_state(translated: Translate) -> None:
    text = f"{SKYRL} trainer.strategy=megatron {MEGATRON}.expert_model_parallel_size=2 trainer.policy.model.lora.rank=8"
    named = " trainer.policy.model.lora.target_modules="
    for whole in ("", f"{named}[linear_qkv,linear_proj,linear_fc1,linear_fc2]"):
        assert translated(f"{text}{whole}").keys[TARGET] == "all-linear,experts"
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert translated(f"{text}{named}[linear_qkv,linear_proj]").keys[TARGET] == attention
    with pytest.raises(ConfigError, match="puts adapters on a part of the experts"):
        translated(f"{text}{named}[linear_proj,linear_fc1]")


@pytest.mark.parametrize("sizes", ["tensor_parallel_size=16", "tensor_parallel_size=8 {}.pipeline_parallel_size=2"])
def test_an_engine_over_two_nodes_becomes_two_engines(sizes: str, translated: Translate) -> None:
    nodes = " ".join(
        f"trainer.placement.{role}_num_nodes=2 trainer.placement.{role}_num_gpus_per_node=8"
        for role in ("policy", "ref")
    )
    translation = translated(f"{SKYRL} {nodes} {ENGINE}.num_engines=1 {ENGINE}.{sizes.format(ENGINE)}")
    assert translation.keys[f"{OPTIONS}.tensor_parallel_size"] == 8
    assert translation.keys["actor_infer.num_gpus_per_worker"] == 8
    assert translation.keys["actor_infer.device_mapping"] == "list(range(0,16))"
    assert tells(translation, "2 times as many engines of 8")
    load(translation, QUICKSTART)


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
    translation = translated(f"{text} trainer.placement.colocate_all=false {ENGINE}.num_engines=4 {words}")
    assert expected.items() <= translation.keys.items()
    load(translation, QUICKSTART)


def test_the_embedded_engine_takes_the_place_of_one_that_lacks_the_family(translated: Translate) -> None:
    """It holds the model on one device: SkyRL's two engines of two ranks become four."""
    translation = translated(
        f"{SKYRL} trainer.policy.model.path=/m/moonlight16b {ENGINE}.backend=sglang {ENGINE}.tensor_parallel_size=2 "
        f"{ENGINE}.num_engines=2 {ENGINE}.engine_init_kwargs.max_logprobs=8"
    )
    assert translation.keys[ENGINE_NAME] == "hf_infer"
    assert translation.keys["actor_infer.device_mapping"] == "list(range(0,4))"
    assert not [key for key in translation.keys if "num_gpus_per_worker" in key or "engine_args" in key]
    assert tells(translation, "hf_infer samples from the same model, more slowly")
    load(translation, QUICKSTART)


def test_v1_trainers_of_verl_run_ahead(translated: Translate) -> None:
    """``num_warmup_batches`` are in flight, on the trainer's devices or on those of ``rollout.nnodes``."""
    mode = f"{VERL} trainer.use_v1=true trainer.v1.trainer_mode="
    shared = translated(f"{mode}colocate_async trainer.v1.colocate_async.num_warmup_batches=0.5").keys
    assert (shared["async_generation_ratio"], shared["partial_rollout"]) == (0.5, True)
    assert shared["actor_infer.device_mapping"] == shared["actor_train.device_mapping"] == "list(range(0,8))"
    apart = translated(f"{mode}separate_async trainer.v1.separate_async.parameter_sync_step=2 {POOL}")
    assert apart.keys["async_generation_ratio"] == 1 and apart.keys["enable_old_logprobs_recompute"]
    assert apart.keys["actor_infer.device_mapping"] == "list(range(8,12))"
    bypass = translated(f"{mode}colocate_async {CORRECTION}.bypass_mode=true")
    assert "enable_old_logprobs_recompute" not in bypass.keys
    for translation in (apart, bypass):
        load(translation, QUICKSTART)
    assert "async_generation_ratio" not in translated(f"{mode}sync").keys


def test_the_reference_has_the_parallel_sizes_of_the_actor(translated: Translate) -> None:
    text = f"{VERL} {KL} model_engine=megatron {ACTOR}.megatron.tensor_model_parallel_size=4 "
    name = "reference.strategy_args.strategy_config.tensor_model_parallel_size"
    assert translated(text).keys[name] == 4
    assert translated(f"{text} actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2").keys[name] == 2


def test_scripts_from_before_the_engine_had_to_be_named_run_vllm(translated: Translate) -> None:
    options = f"{ROLLOUT}.tensor_model_parallel_size=2 {ROLLOUT}.gpu_memory_utilization=0.7"
    named, unnamed = (
        {key: value for key, value in translated(f"{text} {options}").keys.items() if key.startswith(OPTIONS[:25])}
        for text in (VERL, VERL.replace("rollout.name=vllm", "rollout.seed=0"))
    )
    assert unnamed == named and unnamed[f"{OPTIONS}.tensor_parallel_size"] == 2


def test_steps_of_critic_warmup_count_from_one_there(translated: Translate) -> None:
    critic = "adv_estimator=gae critic.model.path=m critic.ppo_micro_batch_size_per_gpu=2"
    gae = VERL.replace("adv_estimator=grpo", critic)
    for written, ours in ((0, 0), (1, 0), (20, 19)):
        assert translated(f"{gae} trainer.critic_warmup={written}").keys["critic_warmup"] == ours
    alone = translated(f"{VERL} trainer.critic_warmup=20")
    assert "critic_warmup" not in alone.keys and tells(alone, "the first 19 steps train nothing")


def test_keys_of_a_fork_that_change_nothing_are_left_out(translated: Translate) -> None:
    """Those that measure, and a section that is switched off."""
    measures = "reward_model.prime_num_processes=32 trainer.val_generations_to_log_to_txt=9 wandb_config.project=p"
    translation = translated(f"{VERL} {measures} algorithm.curiosity.enable=False algorithm.curiosity.scale=0.1")
    assert translation.keys == translated(VERL).keys
    left_out = [note.theirs for note in translation.notes if "its name says what is logged" in note.text]
    assert left_out == [word.partition("=")[0] for word in measures.split()]
    assert tells(translation, "left out: its section is switched off there", "algorithm.curiosity.scale")


def test_environments_of_skyrl_end_their_episodes_there(translated: Translate) -> None:
    played = translated(f"{SKYRL} environment.env_class=babyai")
    assert tells(played, "ends an episode there", "environment.env_class")


def test_validation_has_sampling_of_its_own_in_verl(translated: Translate) -> None:
    """What ``val_kwargs`` leave out is verl's default, not the sampling of training; no prompt is asked twice."""
    sampled = f"{ROLLOUT}.top_p=0.9 {ROLLOUT}.top_k=20 {ROLLOUT}.val_kwargs.temperature=0.6"
    loaded = load(translated(f"{VERL} {sampled}"), QUICKSTART)
    assert loaded.config.validation is not None and not loaded.config.validation.greedy
    asked = loaded.config.validation.generating_args
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.6, 1.0, -1)


def test_notes_on_columns_and_tokenizers_say_what_becomes_of_them(translated: Translate) -> None:
    model = "reward_model.enable=true reward_model.model.path=rm reward_model.model.input_tokenizer"
    for written, read in (("m", "chat"), ("null", "tokens")):
        translation = translated(f"{VERL} data.prompt_key=question {model}={written}")
        assert translation.keys["rewards.reward_model.reward_kwargs.input"] == read
        assert translation.keys["actor_train.data_args.messages"] == "question"
        for key in ("data.prompt_key", "reward_model.model.input_tokenizer"):
            assert not tells(translation, "left out", key)


def test_the_note_of_a_backend_names_what_decided(translated: Translate) -> None:
    notes = translated(f"{VERL} {KL} model_engine=megatron").notes
    assert [note.theirs for note in notes if f"{NAME}=megatron_train" in note.ours] == ["model_engine"]


def test_what_comes_first_ends_the_run(translated: Translate) -> None:
    text = f"{VERL} trainer.total_training_steps=500 trainer.total_epochs=2"
    for rows, steps in ((640, 2 * (640 // 64)), (64_000, 500), (None, 500)):
        assert translated(text, train_rows=rows).keys["max_steps"] == steps
    assert tells(translated(text), "if that is sooner", "trainer.total_epochs")


def test_the_validation_before_a_run_that_never_validates_is_told(translated: Translate) -> None:
    for before, told in (("", True), ("trainer.val_before_train=False", False)):
        translation = translated(f"{VERL} trainer.test_freq=-1 {before}")
        assert tells(translation, "nor before the first step", "trainer.test_freq") is told
