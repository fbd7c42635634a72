"""Damaged configurations: whatever is wrong is said in lines, at once, never by a traceback.

Seeded mutations of the shipped recipes: bytes, YAML, nesting, types, huge numbers, aliases, interpolations, overrides.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from roll.config.loader import LoadedConfig, load_config
from roll.config.plan.render import render_plan
from roll.config.reading.errors import ConfigError
from roll.preflight import check_parts

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(file for file in EXAMPLES.glob("*/*.yaml") if file.parent.name != "config")
ROUNDS = 300
MOST_SECONDS = 2.0
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**8 + 1, 2**63, 10**400, float("nan"), float("inf"), "", "~", "x" * 5000, "1e400",
    "${x}", "${pretrain}", "${oc.env:NO_SUCH_NAME}", "${", "???", [], [[]], [None], {}, {"a": {"b": {}}}, [1, "a", {}],
    "list(range(0,99999999))", "list(range(0,0))", "list([0,0])", "list(range(0,8,0))", "+".join(["[0]"] * 400),
)  # fmt: skip
"""Replacements of a value."""
WORDS = (
    "pipeline=[a,b]", "max_steps =3", "rollout_batch_size=100000001", "rollout_batch_size=99999999999999999999", "=3",
    "max_steps=", "max_steps", "~", "~nothing", "+a.b.c=1", "a..b=1", "actor_train=3", "rewards=[1]", "rewards.math=~",
    "actor_train.device_mapping=list(range(0,100000))", "pretrain=${pretrain}", "hydra=3", "defaults=[x]", "a,b=1,2",
    "actor_train.training_args.per_device_train_batch_size=1000003", "num_gpus_per_node=1", "exp_name='", "\x00=\x00",
    "actor_train.strategy_args.strategy_name=[x]", "actor_infer.strategy_args.strategy_config=3", "track_with={a: 1}",
    "actor_train.model_args.ulysses_size=999999999", "a@b=c", "/etc=1", "validation.sets={'': {}}", "ä=ö", "  ",
)  # fmt: skip
"""Overrides that a user may mistype, and some that nobody would."""


def leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    found = [path] if path else []
    return found + [leaf for key, value in items for leaf in leaves(value, (*path, key))]


def at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def new_value(data: Any, draw: random.Random) -> bytes:
    path = draw.choice(leaves(data))
    at(data, path[:-1])[path[-1]] = draw.choice(VALUES)
    return as_yaml(data)


def moved(data: Any, draw: random.Random) -> bytes:
    """A section under another one, under its own name or another key's."""
    source, target = draw.choice(leaves(data)), draw.choice(leaves(data))
    value, place = at(data, source), at(data, target)
    if isinstance(place, dict):
        place[draw.choice((source[-1], "x", 7, "a.b", ""))] = yaml.safe_load(yaml.safe_dump(value))
    else:
        at(data, target[:-1])[target[-1]] = [value, value]
    return as_yaml(data)


def circle(data: Any, draw: random.Random) -> bytes:
    path = draw.choice(leaves(data))
    parent = at(data, path[:-1])
    parent[path[-1]] = draw.choice((data, parent))
    return yaml.safe_dump(data, sort_keys=False).encode()


def aliases(data: Any, draw: random.Random) -> bytes:
    """Every line ten times the one above."""
    lines = ["x0: &x0 [a, b]"] + [
        f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]" for n in range(1, draw.randint(2, 9))
    ]
    return as_yaml(data) + "\n".join(lines).encode()


def self_reference(data: Any, draw: random.Random) -> bytes:
    path = draw.choice([path for path in leaves(data) if all(isinstance(key, str) for key in path)])
    at(data, path[:-1])[path[-1]] = f"${{{'.'.join(path[: draw.randint(1, len(path))])}}}"
    return as_yaml(data)


def bytes_changed(data: Any, draw: random.Random) -> bytes:
    text = bytearray(as_yaml(data))
    for _ in range(draw.randint(1, 4)):
        position = draw.randrange(len(text))
        text[position : position + draw.randint(0, 2)] = draw.choice(
            (b"\t", b"\xff", b":", b": ", b"- ", b"'", b'"', b"{", b"]", b"&x ", b"*x", b"!x ", b"\n", b"%", b"\x00")
        )
    return bytes(text)


def encoded(data: Any, draw: random.Random) -> bytes:
    return as_yaml(data).decode().replace("exp", "ёxp").encode(draw.choice(("utf-16", "utf-8-sig", "koi8-r", "utf-32")))


def cut(data: Any, draw: random.Random) -> bytes:
    text = as_yaml(data)
    return text[: draw.randrange(len(text))]


def deep(data: Any, draw: random.Random) -> bytes:
    return as_yaml(data) + b"x: " + draw.choice((b"[", b"{a: ")) * draw.choice((40, 100, 5000))


def unchanged(data: Any, draw: random.Random) -> bytes:
    return as_yaml(data)


def as_yaml(data: Any) -> bytes:
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True).encode("utf-8", "surrogatepass")


MUTATIONS: tuple[Callable[[Any, random.Random], bytes], ...] = (
    new_value, new_value, new_value, moved, moved, circle, aliases, self_reference, bytes_changed, bytes_changed,
    encoded, cut, deep, unchanged,
)  # fmt: skip


def checked(file: Path, words: list[str]) -> None:
    """The work of ``roll check --skip-files``."""
    loaded: LoadedConfig[Any] = load_config(None, file, None, words, check_files=False)
    check_parts(loaded)
    render_plan(loaded, Console(file=io.StringIO()))


@pytest.mark.long
@pytest.mark.default_rows("0")
@pytest.mark.parametrize("seed", range(6))
def test_no_traceback_and_no_wait(seed: int, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for number in range(ROUNDS // 6):
        draw = random.Random(f"{seed} {number}")
        data = yaml.safe_load(draw.choice(RECIPES).read_text(encoding="utf-8"))
        data.pop("defaults", None)
        mutation = draw.choice(MUTATIONS)
        file.write_bytes(mutation(data, draw))
        words = draw.sample(WORDS, draw.choice((0, 0, 1, 2)) if mutation is not unchanged else 1)
        began = time.process_time()
        try:
            checked(file, words)
        except ConfigError as error:
            assert error.problems and all(str(problem).strip() for problem in error.problems)
        except Exception as error:
            pytest.fail(f"{mutation.__name__} {words} seed {seed} {number}: {type(error).__name__}: {error}")
        seconds = time.process_time() - began
        assert seconds < MOST_SECONDS, (mutation.__name__, words, number)


@pytest.mark.parametrize("word", WORDS)
def test_no_override_ends_in_a_traceback(word: str) -> None:
    began = time.process_time()
    try:
        checked(RECIPES[0], [word])
    except ConfigError as error:
        assert error.problems
    assert time.process_time() - began < MOST_SECONDS


@pytest.mark.parametrize(
    ("recipe", "key", "name"),
    [
        ("examples/tiny_dpo/dpo_config.yaml", "actor_train.data_args.file_name", "x" * 300),
        ("examples/tiny_distill/distill_config.yaml", "teacher_pretrain", "/" + "x" * 300),
        ("examples/tiny/evaluate_config.yaml", "pretrain", "/" + "x" * 300),
    ],
)
def test_names_too_long_for_any_file(recipe: str, key: str, name: str) -> None:
    """``Path.exists()`` raises for them, ``os.path.exists()`` does not."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, EXAMPLES.parent / recipe, None, [f"{key}={name}"])
    assert any(name[:50] in str(problem.value) for problem in caught.value.problems)
