"""Code, links and tables of the pages: Python compiles, blocks of commands are marked as runnable
or not, links work on GitHub and on the site, and tables of models are those of the code.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from scripts import run_docs
from scripts.family_table import configs, row
from scripts.run_docs import blocks
from tests.docs.markdown import PAGES, ROOT, anchors, code_blocks, links
from token2wav import StreamConfig


def test_python_compiles(page: Path) -> None:
    for block in code_blocks(page):
        if block.language == "python":
            # Pages also show the body of a coroutine.
            compile(block.text, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_every_block_of_commands_is_marked_as_runnable_or_not(page: Path) -> None:
    for block in blocks(page):
        assert block.code.text.strip()


def test_blocks_need_the_environment_of_make_setup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_docs, "STAMP", stamp := tmp_path / "setup-stamp")
    monkeypatch.setattr(sys, "argv", ["run_docs"])
    assert run_docs.main() == 2
    assert capsys.readouterr().err == f"run_docs: {stamp} is missing; run: make setup\n"


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


@pytest.mark.slow  # it runs a stream of every flow without arithmetic
def test_the_table_of_families() -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert "\n".join([*(row(name, config) for name, config in configs()), ""]) in page


def test_codecs_with_early_audio() -> None:
    """They hold back less audio than their decoders read ahead."""
    codecs = {name for name, config in configs() if config.withheld_frames(StreamConfig())}
    assert codecs == {"DAC 24 kHz", "Higgs Audio", "SNAC"}  # SNAC at 24 kHz
