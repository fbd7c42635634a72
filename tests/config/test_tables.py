"""A name stands in one table: what is added to it is known to everything that asks for names, and a built-in one is
written in two files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from roll.config.choices import ADV_ESTIMATORS, POLICY_LOSSES, Estimator, PolicyLoss
from roll.config.json_schema import json_schema
from roll.config.pipelines import TRAINS
from roll.config.reading.errors import ConfigError
from roll.config.reading.fields import Table, setting
from roll.config.reference import explain, page
from roll.config.rewards import REWARDS, BuiltInReward
from roll.config.strategies.base import Backend, Package, StrategyConfig
from roll.config.strategies.registry import BACKENDS
from roll.pipelines.rlvr.config import RLVRConfig
from roll.preflight import require_packages
from tests.config.good import changed, load, mistakes

PACKAGE = Path(__file__).parents[2] / "roll"
STRATEGY = "actor_train.strategy_args"


@dataclass(frozen=True)
class ToyOptions(StrategyConfig):
    toy_ranks: int = setting(1, ge=1)
    """Ranks of a toy."""


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of each kind, forgotten afterwards."""
    tables: tuple[Table[Any], ...] = (POLICY_LOSSES, ADV_ESTIMATORS, REWARDS, BACKENDS)
    for table in tables:
        monkeypatch.setattr(table, "data", dict(table))
    POLICY_LOSSES.add(PolicyLoss("toy_loss", ("toy-loss",)))
    ADV_ESTIMATORS.add(Estimator("toy_estimator", leaves_one_out=True))
    REWARDS.add(BuiltInReward("toy_reward", target=f"{__name__}.ToyOptions"))
    BACKENDS.add(Backend("toy", ToyOptions, computes="toys.Toy", trains=True, package=Package("toys_", "make toys")))


def test_the_loader_takes_the_names(tmp_path: Path) -> None:
    changes = {"pg_variant": "toy-loss", "estimator": "toy_estimator", "rewards.math.worker_cls": "toy_reward"}
    changes |= {f"{STRATEGY}.strategy_name": "toy_train", f"{STRATEGY}.strategy_config": {"toy_ranks": "2e0"}}
    loaded = load(tmp_path, changed(changes))
    assert loaded.plan.roles["actor_train"].strategy_name == "toy_train"
    assert "toy_train" in TRAINS.able()
    assert not [notice for notice in loaded.warnings if "toy" in str(notice)]
    with pytest.raises(ConfigError, match="make toys"):
        require_packages(loaded)


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [
        ("pg_variant", "toy_los", "toy_loss"),
        ("estimator", "toy_estimater", "toy_estimator"),
        ("rewards.math.worker_cls", "toy_rewrd", "toy_reward"),
        (f"{STRATEGY}.strategy_name", "toy_trian", "toy_train"),
    ],
)
def test_a_misspelt_name_is_met_with_the_nearest(tmp_path: Path, key: str, value: str, nearest: str) -> None:
    (problem,) = mistakes(tmp_path, changed({key: value}))
    assert problem.key == key and problem.example == nearest


def test_the_checks_read_the_rows(tmp_path: Path) -> None:
    one = {"estimator": "toy_estimator", "num_return_sequences_in_group": 1, "rollout_batch_size": 8}
    assert "num_return_sequences_in_group" in {problem.key for problem in mistakes(tmp_path, changed(one))}
    options = {f"{STRATEGY}.strategy_name": "toy_train", f"{STRATEGY}.strategy_config": {"toy_ranks": 0}}
    (problem,) = mistakes(tmp_path, changed(options))
    assert "must be at least 1" in str(problem)


def test_documents_and_schema_list_the_names() -> None:
    assert any("toy_loss" in row.text for row in explain("pg_variant"))
    assert any(row.section == "strategy_config of toy_train and toy_infer" for row in explain("toy_ranks"))
    assert "`toy_estimator`" in page()
    json_schema(RLVRConfig, "with toys")


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        ADV_ESTIMATORS.add(Estimator("grpo"))


def constants(file: Path) -> Iterator[str]:
    """Text constants of a module, documentation aside."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_a_built_in_name_is_written_in_two_files() -> None:
    """One for its row (and its keys), one for its code. Translations and the training service name what other projects
    call alike."""
    files = [file for file in PACKAGE.rglob("*.py") if not {"translation", "training_service"} & {*file.parts}]
    written = {file.relative_to(PACKAGE).as_posix(): set(constants(file)) for file in files}
    homes = (
        ("config/choices.py", "algorithms/policy_losses.py", "gspo cispo vespo topr sapo kl_cov"),
        ("config/choices.py", "algorithms/advantages.py", "rloo opo gpg maxrl remax reinforce++"),
        ("config/rewards.py", "rewards/", "gsm8k_rule exact_match ifeval detection"),
    )
    for table, home, name in ((table, home, name) for table, home, names in homes for name in names.split()):
        found = {file for file, texts in written.items() if name in texts}
        assert table in found and all(file == table or file.startswith(home) for file in found), (name, found)
