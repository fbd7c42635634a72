"""What follows from a configuration: placement, batch arithmetic, lengths, passes, folders.

A plan is derived and frozen; the configuration itself is never rewritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from roll.config.micro_batching import MicroBatching
from roll.config.roles import WorkerConfig
from roll.config.wording import count


@dataclass(frozen=True)
class RolePlan:
    """One role's workers and where they run."""

    name: str
    """``actor_train``, ``rewards.math`` ...; ``judge.math``: the engines of the section ``rewards.math``."""
    key: str
    """Key of the section that describes it."""
    section: WorkerConfig
    """What its workers get: the section with everything filled in that the plan derives. Nothing changes it later."""
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
    """How the rows of a pass without gradient are cut (no meaning for roles that compute none)."""
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
    """Pipeline steps in which the role trains; null: told by the data."""
    rule: MicroBatching | None = None
    """How micro-batches are formed; null: by ``micro_batch_size``."""

    @property
    def mini_batch_size(self) -> int:
        """Samples of one optimizer step."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp_size

    @property
    def optimizer_steps_per_step(self) -> int:
        return self.epochs * (self.samples_per_step // self.mini_batch_size)

    @property
    def total_optimizer_steps(self) -> int | None:
        """Over the whole run; null: told by the data."""
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
        return f"{steps} of {self.mini_batch_size}; {count(self.dp_size, 'rank')} x {share}{repeats}"


@dataclass(frozen=True)
class Folders:
    """Where a run writes. The same folders again when it is continued."""

    output_dir: Path
    checkpoint_dir: Path
    log_dir: Path
    dump_dir: Path | None
    """Sampled texts; null: none are written."""


@dataclass(frozen=True)
class Plan:
    """What every pipeline's plan has."""

    pipeline: str
    exp_name: str
    roles: Mapping[str, RolePlan]
    """Roles that the run starts, by section name."""
    training: Mapping[str, TrainingPlan]
    """Batch arithmetic of the trained roles, by section name."""
    num_devices_per_node: int
    num_nodes: int
    folders: Folders
    max_steps: int | None
    """Pipeline steps; null: told by the data."""
    save_steps: int
    """Steps between checkpoints; 0: none."""
    eval_steps: int
    """Steps between validations; 0: none."""
    sequence_length: int

    @property
    def num_devices(self) -> int:
        """Devices of all nodes together."""
        return self.num_devices_per_node * self.num_nodes

    @property
    def output_dir(self) -> Path:
        return self.folders.output_dir

    @property
    def checkpoint_dir(self) -> Path:
        return self.folders.checkpoint_dir

    @property
    def log_dir(self) -> Path:
        return self.folders.log_dir

    @property
    def dump_dir(self) -> Path | None:
        return self.folders.dump_dir
