"""The plan: placement, batch arithmetic, passes, lengths, folders."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.plan.plan import TrainingPlan, divisors, explain_indivisible, working_values
from roll.config.plan.render import compact
from roll.config.policy_losses import ToprOptions
from roll.config.reading.fields import Choice
from roll.methods.supervised import SupervisedPlan
from roll.pipelines.rlvr.plan import RLVRPlan
from tests.config.good import GOOD_SFT, changed, load, mistakes

CRITIC = {
    "estimator": "gae",
    "critic": {
        "device_mapping": [0, 1],
        "training_args": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
    },
}


def rlvr_plan(folder: Path, changes: dict[str, Any] | None = None) -> RLVRPlan:
    plan = load(folder, changed(changes or {})).plan
    assert isinstance(plan, RLVRPlan)
    return plan


def test_the_arithmetic_of_the_good_one(tmp_path: Path) -> None:
    plan = rlvr_plan(tmp_path)
    training = plan.training["actor_train"]
    assert (plan.prompts_per_step, plan.group_size, plan.samples_per_step) == (64, 4, 256)
    assert training.mini_batch_size == 128
    assert training.optimizer_steps_per_step == 2
    assert training.total_optimizer_steps == 20
    assert training.sentence() == "2 optimizer steps of 128; 2 ranks x 8 micro-batches of 8"
    assert (plan.prompt_length, plan.response_length, plan.sequence_length, plan.max_new_tokens) == (128, 128, 256, 128)


def test_epochs_and_critic_warmup(tmp_path: Path) -> None:
    plan = rlvr_plan(tmp_path, CRITIC | {"ppo_epochs": 3, "critic_warmup": 4, "reward_pretrain": "owner/value"})
    assert plan.needs_critic
    assert plan.training["actor_train"].total_optimizer_steps == (10 - 4) * 3 * 2
    assert plan.training["critic"].total_optimizer_steps == 10 * 3 * 8
    assert plan.roles["critic"].model_path == "owner/value"
    assert plan.roles["actor_infer"].model_path == "owner/model"


def test_keys_of_the_actor_win_over_shared_ones(tmp_path: Path) -> None:
    changes = {"pg_variant": "topr", "topr_positive_weight": 2.0, "actor_train.topr_negative_weight": 0.5}
    loss = load(tmp_path, changed(changes)).config.loss
    assert loss == Choice("topr", ToprOptions(positive_weight=2.0, negative_weight=0.5))
    assert load(tmp_path, changed(changes | {"actor_train.pg_variant": "cispo"})).config.loss.name == "cispo"


def test_normalisation_as_written(tmp_path: Path) -> None:
    assert rlvr_plan(tmp_path).norm_types == ("auto", "auto")
    assert rlvr_plan(tmp_path, {"norm_std_type": None}).norm_types == ("auto", None)
    assert rlvr_plan(tmp_path, {"norm_mean_type": "batch", "norm_std_type": "None"}).norm_types == ("batch", None)


def test_placement(tmp_path: Path) -> None:
    changes = {
        "actor_train.device_mapping": [0, 1, 2, 3],
        "actor_train.training_args.gradient_accumulation_steps": 4,
        "actor_infer.device_mapping": "list(range(2,10))",
        "actor_infer.num_gpus_per_worker": 2,
        "use_kl_loss": True,
        "kl_loss_coef": 0.01,
        "reference.device_mapping": [0, 1],
        "rewards.math.world_size": 5,
    }
    plan = rlvr_plan(tmp_path, changes)
    assert list(plan.roles) == ["actor_train", "actor_infer", "reference", "rewards.math", "rewards.choice"]
    infer = plan.roles["actor_infer"]
    assert (infer.world_size, infer.dp_size, infer.num_gpus_per_worker) == (4, 4, 2)
    assert infer.device_mapping == tuple(range(2, 10))
    assert infer.colocated_with == ("actor_train",)
    assert plan.roles["actor_train"].colocated_with == ("actor_infer", "reference")
    assert plan.roles["rewards.math"].world_size == 5 and plan.roles["rewards.math"].device_mapping == ()
    assert (plan.num_devices_per_node, plan.num_nodes, plan.num_devices) == (8, 2, 16)


def test_a_node_is_no_larger_than_needed_unless_written(tmp_path: Path) -> None:
    data = changed({})
    del data["num_gpus_per_node"]
    plan = load(tmp_path, data).plan
    assert (plan.num_devices_per_node, plan.num_nodes) == (2, 1)
    plan = load(tmp_path, data, "actor_infer.device_mapping=list(range(0,16))").plan
    assert (plan.num_devices_per_node, plan.num_nodes) == (8, 2)


def test_nodes_follow_from_the_device_ids_whatever_is_written(tmp_path: Path) -> None:
    """As ROLL has it, whose files say ``num_nodes: 1`` next to 16 devices."""
    for written in (1, 4):
        loaded = load(tmp_path, changed({"num_nodes": written, "actor_infer.device_mapping": [*range(16)]}))
        assert (loaded.plan.num_devices_per_node, loaded.plan.num_nodes) == (8, 2)
        assert "num_nodes" in {notice.key for notice in loaded.warnings}


# changes, needs_reference, needs_old_log_probs; the plain one makes one optimizer step per rollout
ON_POLICY = {"actor_train.training_args.gradient_accumulation_steps": 16}
PASSES: list[tuple[dict[str, Any], bool, bool]] = [
    ({}, False, False),
    ({"init_kl_coef": 0.2}, False, False),
    ({"use_kl_loss": True}, False, False),
    ({"kl_loss_coef": 0.1}, False, False),
    ({"use_kl_loss": True, "kl_loss_coef": 0.1}, True, False),
    ({"add_token_level_kl": True}, True, True),
    ({"add_token_level_kl": True, "init_kl_coef": 0}, False, False),
    ({"enable_reference": True}, True, False),
    ({"ppo_epochs": 2}, False, True),
    ({"actor_train.training_args.gradient_accumulation_steps": 8}, False, True),
    ({"enable_old_logprobs_recompute": True}, False, True),
    ({"ppo_epochs": 2, "force_disable_old_logprobs_recompute": True}, False, False),
    ({"top_entropy_quantile": 0.2}, False, True),
    ({"target_entropy": 0.2}, False, True),
    ({"estimator": "optimal_token_baseline"}, False, True),
]


@pytest.mark.parametrize(("changes", "reference", "old_log_probs"), PASSES)
def test_passes_that_something_consumes(
    tmp_path: Path, changes: dict[str, Any], reference: bool, old_log_probs: bool
) -> None:
    plan = rlvr_plan(tmp_path, ON_POLICY | changes)
    assert (plan.needs_reference, plan.needs_old_log_probs) == (reference, old_log_probs)
    assert ("reference" in plan.roles) == reference


def test_the_engines_log_probs_stand_in_where_old_ones_are_used_and_not_computed(tmp_path: Path) -> None:
    never = {"force_disable_old_logprobs_recompute": True}
    # In a single update, too, unless a correction compares the current policy with the engine.
    corrected = {"train_infer_correction": "tis"}
    cases = ({}, True), (corrected, False), ({"ppo_epochs": 2}, True), ({"add_token_level_kl": True}, True)
    for changes, stands_in in cases:
        assert rlvr_plan(tmp_path, ON_POLICY | changes).engine_log_probs_as_old is False
        assert rlvr_plan(tmp_path, ON_POLICY | changes | never).engine_log_probs_as_old is stands_in


def test_lengths_follow_from_one_another(tmp_path: Path) -> None:
    data = changed({"sequence_length": 192, "actor_infer.generating_args.max_new_tokens": 500})
    del data["response_length"]
    plan = load(tmp_path, data).plan
    assert isinstance(plan, RLVRPlan)
    assert (plan.response_length, plan.sequence_length, plan.max_new_tokens) == (64, 192, 64)
    changes = {
        "val_prompt_length": 100,
        "val_sequence_length": 400,
        "validation.generating_args": {"max_new_tokens": 90, "num_return_sequences": 4},
    }
    plan = rlvr_plan(tmp_path, changes)
    (only,) = plan.validation_sets
    assert (only.name, only.prompt_length, only.sequence_length, only.max_new_tokens) == ("", 100, 400, 90)
    assert only.samples_per_prompt == 4
    assert plan.max_sequence_length == 400


def test_validation_inherits_columns_it_leaves_out(tmp_path: Path) -> None:
    columns = {"tag": "kind", "ground_truth": "gold", "images": "pictures"}
    changes = {f"actor_train.data_args.{key}": value for key, value in {"template": "qwen3", **columns}.items()}
    inherited = rlvr_plan(tmp_path, changes).validation_sets[0].data_args
    assert {key: getattr(inherited, key) for key in columns} == columns
    assert (inherited.template, inherited.tag, inherited.messages) == ("qwen3", "kind", "messages")
    assert inherited.file_name == "val.jsonl"
    changes |= {"validation.data_args.template": "native", "validation.data_args.prompt": "question"}
    own = rlvr_plan(tmp_path, changes).validation_sets[0].data_args
    assert (own.template, own.prompt, own.messages) == ("native", "question", None)


def test_validation_sets_take_over_what_they_leave_out(tmp_path: Path) -> None:
    sets = {
        "easy": {"data_args": {"file_name": "easy.jsonl", "template": "raw"}, "greedy": False},
        "hard": {
            "data_args": {"file_name": "hard.jsonl"},
            "generating_args": {"num_return_sequences": 8},
            "prompt_length": 200,
            "sequence_length": 900,
        },
    }
    changes = {
        "validation.sets": sets,
        "validation.data_args.tag": "kind",
        "validation.generating_args": {"temperature": 0.5, "num_return_sequences": 2},
    }
    plan = rlvr_plan(tmp_path, changes)
    own, easy, hard = plan.validation_sets
    assert [one.name for one in plan.validation_sets] == ["", "easy", "hard"]
    assert [one.data_args.file_name for one in plan.validation_sets] == ["val.jsonl", "easy.jsonl", "hard.jsonl"]
    assert (easy.data_args.template, easy.data_args.tag, hard.data_args.template) == ("raw", "kind", "native")
    assert (own.samples_per_prompt, easy.samples_per_prompt, hard.samples_per_prompt) == (2, 2, 8)
    assert hard.generating_args.temperature == 0.5
    assert (own.greedy, easy.greedy) == (True, False)
    assert (hard.prompt_length, hard.sequence_length, hard.max_new_tokens) == (200, 900, 700)
    assert (easy.prompt_length, easy.sequence_length) == (128, 256)
    assert plan.max_sequence_length == 900
    alone = rlvr_plan(tmp_path, {"validation": {"sets": sets}})
    assert [one.name for one in alone.validation_sets] == ["easy", "hard"]


def test_folders(tmp_path: Path) -> None:
    shared = rlvr_plan(tmp_path)
    assert (shared.output_dir, shared.log_dir) == (Path("output/good"), Path("output/logs/good"))
    assert shared.checkpoint_dir == Path("output/good/checkpoints") and shared.dump_dir is None
    own = rlvr_plan(tmp_path, {"output_dir": "/a/b", "logging_dir": "/a/l", "rollout_dump_dir": "/a/d"})
    assert (own.output_dir, own.log_dir, own.dump_dir) == (Path("/a/b"), Path("/a/l"), Path("/a/d"))
    own = rlvr_plan(tmp_path, {"output_dir": "/a/b"})
    assert own.log_dir == Path("/a/b/logs"), "another output_dir of the file has other logs"
    data = changed({})
    del data["exp_name"]
    assert load(tmp_path, data).plan.exp_name == "config"


def test_intervals(tmp_path: Path) -> None:
    plan = rlvr_plan(tmp_path, {"save_steps": -1, "eval_steps": 5, "validation.eval_steps": 3})
    assert (plan.save_steps, plan.eval_steps) == (0, 3)
    assert rlvr_plan(tmp_path, {"eval_steps": -1}).eval_steps == 0


def test_sft_plan(tmp_path: Path) -> None:
    plan = load(tmp_path, GOOD_SFT).plan
    assert isinstance(plan, SupervisedPlan)
    assert plan.global_batch_size == 8
    assert plan.training["sft_train"].total_optimizer_steps == plan.max_steps == 10
    open_ended = load(tmp_path, GOOD_SFT, "max_steps=null").plan
    assert open_ended.max_steps is None and open_ended.training["sft_train"].total_optimizer_steps is None


def test_frozen_and_picklable(tmp_path: Path) -> None:
    loaded = load(tmp_path, changed({}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.config.max_steps = 3
    again = pickle.loads(pickle.dumps(loaded))
    assert again.config == loaded.config and again.plan == loaded.plan


@given(
    prompts=st.integers(1, 300),
    group=st.integers(1, 16),
    micro=st.integers(1, 32),
    accumulation=st.integers(1, 16),
    ranks=st.integers(1, 16),
)
def test_suggested_values_work(prompts: int, group: int, micro: int, accumulation: int, ranks: int) -> None:
    plan = TrainingPlan(prompts * group, micro, accumulation, ranks)
    problem = explain_indivisible(plan, prompts, group)
    assert (problem is None) == ((prompts * group) % (micro * accumulation * ranks) == 0)
    if problem is None:
        return
    for suggestion in working_values(plan, prompts, group, "actor_train").split(", or "):
        key, value = suggestion.split(": ")
        fixed = {
            "rollout_batch_size": lambda new: TrainingPlan(new * group, micro, accumulation, ranks),
            "actor_train.training_args.gradient_accumulation_steps": lambda new: dataclasses.replace(
                plan, gradient_accumulation_steps=new
            ),
            "actor_train.training_args.per_device_train_batch_size": lambda new: dataclasses.replace(
                plan, micro_batch_size=new
            ),
        }[key](int(value))
        assert fixed.samples_per_step > 0 and fixed.samples_per_step % fixed.mini_batch_size == 0


@given(st.integers(1, 5_000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_suggestion_in_the_message_loads(tmp_path: Path) -> None:
    damaged = {"actor_train.training_args.gradient_accumulation_steps": 3}
    (problem,) = mistakes(tmp_path, changed(damaged))
    key, value = str(problem.example).split(", or ")[0].split(": ")
    assert mistakes(tmp_path, changed(damaged | {key: int(value)})) == ()


def test_compact() -> None:
    assert compact([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
