"""The pictures of docs/architecture.md, from the code: ``python docs/site/architecture.py`` writes them.

One has the folders of ``roll/`` on their floors, with a line from each to what its files import, unless a folder on the
way imports that too; the other the pipelines of the registry and the roles of their definitions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.test_architecture import FLOORS, area_of, imports, modules  # noqa: E402

PICTURES = ROOT / "docs/images/architecture"
WIDTH, BOX, GAP, ROW, PLACES = 1000, 136, 12, 86, 6
STYLE = (
    "<style>text{font:13px sans-serif;fill:#222}.small{font-size:11px;fill:#666}"
    "rect{fill:#eef1fb;stroke:#3f51b5}line{stroke:#9aa3c7}</style>"
)


def edges() -> dict[str, set[str]]:
    """Areas (folders and files of ``roll/``) that the files of each import from, other than itself."""
    areas = {area for floor in FLOORS.values() for area in floor}
    found: dict[str, set[str]] = {area: set() for area in areas}
    for module, tree in modules().items():
        if (area := area_of(module)) in areas:
            names = {name.split(".")[1] for name in imports(tree) if name.startswith("roll.")}
            found[area] |= names & areas - {area}
    return found


def drawn(graph: dict[str, set[str]], floor_of: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Edges that lead down, without those that a path of others says already."""
    down = {area: {other for other in others if floor_of[other] < floor_of[area]} for area, others in graph.items()}

    def reached(area: str) -> set[str]:
        return set().union(*(down[other] | reached(other) for other in down[area])) if down[area] else set()

    for area in sorted(down):
        for other in sorted(down[area] - reached(area)):
            yield area, other


def svg(width: int, height: int, parts: list[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{STYLE}\n' + "\n".join(parts) + "\n</svg>\n"


def floors_picture() -> str:
    graph, floor_of = edges(), {area: floor for floor, areas in FLOORS.items() for area in areas}
    rows = [
        (floor, sorted(FLOORS[floor])[start : start + PLACES])
        for floor in sorted(FLOORS, reverse=True)
        for start in range(0, len(FLOORS[floor]), PLACES)
    ]
    places: dict[str, tuple[float, float]] = {}
    boxes, lines = [], []
    for number, (floor, areas) in enumerate(rows):
        left = (WIDTH - len(areas) * (BOX + GAP) + GAP) / 2
        boxes.append(f'<text class="small" x="4" y="{number * ROW + 30}">{floor}</text>')
        for place, area in enumerate(areas):
            x, y = left + place * (BOX + GAP), number * ROW + 8
            places[area] = x + BOX / 2, y
            boxes.append(f'<rect x="{x:.0f}" y="{y}" width="{BOX}" height="40" rx="4"/>')
            boxes.append(f'<text x="{x + BOX / 2:.0f}" y="{y + 24}" text-anchor="middle">{escape(area)}</text>')
    for area, other in drawn(graph, floor_of):
        (x, y), (to_x, to_y) = places[area], places[other]
        lines.append(f'<line x1="{x:.0f}" y1="{y + 40}" x2="{to_x:.0f}" y2="{to_y}"/>')
    return svg(WIDTH, len(rows) * ROW - 30, lines + boxes)


def pipelines_picture() -> str:
    from roll.config.pipelines import definitions

    found = definitions()
    roles = list(dict.fromkeys(role.name for one in found for role in one.roles))
    left, cell, top = 110, 92, 40
    parts = []
    for place, role in enumerate(roles):
        x = left + place * cell + cell / 2
        parts.append(f'<text class="small" x="{x:.0f}" y="24" text-anchor="middle">{escape(role)}</text>')
    for number, one in enumerate(found):
        y = top + number * 30
        parts.append(f'<text x="8" y="{y + 14}">{escape(one.name)}</text>')
        for role in one.roles:
            x = left + roles.index(role.name) * cell + cell / 2
            fill = "#fff" if role.optional else "#3f51b5"
            title = f"<title>{escape(f'{role.name} {role.task.name}')}</title>"
            parts.append(f'<circle cx="{x:.0f}" cy="{y + 10}" r="8" fill="{fill}" stroke="#3f51b5">{title}</circle>')
    return svg(left + len(roles) * cell, top + len(found) * 30 + 4, parts)


def pictures() -> dict[Path, str]:
    return {PICTURES / "floors.svg": floors_picture(), PICTURES / "pipelines.svg": pipelines_picture()}


if __name__ == "__main__":
    PICTURES.mkdir(parents=True, exist_ok=True)
    for file, text in pictures().items():
        file.write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {file.relative_to(ROOT)}\n")
