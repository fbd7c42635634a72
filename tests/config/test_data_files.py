"""Which names ``file_name`` takes, and what is said against others."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config.data import HubName, hub_name, matching_files, name_problem


def test_hub_names() -> None:
    assert hub_name("hub:openai/gsm8k") == HubName("openai/gsm8k", None, "train")
    assert hub_name("hub:openai/gsm8k/main:test") == HubName("openai/gsm8k", "main", "test")
    assert hub_name("hub:a/b:train[:1000]") == HubName("a/b", None, "train[:1000]")
    assert hub_name("hub:a/b/c:train[-10%:]") == HubName("a/b", "c", "train[-10%:]")
    assert hub_name("data/hub.jsonl") is None
    with pytest.raises(ValueError, match="or :train"):
        hub_name("hub:a/b:train[5]")
    with pytest.raises(ValueError, match="is written hub:OWNER/NAME"):
        hub_name("hub:gsm8k")


def test_files_folders_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("b.jsonl", "a.csv.gz", "notes.md"):
        (tmp_path / "data" / name).write_text("")
    (tmp_path / "empty").mkdir()
    assert [path.name for path in matching_files(Path("data"))] == ["a.csv.gz", "b.jsonl"]
    assert [path.name for path in matching_files(Path("data/*.jsonl"))] == ["b.jsonl"]
    for good in ("data", "data/", "data/*.jsonl", "data/a.csv.gz", "hub:openai/gsm8k"):
        assert name_problem(good, check_files=True) is None, good
    for bad, rule in (
        ("data/notes.md", "must be a file of one of the kinds .json"),
        ("data/c.jsonl", "no such file"),
        ("other/*.jsonl", "no such file"),
        ("empty", "the folder holds no data file"),
        ("openai/gsm8k", "a data set of the hub is written hub:openai/gsm8k"),
    ):
        assert rule in str(name_problem(bad, check_files=True)), bad
    assert name_problem("other/c.jsonl", check_files=False) is None
