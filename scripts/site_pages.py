"""MkDocs hook (see mkdocs.yml): add README.md, CONTRIBUTING.md and linked source files to the site.

Links are written for the repository, in which README.md is above docs/; the hook rewrites them for the site.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
TEXTS = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml"}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def place(file: str) -> str:
    """Return the path of a repository file in the site's sources."""
    if file in TEXTS:
        return TEXTS[file]
    return file.removeprefix("docs/") if file.startswith("docs/") else f"source/{file}.md"


def target(page: str, link: str) -> str | None:
    """Return the repository file that a page's link leads to, if any."""
    origin = {page: file for file, page in TEXTS.items()}.get(page, f"docs/{page}")  # the inverse of `place`
    found = os.path.normpath(PurePosixPath(origin).parent / link)
    return found if (ROOT / found).is_file() else None


def rewrite_links(text: str, page: str) -> str:
    """Return a page's text with links rewritten for the site."""

    def link(match: re.Match[str]) -> str:
        file = target(page, match[1])
        if file is None:
            return match[0]
        return os.path.relpath(place(file), PurePosixPath(page).parent) + (match[2] or "")

    return LINK.sub(link, text)


def source(file: str) -> str:
    """Return the page of a source file, excluded from search."""
    path = ROOT / file
    language = LANGUAGES.get(path.suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n# {file}\n\n``````{language}\n{path.read_text()}``````\n"


def on_files(files: Files, config: Any) -> Files:
    """Add README.md, CONTRIBUTING.md and all linked source files."""
    for file, page in TEXTS.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text()))
    pages = [file for file in files if file.is_documentation_page()]
    linked = {target(page.src_uri, match[0]) for page in pages for match in LINK.findall(page.content_string)}
    for file in sorted(filter(None, linked)):
        if place(file).startswith("source/"):
            added = File.generated(config, place(file), content=source(file), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page, except on source pages."""
    return markdown if page.file.src_uri.startswith("source/") else rewrite_links(markdown, page.file.src_uri)
