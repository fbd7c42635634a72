"""The page of the tables is the generated one, and the tables name keys that exist."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll import cli
from roll.agents.agent_options import VerlOptions
from roll.config.loader import load_config
from roll.config.reading.legacy_keys import dead_keys
from roll.config.reading.schema import known_keys
from roll.config.reference import tables
from roll.translation.engine import DIALECTS
from roll.translation.rules import read_table
from tests.translation.conftest import ROOT
from tests.translation.source_formulas import Responses, mean
from tests.translation.test_algorithms import RESPONSES, OurSide, assert_equal

TABLE = """
$SECTION = their.section
@ROLE = theirs.actor actor_train actor; critic {critic,reference} critic

# First
$SECTION.{a,b} other.* | c d.* | whole?7 > size | 3 | [5] a note
# Second
@ROLE.lr | @ROLE.rate | number = lr.@ROLE
more.keys
    and.others | none: nothing needs it | only [1, null]: one device
"""
RULES = [(name, rule) for name, dialect in DIALECTS.items() for section in dialect.sections for rule in section.rules]


def test_page_is_up_to_date() -> None:
    """Write it again with ``python docs/site/translation.py``."""
    spec = importlib.util.spec_from_file_location("translation_page", ROOT / "docs/site/translation.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (ROOT / "docs/translation.md").read_text(encoding="utf-8")
    assert text == module.page(text)


GUIDE = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
GUIDES = re.findall(r"```bash\n((?:(?!```).)*)```\n\n```yaml\n(.*?)```", GUIDE, re.DOTALL)


def test_every_project_has_a_guide() -> None:
    assert [re.search(r"verl|skyrl|trl|openrlhf", command)[0] for command, _ in GUIDES] == [  # type: ignore[index]
        "verl",
        "skyrl",
        "trl",
        "openrlhf",
    ]


@pytest.mark.parametrize(("command", "written"), GUIDES[:2])
def test_guides_are_translations(
    command: str, written: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(command))
    assert cli.main(["translate", "--yaml", "--train-rows", "7473"]) == 0
    assert capsys.readouterr().out == written


def trl_loss(batch: Responses, high: float, beta: float, cap: float) -> Tensor:
    """TRL 1's defaults: ``dapo``, groups' spread, sequences whose weight exceeds ``cap`` left out, k3 unbounded."""
    ratio, advantages = (batch.log_probs - batch.old).exp(), compared(batch)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - high, 1 + high) * advantages)
    weight = ((batch.old - batch.rollout) * batch.mask).sum(-1, keepdim=True).exp()
    distance = batch.reference - batch.log_probs
    return mean(loss * weight * (weight <= cap) + beta * (distance.exp() - distance - 1), batch.mask)


def openrlhf_loss(batch: Responses, high: float, beta: float) -> Tensor:
    """``group_norm`` with the KL in the loss, each estimate within 10 of 0."""
    ratio, advantages = (batch.log_probs - batch.old).exp(), compared(batch).clamp(-10, 10)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - high, 1 + high) * advantages)
    distance = batch.log_probs - batch.reference
    return mean(loss + beta * ((-distance).exp() - 1 + distance).clamp(-10, 10), batch.mask)


def compared(batch: Responses) -> Tensor:
    """Scores less the mean of their group, divided by its spread: (B, 1)."""
    result = torch.zeros_like(batch.scores)
    for group in batch.group.unique().tolist():
        scores = batch.scores[batch.group == group]
        result[batch.group == group] = (scores - scores.mean()) / (scores.std() + 1e-6)
    return result[:, None]


@pytest.mark.parametrize(
    ("place", "theirs"),
    [(2, lambda batch: trl_loss(batch, 0.2, 0.001, 3.0)), (3, lambda batch: openrlhf_loss(batch, 0.2, 0.001))],
    ids=["trl", "openrlhf"],
)
def test_guides_without_a_translation_have_the_same_loss_and_gradient(
    place: int, theirs: Callable[[Responses], Tensor], tmp_path: Path
) -> None:
    file = tmp_path / "guide.yaml"
    file.write_text(GUIDES[place][1], encoding="utf-8")
    batch = RESPONSES
    loaded = load_config(None, file, check_files=False)
    if not loaded.plan.needs_old_log_probs:  # a batch has one update: the policy before it is the current one
        batch = replace(RESPONSES, old=RESPONSES.log_probs.detach())
    assert_equal(OurSide(loaded, batch).actor_loss(), theirs(batch), RESPONSES.log_probs)


@pytest.mark.parametrize("name", DIALECTS)
def test_no_key_has_two_rules(name: str) -> None:
    spellings = [spelling for dialect, rule in RULES if dialect == name for spelling in rule.spellings]
    assert sorted(set(spellings)) == sorted(spellings)


@pytest.mark.parametrize("name", DIALECTS)
def test_defaults_have_rules(name: str) -> None:
    dialect = DIALECTS[name]
    assert [key for key in dialect.defaults if key not in dialect.rules] == []


@pytest.mark.parametrize("dialect", DIALECTS)
def test_our_keys_exist_and_what_has_none_says_why(dialect: str) -> None:
    known = {key for _, cls, _ in tables() for key in (*known_keys(cls), *dead_keys(cls))}
    known |= {field.name for field in dataclasses.fields(VerlOptions)}
    known |= {"reward_kwargs", "<name>", "gsm8k_rule", "project"}
    rules = [rule for name, rule in RULES if name == dialect]
    assert rules
    assert [(rule.spellings, key) for rule in rules for key in rule.ours if unknown_parts(key, known)] == []
    assert [rule.spellings for rule in rules if not (rule.ours or rule.note)] == []


def unknown_parts(key: str, known: set[str]) -> list[str]:
    parts = [part for part in key.partition(".engine_args.")[0].split(".") if part != "*"]
    return [part for part in parts if part not in known]


def test_unknown_parts_are_seen() -> None:
    assert unknown_parts("actor_infer.engine_args.anything.*", {"actor_infer"}) == []
    assert unknown_parts("actor_infer.lerning_rate", {"actor_infer", "learning_rate"}) == ["lerning_rate"]


def test_a_row_is_a_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.table").write_text(TABLE, encoding="utf-8")
    monkeypatch.setattr("roll.config.words.TABLES", tmp_path)
    first, second = read_table("toy", {})
    assert (first.title, second.title) == ("First", "Second")
    (rule,) = first.rules
    assert rule.spellings == ("their.section.a", "their.section.b", "other.*") and rule.ours == ("c", "d.*")
    assert (rule.value(None), rule.value(2), rule.fact, rule.computed) == (7, 2, "size", True)
    assert (rule.default, rule.note_for("5"), rule.note_for("6")) == ("3", "a note", "")
    actor, critic, last = second.rules
    assert (actor.spellings, actor.ours, actor.fact) == (("theirs.actor.lr",), ("actor_train.rate",), "lr.actor")
    assert (critic.ours, critic.fact, critic.computed) == (("critic.rate", "reference.rate"), "lr.critic", False)
    assert last.spellings == ("more.keys", "and.others") and (last.ours, last.note) == ((), "nothing needs it")
    assert last.value(None) is None
    with pytest.raises(ValueError, match="one device"):
        last.value(2)


def test_the_longest_pattern_counts() -> None:
    found = DIALECTS["verl"].find("actor_rollout_ref.model.override_config.model_config.rope_theta")
    assert found is not None and found[1] == "rope_theta"
    found = DIALECTS["verl"].find("actor_rollout_ref.model.override_config.rope_scaling.type")
    assert found is not None and found[1] == "rope_scaling.type"


@pytest.mark.parametrize(
    ("dialect", "key", "value", "rule"),
    [
        ("verl", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 0, "must be 1 at least"),
        ("verl", "actor_rollout_ref.actor.optim.betas", False, "must be two numbers"),
        ("skyrl", "generator.inference_engine_tensor_parallel_size", 0, "must be 1 at least"),
    ],
)
def test_numbers_that_nothing_can_be_divided_by_are_refused(dialect: str, key: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        DIALECTS[dialect].rules[key].value(value)
