"""The floors of docs/architecture.md, read off the imports: they run downwards, optional packages stay optional, and no
new circle of files arises; and docstrings that say at once what they describe. One test a rule, which lists every
violation."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

from roll.config.run import PolicyRunConfig
from roll.methods.opd_keys import TaughtConfig
from roll.pipelines.rlvr.definition import OPD

PACKAGE = Path(__file__).parent.parent / "roll"
TEXTS = {module: module.read_text(encoding="utf-8") for module in sorted(PACKAGE.rglob("*.py"))}


@cache
def modules() -> dict[Path, ast.Module]:
    """File to syntax tree. Not where the file is imported: every test process collects it."""
    return {module: ast.parse(text) for module, text in TEXTS.items()}


FLOORS = {
    1: {"config", "protocol", "platforms"},
    2: {"algorithms", "models", "datasets"},
    3: {
        *("environments", "agents", "strategies", "weight_sync", "distributed"),
        *("rewards", "rollout", "checkpoint", "tracking", "serving"),
    },
    4: {"methods", "workers", "report"},
    5: {"pipelines"},
    6: {
        *("api", "cli", "clients", "command_line", "doctor", "evaluate", "preflight", "rehearsal"),
        *("replay", "starter", "sweep", "training_service", "translation"),
    },
}
FLOOR_OF = {area: floor for floor, areas in FLOORS.items() for area in areas}
STRANGERS = {("algorithms", "strategies"), ("strategies", "algorithms")}
OPTIONAL = {
    *("vllm", "sglang", "deepspeed", "megatron", "peft", "flash_attn", "liger_kernel", "gguf"),
    *("wandb", "swanlab", "mlflow", "tensordict", "trl"),
}
BACKEND_FOLDERS = {name: f"strategies/{name}" for name in ("megatron", "vllm", "sglang")}
"""Packages whose classes a backend derives its own from: the modules of its folder import them, and no module outside
imports that folder before the backend is chosen."""
WITHOUT_RAY = FLOORS[1] | FLOORS[2] | {"report"}


def area_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted(module: Path) -> str:
    return ".".join(module.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield node.module or ""


def imported_files(tree: ast.AST, files: set[str]) -> set[str]:
    """The ones of ``files`` (dotted names) that a file imports, inside functions and for type checks as well.

    ``from roll.x import y`` is an import of ``roll.x.y`` where that is a file, otherwise of ``roll.x``.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in files else str(node.module) for name in full}
    return found & files


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one node."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = edges[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reach = {node: reachable(node) for node in edges}
    found = {frozenset(other for other in reach[node] if node in reach[other]) for node in edges if node in reach[node]}
    return [set(circle) for circle in sorted(found, key=sorted) if len(circle) > 1]


def violations_of_floors(module: Path, tree: ast.Module) -> Iterator[str]:
    area = area_of(module)
    if area == "__init__":
        return
    for name in imports(tree):
        root, _, rest = name.partition(".")
        if root == "ray" and area in WITHOUT_RAY:
            yield f"{dotted(module)} imports {name}: roll/{area} does not know Ray"
        if root != "roll" or not rest:
            continue
        other = rest.partition(".")[0]
        if FLOOR_OF[other] > FLOOR_OF[area]:
            yield f"{dotted(module)} (floor {FLOOR_OF[area]}) imports {name} (floor {FLOOR_OF[other]})"
        if (area, other) in STRANGERS:
            yield f"{dotted(module)} imports {name}: the two never meet below roll/workers"


def test_imports_run_downwards() -> None:
    assert [line for module, tree in modules().items() for line in violations_of_floors(module, tree)] == []


def optional_imports(module: Path, tree: ast.Module) -> set[str]:
    """Optional packages, and modules of backends that need one, which come with every import of the module."""
    names = {name for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom) for name in imports(one)}
    found = {name.partition(".")[0] for name in names} & OPTIONAL
    for package, folder in BACKEND_FOLDERS.items():
        if module.is_relative_to(PACKAGE / folder):
            found.discard(package)
        else:
            inside = f"roll.{folder.replace('/', '.')}"
            found |= {name for name in names if f"{name}.".startswith(f"{inside}.")}
    return found


def test_optional_packages_are_imported_only_when_chosen() -> None:
    found = {dotted(module): optional_imports(module, tree) for module, tree in modules().items()}
    assert {module: names for module, names in found.items() if names} == {}


def test_no_circle_of_files() -> None:
    """Imports inside functions count: they hide a circle from Python, not from a reader."""
    files = {dotted(module) for module in modules()}
    edges = {dotted(module): imported_files(tree, files) - {dotted(module)} for module, tree in modules().items()}
    assert circles(edges) == [], "these files import each other"


def test_every_area_has_its_floor() -> None:
    areas = {area_of(module) for module in modules()} - {"__init__"}
    assert areas <= set(FLOOR_OF), f"docs/architecture.md gives no floor to {sorted(areas - set(FLOOR_OF))}"


def test_docstrings_open_with_a_noun_or_an_imperative() -> None:
    """Those of attributes and constants as well."""
    found = [f"{module}: {line}" for module, tree in modules().items() for line in indirect_openings(tree)]
    assert found == [], "say what it is or does: 'State of an engine.', 'Return ...'"


def indirect_openings(tree: ast.Module) -> list[str]:
    """First lines of docstrings that open with a question's word, in the order of the file."""
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    lines = [str(text.value).strip().split("\n")[0] for text in sorted(texts, key=lambda text: text.lineno)]
    return [line for line in lines if line.partition(" ")[0].rstrip(",:") in ("What", "How", "Whether")]


def test_pictures_are_drawn_from_the_code() -> None:
    """Written by ``python docs/site/architecture.py``."""
    spec = importlib.util.spec_from_file_location("architecture", PACKAGE.parent / "docs/site/architecture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for file, text in module.pictures().items():
        assert file.read_text(encoding="utf-8") == text, "python docs/site/architecture.py"


def test_a_method_that_is_added_has_one_home() -> None:
    """Its names are that of its pipeline, and of its keys those of one word, which are its roles' among others."""
    inherited = {item.name for item in fields(PolicyRunConfig)}
    own = {item.name for item in fields(TaughtConfig)} - inherited
    names = {OPD.name} | {name for name in own if "_" not in name}
    assert {"opd", "teacher"} <= names
    naming = [dotted(module) for module, text in TEXTS.items() if any(name in text for name in names)]
    outside = [name for name in naming if not name.startswith("roll.methods")]
    assert len(naming) <= 18 and len(outside) <= 9, naming
