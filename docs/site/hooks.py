"""What `make docs` adds to mkdocs: README as the front page, and pages of linked source files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", flags=re.MULTILINE | re.DOTALL)
# Pages outside docs/ and their names on the site.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/, and one for each source file that a page links to."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    texts = [(ROOT / name, (ROOT / name).read_text()) for name in PAGES]
    texts += [(path, path.read_text()) for path in DOCS.rglob("*.md")]
    linked = {target for path, text in texts for target in targets(path, text) if is_source(target)}
    for path in sorted(linked):
        files.append(File.generated(config, source_page(path), content=source_text(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links of files outside docs/ to their pages; those of folders become text."""
    origin = next((ROOT / name for name, at in PAGES.items() if at == page.file.src_uri), None)
    path = origin or DOCS / page.file.src_uri
    if page.file.src_uri.startswith("source/"):
        return markdown

    def rewritten(match: re.Match[str]) -> str:
        start, link, anchor, end = match[1], match[2], match[3] or "", match[4]
        if "://" in link:
            return match[0]
        target = resolved(path, link)
        if target.is_dir():
            return "](" + "FOLDER" + ")"
        at = page_of(target)
        return start + os.path.relpath(at, Path(page.file.src_uri).parent) + anchor + end

    parts = re.split(f"({CODE.pattern})", markdown, flags=CODE.flags)
    parts[::2] = [LINK.sub(rewritten, part) for part in parts[::2]]
    return re.sub(r"\[([^]]*)\]\(FOLDER\)", r"\1", "".join(parts))


def targets(path: Path, text: str) -> list[Path]:
    """The files of the repository that a page links to."""
    links = LINK.findall(CODE.sub("", text))
    return [resolved(path, link[1]) for link in links if "://" not in link[1]]


def resolved(path: Path, link: str) -> Path:
    return Path(os.path.normpath(path.parent / link))


def is_source(path: Path) -> bool:
    return path.is_file() and DOCS not in path.parents and path.name not in PAGES


def page_of(target: Path) -> str:
    """The path below docs/ of the page or picture that shows `target`."""
    relative = target.relative_to(ROOT).as_posix()
    if relative in PAGES:
        return PAGES[relative]
    return source_page(target) if is_source(target) else target.relative_to(DOCS).as_posix()


def source_page(path: Path) -> str:
    return f"source/{path.relative_to(ROOT).as_posix()}.md"


def source_text(path: Path) -> str:
    """A page with the text of a file; searches do not look into it."""
    name = path.relative_to(ROOT).as_posix()
    language = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash"}.get(path.suffix, "text")
    head = f"---\ntitle: {path.name}\nsearch: {{exclude: true}}\nhide: [toc]\n---\n\n# {name}\n\n"
    return f"{head}````{language}\n{path.read_text()}\n````\n"
