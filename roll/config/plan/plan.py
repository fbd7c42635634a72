"""The plan, which follows from a configuration: placement, batch arithmetic, micro-batches, lengths, passes,
folders. Torch-free.

A plan is derived and frozen; the configuration itself is never rewritten."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import ceil, floor, gcd, isqrt
from pathlib import Path

from roll.config.reading.errors import Problems, count
from roll.config.roles import WorkerConfig

KINDS = ("train", "infer")  # endings of the keys of training passes and of passes without gradient
_PACKED_KEY_ENDING = {"train": "train", "infer": "forward"}


@dataclass(frozen=True)
class MicroBatching:
    """The rule for one kind of pass.

    ======================  =====================================================================================
    fixed rows              ``rows`` consecutive rows (``max_tokens`` None, not ``balances``)
    dynamic batching        rows of like lengths, at most ``max_tokens`` tokens
    balanced packing        any rows, at most ``max_tokens`` tokens, nearly the same work in each (``balances``)
    ======================  =====================================================================================
    """

    rows: int
    removes_padding: bool = False
    """The rows of a micro-batch are concatenated into one row of tokens."""
    max_tokens: int | None = None
    """Tokens that a micro-batch may compute, padding included."""
    width_multiple: int = 1
    """Widths of micro-batches with padding are rounded up to a multiple of this."""
    balances: bool = False
    """``max_tokens`` None then means the longest row."""
    min_count: int = 1
    """At least so many micro-batches, where there are as many rows."""

    def sentence(self) -> str:
        """``micro-batches of 8 rows, without padding``."""
        ending = ", without padding" if self.removes_padding else ""
        if self.max_tokens is None:
            return f"micro-batches of {count(self.rows, 'row')}{ending}"
        kind = "balanced micro-batches" if self.balances else "micro-batches"
        return f"{kind} of at most {self.max_tokens:,} tokens{ending}"


def micro_batching(role: WorkerConfig, trains: bool) -> MicroBatching:
    """The rule of a role for optimizer steps, or for passes without gradient."""
    packing = role.sequence_packing_args
    if trains:
        rows, dynamic = role.training_args.per_device_train_batch_size, role.use_dynamic_batching_in_train
        budget, multiple = role.max_tokens_per_microbatch_in_train, role.sequence_length_round_in_train
        packed, fewest = packing.max_packed_sequence_length_train, packing.min_num_micro_batches_train
    else:
        rows, dynamic = role.infer_batch_size, role.use_dynamic_batching_in_infer
        budget, multiple = role.max_tokens_per_microbatch_in_infer, role.sequence_length_round_in_infer
        packed, fewest = packing.max_packed_sequence_length_forward, packing.min_num_micro_batches_forward
    removes_padding = role.use_remove_padding or role.use_sequence_packing
    if balances_packs(role):
        return MicroBatching(rows, True, packed, balances=True, min_count=fewest)
    if dynamic:
        return MicroBatching(rows, removes_padding, budget, width_multiple=1 if removes_padding else multiple)
    return MicroBatching(rows, removes_padding)


def balances_packs(role: WorkerConfig) -> bool:
    return role.use_sequence_packing and role.sequence_packing_args.algorithm == "load_balance"


def with_packed_lengths(role: WorkerConfig, sequence_length: int) -> WorkerConfig:
    """The role with packed rows as long as the pipeline's sequences, where its section leaves them open."""
    packing = role.sequence_packing_args
    filled = replace(
        packing,
        max_packed_sequence_length_forward=packing.max_packed_sequence_length_forward or sequence_length,
        max_packed_sequence_length_train=packing.max_packed_sequence_length_train or sequence_length,
    )
    return replace(role, sequence_packing_args=filled)


def check_micro_batching(
    name: str, role: WorkerConfig, sequence_length: int, rows_per_step: int | None, problems: Problems
) -> None:
    """Report budgets that are missing or too small for the longest row, of ``sequence_length`` tokens, and keys that
    have no effect. ``rows_per_step``: rows of one rank in an optimizer step; None for a role that does not train."""
    kinds = KINDS if rows_per_step is not None else KINDS[1:]
    for kind in KINDS:
        _check_dynamic(name, role, kind, kind in kinds, sequence_length, problems)
    packing, path = role.sequence_packing_args, f"{name}.sequence_packing_args"
    if not balances_packs(role):
        reason = "algorithm: load_balance" if role.use_sequence_packing else "use_sequence_packing"
        if packing != type(packing)():
            problems.note(path, f"no effect without {reason}")
        return
    for kind in kinds:
        key = f"max_packed_sequence_length_{_PACKED_KEY_ENDING[kind]}"
        budget: int | None = getattr(packing, key)
        if budget is not None and budget < sequence_length:
            rule = f"is less than the longest sequence ({sequence_length} tokens)"
            problems.add(f"{path}.{key}", budget, rule, sequence_length)
    fewest = packing.min_num_micro_batches_train
    if rows_per_step is not None and fewest > rows_per_step:
        rule = f"is more than the {count(rows_per_step, 'row')} that a rank has in an optimizer step"
        problems.add(f"{path}.min_num_micro_batches_train", fewest, rule, rows_per_step)


