"""TRL and OpenRLHF: their arguments, and the loss and gradient of every algorithm against formulas of their own.

The formulas are plain float64, written down from the definitions: TRL's ``GRPOConfig`` and its loss, OpenRLHF's
arguments, ``PolicyLoss`` and the experience maker.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.config.reading.errors import ConfigError
from roll.translation import command
from roll.translation.command import load
from roll.translation.openrlhf import OPENRLHF as OPENRLHF_DIALECT
from roll.translation.trl import MODES
from tests.translation.conftest import QUICKSTART, Translate
from tests.translation.source_formulas import Responses, mean, row_means
from tests.translation.test_algorithms import LONGEST, PROMPT, RESPONSES, OurSide, assert_equal, assert_follows

Settings = dict[str, Any]
TRL = (
    "trl grpo --model_name_or_path m --dataset_name gsm8k.parquet --reward_funcs accuracy_reward --num_generations 4 "
    f"--per_device_train_batch_size 16 --max_prompt_length {PROMPT} --max_completion_length {LONGEST} "
)
OPENRLHF = (
    "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --reward_pretrain rm --prompt_data gsm8k.jsonl "
    "--colocate_all_models "
    "--actor_num_gpus_per_node 1 --ref_num_gpus_per_node 1 --critic_num_gpus_per_node 1 --reward_num_gpus_per_node 1 "
    "--vllm_num_engines 1 --rollout_batch_size 8 --n_samples_per_prompt 4 --train_batch_size 16 "
    f"--prompt_max_len {PROMPT} --generate_max_len {LONGEST} "
)
SPREAD = 1e-6
"""Constant added to the spread of a group here; 1e-4 in TRL, 1e-9 in OpenRLHF: see the page."""


def words(settings: Settings) -> str:
    return " ".join(f"--{key}" if value is True else f"--{key} {value}" for key, value in settings.items())


def compared(batch: Responses, spread: float | None) -> Tensor:
    """Scores against those of their group, divided by its spread unless ``spread`` is None: (B, 1)."""
    result = torch.zeros_like(batch.scores)
    for group in batch.group.unique().tolist():
        rows = batch.group == group
        scores = batch.scores[rows]
        result[rows] = scores - scores.mean()
        if spread is not None:
            result[rows] /= scores.std() + spread
    return result[:, None]


def trl_loss(batch: Responses, settings: Settings, spread: float = SPREAD) -> Tensor:
    kind, scale = settings.get("loss_type", "dapo"), settings.get("scale_rewards", "group")
    advantages = compared(batch, spread if scale == "group" else None)
    if scale == "batch":
        advantages = advantages / (batch.scores.std() + spread)
    if settings.get("mask_truncated_completions"):
        batch = batch.without_truncated()
    mask, log_ratio = batch.mask, batch.log_probs - batch.old
    if settings.get("importance_sampling_level") == "sequence":
        log_ratio = row_means(log_ratio, mask)[:, None]
    ratio, low = log_ratio.exp(), settings.get("epsilon", 0.2)
    high = settings.get("epsilon_high", low)
    if kind == "cispo":
        loss = -ratio.clamp(max=high).detach() * advantages * batch.log_probs
    elif kind == "vespo":
        whole = (log_ratio.detach() * mask).sum(-1, keepdim=True).clamp(math.log(1e-8), 20)
        k, decay = (
            torch.where(advantages >= 0, settings.get(f"vespo_{name}_pos", up), settings.get(f"vespo_{name}_neg", down))
            for name, up, down in (("k", 2.0, 3.0), ("lambda", 3.0, 2.0))
        )
        loss = -(decay + k * whole - decay * whole.exp()).exp() * advantages * batch.log_probs
    elif kind == "sapo":
        heat = torch.where(
            advantages > 0, settings.get("sapo_temperature_pos", 1.0), settings.get("sapo_temperature_neg", 1.05)
        )
        loss = -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantages
    else:
        bounded = ratio.clamp(max=settings["delta"]) if "delta" in settings else ratio
        loss = -torch.minimum(bounded * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    loss = loss * torch.ones_like(mask)
    if share := settings.get("top_entropy_quantile"):
        entropy = batch.entropy.detach()
        loss = loss * (entropy >= entropy[mask.bool()].quantile(1 - share))
    if settings.get("use_vllm") and settings.get("vllm_importance_sampling_correction", True) is True:
        level, _, action = settings.get("vllm_importance_sampling_mode", "sequence_mask").partition("_")
        cap, difference = settings.get("vllm_importance_sampling_cap", 3.0), (batch.old - batch.rollout) * mask
        weight = (difference.sum(-1, keepdim=True) if level == "sequence" else difference).exp()
        loss = loss * (weight.clamp(max=cap) if action == "truncate" else weight * (weight <= cap))
    if beta := settings.get("beta", 0.0):
        distance = batch.reference - batch.log_probs
        weight = (batch.log_probs - batch.old).exp() if settings.get("use_bias_correction_kl") else 1.0
        loss = loss + beta * weight * (distance.exp() - distance - 1)
    if kind in ("grpo", "sapo"):
        return row_means(loss, mask).mean()
    if kind == "luspo":
        return (loss * mask).sum(-1).mean()
    if kind == "dr_grpo":
        return (loss * mask).sum() / (len(mask) * batch.response_length)
    return mean(loss, mask)


VLLM: Settings = {"use_vllm": True}
TRL_CASES: list[Settings] = [
    {},
    *({"loss_type": kind} for kind in ("grpo", "dr_grpo", "bnpo")),
    *({"loss_type": kind, "beta": 0.1, "epsilon": 0.1, "epsilon_high": 0.3} for kind in ("grpo", "dapo", "dr_grpo")),
    {"delta": 1.5},
    {"loss_type": "cispo", "epsilon_high": 1.3, "beta": 0.05},
    {"loss_type": "sapo"},
    {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
    *(
        {"importance_sampling_level": "sequence", "loss_type": kind, "epsilon": 0.1, "epsilon_high": 0.2}
        for kind in ("grpo", "dapo", "dr_grpo")
    ),
    {"loss_type": "vespo", "beta": 0.1},
    {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.7, "vespo_lambda_neg": 1.5},
    *({"loss_type": "luspo", "importance_sampling_level": level, "beta": 0.1} for level in ("token", "sequence")),
    {"scale_rewards": "none"},
    {"scale_rewards": "batch"},
    VLLM,
    *(
        VLLM | {"vllm_importance_sampling_mode": f"{level}_{action}", "vllm_importance_sampling_cap": 1.1, "beta": 0.1}
        for level in ("token", "sequence")
        for action in ("truncate", "mask")
    ),
    VLLM | {"vllm_importance_sampling_correction": "false"},
    *({"mask_truncated_completions": True, "beta": 0.1, "loss_type": kind} for kind in ("dapo", "bnpo")),
    {"mask_truncated_completions": True, "epsilon_high": 1.3, "loss_type": "cispo"},
    {"beta": 0.1, "use_bias_correction_kl": True, "loss_type": "dr_grpo"},
    *({"top_entropy_quantile": share, "beta": 0.1} for share in (0.2, 0.5)),
]


def name_of(settings: Settings) -> str:
    return words(settings).replace("--", "") or "defaults"


@pytest.mark.parametrize("settings", TRL_CASES, ids=name_of)
def test_trl_has_the_same_loss_and_gradient(settings: Settings, translated: Translate) -> None:
    loaded = load(translated(TRL + "--num_iterations 2 " + words(settings)), QUICKSTART)
    assert loaded.plan.needs_old_log_probs
    assert_equal(OurSide(loaded, RESPONSES).actor_loss(), trl_loss(RESPONSES, settings), RESPONSES.log_probs)


@pytest.mark.parametrize("settings", [{}, {"loss_type": "cispo", "epsilon_high": 1.3, "beta": 0.05}], ids=name_of)
def test_trl_with_a_single_update_of_a_batch(settings: Settings, translated: Translate) -> None:
    """The policy before the update is the current one: no pass computes it, there or here."""
    loaded = load(translated(TRL + words(settings)), QUICKSTART)
    assert not loaded.plan.needs_old_log_probs
    there = replace(RESPONSES, old=RESPONSES.log_probs.detach())
    assert_equal(OurSide(loaded, there).actor_loss(), trl_loss(there, settings), RESPONSES.log_probs)


def test_what_trl_adds_to_the_spread_is_one_part_in_thousands() -> None:
    """The page says so: rewards of 0 and 1 have a spread of a half or so."""
    ours, theirs = compared(RESPONSES, SPREAD), compared(RESPONSES, 1e-4)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 5e-4


def openrlhf_rewards(batch: Responses, settings: Settings) -> Tensor:
    kl, weight = openrlhf_kl(batch, settings), settings.get("init_kl_coef", 0.01)
    rewards = torch.zeros_like(kl) if settings.get("use_kl_loss") else -weight * kl.detach() * batch.mask
    for row, length in enumerate(batch.mask.sum(-1).int().tolist()):
        rewards[row, length - 1] += openrlhf_scores(batch, settings)[row]
    return rewards


def openrlhf_scores(batch: Responses, settings: Settings) -> Tensor:
    """Punished for their length, then compared, then held within ``reward_clip_range``."""
    kind, low, high = settings.get("advantage_estimator", "gae"), *settings.get("reward_clip_range", "-10 10").split()
    if buffer := settings.get("overlong_buffer_len"):
        beyond = (batch.mask.sum(-1) - (batch.response_length - buffer)).clamp(0, buffer)
        batch = replace(batch, scores=batch.scores - beyond / buffer * settings.get("overlong_penalty_factor", 1.0))
    if kind in ("gae", "reinforce"):
        scores = batch.scores
    elif kind == "group_norm":
        scores = compared(batch, SPREAD)[:, 0]
    else:
        scores = compared(batch, None)[:, 0] * (4 / 3 if kind == "rloo" else 1)  # leaving one of four out
    return scores.clamp(float(low), float(high))


def openrlhf_kl(batch: Responses, settings: Settings) -> Tensor:
    policy = batch.log_probs if settings.get("use_kl_loss") else batch.old
    distance = policy - batch.reference
    kind = settings.get("kl_estimator", "k1")
    kl = {"k1": distance, "k2": distance**2 / 2, "k3": (-distance).exp() - 1 + distance}[kind]
    return kl.clamp(-10, 10)


def openrlhf_advantages(batch: Responses, settings: Settings) -> tuple[Tensor, Tensor]:
    kind = settings.get("advantage_estimator", "gae")
    rewards, mask = openrlhf_rewards(batch, settings), batch.mask
    discounted = kind in ("gae", "reinforce")
    gamma = settings.get("gamma", 1.0) if discounted else 1.0
    decay = gamma * settings.get("lambd", 1.0) if kind == "gae" else gamma
    advantages, carried = torch.zeros_like(rewards), torch.zeros(len(rewards), dtype=rewards.dtype)
    for step in reversed(range(rewards.shape[1])):
        value = batch.values[:, step] if kind == "gae" else 0.0
        later = batch.values[:, step + 1] if kind == "gae" and step + 1 < rewards.shape[1] else 0.0
        carried = (rewards[:, step] + gamma * later - value + decay * carried) * mask[:, step]
        advantages[:, step] = carried
    returns = advantages + batch.values if kind == "gae" else advantages
    if kind in ("gae", "reinforce", "reinforce_baseline"):
        centred = advantages - mean(advantages, mask)
        # Divided by N there, by N - 1 here: 1.00001 times as much for 50,000 tokens.
        variance = mean(centred**2, mask) * mask.sum() / (mask.sum() - 1)
        advantages = centred / (variance + 1e-8).sqrt()
    return advantages * mask, returns


def openrlhf_weights(log_ratio: Tensor, mask: Tensor, settings: Settings) -> Tensor:
    """Older versions have one bound, newer ones two and three ways to use them."""
    bounds = str(settings.get("vllm_is_truncated_threshold", "2.0")).split()
    low, high = float(bounds[0]) if len(bounds) == 2 else 0.0, float(bounds[-1])
    ratio, kind = log_ratio.exp(), settings.get("vllm_is_correction_type", "tis")
    if kind == "tis" and not settings.get("use_icepop"):
        return ratio.clamp(low, high)
    judged = row_means(log_ratio, mask).exp()[:, None] if kind == "seq-mask-tis" else ratio
    return ratio * ((judged >= low) & (judged <= high))


def openrlhf_loss(batch: Responses, settings: Settings) -> Tensor:
    advantages, mask = openrlhf_advantages(batch, settings)[0], batch.mask
    log_ratio = batch.log_probs - batch.old
    gspo = settings.get("policy_loss_type") == "gspo"
    ratio = (row_means(log_ratio, mask)[:, None] if gspo else log_ratio).exp()
    low, high = (float(x) for x in str(settings.get("eps_clip_low_high", "0.2 0.2")).split())
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if "dual_clip" in settings:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, settings["dual_clip"] * advantages), surrogate)
    loss = -surrogate
    if settings.get("enable_vllm_is_correction"):
        loss = loss * openrlhf_weights((batch.old - batch.rollout) * mask, mask, settings)
    total = row_means(loss, mask).mean() if gspo else mean(loss, mask)
    if settings.get("use_kl_loss"):
        total = total + settings.get("init_kl_coef", 0.01) * mean(openrlhf_kl(batch, settings), mask)
    return total - settings.get("entropy_loss_coef", 0.0) * mean(batch.entropy, mask)


def openrlhf_value_loss(batch: Responses, settings: Settings) -> Tensor:
    returns, bound = openrlhf_advantages(batch, settings)[1], settings.get("value_clip", 0.5)
    clipped = batch.values + (batch.new_values - batch.values).clamp(-bound, bound)
    return 0.5 * mean(torch.maximum((batch.new_values - returns) ** 2, (clipped - returns) ** 2), batch.mask)


IN_LOSS: Settings = {"use_kl_loss": True, "kl_estimator": "k3"}
OPENRLHF_CASES: list[Settings] = [
    {},
    {"gamma": 0.9, "lambd": 0.8, "init_kl_coef": 0.2, "value_clip": 0.1},
    {"advantage_estimator": "reinforce", "init_kl_coef": 0.2, "gamma": 0.9},
    *({"advantage_estimator": "reinforce", "init_kl_coef": 0.1, "kl_estimator": kind} for kind in ("k2", "k3")),
    *(
        {"advantage_estimator": kind, "init_kl_coef": 0}
        for kind in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
    ),
    *(
        {"advantage_estimator": "group_norm", **IN_LOSS, "kl_estimator": kind, "init_kl_coef": 0.1}
        for kind in ("k1", "k2", "k3")
    ),
    {"advantage_estimator": "group_norm", **IN_LOSS, "policy_loss_type": "gspo", "entropy_loss_coef": 0.1},
    {"advantage_estimator": "group_norm", **IN_LOSS, "eps_clip_low_high": "0.1 0.3", "dual_clip": 1.5},
    {"advantage_estimator": "rloo", **IN_LOSS, "enable_vllm_is_correction": True, "vllm_is_truncated_threshold": 1.1},
    {"advantage_estimator": "rloo", **IN_LOSS, "entropy_loss_coef": 0.05},
    *(
        {"advantage_estimator": "rloo", **IN_LOSS, "enable_vllm_is_correction": True, **weights}
        for weights in (
            {},
            {"vllm_is_truncated_threshold": "0.8 1.1"},
            {"vllm_is_truncated_threshold": "0.8 1.1", "use_icepop": True},
            {"vllm_is_truncated_threshold": "0.8 1.1", "vllm_is_correction_type": "icepop"},
            {"vllm_is_truncated_threshold": "0.95 1.05", "vllm_is_correction_type": "seq-mask-tis"},
        )
    ),
    *(
        {"advantage_estimator": kind, **IN_LOSS, "overlong_buffer_len": 6, "overlong_penalty_factor": 0.5}
        for kind in ("gae", "rloo", "reinforce_baseline", "group_norm")
    ),
    *(
        {"advantage_estimator": kind, **IN_LOSS, "reward_clip_range": "-0.4 0.4"}
        for kind in ("gae", "reinforce", "reinforce_baseline", "group_norm", "dr_grpo")
    ),
]


@pytest.mark.parametrize("settings", OPENRLHF_CASES, ids=name_of)
def test_openrlhf_has_the_same_loss_and_gradient(settings: Settings, translated: Translate) -> None:
    loaded = load(translated(OPENRLHF + words(settings)), QUICKSTART)
    ours = OurSide(loaded, RESPONSES)
    assert_equal(ours.actor_loss(), openrlhf_loss(RESPONSES, settings), RESPONSES.log_probs)
    if loaded.plan.needs_critic:
        assert_equal(ours.critic_loss(), openrlhf_value_loss(RESPONSES, settings), RESPONSES.new_values)


def test_openrlhf_adapts_the_weight_of_the_kl(translated: Translate) -> None:
    words_of = words({"kl_target": 0.3, "kl_horizon": 50, "init_kl_coef": 0.2})
    loaded = load(translated(OPENRLHF + words_of), QUICKSTART)
    assert_follows(OurSide(loaded, RESPONSES).scoring, 0.2, 0.3, 50)


def test_every_name_of_an_algorithm_has_a_comparison() -> None:
    rules = OPENRLHF_DIALECT.rules
    assert {case.get("loss_type", "dapo") for case in TRL_CASES} == set(MODES)
    for key, default, names in (
        ("advantage_estimator", "gae", "gae reinforce reinforce_baseline rloo group_norm dr_grpo"),
        ("policy_loss_type", "ppo", "ppo gspo"),
        ("kl_estimator", "k1", "k1 k2 k3"),
        ("vllm_is_correction_type", "tis", "tis icepop seq-mask-tis"),
    ):
        assert {case.get(key, default) for case in OPENRLHF_CASES} == set(names.split())
        for name in names.split():
            rules[key].value(name)
        with pytest.raises(ValueError, match="known: " + ", ".join(names.split())):
            rules[key].value("another")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{TRL} --loss_type other", "loss_type = .?other.?: has no translation"),
        (f"{TRL} --loss_type vespo --use_vllm", "multiplies the ratio of the response"),
        (f"{TRL} --loss_type bnpo --gradient_accumulation_steps 2", "each of the 2 micro-batches"),
        (f"{TRL} --delta 1.1", "must be above 1 \\+ epsilon_high"),
        (f"{TRL} --loss_type sapo --importance_sampling_level sequence", "token by token"),
        (f"{TRL} --num_generations 5", "do not divide into groups of 5"),
        *(
            (f"{TRL} --mask_truncated_completions --loss_type {kind}", "counts them in the mean over responses")
            for kind in ("grpo", "dr_grpo", "sapo")
        ),
        (f"{TRL} --use_bias_correction_kl --importance_sampling_level sequence --beta 1", "weighs the KL by the ratio"),
        (f"{OPENRLHF} --advantage_estimator rloo {words(IN_LOSS)} --reward_clip_range -1 1", "behind the comparison"),
        (f"{TRL} --reward_funcs mine.reward", "takes whole batches as TRL calls them"),
        (
            f"{TRL} --lerning_rate 1",
            "no translation is known for this key of TRL; the nearest known one is learning_rate",
        ),
        (f"{OPENRLHF} --advantage_estimator group_norm", "use_kl_loss puts it into the loss"),
        (f"{OPENRLHF} --normalize_reward", "scale and shift"),
        (f"{OPENRLHF} --remote_rm_url http://h/score", "a protocol of its own"),
        (f"{OPENRLHF} --max_len long", "max_len = 'long': must be a whole number"),
        (f"{TRL} --reward_weights much", "reward_weights = 'much': must be a number"),
        (f"{OPENRLHF} --agent_func_path a.py", "tools and agents have no translation"),
        ("trl sft --model_name_or_path m --dataset_name d/e", "the answers alone"),
        ("python3 train_grpo.py --model_name_or_path m", "what it trains is in its code"),
    ],
)
def test_what_has_no_equal_is_refused(text: str, reason: str, translated: Translate) -> None:
    with pytest.raises(ConfigError, match=reason):
        translated(text)


def test_trl_batches(translated: Translate) -> None:
    """8 processes x 4 x 4 = 128 completions = 16 prompts, one optimizer step; with 16 steps a generation, 4 steps."""
    text = (
        "accelerate launch --num_processes 8 --config_file zero2.yaml trl/scripts/grpo.py --model_name_or_path m "
        "--dataset_name owner/name --reward_funcs accuracy_reward --per_device_train_batch_size 4 "
        "--gradient_accumulation_steps 4 --max_steps 100 "
    )
    plain = load(translated(text), QUICKSTART)
    assert plain.config.rollout_batch_size == 16 and plain.config.max_steps == 100
    assert plain.config.actor_train.strategy_args.strategy_name == "deepspeed_train"
    assert plain.config.actor_train.data_args.file_name == ["hub:owner/name:train"]
    assert "1 optimizer step of 128" in plain.plan.training["actor_train"].sentence()
    several = load(translated(f"{text} --steps_per_generation 16 --num_iterations 2"), QUICKSTART)
    assert several.config.rollout_batch_size == 64 and several.config.max_steps == 12 and several.config.ppo_epochs == 2


def test_trl_reads_yaml_files(tmp_path: Path, translated: Translate) -> None:
    """Below the command line, or alone."""
    file = tmp_path / "grpo.yaml"
    text = "model_name_or_path: m\ndataset_name: owner/name\nreward_funcs: [accuracy_reward]\nlearning_rate: 1.0e-5\n"
    file.write_text(f"{text}beta: 0.04\n", encoding="utf-8")
    source = command.with_config(command.read(["trl", "grpo", "--config", str(file), "--beta", "0.1"]))
    keys = translated(source).keys
    assert (keys["kl_loss_coef"], keys["actor_train.training_args.learning_rate"]) == (0.1, 1e-5)
    alone = translated(command.read([str(file)]))
    assert alone.dialect.name == "trl" and alone.whole and alone.keys["kl_loss_coef"] == 0.04


def test_trl_sft(translated: Translate) -> None:
    text = (
        "torchrun --nproc_per_node 4 trl/scripts/sft.py --model_name_or_path m --dataset_name owner/name "
        "--assistant_only_loss --use_peft --lora_r 32 --lora_alpha 16 --gradient_accumulation_steps 2 --max_length 2048"
    )
    loaded = load(translated(text), QUICKSTART)
    training = loaded.config.sft_train
    assert loaded.plan.pipeline == "sft" and loaded.config.sequence_length == 2048
    assert training.device_mapping == [0, 1, 2, 3] and training.training_args.gradient_accumulation_steps == 2
    assert training.model_args.lora_rank == 32 and training.training_args.num_train_epochs == 3
