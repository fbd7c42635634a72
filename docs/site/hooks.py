"""Pages of the documentation site for the files of the repository that the documentation links to.

MkDocs knows the files of ``docs/`` alone. A link to a recipe, a test or a module leads to a page of its own here, under
``source/``, which shows that file (Markdown as it reads, anything else as code, a folder as a list), so that the site
is whole without the repository and ``mkdocs build --strict`` refuses every link that leads nowhere.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "source"
FENCE = re.compile(r"^(```+).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(#[^)\s]*)?(?=\)|\s+\x22)|(?<=\]: )([^)\s:#]+)(#\S*)?$", re.MULTILINE)
"""``[text](path#anchor "title")``, and ``[name]: path#anchor`` on a line of its own."""
PICTURES = (".png", ".svg")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".md": "markdown", ".json": "json"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors of headings as the repository's own view makes them."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each linked file outside ``docs/``, and for those that these link to when they are Markdown."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    waiting = list(texts)
    shown: set[str] = set()
    while waiting:
        path = waiting.pop()
        for target in targets(path, texts.pop(path)):
            if target.startswith("docs/") or not (ROOT / target).exists():
                continue
            if (ROOT / target / "README.md").is_file():
                target = f"{target}/README.md"
            if target in shown:
                continue
            shown.add(target)
            if Path(target).suffix in PICTURES:
                files.append(File.generated(config, uri_of(target), abs_src_path=str(ROOT / target)))
                continue
            files.append(File.generated(config, uri_of(target), content=content(target)))
            if target.endswith(".md"):
                texts[target] = (ROOT / target).read_text(encoding="utf-8")
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page at the pages of :func:`on_files`."""
    uri = page.file.src_uri
    path = uri.removeprefix(f"{SOURCE}/") if uri.startswith(f"{SOURCE}/") else f"docs/{uri}"
    if not (ROOT / path).is_file():
        return markdown

    def moved(match: re.Match[str]) -> str:
        target = resolved(path, match[1] or match[3])
        if target is None or not (ROOT / target).exists():
            return match[0]
        return posixpath.relpath(uri_of(target), posixpath.dirname(uri) or ".") + (match[2] or match[4] or "")

    return outside_fences(markdown, lambda text: LINK.sub(moved, text))


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """``markdown`` with ``change`` applied to all that is not a fenced block."""
    parts: list[str] = []
    end = 0
    for fence in FENCE.finditer(markdown):
        parts += change(markdown[end : fence.start()]), fence[0]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def targets(path: str, text: str) -> set[str]:
    """Files and folders of the repository, relative to its root, that the Markdown file ``path`` links to."""
    found = {resolved(path, match[1] or match[3]) for match in LINK.finditer(FENCE.sub("", text))}
    return {target for target in found if target is not None}


def resolved(path: str, link: str) -> str | None:
    """The link of a file as a path from the repository's root; None: it leads out of the repository."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return None if target.startswith("..") else target


def uri_of(target: str) -> str:
    """Where the site has a file or folder of the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if (ROOT / target).is_dir():
        readme = f"{target}/README.md"
        return f"{SOURCE}/{readme if (ROOT / readme).is_file() else f'{target}/index.md'}"
    return f"{SOURCE}/{target}" if Path(target).suffix in (".md", *PICTURES) else f"{SOURCE}/{target}.md"


def content(target: str) -> str:
    """The Markdown that shows a file or folder."""
    path = ROOT / target
    if path.is_dir():
        names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in path.iterdir())
        return f"# {target}/\n\n" + "".join(f"- `{name}`\n" for name in names if not name.startswith((".", "__")))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return f"# {target}\n\n````{LANGUAGES.get(path.suffix, '')}\n{text.rstrip()}\n````\n"
