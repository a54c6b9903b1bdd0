"""Links between README, the pages and files of the repository work on GitHub and on the site."""

from __future__ import annotations

from pathlib import Path

from tests.docs.markdown import PAGES, ROOT, anchors, links


def test_relative_links_and_anchors(page: Path) -> None:
    check_links(page)


def test_links_of_the_changelog() -> None:
    check_links(ROOT / "CHANGELOG.md")


def check_links(page: Path) -> None:
    for link in links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT), f"{link}: outside the repository"
        assert target.is_file(), f"{link}: a folder is no page of the site"
        if anchor:
            assert target in PAGES, f"{link}: only pages have anchors"
            assert anchor in anchors(target), f"{link}: no such heading in {target.name}"


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    assert set(PAGES) - listed == {index}