def _check_dynamic(
    name: str, role: WorkerConfig, kind: str, is_used: bool, sequence_length: int, problems: Problems
) -> None:
    switch, key = f"{name}.use_dynamic_batching_in_{kind}", f"{name}.max_tokens_per_microbatch_in_{kind}"
    budget: int | None = getattr(role, key.rpartition(".")[2])
    multiple: int = getattr(role, f"sequence_length_round_in_{kind}")
    if not getattr(role, switch.rpartition(".")[2]):
        return
    if not is_used:
        problems.note(switch, "no effect: this role does not train")
        return
    # With padding a row alone in its micro-batch is rounded up as well, and must still fit.
    needed = (
        sequence_length
        if micro_batching(role, kind == "train").removes_padding
        else -(-sequence_length // multiple) * multiple
    )
    if balances_packs(role):
        rule = "and sequence_packing_args.algorithm: load_balance are two ways to form micro-batches; choose one"
        problems.add(switch, True, rule, False)
    elif budget is None:
        problems.missing(key, f"is needed with use_dynamic_batching_in_{kind}: tokens of a micro-batch", 4 * needed)
    elif budget < needed:
        rounded = "" if needed == sequence_length else f", {needed} in steps of sequence_length_round_in_{kind}"
        rule = f"is less than the longest sequence ({sequence_length} tokens{rounded})"
        problems.add(key, budget, rule, needed)


@dataclass(frozen=True)
class RolePlan:
    """One role's workers and where they run."""

    name: str
    """``actor_train``, ``rewards.math`` ...; ``judge.math``: the engines of the section ``rewards.math``."""
    key: str
    """Key of the section that describes it."""
    section: WorkerConfig
    """The section that its workers get, with everything that the plan derives. Nothing changes it later."""
    strategy_name: str | None
    """null: the role computes no model."""
    device_mapping: tuple[int, ...]
    """Logical device ids in order; empty for a role without devices."""
    num_gpus_per_worker: int
    world_size: int
    """Workers."""
    dp_size: int
    """Data-parallel ranks (for engines: engines)."""
    colocated_with: tuple[str, ...]
    """Roles that share at least one device with this one."""
    model_path: str | None
    """Folder or hub name of the model it loads."""
    sequence_length: int
    """Tokens of the longest row that a model computes (for engines: in training)."""
    forward_rule: MicroBatching
    """Micro-batches of a pass without gradient (no meaning for roles that compute none)."""
    worker_cls: str | None = None
    """Dotted path of the user's own worker class, or a reward's short name or dotted path; null: the role's own."""


@dataclass(frozen=True)
class TrainingPlan:
    """Batch arithmetic of one trained role."""

    samples_per_step: int
    """Samples that one pipeline step trains on."""
    micro_batch_size: int
    """Samples of one forward and backward pass on one rank, where ``rule`` has no token budget."""
    gradient_accumulation_steps: int
    """Micro-batches of one rank in an optimizer step."""
    dp_size: int
    epochs: int = 1
    """Passes over the samples of a step."""
    num_steps: int | None = None
    """Pipeline steps in which the role trains; null: the data decide."""
    rule: MicroBatching | None = None
    """Rule that forms micro-batches; null: by ``micro_batch_size``."""

    @cached_property
    def mini_batch_size(self) -> int:
        """Samples of one optimizer step."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp_size

    @property
    def optimizer_steps_per_step(self) -> int:
        return self.epochs * -(-self.samples_per_step // self.mini_batch_size)

    @property
    def total_optimizer_steps(self) -> int | None:
        """Over the whole run; null: the data decide."""
        return None if self.num_steps is None else self.num_steps * self.optimizer_steps_per_step

    def sentence(self) -> str:
        """``2 optimizer steps of 128; 2 ranks x 8 micro-batches of 8``."""
        steps = count(self.optimizer_steps_per_step // self.epochs, "optimizer step")
        micro_batches = count(self.gradient_accumulation_steps, "micro-batch", "micro-batches")
        repeats = f"; {self.epochs} epochs" if self.epochs > 1 else ""
        share = f"{micro_batches} of {self.micro_batch_size}"
        if self.rule is not None and self.rule.max_tokens is not None:
            rows = self.micro_batch_size * self.gradient_accumulation_steps
            share = f"{count(rows, 'row')} in {self.rule.sentence()}"
        elif self.rule is not None and self.rule.removes_padding:
            share += ", without padding"
        size = f"{'at most ' if self.samples_per_step % self.mini_batch_size else ''}{self.mini_batch_size}"
        return f"{steps} of {size}; {count(self.dp_size, 'rank')} x {share}{repeats}"


@dataclass(frozen=True)
class Plan:
    """Base of every pipeline's plan."""

    pipeline: str
    exp_name: str
    roles: Mapping[str, RolePlan]
    """Roles that the run starts, by section name."""
    training: Mapping[str, TrainingPlan]
    """Batch arithmetic of the trained roles, by section name."""
    num_devices_per_node: int
    num_nodes: int
    output_dir: Path
    """Where the run writes, as :attr:`checkpoint_dir` and :attr:`log_dir`; the same again when it is continued."""
    checkpoint_dir: Path
    log_dir: Path
    dump_dir: Path | None
    """Sampled texts; null: none are written."""
    max_steps: int | None
    """Pipeline steps; null: the data decide."""
    save_steps: int
    """Steps between checkpoints; 0: none."""
    eval_steps: int
    """Steps between validations; 0: none."""
    sequence_length: int

    @property
    def num_devices(self) -> int:
        """Devices of all nodes together."""
        return self.num_devices_per_node * self.num_nodes


def explain_indivisible(plan: TrainingPlan, prompts: int, group_size: int) -> str | None:
    """The rule with its numbers and the nearest values that work; None when everything divides."""
    samples, mini = plan.samples_per_step, plan.mini_batch_size
    if samples % mini == 0:
        return None
    return (
        f"{prompts} prompts x {group_size} = {samples} samples do not divide into optimizer steps of {mini} "
        f"({plan.micro_batch_size} per micro-batch x "
        f"{count(plan.gradient_accumulation_steps, 'micro-batch', 'micro-batches')} x {count(plan.dp_size, 'rank')})"
    )


def working_values(plan: TrainingPlan, prompts: int, group_size: int, section: str) -> str:
    """Single changes that make the batch divide, each the nearest one to what is written."""
    found, steps, rows = [], plan.gradient_accumulation_steps, plan.micro_batch_size
    for key, written, other in (
        ("gradient_accumulation_steps", steps, rows),
        ("per_device_train_batch_size", rows, steps),
    ):
        quotient, rest = divmod(plan.samples_per_step, other * plan.dp_size)
        if not rest and quotient:
            _, value = min((abs(one - written), one) for one in divisors(quotient))
            found.append(f"{section}.training_args.{key}: {value}")
    # prompts x group_size is a multiple of mini_batch_size exactly where prompts is one of this.
    quantum = plan.mini_batch_size // gcd(plan.mini_batch_size, group_size)
    multiple = max(1, round(prompts / quantum)) * quantum
    found.append(f"rollout_batch_size: {multiple}")
    return ", or ".join(found)


def divisors(number: int) -> list[int]:
    """All divisors in ascending order; none for 0 and negative numbers."""
    small = [candidate for candidate in range(1, isqrt(max(0, number)) + 1) if number % candidate == 0]
    large = [number // candidate for candidate in reversed(small)]
    # The root of a square is in both halves.
    return small + large[1 if small and small[-1] == large[0] else 0 :]


@dataclass(frozen=True)
class RunAhead:
    """The bounds that ``async_generation_ratio`` r sets; B prompts are trained on in a step.

    Version v of the weights is their state after v training steps; step v starts from it. Two rules:

    - *Capacity*: at any version, groups that are in flight or wait for their step, together with those that were
      already taken at this version, are at most floor((1 + r) * B). So while step v trains, r * B groups of later steps
      may be begun (arXiv 2505.24298, eq. 3, with r for its eta).
    - *Age*: a group is trained on at step s only if its oldest token was sampled with version s - ceil(r) or later.
    """

    ratio: Fraction
    prompts_per_step: int
    num_additional: int = 0
    """Groups beyond the capacity (``is_use_additional_prompts``). Steps then take the first groups to be finished
    and never wait; groups that become too old on the way are given up."""

    @staticmethod
    def of(ratio: float, prompts_per_step: int, num_additional: int = 0) -> RunAhead:
        """Take the decimal number as written: 0.1 is one tenth."""
        return RunAhead(Fraction(str(ratio)), prompts_per_step, num_additional)

    @property
    def capacity(self) -> int:
        """Groups that may be held or taken at one version."""
        return floor((1 + self.ratio) * self.prompts_per_step) + self.num_additional

    @property
    def max_lag(self) -> int:
        """Most versions between the oldest token of a group and the step that trains on it."""
        return ceil(self.ratio)

    def is_too_old(self, version: int, step: int) -> bool:
        """True if a group with tokens of ``version`` may not be trained on at ``step`` any more."""
        return version < step - self.max_lag

    def can_be_taken(self, step: int, ready: Mapping[int, int], unfinished: Mapping[int, int]) -> bool:
        """True if step ``step`` can be filled now, the oldest ready groups first, so that no held group need ever
        become too old.

        Taken oldest first, ``B`` a step, a group can still be trained on in time if, for every k, at most k * B of the
        groups that are left must be trained on within the next k steps. Where that is not so yet, the step waits for
        unfinished old groups. With additional prompts, whatever is ready is taken.

        Args:
            ready: number of ready groups by the version of their oldest token.
            unfinished: number of groups in flight, by the version that they were begun with.
        """
        size = self.prompts_per_step
        if sum(ready.values()) < size:
            return False
        if self.num_additional:
            return True
        for steps_left in range(self.max_lag):
            limit = step - self.max_lag + steps_left
            urgent = sum(count for version, count in ready.items() if version <= limit)
            waiting = sum(count for version, count in unfinished.items() if version <= limit)
            if urgent - min(urgent, size) + waiting > steps_left * size:
                return False
        return True
