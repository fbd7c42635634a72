"""Sentences of an RLVR plan: batch arithmetic, lengths, passes, how far generation runs ahead."""

from __future__ import annotations

from roll.config.plan.plan import RunAhead
from roll.config.reading.errors import count
from roll.pipelines.rlvr.plan import RLVRPlan


def batch_facts(plan: RLVRPlan) -> list[tuple[str, str]]:
    samples = count(plan.samples_per_step, "sample")
    total = f"{count(plan.prompts_per_step, 'prompt')} x {plan.group_size} = {samples}"
    return [
        ("batch" if name == "actor_train" else name, f"{total}; {training.sentence()}")
        for name, training in plan.training.items()
    ]


def rlvr_facts(plan: RLVRPlan) -> list[tuple[str, str]]:
    lengths = (
        f"prompt {plan.prompt_length} + response {plan.response_length} = {plan.sequence_length} tokens"
        f" (at most {plan.max_new_tokens} new)"
    )
    for one in plan.validation_sets if plan.eval_steps else ():
        response = one.sequence_length - one.prompt_length
        lengths += (
            f"; validation {one.name}{' ' if one.name else ''}{one.prompt_length} + {response} = {one.sequence_length}"
            f" (at most {one.max_new_tokens} new)"
        )
    reference = "reference log-probs" + ("" if "reference" in plan.roles else " (actor_train without its adapters)")
    passes = {
        reference: plan.needs_reference,
        "greedy baseline": plan.needs_greedy_baseline,
        "old log-probs": plan.needs_old_log_probs,
        "values": plan.needs_critic,
    }
    needed = ", ".join(name for name, needed in passes.items() if needed) or "none"
    facts = [("lengths", lengths), ("passes", f"{needed} (in addition to generation and training)")]
    return [*facts, ("ahead", run_ahead_sentence(plan))] if plan.is_async else facts


def run_ahead_sentence(plan: RLVRPlan) -> str:
    """Say how far generation may run ahead, how old samples may be, and which policy the loss takes for theirs."""
    ahead = RunAhead.of(plan.async_generation_ratio, plan.prompts_per_step, plan.num_additional_prompts)
    steps = "1 step" if plan.async_generation_ratio == 1 else f"{plan.async_generation_ratio:g} steps"
    age = count(ahead.max_lag, "version")
    old = "; ratios against the engine's log-probs" if plan.engine_log_probs_as_old else ""
    prompts = f"{count(ahead.capacity, 'prompt')} in flight or waiting at a time"
    turns = "; stopped while others have its devices" if plan.engines_take_turns else ""
    return f"generation up to {steps}: {prompts}; samples at most {age} of the weights old{turns}{old}"
