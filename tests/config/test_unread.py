"""Keys that nothing reads are named, and what the fields declare of their readers is what the losses really read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.algorithms.advantages import ADVANTAGE_NAMES, AdvantageInputs, advantage_estimators
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.policy_losses import LossInputs, policy_losses
from roll.config.algorithm import ADV_ESTIMATORS
from roll.config.estimators import GdpoOptions
from roll.config.policy_losses import POLICY_LOSSES
from roll.config.reading.errors import ConfigError
from roll.config.reading.schema import nested_section, rules_of, type_hints
from roll.config.strategies.registry import BACKENDS
from roll.methods.sft_keys import SFTConfig
from roll.pipelines.rlvr.config import RLVRConfig
from tests.config.good import GOOD, GOOD_SFT, changed, load

TRAIN, INFER = "actor_train", "actor_infer"


# (changes, key that is named, part of the note)
@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.3}, ("pg_clip_low", "use_pg_clip_range")),
        ({"pg_variant": "gspo-token", "pg_clip": 0.1, "dual_clip_loss": True}, ("pg_clip", "dual_clip_loss")),
        (
            {"pg_variant": "my_package.losses.loss", "pg_clip": 0.1, "tis_upper_bound": 2},
            ("pg_clip", "tis_upper_bound"),
        ),
        ({"estimator": "my_package.advantages.own", "lambd": 0.5, "gamma": 0.5}, ("lambd", "gamma")),
        (
            {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_clamp": 5, "kl_penalty": "k2"},
            ("kl_loss_clamp", "kl_penalty"),
        ),
        (
            {f"{INFER}.data_args": {}, f"{INFER}.infer_batch_size": 16},
            (f"{INFER}.data_args", f"{INFER}.infer_batch_size"),
        ),
        ({"dual_clip_loss": False, "pg_variant": "cispo"}, ("dual_clip_loss",)),
    ],
)
def test_keys_that_are_read_are_not_named(tmp_path: Path, changes: dict[str, Any], keys: tuple[str, ...]) -> None:
    noted = " ".join(notice.key for notice in load(tmp_path, changed(changes)).warnings)
    assert [key for key in keys if key in noted] == []


def test_sections_of_supervised_training(tmp_path: Path) -> None:
    changes = {"sft_train.generating_args.temperature": 1.0, "validation.training_args.learning_rate": 1.0}
    loaded = load(tmp_path, changed({**changes, "validation.data_args.file_name": "val.jsonl"}, GOOD_SFT))
    assert {"sft_train.generating_args", "validation.training_args"} <= {notice.key for notice in loaded.warnings}


def loss_inputs() -> LossInputs:
    generator = torch.Generator().manual_seed(0)
    log_probs, old, rollout, reference = (-torch.rand(4, 6, generator=generator) * 3 for _ in range(4))
    advantages = torch.randn(4, 6, generator=generator)
    mask = torch.ones(4, 6, dtype=torch.bool)
    return LossInputs(log_probs.requires_grad_(), advantages, mask, old, rollout, reference)


def recorded(options: Any, read: set[str]) -> Any:
    """The options with every field that is read added to ``read``."""
    cls = type(options)

    def look(self: Any, name: str) -> Any:
        if name in names:
            read.add(name)
        return object.__getattribute__(self, name)

    names = {item.name for item in fields(options)}
    watched = type(cls.__name__, (cls,), {"__getattribute__": look})
    return watched(**{name: getattr(options, name) for name in names})


@pytest.mark.parametrize("variant", [name for name in policy_losses.names if name in POLICY_LOSSES])
def test_policy_losses_read_their_options(variant: str) -> None:
    read: set[str] = set()
    own: Any = POLICY_LOSSES[variant].options
    given = {item.name for item in fields(own)} & {"clip_low", "clip_high", "dual_clip"}
    for values in ({}, {name: {"dual_clip": True}.get(name, 0.1) for name in given}):
        policy_losses.resolve(variant)(loss_inputs(), recorded(own(**values), read), MetricBuilder())
    assert read == {item.name for item in fields(own)}


@pytest.mark.parametrize("estimator", [name for name in ADVANTAGE_NAMES if name in ADV_ESTIMATORS])
def test_estimators_read_their_options(estimator: str) -> None:
    read: set[str] = set()
    rewards = torch.zeros(4, 3)
    rewards[:, -1] = torch.tensor([1.0, 0.0, 0.5, 0.0])
    inputs = AdvantageInputs(
        rewards,
        torch.ones(4, 3, dtype=torch.bool),
        torch.tensor([0, 0, 1, 1]),
        values=torch.zeros(4, 3),
        baseline_rewards=torch.zeros(4),
        scores=rewards.sum(-1),
        reward_components=torch.rand(4, 2),
        old_log_probs=torch.full((4, 3), -1.0),
        old_sum_of_squares=torch.full((4, 3), 0.5),
        step_returns=torch.zeros(4, 3),
        state_ids=torch.zeros(4, 3, dtype=torch.long),
    )
    own: Any = ADV_ESTIMATORS[estimator].options
    advantage_estimators.resolve(estimator)(
        inputs, recorded(own(**{GdpoOptions: {"weights": {"a": 1.0, "b": 2.0}}}.get(own, {})), read)
    )
    # The return of a step is computed before the estimator is called, for the episodes of a batch.
    assert read == {item.name for item in fields(own)} - {"step_gamma"}


def sections(cls: type) -> Iterator[type]:
    yield cls
    for hint in type_hints(cls).values():
        inner = nested_section(hint)
        if inner is not None:
            yield from sections(inner)


def test_conditions_name_keys_that_there_are() -> None:
    effective = {"critic", "reference"}
    for root in (RLVRConfig, SFTConfig, *(backend.options for backend in BACKENDS.rows)):
        top = {item.name for item in fields(root)}
        for section in sections(root):
            assert is_dataclass(section)
            near = {item.name for item in fields(section)}
            for item in fields(section):
                others = rules_of(item).read_if
                assert set(others) <= near | top | effective, (section.__name__, item.name)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("+actor_train.generating_args.temperature=0.7", "actor_train.generating_args"),
        ("+actor_infer.training_args.learning_rate=1e-5", "actor_infer.training_args"),
        ("+actor_infer.data_args.file_name=x", "actor_infer.data_args"),
        ("+rewards.math.training_args.learning_rate=1", "rewards.math.training_args"),
        ("+lora_rank=8", "lora_rank"),
    ],
)
def test_what_a_role_never_reads_is_noted_from_the_command_line(tmp_path: Path, override: str, key: str) -> None:
    assert key in [notice.key for notice in load(tmp_path, GOOD, override).warnings]


def test_a_key_that_an_interpolation_reads_is_of_use(tmp_path: Path) -> None:
    adapter = {"lora_target": "all-linear", "lora_rank": "${lora_rank}"}
    loaded = load(tmp_path, changed({"lora_rank": 4, "actor_train.model_args": adapter}, GOOD))
    assert loaded.config.actor_train.model_args.lora_rank == 4  # type: ignore[attr-defined]
    assert "lora_rank" not in [notice.key for notice in loaded.warnings]


def test_a_new_section_of_the_command_line_is_attributed_to_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"command line: foo = "):
        load(tmp_path, GOOD, "+foo.bar=1")


@pytest.mark.parametrize(
    ("key", "belongs"),
    [
        ("temperature", "actor_infer.generating_args.temperature"),
        ("max_new_tokens", "actor_infer.generating_args.max_new_tokens"),
        ("learning_rate", "actor_train.training_args.learning_rate"),
    ],
)
def test_a_misplaced_key_belongs_where_it_is_read(tmp_path: Path, key: str, belongs: str) -> None:
    """The remedy, followed literally, is accepted and noted by nobody."""
    with pytest.raises(ConfigError, match=re.escape(f"it belongs at {belongs}")):
        load(tmp_path, GOOD, f"+{key}=1")
    loaded = load(tmp_path, GOOD, f"++{belongs}=1")
    assert not [notice for notice in loaded.warnings if notice.key.startswith(belongs.rpartition(".")[0])]
