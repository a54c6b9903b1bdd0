"""Contents of a page for the checks: anchors of headings, links, and blocks of code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from scripts.run_docs import Code, code_in

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "lab" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
# a page for developers: it is neither on the site nor in its index
CONTRIBUTING = ROOT / "CONTRIBUTING.md"

_SPAN = re.compile(r"(?<!`)`(?P<text>[^`\n]+(?:\n[^`\n]+)?)`(?!`)")
_HEADING = re.compile(r"^#{1,6} +(?P<text>.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


def prose(page: Path) -> str:
    """Text without its blocks of code."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for code in code_in(lines):
        lines[code.start : code.stop] = [""] * (code.stop - code.start)
    return "\n".join(lines)


def code_blocks(page: Path) -> list[Code]:
    return list(code_in(page.read_text(encoding="utf-8").splitlines()))


def spans(page: Path) -> list[str]:
    """Code within the text, each span on one line."""
    return [" ".join(match["text"].split()) for match in _SPAN.finditer(prose(page))]


def commands(page: Path) -> Iterator[str]:
    """Shell lines in blocks and within the text.

    Continued lines are joined, and comments are removed.
    """
    for block in code_blocks(page):
        if block.language in ("", "bash", "sh"):
            joined = re.sub(r"\\\n\s*", " ", block.text)
            yield from (re.sub(r"(^|\s)#\s.*", "", line) for line in joined.splitlines())
    yield from spans(page)


def links(page: Path) -> list[str]:
    return [match["target"] for match in _LINK.finditer(prose(page))]


def anchors(page: Path) -> set[str]:
    """Anchors of the headings as GitHub makes them."""
    slugs: set[str] = set()
    for match in _HEADING.finditer(prose(page)):
        text = re.sub(r"\]\([^)]*\)", "]", match["text"])
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        count = 0
        while (anchor := f"{slug}-{count}" if count else slug) in slugs:
            count += 1
        slugs.add(anchor)
    return slugs
