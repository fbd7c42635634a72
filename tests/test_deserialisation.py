"""Nothing from outside is read by something that can run code (docs/security.md): every place that could, by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.test_architecture import PACKAGE, TEXTS

PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BETWEEN_PROCESSES = {
    "config/objects.py": "functions and classes of the driver's own, over Ray or the pipe of a child",
    "distributed/actor.py": "a worker class of the driver's own, over Ray, which knows its peers by a token",
}
"""Pickles that come from a process of the same run."""


WORDS = {*PICKLES, "Unpickler", "torch.load", "np.load", "numpy.load", "yaml", "read_pickle"}
"""A file without any of them is not looked into, which takes most of the time."""
VERBS = {"load", "loads", "open", "Unpickler", "load_all", "unsafe_load", "full_load", "unsafe_load_all", "read_pickle"}


def doubtful(tree: ast.AST) -> Iterator[str]:
    """Calls that may run what they read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Unpickler") for base in node.bases):
            methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            yield from [] if "find_class" in methods else [f"line {node.lineno}: {node.name} takes any class"]
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", getattr(node.func, "id", "")) not in VERBS:
            continue
        name = ast.unparse(node.func)
        owner, _, verb = name.rpartition(".")
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        unsafe = (
            (owner.rpartition(".")[2] in PICKLES and verb in ("load", "loads", "open", "Unpickler"))
            or (name == "torch.load" and given.get("weights_only") != "True")
            or (owner in ("np", "numpy") and verb == "load" and given.get("allow_pickle", "False") != "False")
            or (owner == "yaml" and verb in ("unsafe_load", "full_load", "load_all", "unsafe_load_all"))
            or (owner == "yaml" and verb == "load" and "Loader" not in given)
            or verb == "read_pickle"
        )
        if unsafe:
            yield f"line {node.lineno}: {name}"


def test_nothing_from_outside_runs_code_when_it_is_read() -> None:
    suspects = {module: text for module, text in TEXTS.items() if any(word in text for word in WORDS)}
    found = {str(module.relative_to(PACKAGE)): list(doubtful(ast.parse(text))) for module, text in suspects.items()}
    unexpected = {module: lines for module, lines in found.items() if lines and module not in BETWEEN_PROCESSES}
    assert unexpected == {}
    assert set(BETWEEN_PROCESSES) <= {module for module, lines in found.items() if lines}, "one is gone: strike it out"


def test_loaders_of_yaml_build_no_objects() -> None:
    """``Loader`` names in ``roll`` derive from YAML's safe loader."""
    import yaml

    from roll.config.reading.yaml_files import Loader

    assert issubclass(Loader, yaml.SafeLoader | getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def test_doubtful_calls_are_seen() -> None:
    text = """
import pickle, torch, yaml, numpy as np
class Open(pickle.Unpickler): pass
class Closed(pickle.Unpickler):
    def find_class(self, module, name): raise pickle.UnpicklingError
pickle.load(f); pickle.dumps(f); torch.load(f); torch.load(f, weights_only=True)
np.load(f, allow_pickle=True); np.load(f); yaml.load(t); yaml.load(t, Loader=Safe); yaml.safe_load(t)
"""
    lines = [line.partition(": ")[2] for line in doubtful(ast.parse(text))]
    assert sorted(lines) == ["Open takes any class", "np.load", "pickle.load", "torch.load", "yaml.load"]
