"""Every block of commands of every page is run, or says why not (``page_commands`` has the marks)."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.examples.page_commands import EXTRA, REASONS, command_blocks, write_programs
from tests.examples.pages import ROOT, name_of, named_files
from tests.examples.test_docs import PAGES

BLOCKS = [block for page in PAGES for block in command_blocks(page)]
RUN = {page: [block for block in BLOCKS if block.page == page and block.runs] for page in PAGES}
LEFT_BEHIND = "output/tiny_grpo/seed0"
"""A run that the pages speak of: the tiny example's, of two steps."""
SMALL = """defaults:
  - examples/tiny/rlvr_config@_here_

exp_name: my_recipe
max_steps: 1
"""


def test_every_block_says_whether_it_is_run() -> None:
    assert len(BLOCKS) > 70
    assert [block.place for block in BLOCKS if block.runs is None] == [], f"reasons: {', '.join(REASONS)}"


def test_flags_of_commands_exist() -> None:
    """Of every line that begins with ``roll``, run or not: ``docs/commands.md`` is written from the parsers."""
    help_of: dict[str, str] = {}
    for section in re.split(r"^## ", (ROOT / "docs/commands.md").read_text(encoding="utf-8"), flags=re.M)[1:]:
        name = section.split()[1] if section.startswith("roll ") else ""
        help_of[name] = help_of.get(name, "") + section
    wrong = []
    for block in BLOCKS:
        for line in block.text.replace("\\\n", " ").splitlines():
            if match := re.match(r"(?:\w+=\S+ )*roll ([\w-]+)(.*)", re.split(r" #| [>|]", line)[0]):
                flags = re.findall(r"(?<![\w=])--?[a-z][\w-]*", match[2]) if match[1] != "translate" else []
                known = help_of.get(match[1], "")
                wrong += [f"{block.place}: roll {match[1]} {flag}" for flag in flags if flag not in known]
                wrong += [f"{block.place}: roll {match[1]}"] if match[1] not in help_of else []
    assert wrong == []


@dataclass(frozen=True)
class Clone:
    """A copy of the repository in which somebody has run the tiny example."""

    folder: Path
    environment: dict[str, str]

    def bash(self, text: str, overrides: tuple[str, ...] = (), stops: bool = True) -> subprocess.CompletedProcess[str]:
        """``stops``: at the first command that fails."""
        environment = self.environment | {EXTRA: " ".join(overrides)}
        command = ["bash", *(["-e"] if stops else []), "-o", "pipefail", "-c", text]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )


@contextmanager
def ray_in(folder: Path, address: Path) -> Iterator[str]:
    """The address of a Ray that all runs join; its workers begin in ``folder``, as those of a run's own Ray would."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.serve_ray", str(address)]
    with subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.PIPE) as server:
        while not address.exists():
            assert server.poll() is None, "Ray did not start"
            time.sleep(0.05)
        yield address.read_text()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    folder = tmp_path_factory.mktemp("clone")
    ignored = shutil.ignore_patterns("artifacts", "__pycache__")
    for name in ("examples", "configs", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    installed = folder / ".venv"
    (installed / "bin").mkdir(parents=True)
    (installed / "bin/activate").touch()
    for name in ("Makefile", "setup.py", "constraints"):  # older than the mark of an installation, so make run runs
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    (installed / ".installed").touch()
    for name in ("my_recipe.yaml", "recipe.yaml"):
        (folder / name).write_text(SMALL, encoding="utf-8")
    made_here = tmp_path_factory.mktemp("programs")
    programs = write_programs(made_here)
    with ray_in(folder, made_here / "address") as address:
        environment = os.environ | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": address,
            "COLUMNS": "120",
        }
        (installed / "bin/python").symlink_to(programs / "python")
        made = Clone(folder, environment)
        untrained_models(folder)
        first = made.bash("roll run examples/tiny/rlvr_config.yaml max_steps=2 eval_steps=2")
        assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-4000:]
        for name in ("a", "b", "my_recipe"):
            shutil.copytree(folder / LEFT_BEHIND, folder / "output" / name)
        yield made


def untrained_models(folder: Path) -> None:
    """In place of the warm starts of the examples, under the marks by which these are known."""
    tiny = folder / "examples/tiny"
    command = [sys.executable, str(tiny / "prepare.py"), "--seeds", "0", "1"]
    subprocess.run(command, check=True, capture_output=True)
    for seed in (0, 1):
        model = tiny / f"artifacts/seed{seed}"
        shutil.copytree(model / "init", model / "warm_start/model")
    shutil.copy(model / "init/config.json", folder / "config.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples/tiny"))
        patch.syspath_prepend(str(ROOT / "examples/tiny_agentic"))
        spec = importlib.util.spec_from_file_location(
            "agentic_warm_start", ROOT / "examples/tiny_agentic/warm_start.py"
        )
        assert spec is not None and spec.loader is not None
        warm_start = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(warm_start)
        for task in warm_start.PHASES:
            target = folder / f"examples/tiny_agentic/artifacts/{task}/seed0/warm_start"
            shutil.copytree(tiny / "artifacts/seed0/init", target / "model")
            (target / warm_start.FINGERPRINT).write_text(f'{{"recipe": "{warm_start.recipe_hash(task)}"}}')
    for name in [name for name in sys.modules if name in ("demonstrations", "tiny_model", "word_problems", "prepare")]:
        del sys.modules[name]


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.default_rows("README.md", "docs/report.md")
@pytest.mark.parametrize("page", [page for page, blocks in RUN.items() if blocks], ids=name_of)
def test_commands_of_a_page(request: pytest.FixtureRequest, page: Path) -> None:
    clone: Clone = request.getfixturevalue("clone")
    for folder in clone.folder.glob("output/*/*/evaluation"):
        shutil.rmtree(folder)  # another page's, of other models; what is there would be continued
    for name, text in named_files(page).items():
        (clone.folder / name).write_text(text, encoding="utf-8")
    for block in RUN[page]:
        done = clone.bash(block.text, block.overrides, stops=len(block.statuses) == 1)
        assert done.returncode in block.statuses, f"{block.place}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
