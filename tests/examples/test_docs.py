"""The documentation is true where a program can tell: links, configurations, commands, names of metrics."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from roll import cli
from roll.config.loader import find_file, load_config
from roll.config.reading.compose import parse_launcher_args
from tests.examples.metric_names import undocumented
from tests.examples.pages import FENCE, ROOT, name_of, named_files
from tests.support.recipes import loaded

PAGES = sorted(
    page
    for folder in ("", "docs", "docs/design", "examples", "examples/*", "benchmarks", "configs")
    for page in ROOT.glob(f"{folder}/*.md".lstrip("/"))
)


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            yield target


def broken_links(page: Path) -> Iterator[str]:
    for target in links(page):
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists():
            yield f"{name_of(page)}: {target}"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            yield f"{name_of(page)}: {target}; headings: {sorted(anchors(path))}"


def test_relative_links_lead_somewhere() -> None:
    assert [line for page in PAGES for line in broken_links(page)] == []


NAMED_PATH = re.compile(
    r"`((?:roll|tests|docs|examples|benchmarks|configs|constraints)/[\w./-]*|setup\.py|mkdocs\.yml|Makefile)`"
)
MADE_BY_RUNS = ("examples/tiny/artifacts",)
NAMED_FUNCTION = re.compile(r"`(\w+)`")


def test_files_of_the_repository_that_a_page_names_exist() -> None:
    named = {(name_of(page), path) for page in PAGES for path in NAMED_PATH.findall(page.read_text(encoding="utf-8"))}
    assert [(page, path) for page, path in named if not (ROOT / path).exists() and path not in MADE_BY_RUNS] == []


def test_functions_on_the_walks_are_in_their_files() -> None:
    """Rows ``| where | `roll/file.py` | `function`, `Class` | work |`` of the architecture page."""
    rows = re.findall(r"^\|[\w ]*\| `(roll/[\w/]+\.py)` \|([^|]+)\|", (ROOT / "docs/architecture.md").read_text(), re.M)
    assert len(rows) > 40
    missing = [
        f"{file}: {name}"
        for file, names in rows
        for name in NAMED_FUNCTION.findall(names)
        if not re.search(rf"^ *(?:async )?(?:def|class) {name}\b", (ROOT / file).read_text(encoding="utf-8"), re.M)
    ]
    assert missing == []


def test_names_that_contributors_are_told_are_in_the_code() -> None:
    words: set[str] = set()
    for folder in ("roll", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            words.update(re.findall(r"\w+", file.read_text(encoding="utf-8")))
    named = re.findall(r"`@?([A-Za-z_]\w*)[`(=]", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    # Of plain words such as a command's name the code says nothing.
    assert [name for name in named if re.search(r"_|[A-Z]", name) and name not in words] == []


def test_every_page_is_on_the_map_and_in_the_navigation() -> None:
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    records = {f"design/{page.name}" for page in (ROOT / "docs/design").glob("*.md")}
    listed = {target for target in links(ROOT / "docs/index.md") if re.match(r"[^.].*\.md", target)}
    assert listed == (pages - {"index.md"}) | {"design/index.md"}
    assert {f"design/{target}" for target in links(ROOT / "docs/design/index.md")} == records - {"design/index.md"}
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert set(re.findall(r"[\w/-]+\.md", str(navigation))) == pages | records


CONFIGS = [(page, file) for page in PAGES for file in named_files(page) if file.endswith(".yaml")]


@pytest.mark.parametrize(("page", "file"), CONFIGS, ids=lambda value: value if isinstance(value, str) else value.stem)
def test_whole_configurations_pass_the_check(
    page: Path, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in named_files(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    status = cli.main(["check", file, "--skip-files"])
    output = capsys.readouterr()
    assert status == 0, output.err
    assert "note" not in output.out, "an example should do everything that it says"


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every line of the pages that runs a recipe of this repository, without redirection and comment."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for line in re.findall(
            r"^ *(?:\$ )?((?:RANK=\d )?(?:python examples/start_|roll (?:check|run)|examples/).*)$", text, re.M
        ):
            words = shlex.split(line.removesuffix("&"), comments=True)
            words = words[1:] if words[0].startswith("RANK=") else words
            yield name_of(page), words


SHOWN_MISTAKE = ["max_step=40", "rollout_batch_size=20"]


DEFAULTS = {
    "sft": ("tiny", "sft_config"),
    "agentic": ("tiny_agentic", "lake_config"),
    "rlvr_vl": ("tiny_vl", "rlvr_config"),
}
"""Folder and name that launchers take without flags."""


def recipe_and_overrides(words: list[str]) -> tuple[list[str], list[str]] | None:
    """The recipe as ``load_config`` wants it, and the overrides; None for a file that the page only imagines."""
    if words[0] == "roll":
        recipe, overrides = [words[2]], [word for word in words[3:] if not word.startswith("--")]
        known = words[2].startswith(("examples/", "tiny/", "gsm8k/"))
        return (recipe, overrides) if known else None
    if words[0] == "python":
        if not all(re.fullmatch(r"[-\w./=+\[\]:~]+", word) for word in words) or "DIR" in words:
            return None
        name = next((name for part, name in DEFAULTS.items() if part in words[1]), ("tiny", "rlvr_config"))
        arguments = parse_launcher_args(words[2:], *name)
        return [arguments.config_path, arguments.config_name], list(arguments.overrides)
    return (["gsm8k", "rlvr_config"], words[1:]) if words[0].endswith("run_gsm8k.sh") else None


COMMANDS = sorted((page, *words) for words, page in {tuple(words): page for page, words in commands()}.items())
"""Each once, with a page that has it."""


def test_commands_name_recipes_and_keys_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    known = [(page, words, recipe_and_overrides(words)) for page, *words in COMMANDS]
    known = [(page, words, found) for page, words, found in known if found is not None and found[1] != SHOWN_MISTAKE]
    assert len(known) > 10
    refused = []
    for page, words, (recipe, overrides) in known:
        try:
            if overrides:
                load_config(None, *recipe, overrides=overrides, check_files=False)
            else:
                loaded(find_file(Path(recipe[0]), next(iter(recipe[1:]), None)).resolve())
        except (OSError, ValueError) as error:
            refused.append(f"{page}: {' '.join(words)}: {error}")
    assert refused == []


def test_the_mistakes_that_the_quickstart_promises(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(ROOT / "examples/tiny/rlvr_config.yaml"), "--skip-files", *SHOWN_MISTAKE]) == 2
    assert capsys.readouterr().err.startswith("2 mistakes")


def test_metrics_named_on_other_pages_are_on_the_metrics_page() -> None:
    families = r"`((?:actor|critic|token|group|scheduler|system|time|memory|val|val_correct|sft_train)/[\w/<>@]+)`"
    for page in PAGES:
        if page.name == "metrics.md":
            continue
        names = set(re.findall(families, page.read_text(encoding="utf-8"))) - {"time/<phase>"}
        assert undocumented([name.replace("<", "").replace(">", "") for name in names]) == [], name_of(page)
