"""The index of algorithms, from the registries: ``python docs/site/algorithms.py`` writes the page and its curves.

A row is a name that the YAML may say: the page that defines it, the function's file, and what the tiny example learned
with it (``benchmarks/reproduce.py algorithms``): accuracy before and after, and the course of the score for those runs
whose course was recorded.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/algorithm-index.md"
CURVES = ROOT / "docs/images/curves"
HEAD = """# Index of algorithms

Every name that the registries have; it links to its code. `python docs/site/algorithms.py` writes this page. The last
column is the mean score of each of 40 steps of the tiny example with the recipe of that name, a line for each seed
([results](algorithms.md#recipes)).
"""
WIDTH, HEIGHT = 120, 32
COLOURS = ("#3f51b5", "#e65100", "#00796b", "#ad1457", "#5d4037")


@dataclass(frozen=True)
class Family:
    """Functions behind one key."""

    title: str
    key: str
    page: str
    functions: Mapping[str, Callable[..., Any]]


def families() -> list[Family]:
    from roll.algorithms.advantages import advantage_estimators
    from roll.algorithms.aggregation import aggregation_modes
    from roll.algorithms.distillation import divergence
    from roll.algorithms.kl import kl_estimators
    from roll.algorithms.policy_losses import policy_losses
    from roll.algorithms.preferences import pair_losses
    from roll.config.losses import DivergenceConfig

    def of(registry: Any) -> dict[str, Callable[..., Any]]:
        # Tests and own modules may have registered more: the page is about those of this package.
        found = {name: registry.resolve(name) for name in registry.names}
        return {name: function for name, function in found.items() if function.__module__.startswith("roll.")}

    objectives = get_args(get_type_hints(DivergenceConfig)["kd_objective"])
    here = "algorithms.md"
    return [
        Family("Advantages", "estimator", f"{here}#advantages-estimator", of(advantage_estimators)),
        Family("Policy losses", "loss", f"{here}#policy-losses-loss", of(policy_losses)),
        Family("Aggregation", "loss_agg_mode", f"{here}#aggregation-loss_agg_mode", of(aggregation_modes)),
        Family("KL estimators", "kl_loss_type", f"{here}#kl", of(kl_estimators)),
        Family("Preference losses", "loss_type", "preferences.md", of(pair_losses)),
        Family("Divergences to a teacher", "kd_objective", "distillation.md", dict.fromkeys(objectives, divergence)),
    ]


def page() -> str:
    """The page as Markdown."""
    parts = [HEAD]
    for family in families():
        parts.append(f"## {family.title}: `{family.key}`\n\nDefined in [{Path(family.page).stem}]({family.page}).")
        names = {name: (code(name, function), learned(family.key, name)) for name, function in family.functions.items()}
        if not any(curve for _, curve in names.values()):
            parts.append(", ".join(linked for linked, _ in names.values()) + ".")
            continue
        lines = [f"| {linked} | {curve} |" for linked, curve in names.values()]
        parts.append("\n".join(["| name | learns |", "|---|---|", *lines]))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def code(name: str, function: Callable[..., Any]) -> str:
    file = Path(inspect.getsourcefile(function) or "").resolve().relative_to(ROOT)
    return f"[`{name}`](../{file})"


@cache
def recipes() -> dict[tuple[str, str], Any]:
    """Rows of the recorded table by key and name: a recipe of that name, or the first one that has it."""
    sys.path.append(str(ROOT))
    from benchmarks.reproduce import read_table
    from roll.config.loader import load_config

    found: dict[tuple[str, str], Any] = {}
    for measured in read_table("algorithms").rows:
        config = load_config(None, ROOT / measured.config, check_files=False).config
        named = measured.name.replace("_pp", "++").replace("pass_at_k", "pass@k")
        for key, value in (("estimator", config.estimator.name), ("loss", config.loss.name)):
            if named == value or (key, value) not in found:
                found[key, value] = measured
    return found


def learned(key: str, name: str) -> str:
    measured = recipes().get((key, name))
    return f"![{measured.name}](images/curves/{measured.name}.svg)" if measured and curve(measured) else ""


def curve(measured: Any) -> str:
    """An SVG of the recorded scores; empty: there are none."""
    lines = [result["curve"] for result in measured.results if len(result.get("curve", ())) > 1]
    if not lines:
        return ""
    drawn = []
    for number, values in enumerate(lines):
        points = " ".join(
            f"{2 + (WIDTH - 4) * place / (len(values) - 1):.1f},{HEIGHT - 2 - (HEIGHT - 4) * min(max(value, 0), 1):.1f}"
            for place, value in enumerate(values)
        )
        colour = COLOURS[number % len(COLOURS)]
        drawn.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.2" points="{points}"/>')
    box = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbb"/>'
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{box}{"".join(drawn)}</svg>\n'


def pictures() -> Iterator[tuple[Path, str]]:
    """Files and texts of the curves that the page shows."""
    shown = {id(measured): measured for measured in recipes().values()}
    for measured in shown.values():
        if text := curve(measured):
            yield CURVES / f"{measured.name}.svg", text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    CURVES.mkdir(parents=True, exist_ok=True)
    for file, text in pictures():
        file.write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
