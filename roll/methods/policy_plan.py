"""The plan of a run whose policy learns from its own samples: which passes are needed, and the batch arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import TypeVar

from roll.config.algorithm import correction_options
from roll.config.choices import traits
from roll.config.lora import adapter_rank
from roll.config.pipelines import POLICY_KEYS, READ_KEYS, TEACHES, Panel, PipelineDefinition, Task
from roll.config.plan.plan import Plan, RunAhead, TrainingPlan
from roll.config.plan.planning import training_plan, with_cache_length
from roll.config.reading.errors import count
from roll.config.roles import INVARIANT_ATTENTION, WorkerConfig
from roll.config.run import PolicyRunConfig
from roll.config.strategies.registry import backend_of, generation_strategies, with_engine_size
from roll.methods.opd_keys import (
    TaughtConfig,
    TeacherConfig,
    check_opd,
    is_taught,
    opd_divergence,
    taught_by_advantage,
    teacher_role,
)
from roll.methods.teachers import check_teachers_of, check_vocabularies_of, finished_teacher, is_teacher
from roll.workers import frozen_worker

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig

POLICY_PANELS = (
    Panel("KL", ("critic/kl", "actor/kl_loss", "actor/approxkl"), first_only=True, smooth=True, zero_is_none=True),
    Panel("Entropy", ("actor/entropy", "critic/entropy/mean"), first_only=True, smooth=True),
)
"""Panels of every such run."""
# Name of the passes of roles that a method adds.
ADDED_PASSES = "teachers"
check_method = check_opd
"""Rules across keys of the methods that a run adds."""


PolicyConfig = TaughtConfig
"""Keys of every run whose policy learns from its own samples, those of the methods that add to it included."""
C = TypeVar("C", bound=PolicyConfig, default=Any)
P = TypeVar("P", bound=Plan, default=Any)


@dataclass(frozen=True)
class PolicyPlan(Plan):
    """Plan of every run that trains a policy on its own samples."""

    prompts_per_step: int
    """Prompts, or tasks of environments, of one step; each is a group."""
    group_size: int
    """Samples, or episodes, of each of them."""
    max_new_tokens: int
    """Most tokens of a response in training."""
    norm_length: int
    """Tokens that the mode ``seq-mean-token-sum-norm`` divides by."""
    validates_concurrently: bool
    """Validation goes on while other roles compute and train."""
    needs_reference: bool
    """Something consumes reference log-probs."""
    needs_old_log_probs: bool
    """Something consumes the trainer's log-probs before the update."""
    needs_old_entropy: bool
    """Something consumes the entropies of that pass."""
    needs_sum_of_squares: bool
    """Something consumes the sums of squared probabilities of that pass."""
    engine_log_probs_as_old: bool
    """Something consumes old log-probs, and the engine's stand in for the trainer's."""
    async_generation_ratio: float
    """Steps that generation may run ahead of training; 0: synchronous."""
    num_additional_prompts: int
    """Prompts drawn beyond the need."""
    needs_critic: bool
    norm_types: tuple[str | None, str | None]
    """``norm_mean_type`` and ``norm_std_type`` as written (null included); ``auto`` where the file leaves them open, so
    that the estimator's own pair holds."""

    @property
    def added_workers(self) -> dict[str, str]:
        """The worker class of each role that a method adds: it looks at the samples, and never learns."""
        return {name: frozen_worker(role.section) for name, role in self.roles.items() if is_teacher(name)}

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def is_async(self) -> bool:
        """Generation goes on while training does."""
        return self.async_generation_ratio > 0

    @property
    def engines_take_turns(self) -> bool:
        """True if other roles compute on the engines' devices, so that generation stops in the meantime."""
        return bool(self.roles["actor_infer"].colocated_with)


