"""Site that `make docs` builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import token2wav
import token2wav_client
import token2wav_server
from tests.docs.markdown import PAGES, ROOT

PACKAGES = (token2wav, token2wav_client, token2wav_server)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason='pip install ".[docs]" to build the site')
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


def test_site_has_every_page(site: Path) -> None:
    assert {page.with_suffix(".html").name.lower() for page in PAGES} <= {
        file.name for file in site.glob("*.html")
    }


def test_site_documents_every_public_name(site: Path) -> None:
    for package in PACKAGES:
        text = (site / "api" / f"{package.__name__}.html").read_text(encoding="utf-8")
        for name in package.__all__:
            assert re.search(rf'id="{package.__name__}[\w.]*\.{name}"', text), (
                f"{package.__name__}.{name}"
            )


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    for file in site.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        loaded = re.findall(
            r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(https?:[^"]*)"', text
        )
        assert not loaded, f"{file.name}: {loaded}"
