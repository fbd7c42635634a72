from __future__ import annotations

import math
import subprocess
import sys

import pytest

from roll.algorithms.metrics import Correlation
from roll.algorithms.registry import Registry


def test_names_aliases_and_dotted_paths() -> None:
    registry: Registry = Registry("thing")
    registry.add(math.sin, "sine", ("sin",))
    assert registry.names == ("sine",)
    assert registry.resolve("sin") is math.sin
    assert registry.resolve("math.cos") is math.cos
    assert registry.resolve("os.path:join")("a", "b") == "a/b"
    registry.add(math.sin, "sine")
    with pytest.raises(ValueError, match="registered already"):
        registry.add(math.cos, "sine")


@pytest.mark.parametrize(
    ("name", "message"),
    [("sinn", "nearest known: 'sine'"), ("no_such.module", "no_such"), ("math.no", "math"), ("math.pi", "float")],
)
def test_mistakes_are_named(name: str, message: str) -> None:
    registry: Registry = Registry("thing")
    registry.add(math.sin, "sine")
    with pytest.raises(ValueError, match=message):
        registry.resolve(name)


def test_options_do_not_import_torch() -> None:
    code = "import sys, roll.algorithms.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_correlation_of_constants_and_of_a_single_value_is_one() -> None:
    assert Correlation(1, 1, 1, 1, 1, 1).value() == 1.0
    assert Correlation(3, 3, 6, 3, 14, 6).value() == 1.0
