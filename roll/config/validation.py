"""``validation``: which questions are asked during training, and how the answers are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.config.data import DataArguments
from roll.config.reading.fields import setting
from roll.config.roles import GeneratingArguments, StrategyArguments, WorkerConfig


@dataclass(frozen=True)
class ValidationSetConfig:
    """``validation.sets.<name>``: a set with a name of its own. What it leaves out is as ``validation`` has it."""

    data_args: DataArguments = field(default_factory=DataArguments)
    """Its files; columns and template that it leaves out are those of ``validation.data_args``."""
    generating_args: GeneratingArguments = field(default_factory=GeneratingArguments)
    """How its answers are sampled, and ``num_return_sequences`` of them; keys that it leaves out are those of
    ``validation.generating_args``."""
    greedy: bool | None = None
    """Also answer every prompt once with greedy decoding; null: as ``validation`` says."""
    prompt_length: int | None = setting(None, ge=1)
    """Longest prompt of this set; goes with ``sequence_length``. null: as in the rest of the validation."""
    sequence_length: int | None = setting(None, ge=2)
    """Prompt plus response of this set; goes with ``prompt_length``. null: as in the rest of the validation."""


@dataclass(frozen=True)
class ValidationConfig(WorkerConfig):
    """``validation``: which questions are asked every ``eval_steps``, and how the answers are sampled.

    Only ``data_args`` and ``generating_args`` of the role's keys count; the engines are those of ``actor_infer``.
    """

    strategy_args: StrategyArguments = field(default_factory=lambda: StrategyArguments(strategy_name="hf_infer"))
    """Has no effect: the engines are those of ``actor_infer``."""
    greedy: bool = True
    """Also answer every prompt once with greedy decoding."""
    eval_steps: int | None = setting(None, ge=-1)
    """Steps between validations; null: the run's ``eval_steps``."""
    before_train: bool = True
    """Validate before the first step."""
    beside_training: bool | None = None
    """The engines validate while the other roles work on the samples of the step, which waits at its end for what is
    left; the answers are the same. All roles that answer or score need devices of their own. null: where devices allow
    it; false: validation comes before the step's samples, and everything else waits."""
    sets: dict[str, ValidationSetConfig] = field(default_factory=dict)
    """Further sets by name, each with files, sampling and lengths of its own. With sets, ``data_args.file_name`` may be
    left out."""
