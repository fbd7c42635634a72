"""What texts become: of every row of a table keys, notes and plan; which texts are the same, and what is refused.

``cases.yaml`` has them. ``$NAME`` in a text is the text of that name; ``@O``, ``@N`` and ``@T`` in a key are
``strategy_args.strategy_config``, ``strategy_args.strategy_name`` and ``training_args``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.config.reading.errors import ConfigError
from roll.translation.engine import Translation
from tests.config.good import GONE
from tests.support.meanings import at, meaning, plain
from tests.translation.conftest import Translate, run_of


class Cases(yaml.SafeLoader):
    pass


Cases.add_constructor("!gone", lambda loader, node: GONE)
CASES = yaml.load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"), Cases)
SHORT = {"@O": "strategy_args.strategy_config", "@N": "strategy_args.strategy_name", "@T": "training_args"}


def text_of(written: str) -> str:
    """``written`` with its names replaced, and theirs; ``$$X`` stays a variable of the shell."""
    while (whole := re.sub(r"(?<!\$)\$([A-Z_0-9]+)", lambda name: CASES["names"][name[1]], written)) != written:
        written = whole
    return written.replace("$$", "$")


def keys_of(written: dict[str, Any]) -> dict[str, Any]:
    return {re.sub("@[ONT]", lambda short: SHORT[short[0]], key): value for key, value in written.items()}


def tells(translation: Translation, words: str, theirs: str = "") -> bool:
    """A note, of one of their keys if it is named, holds these words."""
    return any(words in note.text and theirs in note.theirs for note in translation.notes)


def check(translation: Translation) -> None:
    """It can be run, unless it names no data; a supervised run has no key of another pipeline."""
    if translation.whole and not any(key.endswith("data_args.file_name") for key in translation.keys):
        return
    run_of(translation)
    if translation.keys.get("pipeline") == "sft":
        assert [key for key in translation.keys if key.startswith(("actor_", "rewards", "reference"))] == []
        assert not any("actor_train" in word for note in translation.notes for word in note.ours)


@pytest.mark.parametrize("row", CASES["keys"], ids=lambda row: row[0][:60])
def test_keys_that_a_text_becomes(row: list[Any], translated: Translate) -> None:
    text, expected, notes, more = (*row, {}, {})[:4]
    translation = translated(text_of(text), train_rows=more.get("train_rows"))
    wanted = keys_of(expected)
    assert {key: translation.keys.get(key, GONE) for key in wanted} == wanted
    assert [theirs for theirs, words in notes.items() if not tells(translation, words, theirs)] == []
    assert [theirs for theirs, words in more.get("silent", {}).items() if tells(translation, words, theirs)] == []
    check(translation)
    for path, value in more.get("loaded", {}).items():
        assert plain(at(meaning(run_of(translation)), path)) == value, path


@pytest.mark.parametrize("row", CASES["more"], ids=lambda row: row[0][:60])
def test_ways_to_compute_and_to_log_the_same(row: list[Any], translated: Translate) -> None:
    """The keys of the text's first name, and no others than those of the row."""
    text, more = row
    translation = translated(text_of(text))
    assert translation.keys == {**translated(text_of(text.split()[0])).keys, **keys_of(more)}
    check(translation)


@pytest.mark.parametrize("row", CASES["only"], ids=lambda row: row[0][:60])
def test_a_change_brings_along_what_belongs_to_it(row: list[Any], translated: Translate) -> None:
    """A loss has the options and defaults of its project; the rest of the recipe stays."""
    text, keys = row
    assert translated(text_of(text)).keys == keys_of(keys)


@pytest.mark.parametrize("row", CASES["same"], ids=lambda row: row[0][:60])
def test_two_ways_to_say_the_same(row: list[str], translated: Translate) -> None:
    one, other = map(text_of, row)
    assert translated(one).keys.items() == translated(other).keys.items()


@pytest.mark.parametrize("row", CASES["refused"], ids=lambda row: row[0][:60])
def test_what_cannot_be_kept_is_refused(row: list[Any], translated: Translate) -> None:
    text, words = row
    with pytest.raises(ConfigError) as caught:
        translated(text_of(text))
    assert [one for one in ([words] if isinstance(words, str) else words) if one not in str(caught.value)] == []
    assert "must be key=value" not in str(caught.value)
