"""The presets in ``configs/`` load from a recipe two folders away."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from roll.config.loader import load_config
from roll.config.strategies.fsdp import Fsdp2StrategyConfig
from roll.config.strategies.registry import typed_strategy_config
from tests.config.good import changed

CONFIGS = Path(__file__).parents[2] / "configs"
FSDP2 = sorted(file.stem for file in CONFIGS.glob("fsdp2_*.yaml"))


@pytest.mark.parametrize("preset", FSDP2)
def test_preset(tmp_path: Path, preset: str) -> None:
    shutil.copytree(CONFIGS, tmp_path / "configs")
    recipe = tmp_path / "examples/mine"
    recipe.mkdir(parents=True)
    data = changed(
        {
            "defaults": [f"../../configs/{preset}@_here_", "../../configs/on_policy_sampling@_here_"],
            "actor_train.strategy_args.strategy_config": f"${{{preset}}}",
            "actor_infer.generating_args": "${on_policy_sampling}",
        }
    )
    (recipe / "rlvr_config.yaml").write_text(yaml.safe_dump(data))
    loaded = load_config(None, recipe, "rlvr_config", check_files=False)
    options = typed_strategy_config(loaded.config.actor_train.strategy_args)
    assert isinstance(options, Fsdp2StrategyConfig)
    assert options.offload_policy == preset.endswith("offload")
    assert loaded.config.actor_infer.generating_args.top_k == -1
    assert not [notice for notice in loaded.warnings if "not comparable" in notice.text]


def test_a_key_may_have_the_name_of_a_folder_beside_the_file(tmp_path: Path) -> None:
    """Hydra would take it for a group of configurations, and find none."""
    (tmp_path / "artifacts").mkdir()
    data = changed({"artifacts": "here", "output_dir": "${artifacts}/run"})
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(data))
    loaded = load_config(None, tmp_path, "mine", ["artifacts=there"], check_files=False)
    assert loaded.config.output_dir == "there/run"
