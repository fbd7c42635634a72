"""LoRA's keys: how targets are written, what is refused before a start, and what they do to the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.config import lora
from roll.config.installation import install_command
from roll.config.lora import is_pattern, names_of
from tests.config.good import GONE, changed, mistakes

MODEL = "actor_train.model_args"


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("q_proj", ("q_proj",)),
        ("q_proj, v_proj,", ("q_proj", "v_proj")),
        (["q_proj", "mlp.down_proj"], ("q_proj", "mlp.down_proj")),
        (None, ()),
    ],
)
def test_names(written: Any, names: tuple[str, ...]) -> None:
    assert names_of(written) == names
    assert not is_pattern(written)


def test_a_pattern_may_have_commas() -> None:
    assert is_pattern(r".*layers\.\d{1,2}\.self_attn\.(q|v)_proj")
    assert not is_pattern("all-linear")


def test_an_adapter_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    data = {f"{MODEL}.adapter_name_or_path": "/nowhere/adapter", "validation": GONE}
    data["actor_train.data_args.file_name"] = [str(tmp_path / "train.jsonl")]
    (problem,) = mistakes(tmp_path, changed(data), check_files=True)
    assert problem.key == f"{MODEL}.adapter_name_or_path" and "no such folder" in problem.rule


def test_adapted_experts_travel_merged(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    held = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(held))
    (problem,) = mistakes(
        tmp_path, changed({f"{MODEL}.adapter_name_or_path": str(adapter), "weight_sync": {"lora": "adapter"}})
    )
    assert problem.key == "weight_sync.lora"


def test_without_peft_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    (tmp_path / "train.jsonl").touch()
    files = {"actor_train.data_args.file_name": [str(tmp_path / "train.jsonl")], "validation": GONE}
    data = changed({f"{MODEL}.lora_target": "all-linear", **files})
    (problem,) = mistakes(tmp_path, data, check_files=True)
    assert problem.key == f"{MODEL}.lora_target" and install_command("peft") in problem.rule
    assert mistakes(tmp_path, data) == (), "a check on another machine does not look"


def test_an_adapter_decides_its_own_size(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    changes = {f"{MODEL}.adapter_name_or_path": str(adapter)}
    (problem,) = mistakes(tmp_path, changed(changes))
    assert "is not a peft adapter: it has no adapter_config.json" in problem.rule
    (adapter / "adapter_config.json").write_text("16")  # damaged: no object
    assert mistakes(tmp_path, changed(changes)) == ()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 16, "lora_alpha": 32}))
    agreeing = {f"{MODEL}.lora_target": "q_proj", f"{MODEL}.lora_rank": 16, f"{MODEL}.lora_alpha": 32}
    assert mistakes(tmp_path, changed(changes | agreeing)) == ()
    (problem,) = mistakes(tmp_path, changed(changes | {f"{MODEL}.lora_rank": 8}))
    assert problem.key == f"{MODEL}.lora_rank" and "which has 16" in problem.rule and problem.example == 16
    (problem,) = mistakes(tmp_path, changed(changes | {f"{MODEL}.additional_target": "lm_head"}))
    assert "decided by the adapter" in problem.rule
