"""The registry of pipelines is the only list of them, and a plan's sections are what workers get."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from roll import __version__, cli
from roll.config.loader import load_config
from roll.config.pipelines import NAMES, PIPELINES, definitions
from roll.config.plan import render
from roll.config.plan.render import effective_yaml
from roll.config.reading.schema import known_keys, nested_section, type_hints
from roll.config.roles import WorkerConfig
from tests.config.good import changed, load

PACKAGE = Path(__file__).parents[2] / "roll"
ASKING = (
    *sorted((PACKAGE / "config").glob("*.py")),
    *sorted((PACKAGE / "tracking").glob("*.py")),
    *(PACKAGE / name for name in ("preflight.py", "cli.py")),
    *(PACKAGE / "pipelines" / name for name in ("run_context.py", "run_lifetime.py", "inspect_data.py", "serve.py")),
)
"""Modules that ask a pipeline's definition instead of knowing pipelines."""


def test_sft_stands_in_its_folder_and_in_the_registry() -> None:
    found = []
    for module in ASKING:
        if module.name == "losses.py":
            continue  # one of its losses is called so
        for number, line in enumerate(module.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(r"sft", line.replace("roll.datasets.sft", "").replace("SftDataset", ""), re.IGNORECASE):
                found.append(f"{module.name}:{number}: {line.strip()}")
    found = [line for line in found if "SftRow" not in line]  # rows of demonstrations, which any pipeline may read
    entry = [line for line in found if line.startswith("pipelines.py:")]
    documented = [line for line in found if line.startswith("run.py:") and "``sft``" in line]
    assert len(entry) == 1 and len(documented) == 1
    assert set(found) == {*entry, *documented}


def test_nothing_asks_for_a_class_of_pipeline() -> None:
    kinds = re.compile(r"isinstance\([^)]*(RLVR|SFT)|\b(RLVRPlan|RLVR_|roll\.pipelines\.(rlvr|sft))")
    allowed = {"pipelines.py"}
    assert not [one.name for one in ASKING if one.name not in allowed and kinds.search(one.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("pipeline", definitions(), ids=lambda one: one.name)
def test_a_definition_agrees_with_its_configuration(pipeline: object) -> None:
    hints = type_hints(pipeline.config_class)  # type: ignore[attr-defined]
    for role in pipeline.roles:  # type: ignore[attr-defined]
        section = nested_section(hints[role.name])
        assert section is not None and issubclass(section, WorkerConfig)
        item = next(one for one in fields(pipeline.config_class) if one.name == role.name)  # type: ignore[attr-defined]
        assert (item.default is None) == role.optional


def test_registry() -> None:
    names = ("agentic", "agentic_rollout", "distill", "dpo", "evaluate", "opd", "rlvr", "rm", "sft")
    assert names == NAMES
    assert [one.name for one in definitions()] == list(NAMES)
    for entry, pipeline in ((entry, one) for entry in PIPELINES for one in definitions() if one.name == entry.name):
        assert set(entry.start_keys) <= {*known_keys(pipeline.config_class), *pipeline.section_aliases}


def test_sections_of_the_plan_are_finished(tmp_path: Path) -> None:
    judged = {
        "worker_cls": "llm_judge",
        "judge_model_type": "inference",
        "tag_included": ["judged"],
        "device_mapping": [4, 5],
        "strategy_args": {"strategy_name": "hf_infer", "strategy_config": {}},
    }
    loaded = load(tmp_path, changed({"rewards.own": judged, "validation.data_args.file_name": "val.jsonl"}))
    sections = {name: role.section for name, role in loaded.plan.roles.items()}
    assert {name: section.name for name, section in sections.items() if "." not in name} == {
        name: name for name in ("actor_train", "actor_infer")
    }
    assert sections["actor_train"].model_args.model_name_or_path == "owner/model"
    assert sections["actor_train"].sequence_packing_args.max_packed_sequence_length_train == 256
    assert sections["actor_infer"].strategy_args.strategy_config == {"max_model_len": 256, "max_num_seqs": 64}
    judge = sections["judge.own"]
    assert judge.strategy_args.strategy_config == {"max_model_len": 2 * 256 + 2048, "load_format": "auto"}
    assert (judge.device_mapping, judge.world_size) == ([4, 5], 2)
    rewards = {name: (one.name, one.world_size, one.max_concurrency, one.worker_cls) for name, one in sections.items()}
    assert rewards["rewards.own"] == ("own", 2, 16, "llm_judge")
    assert rewards["rewards.math"] == ("math", 1, 1, "math_rule")
    assert loaded.plan.roles["judge.own"].key == "rewards.own"
    assert loaded.config.actor_infer.strategy_args.strategy_config == {"max_num_seqs": 64}


def test_resolved_says_what_the_plan_fills_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    section = {"worker_cls": "math_rule", "judge_api_key": "hidden-from-all"}
    Path("good.yaml").write_text(yaml.safe_dump(changed({"rewards.math": section | {"tag_included": ["math"]}})))
    assert cli.main(["check", "good.yaml", "--skip-files", "--resolved"]) == 0
    text = capsys.readouterr().out
    resolved, _, filled_in = text.partition("# Filled in by the plan, by role:")
    assert yaml.safe_load(text) == yaml.safe_load(resolved)
    assert "# actor_infer.strategy_args.strategy_config.max_model_len: 256\n" in filled_in
    assert "# actor_train.model_args.model_name_or_path: owner/model\n" in filled_in
    assert "# rewards.math.max_concurrency: 1\n" in filled_in and "hidden" not in text


def test_a_default_of_several_lines_is_one_line_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a pipeline of one's own may have; a resumed run and the report read the text back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(render, "defaults_in_force", lambda loaded: {"separator": "\n"})
    Path("good.yaml").write_text(yaml.safe_dump(changed({})))
    loaded = load_config(None, "good.yaml", check_files=False)
    text = effective_yaml(loaded)
    assert '# separator: "\\n"\n' in text and yaml.safe_load(text) == loaded.resolved


def test_resolved_says_which_defaults_are_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that the run reads and nobody wrote. Loaded again, the text is the same configuration."""
    monkeypatch.chdir(tmp_path)
    changes = {"critic_warmup": 3, "actor_train.training_args.weight_decay": 0.1, "loss": {"name": "vespo", "k_pos": 2}}
    Path("good.yaml").write_text(yaml.safe_dump(changed(changes)))
    assert cli.main(["check", "good.yaml", "--skip-files", "--resolved"]) == 0
    text = capsys.readouterr().out
    *_, defaults = text.partition(f"# Defaults of roll {__version__}:\n")
    keys = {line.removeprefix("# ").partition(": ")[0] for line in defaults.splitlines()}
    assert {"estimator.gamma", "actor_train.training_args.adam_beta1", "loss.k_neg", "rewards.math.timeout"} <= keys
    written = {"rollout_batch_size", "actor_train.training_args.weight_decay", "loss.k_pos", "loss"}
    unread = {
        "dual_clip_loss",
        "actor_infer.training_args.weight_decay",
        "reference.infer_batch_size.x",
        "critic.device_mapping",
    }
    assert not keys & (written | unread)
    Path("again.yaml").write_text(text)
    assert cli.main(["check", "again.yaml", "--skip-files", "--resolved"]) == 0
    assert capsys.readouterr().out == text
