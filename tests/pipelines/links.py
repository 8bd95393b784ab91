"""Follow the links of pages and of Markdown on a disk, as a reader of a clone would."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Html(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for key, value in attrs if key in ("href", "src") and value]
        self.names |= {value for key, value in attrs if key in ("id", "name") and value}


def _markdown(text: str) -> tuple[list[str], set[str]]:
    """Links, and the names that code hosts give to headings."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)
    names = {re.sub(r"[^\w\- ]", "", one).strip().lower().replace(" ", "-") for one in headings}
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "``", prose)), names


@cache
def _of(text: str, suffix: str) -> tuple[list[str], set[str]]:
    if suffix == ".md":
        return _markdown(text)
    page = _Html(text)
    return page.links, page.names


def read(path: Path) -> tuple[list[str], set[str]]:
    """Links of a page or of a Markdown file, and the places in it that links may name."""
    return _of(path.read_text(encoding="utf-8"), path.suffix)


def dead(path: Path, root: Path) -> list[str]:
    """Links of a file that lead nowhere below ``root``; addresses on the network are not asked."""
    found = []
    for link in sorted(set(read(path)[0])):
        parts = urlsplit(link)
        if parts.scheme in ("http", "https", "data", "mailto"):
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        lost = not target.is_relative_to(root.resolve()) or not target.exists()
        if not lost and parts.fragment and target.suffix in (".md", ".html"):
            lost = unquote(parts.fragment) not in read(target)[1]
        if lost:
            found.append(f"{path.relative_to(root)}: {link}")
    return found
