"""Configurations of distillation, offline and on the student's own samples: what loads, and what is refused in
words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.config.loader import load_config
from roll.config.reading.errors import ConfigError
from roll.methods.opd_keys import coefficients
from roll.methods.teachers import check_vocabularies
from tests.config.good import DISTILL, GONE, TEACHER, changed, load, opd


def test_a_cache_takes_the_place_of_a_teacher(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("{}")
    cached = changed({"teacher": GONE, "teacher_cache": str(tmp_path)}, DISTILL)
    assert load(tmp_path, cached).plan.roles.keys() == {"student"}


def test_documented_top_level_opd_kl_coef_counts(tmp_path: Path) -> None:
    """In ROLL it is no field, and ignored without a word."""
    two = {"a": {**TEACHER, "opd_kl_coef": 0.2}, "b": TEACHER}
    config = load(tmp_path, opd(opd_kl_coef=0.7, teacher=two)).config
    assert coefficients(config) == {"a": 0.2, "b": 0.7}


def vocabulary(folder: Path, tokens: dict[str, int], added: dict[str, int]) -> str:
    folder.mkdir()
    entries = [{"id": number, "content": token} for token, number in added.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": entries}))
    return str(folder)


def test_vocabularies_are_compared_added_tokens_included(tmp_path: Path) -> None:
    """ROLL compares none, and cuts the teacher's at ``vocab_size``, before the token that ends a turn."""
    student = vocabulary(tmp_path / "student", {"a": 0, "b": 1}, {"<end>": 2})
    same = vocabulary(tmp_path / "same", {"b": 1, "a": 0}, {"<end>": 2})
    other = vocabulary(tmp_path / "other", {"a": 0, "b": 1}, {"<stop>": 2})
    check_vocabularies(student, same, "teacher_pretrain", tmp_path)
    with pytest.raises(ConfigError, match=r"1 token id differs, the first is 2 \(student '<end>', teacher '<stop>'\)"):
        check_vocabularies(student, other, "teacher_pretrain", tmp_path)


@pytest.mark.parametrize("is_taught", [False, True])
def test_an_evaluation_asks_no_teacher(is_taught: bool) -> None:
    keys = ["adv_estimator=reinforce", "+is_pure_opd=true", "+teacher.model_args.model_name_or_path=my/teacher"]
    loaded = load_config(None, "tiny/evaluate_config", None, keys if is_taught else [], check_files=False)
    loaded.pipeline.check_services(loaded)
    loaded.pipeline.check_parts(loaded)
