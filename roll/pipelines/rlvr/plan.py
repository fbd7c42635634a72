"""The plan of an RLVR run."""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.plan import Plan
from roll.config.roles import DataArguments, GeneratingArguments


@dataclass(frozen=True)
class ValidationSet:
    """One set of questions, and how they are answered."""

    name: str
    """Empty for the set of ``validation.data_args``."""
    data_args: DataArguments
    """What the set leaves out of columns and template is filled in."""
    generating_args: GeneratingArguments
    prompt_length: int
    sequence_length: int
    max_new_tokens: int
    samples_per_prompt: int
    greedy: bool
    """Every question is also answered greedily."""


@dataclass(frozen=True)
class RLVRPlan(Plan):
    """Plan of an RLVR run."""

    prompts_per_step: int
    group_size: int
    """Samples of each prompt."""
    prompt_length: int
    response_length: int
    max_new_tokens: int
    """Most tokens that a response is given in training."""
    norm_length: int
    """Tokens that the mode ``seq-mean-token-sum-norm`` divides by."""
    validation_sets: tuple[ValidationSet, ...]
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
    """Prompts asked beyond the need."""
    needs_greedy_baseline: bool
    """Every prompt is answered once more, greedily, for the advantages."""
    needs_critic: bool
    pg_variant: str
    """The actor's policy loss."""
    norm_types: tuple[str | None, str | None]
    """``norm_mean_type`` and ``norm_std_type`` as written (null included); ``auto`` where the file leaves them open, so
    that the estimator's own pair holds."""

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def is_async(self) -> bool:
        """Generation goes on while training does."""
        return self.async_generation_ratio > 0

    @property
    def engines_take_turns(self) -> bool:
        """Whether other roles compute on the engines' devices, so that generation stops in the meantime."""
        return bool(self.roles["actor_infer"].colocated_with)

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence that an engine meets, validation included."""
        return max(self.sequence_length, *(one.sequence_length for one in self.validation_sets), 0)
