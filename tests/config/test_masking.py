"""Values that are hidden in configurations and texts, and those that are not."""

from __future__ import annotations

import os
import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from roll.config.pipelines import definitions
from roll.config.reading.errors import Problem
from roll.config.reading.masking import MASK, is_secret, know_keys, masked, masked_text, register_secrets
from roll.config.reading.schema import declared_secrets
from roll.config.reading.secrecy import looks_random, tells_secret
from tests.config.good import read_table

SECRET = "s3cr3t-value"
CASES = read_table("secrets")


@pytest.mark.parametrize("name", CASES["names"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)
    assert masked({"outer": [{name: SECRET}]}) == {"outer": [{name: MASK}]}
    assert SECRET not in str(Problem(f"rewards.{name}", SECRET, "must be something else"))


@pytest.mark.parametrize("name", CASES["other_names"])
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(("name", "value", "hidden"), CASES["open"])
def test_the_value_decides_where_a_name_leaves_it_open(name: str, value: object, hidden: bool) -> None:
    assert masked({"data": {name: value}}) == {"data": {name: MASK if hidden else value}}


@pytest.mark.parametrize("text", CASES["texts"])
def test_secrets_in_texts(text: str) -> None:
    hidden = masked_text(text)
    assert MASK in hidden
    assert SECRET not in hidden
    assert "abcdefghijklmnop" not in hidden
    assert masked_text(hidden) == hidden
    assert masked({"note": [text]}) == {"note": [hidden]}, "under whatever name"


@pytest.mark.parametrize("text", CASES["other_texts"])
def test_other_texts_stay(text: str) -> None:
    assert masked_text(text) == text


def test_values_that_were_met_under_a_secret_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_PAT", "from-the-environment")
    register_secrets({"rewards": {"judge": {"judge_api_key": "given-in-1-file"}}, "sort_key": "solution"})
    text = "the service said: from-the-environment and given-in-1-file are wrong for the solution"
    assert masked_text(text) == f"the service said: {MASK} and {MASK} are wrong for the solution"


def test_the_working_directory_is_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/home/someone/project")
    monkeypatch.setenv("DB_PWD", "horse-battery-staple")
    text = "no such file: /home/someone/project/data.jsonl"
    assert masked_text(text) == text
    assert masked_text("it is horse-battery-staple") == f"it is {MASK}"


@pytest.fixture
def schema() -> None:
    """The keys that every load makes known."""
    for pipeline in definitions():
        know_keys(declared_secrets(pipeline.config_class))


PLAIN = "correct-horse-battery"


@pytest.mark.usefixtures("schema")
@pytest.mark.parametrize(("tree", "secret"), CASES["trees"])
def test_secrets_in_a_configuration(tree: dict[str, Any], secret: str) -> None:
    text = yaml.safe_dump(masked(tree), width=1000)
    assert MASK in text and secret not in text
    assert masked(masked(tree)) == masked(tree)


@pytest.mark.usefixtures("schema")
@pytest.mark.parametrize("tree", CASES["other_trees"])
def test_other_things_in_a_configuration(tree: dict[str, Any]) -> None:
    assert masked(tree) == tree


CREDENTIALS = {"judge_api_key", "IFLOW_apiKey", "IFLOW_searchApiKey", "RAY_AUTH_TOKEN", "api_key", "secrets"}
"""Keys of the published files that hold credentials, or a place for one."""
ROOTS = [Path(__file__).parents[2] / "examples", Path(os.environ.get("PUBLIC_CONFIGS_DIR", "/nowhere"))]


def hidden_keys(before: Any, after: Any, key: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            yield from hidden_keys(value, after[name], name)
    elif isinstance(before, list) and isinstance(after, list):
        for value, shown in zip(before, after, strict=True):
            yield from hidden_keys(value, shown, key)
    elif before != after:
        yield key


@cache
def trees_of(root: Path) -> list[tuple[Path, Any]]:
    """Of all YAML files below ``root``, read by libyaml where it is there: it takes a tenth of the time."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    files = sorted(root.rglob("*.yaml"))
    return [(file, tree) for file in files for tree in yaml.load_all(file.read_text("utf-8"), Loader=loader)]


@pytest.mark.usefixtures("schema")
@pytest.mark.parametrize("root", ROOTS, ids=["examples", "published"])
def test_values_of_whole_configurations_stay(root: Path) -> None:
    if not trees_of(root):
        pytest.skip("PUBLIC_CONFIGS_DIR does not name a folder of published configurations")
    for file, tree in trees_of(root):
        assert set(hidden_keys(tree, masked(tree))) <= CREDENTIALS, file


def test_a_field_with_the_name_of_a_secret_says_whether_it_is_one() -> None:
    """A column is known by its key, so a credential of the schema has to be declared."""
    for pipeline in definitions():
        keys = declared_secrets(pipeline.config_class)
        columns = {name for name in keys if name.endswith("_key")} - {"judge_api_key"}
        named = {name for name in keys if tells_secret(name, PLAIN)}
        assert {name for name, is_declared in keys.items() if is_declared} == named - columns


ALPHABETS = {
    "lower-case letters": string.ascii_lowercase,
    "lower-case letters and digits": string.ascii_lowercase + string.digits,
    "hexadecimal": string.digits + "abcdef",
    "base32": string.ascii_uppercase + "234567",
    "base32 in lower case": string.ascii_lowercase + "234567",
    "base64url": string.ascii_letters + string.digits + "-_",
}


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_random_texts_of_any_alphabet_are_recognised(alphabet: str) -> None:
    random = Random(0)
    found = [looks_random("".join(random.choices(ALPHABETS[alphabet], k=random.randint(20, 64)))) for _ in range(2000)]
    assert sum(found) >= 0.99 * len(found)
