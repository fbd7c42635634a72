"""Division of a rank's rows into micro-batches by the keys of a role. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roll.config.reading.errors import count

if TYPE_CHECKING:
    from roll.config.reading.errors import Problems
    from roll.config.roles import WorkerConfig


KINDS = ("train", "infer")
"""Endings of the keys of training passes and of passes without gradient."""
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
    """The rows of a micro-batch lie behind one another in one row of tokens."""
    max_tokens: int | None = None
    """Tokens that a micro-batch may compute, padding included."""
    width_multiple: int = 1
    """Widths of micro-batches with padding are rounded up to a multiple of this."""
    balances: bool = False
    """``max_tokens`` None then stands for the longest row."""
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
    """Report budgets that are missing or too small for the longest sequence, and keys that have no effect.

    Args:
        name: of the role's section.
        sequence_length: tokens of the longest row.
        rows_per_step: rows of one rank in an optimizer step; None for a role that does not train.
    """
    kinds = KINDS if rows_per_step is not None else KINDS[1:]
    for kind in KINDS:
        _check_dynamic(name, role, kind, kind in kinds, sequence_length, problems)
    _check_packing(name, role, kinds, sequence_length, problems)
    fewest = role.sequence_packing_args.min_num_micro_batches_train
    if rows_per_step is not None and balances_packs(role) and fewest > rows_per_step:
        rule = f"is more than the {count(rows_per_step, 'row')} that a rank has in an optimizer step"
        key = f"{name}.sequence_packing_args.min_num_micro_batches_train"
        problems.add(key, fewest, rule, rows_per_step)


def _check_dynamic(
    name: str, role: WorkerConfig, kind: str, is_used: bool, sequence_length: int, problems: Problems
) -> None:
    switch, key = f"{name}.use_dynamic_batching_in_{kind}", f"{name}.max_tokens_per_microbatch_in_{kind}"
    budget: int | None = getattr(role, key.rpartition(".")[2])
    multiple: int = getattr(role, f"sequence_length_round_in_{kind}")
    if not getattr(role, switch.rpartition(".")[2]):
        if budget is not None:
            problems.note(key, f"no effect without use_dynamic_batching_in_{kind}")
        return
    if not is_used:
        problems.note(switch, "no effect: this role does not train")
        return
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


def _check_packing(
    name: str, role: WorkerConfig, kinds: tuple[str, ...], sequence_length: int, problems: Problems
) -> None:
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
