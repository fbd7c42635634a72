"""The page of the tables is the generated one, and the tables name keys that exist."""

from __future__ import annotations

import pytest

from roll.config.reading.schema import known_keys
from roll.config.reference import PAGES
from roll.translation.engine import DIALECTS
from roll.translation.page import page
from tests.translation.conftest import ROOT

RULES = [(name, rule) for name, dialect in DIALECTS.items() for section in dialect.sections for rule in section.rules]


def test_page_is_up_to_date() -> None:
    """Write it again with ``python -m roll.translation.page docs/translation.md``."""
    text = (ROOT / "docs/translation.md").read_text(encoding="utf-8")
    assert text == page(text)


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
    known = {key for _, cls, _ in PAGES for key in known_keys(cls)}
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
