"""Words that users of other projects type: each is answered with the key that has the effect, in the place that reads
it, and a word that nobody knows with no guess."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.config.checks.unknown_keys import Guide
from roll.config.pipelines import NAMES, definition_of
from roll.config.reading.errors import ConfigError, Problem
from roll.config.reference import explain
from roll.config.words import OPTIONS, vocabulary
from tests.config.good import GONE, GOOD, GOOD_SFT, changed, load, mistakes, read_table
from tests.config.test_mistakes import MISTAKES, Row

TABLE = read_table("words")
WORDS: dict[str, tuple[Any, str]] = TABLE["words"]
"""A word at the top of a file: a value of ours, and the key that is meant."""
UNKNOWN = ("foo", "gpu_type", "my_setting", "total_whatever", "reward_shaping", "xyz", "lo", "grp", "ro")
VAGUE = ("path", "type", "enable", "mode")
"""Names that mean something in their section only."""
NAMED = re.compile(r"(?:it belongs at|here it is called|the nearest known one is) ([\w.<>]+)")


@pytest.mark.parametrize(
    ("word", "value", "key"), [(word, *rest) for word, rest in (WORDS | TABLE["misplaced"]).items()]
)
def test_the_key_that_is_named_has_the_effect(tmp_path: Path, word: str, value: Any, key: str) -> None:
    """The run is another one with the value there, and nothing says that it is unread."""
    base = changed(TABLE["settings"].get(word, {}))
    problem = next(one for one in mistakes(tmp_path, changed({word: value}, base)) if one.key == word)
    assert NAMED.findall(problem.rule) == [key] and "no effect" not in problem.rule
    before = plan_of(tmp_path, base)
    loaded = load(tmp_path, changed({key.replace("<name>", "math"): value}, base))
    assert (loaded.config, loaded.plan) != before
    assert [notice for notice in loaded.warnings if "no effect" in notice.text and key in notice.key] == []


def plan_of(folder: Path, data: Any) -> tuple[Any, Any] | None:
    try:
        loaded = load(folder, data)
    except ConfigError:
        return None
    return loaded.config, loaded.plan


def in_full(problem: Problem, name: str) -> str:
    """The key that a mistake names, with the section that it shares with the one that is wrong."""
    section = problem.key.rpartition(".")[0]
    return name if "." in name or not section else f"{section}.{name}"


# Damaged policies and supervised runs: no row of another group has a remedy that these lack.
DAMAGES = [row for row in MISTAKES if row.base in (GOOD, GOOD_SFT) and not row.model]


@pytest.mark.parametrize("row", DAMAGES, ids=lambda row: row.key)
def test_remedies_are_remedies(tmp_path: Path, row: Row) -> None:
    """Followed to the letter, a remedy ends its mistake; a key that it names is known and read."""
    damaged, key = changed(row.changes, row.base), row.key
    problem = mistakes(tmp_path, damaged)[0]
    names = [name.replace("<name>", "math") for name in NAMED.findall(problem.rule)]
    if names and problem.rule.startswith("unknown key"):
        path = in_full(problem, names[0])
        mended = changed({key: GONE, path: problem.value}, damaged)
        assert not [one for one in mistakes(tmp_path, mended) if "unknown" in one.rule]
        notices = load(tmp_path, mended).warnings if not mistakes(tmp_path, mended) else ()
        assert not [notice for notice in notices if "no effect" in notice.text and path in notice.key]
    elif problem.example is not None and problem.value != key.rpartition(".")[2]:
        example = yaml.safe_load(str(problem.example).partition(", or ")[0])
        whole = isinstance(problem.example, str) and ":" in problem.example and not problem.example.startswith("{")
        mended = changed(example if whole else {key: example}, damaged)
        assert key not in [one.key for one in mistakes(tmp_path, mended)]


@pytest.mark.parametrize("word", (*UNKNOWN, *VAGUE))
def test_nothing_is_guessed(tmp_path: Path, word: str) -> None:
    (problem,) = mistakes(tmp_path, changed({word: 1}))
    assert problem.rule.startswith("unknown key") and not NAMED.search(problem.rule) and problem.example is None


@pytest.mark.parametrize(("pipeline", "word", "key"), TABLE["pipelines"])
def test_a_word_means_what_the_pipeline_has(pipeline: str, word: str, key: str | None) -> None:
    definition = definition_of(pipeline)
    offers = Guide(definition.config_class(), definition).called(word)
    assert (min(offers, key=lambda offer: offer.rank(word)).place.path if offers else None) == key


@pytest.mark.parametrize("name", NAMES)
def test_every_pipeline_places_every_key(name: str) -> None:
    """A pipeline on top of another may lack some of its roles; what is offered is one of its keys."""
    definition = definition_of(name)
    guide = Guide(definition.config_class(), definition)
    found = {place.schema_path for key in guide.paths for place in guide.places(key)}
    offers = [offer for word in vocabulary() for offer in guide.called(word)]
    assert len(found) > 100 and len(offers) > 100
    assert not [
        path for path in found if path not in guide.paths.get(path.rpartition(".")[2], ()) and OPTIONS not in path
    ]


def test_a_word_as_a_value_leads_to_its_keys(tmp_path: Path) -> None:
    (problem,) = mistakes(tmp_path, changed({"estimator": "dapo"}))
    assert "roll explain dapo names the keys for it" in problem.rule and problem.example == "grpo"


def test_what_goes_together_is_said(tmp_path: Path) -> None:
    (problem,) = mistakes(tmp_path, changed({"beta": 0.1}))
    assert "here it is called kl_loss_coef, which has no effect without use_kl_loss" in problem.rule
    (problem,) = mistakes(tmp_path, changed({"lora_r": 8}))
    assert problem.rule.endswith("lora_rank, together with actor_train.model_args.lora_target")


def test_sections_of_other_projects_lead_to_the_translation(tmp_path: Path) -> None:
    (problem,) = mistakes(tmp_path, changed({"data": {"train_batch_size": 8, "max_prompt_length": 8}}))
    assert "a section of verl and SkyRL: roll translate" in problem.rule
    (problem,) = mistakes(tmp_path, changed({"actor_rollout_ref.rollout.n": 8}))
    assert "here it is called num_return_sequences_in_group" in problem.rule


def test_every_spoken_word_is_explained_by_keys_that_exist() -> None:
    """The words of the other tables are translated, and tests/translation/test_page.py looks for their keys."""
    spoken = [word for word, meanings in vocabulary().items() if any(one.ours and not one.project for one in meanings)]
    assert len(spoken) > 150 and all(explain(word) for word in spoken)


@pytest.mark.parametrize(("word", "key"), [(word, key) for word, (_, key) in WORDS.items()])
def test_explain_answers_the_same(word: str, key: str) -> None:
    name, found = key.rpartition(".")[2], explain(word)
    assert any(name == row.key or f"`{name}`" in row.text for row in found)


@pytest.mark.parametrize(("value", "key"), TABLE["values"])
def test_values_are_explained_by_their_keys(value: str, key: str) -> None:
    assert key in [found.key for found in explain(value)]


@pytest.mark.parametrize("word", UNKNOWN)
def test_explain_guesses_nothing(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explain(word)
    assert "nearest" not in caught.value.problems[0].rule