class PolicyDefinition(PipelineDefinition[C, P]):
    """Common parts of the pipelines whose policy learns from its own samples."""

    compares_log_probs = True
    reference: ClassVar[tuple[tuple[str, type, tuple[type, ...]], ...]] = (
        ("RLVR and agentic: on-policy distillation (top level)", TaughtConfig, (PolicyRunConfig,)),
    )
    section_tables: ClassVar[tuple[tuple[str, type, tuple[type, ...]], ...]] = (
        ("`teacher` (in addition to the keys of a role)", TeacherConfig, (WorkerConfig,)),
    )

    def task_of(self, key: str, section: WorkerConfig) -> Task:
        return TEACHES if is_teacher(key) else super().task_of(key, section)

    def reads(self, key: str, section: WorkerConfig, config: C) -> frozenset[str]:
        if "." not in key and not self.is_role(key):  # of a pipeline with fewer roles on top of this one
            return frozenset()
        return READ_KEYS[self.task_of(key, section)] | (POLICY_KEYS if key == "actor_train" else frozenset())

    def effective(self, config: C) -> dict[str, Any]:
        return {
            "critic": needs_critic(config) and config.critic is not None,
            "reference": needs_reference(config) or taught_by_advantage(config),
            "teacher": config.teacher if is_taught(config) else {},
        }

    def distributions(self, config: C, role: str) -> tuple[int | None, int | None]:
        if not is_taught(config) or taught_by_advantage(config):
            return None, None
        count = opd_divergence(config).logits_topk
        return count if role == "actor_train" else None, count if is_teacher(role) else None

    def check_parts(self, loaded: LoadedConfig[Any]) -> None:
        check_vocabularies_of(self, loaded, "actor_train")

    def check_services(self, loaded: LoadedConfig[Any]) -> None:
        config: PolicyConfig = loaded.config
        count = {"advantage": -1, "full_vocabulary": 0}.get(config.opd_form, config.opd_topk)
        check_teachers_of(self, loaded, "actor_train", count)

    def shared_facts(self, plan: Any, what: str, unit: str, greedy: bool = False) -> list[tuple[str, str]]:
        """The passes besides generation and training, and how far ``what`` runs ahead in groups called ``unit``."""
        reference = "reference log-probs" + ("" if "reference" in plan.roles else " (actor_train without its adapters)")
        passes = {
            reference: plan.needs_reference,
            "greedy baseline": greedy,
            "old log-probs": plan.needs_old_log_probs,
            ADDED_PASSES: bool(plan.added_workers),
            "values": plan.needs_critic,
        }
        needed = ", ".join(name for name, needed in passes.items() if needed) or "none"
        facts = [("passes", f"{needed} (in addition to generation and training)")]
        if plan.is_async:
            ahead = RunAhead.of(plan.async_generation_ratio, plan.prompts_per_step, plan.num_additional_prompts)
            steps = "1 step" if plan.async_generation_ratio == 1 else f"{plan.async_generation_ratio:g} steps"
            sentence = f"{what} up to {steps}: {count(ahead.capacity, unit)} in flight or waiting at a time"
            sentence += f"; samples at most {count(ahead.max_lag, 'version')} of the weights old"
            sentence += "; stopped while others have its devices" if plan.engines_take_turns else ""
            # Which policy the loss takes for that of the samples.
            sentence += "; ratios against the engine's log-probs" if plan.engine_log_probs_as_old else ""
            facts.append(("ahead", sentence))
        return facts

    def running_requests(self, config: C) -> int:
        return config.max_running_requests


def policy_plan(config: PolicyConfig) -> dict[str, Any]:
    """The fields of a :class:`PolicyPlan` that follow from the shared keys.

    Left to the pipeline: those of samples and their lengths, and ``validates_concurrently``.
    """
    return {
        "needs_reference": needs_reference(config),
        "needs_old_log_probs": needs_old_log_probs(config),
        "needs_old_entropy": needs_old_entropy(config),
        "needs_sum_of_squares": traits(config.estimator).needs_squares,
        "engine_log_probs_as_old": engine_log_probs_as_old(config),
        "async_generation_ratio": config.async_generation_ratio,
        "needs_critic": needs_critic(config),
        "norm_types": (config.norm_mean_type, config.norm_std_type),
    }


def policy_training_plans(config: PolicyConfig) -> dict[str, TrainingPlan]:
    samples = config.samples_per_step
    # The actor's schedule begins after the critic's warm-up, when the actor takes its first step.
    warmup = config.critic_warmup if needs_critic(config) else 0
    sequence, epochs = config.longest_sequence, config.ppo_epochs
    plans = {
        "actor_train": training_plan(config.actor_train, sequence, samples, epochs, max(0, config.max_steps - warmup))
    }
    if needs_critic(config) and config.critic is not None:
        plans["critic"] = training_plan(config.critic, sequence, samples, epochs, config.max_steps)
    return plans


def needs_reference(config: PolicyConfig) -> bool:
    """KL in the loss or in the reward consumes it; ``init_kl_coef`` alone does not."""
    in_loss = config.use_kl_loss and config.kl_loss_coef > 0
    return in_loss or kl_in_reward(config) or config.enable_reference


def kl_in_reward(config: PolicyConfig) -> bool:
    return config.add_token_level_kl and config.init_kl_coef > 0


def needs_critic(config: PolicyConfig) -> bool:
    """``gae`` uses values; an estimator of the user's own gets them where there is a critic section."""
    # Nothing says what a function of the user's own reads, but a critic section is written on purpose.
    own = "." in config.estimator.name and config.critic is not None
    return traits(config.estimator).needs_values or own


def rollout_file(folder: Path, step: int) -> Path:
    """Path of a step's batch."""
    return folder / f"rollout_step_{step:06d}.safetensors"


