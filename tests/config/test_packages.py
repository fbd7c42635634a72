"""A run without the package of its strategy ends before anything starts; its plan does not need it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from roll import preflight
from roll.config.installation import install_command
from roll.config.loader import load_config
from roll.config.model_files import is_installed
from roll.config.reading.errors import ConfigError
from roll.preflight import check_types, require_packages
from tests.config.good import GOOD, changed, load, write_rows
from tests.conftest import ROOT

ENGINE = {"actor_infer.strategy_args.strategy_name": "vllm"}


def test_a_missing_package_is_named_with_its_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(tmp_path, changed(ENGINE))
    monkeypatch.setattr(preflight, "is_installed", lambda module: module != "vllm")
    with pytest.raises(ConfigError, match=r"actor_infer\.strategy_args\.strategy_name = 'vllm': .*make install-vllm"):
        require_packages(loaded)
    monkeypatch.setattr(preflight, "is_installed", lambda module: True)
    require_packages(loaded)


def test_the_base_install_needs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "is_installed", lambda module: False)
    require_packages(load(tmp_path, changed({})))


@pytest.mark.parametrize(
    ("role", "strategy", "config", "is_refused"),
    [
        ("actor_train", "deepspeed_train", {"zero_stage": 1}, True),
        ("reference", "deepspeed_infer", {"zero_stage": 3}, True),
        ("reference", "deepspeed_infer", {"zero_stage": 2}, False),
        ("actor_train", "fsdp2_train", {}, False),
    ],
)
def test_fp16_where_deepspeed_does_not_compute_in_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    strategy: str,
    config: dict[str, int],
    is_refused: bool,
) -> None:
    changes = {
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "reference": {"device_mapping": [0], "infer_batch_size": 8},
        **{f"{name}.model_args.dtype": "fp16" for name in ("actor_infer", role)},
        **({} if role == "actor_train" else {"actor_train.model_args.dtype": "fp16"}),
        f"{role}.strategy_args": {"strategy_name": strategy, "strategy_config": config},
    }
    loaded = load(tmp_path, changed(changes))
    monkeypatch.setattr(preflight, "computes_in_fp16", lambda: False)
    if is_refused:
        with pytest.raises(ConfigError, match=rf"{role}\.model_args\.dtype = 'fp16': .*AVX512.*dtype: bf16"):
            check_types(loaded)
    else:
        check_types(loaded)
    monkeypatch.setattr(preflight, "computes_in_fp16", lambda: True)
    check_types(loaded)


@pytest.mark.parametrize("strategy", ["deepspeed_train", "deepspeed_infer", "none_of_these"])
def test_fp16_of_a_reward_without_a_model_needs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    name = next(iter(load(tmp_path, changed({})).config.rewards))
    arguments = {"strategy_name": strategy, "strategy_config": {"zero_stage": 3}}
    changes = {f"rewards.{name}.model_args.dtype": "fp16", f"rewards.{name}.strategy_args": arguments}
    monkeypatch.setattr(preflight, "computes_in_fp16", lambda: False)
    check_types(load(tmp_path, changed(changes)))


def test_looking_for_a_package() -> None:
    assert is_installed("json") and not is_installed("no_such_package.part")


def test_the_check_notes_a_package_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    monkeypatch.setattr("roll.config.checks.roles.is_installed", lambda module: module != "sglang")
    engine = {"strategy_name": "sglang", "strategy_config": {}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(changed({"actor_infer.strategy_args": engine}, GOOD)))
    notes = {notice.key: notice.text for notice in load_config(None, tmp_path / "run.yaml").warnings}
    assert "is not installed on this host" in notes["actor_infer.strategy_args.strategy_name"]


def test_a_clone_is_named_by_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in (tmp_path, ROOT):
        monkeypatch.chdir(folder)
        install_command.cache_clear()
        *words, source = shlex.split(install_command("megatron"))
        place, _, extra = source.partition("[")
        assert words == ["pip", "install", "-e"] and extra == "megatron]"
        assert (Path(place) / "setup.py").is_file()
    install_command.cache_clear()
