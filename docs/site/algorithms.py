"""The index of algorithms, from the registries: ``python docs/site/algorithms.py`` writes the page and its curves.

A row is a name that the YAML may say: the first sentence of its function's docstring, the papers that docstring or the
row of the page about it names, the function's file, and what the tiny example learned with it
(``benchmarks/reproduce.py algorithms``): accuracy before and after, and the course of the score for those runs whose
course was recorded.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/algorithm-index.md"
CURVES = ROOT / "docs/images/curves"
HEAD = """# Index of algorithms

Every name that the registries have, one row each. `python docs/site/algorithms.py` writes this page. The last column is
what the recipe of that name learns on the tiny example in 40 steps (accuracy before and after, mean over the seeds of
[the table](algorithms.md#recipes)); a curve is the mean score of a step, each seed a line, from 0 to 1.
"""
ARXIV = re.compile(r"\b(\d{4}\.\d{5})\b")
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
    from roll.algorithms import losses
    from roll.algorithms.advantages import advantage_estimators
    from roll.algorithms.aggregation import aggregation_modes
    from roll.algorithms.distillation import DIVERGENCES
    from roll.algorithms.kl import kl_estimators
    from roll.algorithms.policy_losses import policy_losses
    from roll.algorithms.preferences import pair_losses

    def of(registry: Any) -> dict[str, Callable[..., Any]]:
        # Tests and own modules may have registered more: the page is about those of this package.
        found = {name: registry.resolve(name) for name in registry.names}
        return {name: function for name, function in found.items() if function.__module__.startswith("roll.")}

    here = "algorithms.md"
    return [
        Family("Advantages", "adv_estimator", f"{here}#advantages-adv_estimator", of(advantage_estimators)),
        Family("Policy losses", "loss", f"{here}#policy-losses-loss", of(policy_losses)),
        Family("Aggregation", "loss_agg_mode", f"{here}#aggregation-loss_agg_mode", of(aggregation_modes)),
        Family("KL estimators", "kl_loss_type", f"{here}#kl", of(kl_estimators)),
        Family("Value losses", "value_loss_type", here, of(losses.value_losses)),
        Family("Preference losses", "loss_type", "preferences.md", of(pair_losses)),
        Family("Divergences to a teacher", "kd_objective", "distillation.md", DIVERGENCES),
    ]


def page() -> str:
    """The page as Markdown."""
    parts = [HEAD]
    for family in families():
        parts += [
            f"## {family.title}: `{family.key}`",
            "| name | definition | papers | code | learns |\n|---|---|---|---|---|",
        ]
        parts[-1] += "".join(f"\n{row(family, name, function)}" for name, function in family.functions.items())
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def row(family: Family, name: str, function: Callable[..., Any]) -> str:
    page = family.page.partition("#")[0]
    found = dict.fromkeys(papers(function, page, name))
    links = ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in found)
    file = Path(inspect.getsourcefile(function) or "").resolve().relative_to(ROOT)
    defined = function.__name__ if function.__name__.isidentifier() else "in a table"
    cells = [
        f"[`{name}`]({family.page})",
        definition(function, page, name),
        links,
        f"[`{defined}`](../{file})",
        learned(family.key, name),
    ]
    return f"| {' | '.join(cells)} |"


def definition(function: Callable[..., Any], page: str, name: str) -> str:
    """The first sentence, without its source; else what the module's docstring or the page's table has."""
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    sentence = re.split(r"[;,(]?\s*\(?arXiv|; \d{4}\.\d{5}|\.(?:\s|$)", text, maxsplit=1)[0].strip()
    sentence += ")" * (sentence.count("(") - sentence.count(")"))
    listed = re.search(rf"^ +{re.escape(name)} +(\S.*?)(?:  |$)", sys.modules[function.__module__].__doc__ or "", re.M)
    if listed and not sentence:
        sentence = listed[1]
    return (sentence or cells_on_page(page, name)[1]).replace("|", "\\|")


def papers(function: Callable[..., Any], page: str, name: str) -> list[str]:
    """Numbers at arXiv in the docstring, in the module's list of names, or in the page's row."""
    text = inspect.getdoc(function) or ""
    listed = re.search(rf"^ +{re.escape(name)} +(\S.*)$", sys.modules[function.__module__].__doc__ or "", re.M)
    for source in (text, listed[1] if listed else "", " ".join(cells_on_page(page, name))):
        if found := ARXIV.findall(source):
            return found
    return []


def cells_on_page(page: str, name: str) -> list[str]:
    """Those of the page's table row of that name."""
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        if re.match(rf"\| [^|]*`{re.escape(name)}`", line):
            return [cell.strip() for cell in line.strip("| ").split(" | ")]
    return ["", ""]


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
        for key, value in (("adv_estimator", config.adv_estimator), ("loss", config.loss.name)):
            if named == value or (key, value) not in found:
                found[key, value] = measured
    return found


def learned(key: str, name: str) -> str:
    measured = recipes().get((key, name))
    before, after = (measured.recorded(figure) if measured else {} for figure in ("before", "after"))
    if not after:
        return ""
    text = f"{fmean(before.values()):.3f} to {fmean(after.values()):.3f}"
    if curve(measured):
        text += f" ![{measured.name}](images/curves/{measured.name}.svg)"
    return text


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