def uses_old_log_probs(config: PolicyConfig) -> bool:
    """More than one optimizer step on a rollout, or KL in the reward."""
    # In a single step old and current log-probs are the same numbers: the ratio is 1, without a pass to compute it.
    return policy_training_plans(config)["actor_train"].optimizer_steps_per_step > 1 or kl_in_reward(config)


def learns_from_scores(written: Mapping[str, Any]) -> bool:
    """False for the top-level keys of a run whose scores are measured only."""
    return not written.get("is_pure_opd")


def is_async(config: PolicyConfig) -> bool:
    return config.async_generation_ratio > 0


def engine_log_probs_as_old(config: PolicyConfig) -> bool:
    """The engine's log-probs stand in for the trainer's before the update: where those are forbidden, and in
    asynchronous runs, whose samples come from older weights, unless a correction compares both or something else needs
    the trainer's. With ``strict_on_policy`` they are the trainer's."""
    if config.strict_on_policy:
        return not (config.enable_old_logprobs_recompute or needs_old_distribution(config))
    if config.force_disable_old_logprobs_recompute:
        return uses_old_log_probs(config) or not corrects_old_log_probs(config)
    return is_async(config) and not (config.train_infer_correction or trainer_is_old(config))


def trainer_is_old(config: PolicyConfig) -> bool:
    """True if something besides the policy's loss needs the trainer's log-probs before the update."""
    compared = kl_in_reward(config) or taught_by_advantage(config)
    return config.enable_old_logprobs_recompute or compared or needs_old_distribution(config)


def needs_old_log_probs(config: PolicyConfig) -> bool:
    """The trainer looks at the samples before the update: something uses old log-probs, entropies or sums of squares;
    the two force keys have the last word."""
    if config.force_disable_old_logprobs_recompute or engine_log_probs_as_old(config):
        return False
    compared = uses_old_log_probs(config) or taught_by_advantage(config) or corrects_batches(config)
    return compared or needs_old_distribution(config) or config.enable_old_logprobs_recompute


def corrects_old_log_probs(config: PolicyConfig) -> bool:
    """True if a correction compares the engine with the trainer's policy before the update."""
    options = correction_options(config.train_infer_correction)
    return options.function is not None or any(rule.policy == "old" for rule in options.rules)


def corrects_batches(config: PolicyConfig) -> bool:
    """True if a correction needs the whole batch before the update: it drops tokens, or uses the mean of weights."""
    options = correction_options(config.train_infer_correction)
    return bool(options.rejections or options.normalized)


def needs_old_entropy(config: PolicyConfig) -> bool:
    return config.top_entropy_quantile < 1.0 or config.target_entropy is not None


def needs_old_distribution(config: PolicyConfig) -> bool:
    """True if more of the trainer's distributions before the update is needed than the samples' log-probs."""
    return needs_old_entropy(config) or traits(config.estimator).needs_squares


def finished_policy(name: str, role: WorkerConfig, config: PolicyConfig, longest: int) -> WorkerConfig:
    """The section of a role as its workers get it, with engines that have room for ``longest`` tokens."""
    if is_teacher(name):
        return finished_teacher(role, longest)
    if role.strategy_args.strategy_name in generation_strategies():
        role = with_cache_length(role, longest)
    arguments = role.strategy_args
    room_for = backend_of(arguments.strategy_name).adapter_arguments
    if name == "actor_infer" and config.weight_sync.lora == "adapter" and room_for is not None:
        needed = room_for(adapter_rank(config.actor_train.model_args))
        # Room for the adapter that the trainer will send; what the user has written wins.
        engine_args = needed | dict(arguments.strategy_config.get("engine_args") or {})
        options = {**arguments.strategy_config, "engine_args": engine_args}
        role = replace(role, strategy_args=replace(arguments, strategy_config=options))
    if config.strict_on_policy and name in ("actor_infer", "actor_train"):
        role = replace(role, model_args=replace(role.model_args, attn_implementation=INVARIANT_ATTENTION))
    return role


def looks_at_samples(role: str) -> bool:
    """True for the roles that take no part in a validation: they compute columns of training samples, or learn."""
    return role in ("actor_train", "reference", "critic") or is_teacher(role)


def policy_roles(config: PolicyConfig) -> dict[str, WorkerConfig]:
    """The sections of policy, engines, reference, critic and teachers, as far as this run starts them."""
    roles: dict[str, WorkerConfig] = {
        "actor_train": config.actor_train,
        "actor_infer": with_engine_size(config.actor_infer),
    }
    if config.reference is not None and needs_reference(config):
        roles["reference"] = config.reference
    if config.critic is not None and needs_critic(config):
        roles["critic"] = config.critic
    if is_taught(config):
        roles |= {teacher_role(name): section for name, section in config.teacher.items()}
    return roles
