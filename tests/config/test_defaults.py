"""Whose defaults a policy's file has: those of GRPO, or ROLL's in ROLL's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import roll
from roll.config.loader import LoadedConfig, load_config
from roll.config.plan.render import default_facts, effective_yaml
from roll.config.reading.errors import ConfigError
from tests.config.good import SMALLEST, changed

ROLLS = {
    "adv_estimator": "grpo",
    "actor_train.device_mapping": [0],
    "actor_train.training_args.per_device_train_batch_size": 6,
    "actor_infer.device_mapping": [0],
}


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLL_PLATFORM", "cpu")


def read(folder: Path, data: dict[str, Any] | str) -> LoadedConfig[Any]:
    """As from a file: what :func:`tests.config.good.load` leaves out decides whose defaults it has."""
    file = folder / "run.yaml"
    file.write_text(data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return load_config(None, file, check_files=False)


HYDRA = {"hydra": {"run": {"dir": "."}}}


@pytest.mark.parametrize("mark", [HYDRA, {"defaults": "roll"}])
def test_rolls_files_have_rolls_defaults(tmp_path: Path, mark: dict[str, Any]) -> None:
    loaded = read(tmp_path, changed(mark | ROLLS, SMALLEST))
    config = loaded.config
    assert (config.num_return_sequences_in_group, config.num_gpus_per_node) == (1, 8)
    assert config.actor_train.training_args.learning_rate == 5e-5
    sampling = config.actor_infer.generating_args
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.95, 0.7, 50)
    assert "ROLL's" in dict(default_facts(loaded))["defaults"]
    with pytest.raises(ConfigError, match="device_mapping: is needed"):
        read(tmp_path, changed(mark, SMALLEST))


@pytest.mark.parametrize("mark", [{}, HYDRA])
def test_the_configuration_of_a_run_means_the_same_again(tmp_path: Path, mark: dict[str, Any]) -> None:
    """``config.yaml`` has no ``hydra`` section: it says whose defaults it has."""
    loaded = read(tmp_path, changed(mark | ROLLS, SMALLEST))
    again = read(tmp_path, effective_yaml(loaded))
    assert again.config == loaded.config and again.resolved == loaded.resolved
    assert roll.load_config(loaded.resolved, check_files=False).config == loaded.config


def test_an_unknown_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"defaults = 'verl': must be one of learning, roll, or a list of files"):
        read(tmp_path, changed({"defaults": "verl"}, SMALLEST))
