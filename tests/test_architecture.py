"""The floors of docs/architecture.md, read off the imports: they run downwards, and optional packages stay optional."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "roll"
MODULES = sorted(PACKAGE.rglob("*.py"))

FLOORS = {
    1: {"config", "protocol", "platforms"},
    2: {"algorithms", "models", "datasets"},
    3: {"strategies", "weight_sync", "distributed", "rewards", "rollout", "checkpoint", "tracking", "serving"},
    4: {"workers", "translation"},
    5: {"pipelines"},
    6: {"cli", "hub_models", "preflight"},
}
FLOOR_OF = {area: floor for floor, areas in FLOORS.items() for area in areas}
STRANGERS = {("algorithms", "strategies"), ("strategies", "algorithms")}
OPTIONAL = {"vllm", "sglang", "deepspeed", "megatron", "peft", "wandb", "swanlab", "tensordict", "trl"}
BACKEND_FOLDERS = {name: f"strategies/{name}" for name in ("megatron", "vllm", "sglang")}
"""Packages whose classes a backend derives its own from: the modules of its folder import them, and no module outside
imports that folder before the backend is chosen."""
WITHOUT_RAY = FLOORS[1] | FLOORS[2]


def area_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield node.module or ""


def imports_at_module_level(tree: ast.Module) -> Iterator[str]:
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from imports(statement)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_imports_run_downwards(module: Path) -> None:
    area = area_of(module)
    if area == "__init__":
        return
    tree = ast.parse(module.read_text(encoding="utf-8"))
    for name in imports(tree):
        root, _, rest = name.partition(".")
        if root == "ray":
            assert area not in WITHOUT_RAY, f"roll/{area} does not know Ray"
        if root != "roll" or not rest:
            continue
        other = rest.partition(".")[0]
        assert FLOOR_OF[other] <= FLOOR_OF[area], f"roll/{area} (floor {FLOOR_OF[area]}) imports roll.{rest}"
        assert (area, other) not in STRANGERS, f"roll/{area} imports roll.{rest}: the two never meet below roll/workers"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_optional_packages_are_imported_only_when_chosen(module: Path) -> None:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    names = set(imports_at_module_level(tree))
    found = {name.partition(".")[0] for name in names} & OPTIONAL
    for package, folder in BACKEND_FOLDERS.items():
        if module.is_relative_to(PACKAGE / folder):
            found.discard(package)
        else:
            inside = f"roll.{folder.replace('/', '.')}"
            found |= {name for name in names if f"{name}.".startswith(f"{inside}.")}
    assert not found, f"{module.relative_to(PACKAGE)} imports {sorted(found)} wherever it is imported"


def test_every_area_has_its_floor() -> None:
    areas = {area_of(module) for module in MODULES} - {"__init__"}
    assert areas <= set(FLOOR_OF), f"docs/architecture.md gives no floor to {sorted(areas - set(FLOOR_OF))}"
