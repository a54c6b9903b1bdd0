"""Hooks of MkDocs (mkdocs.yml) that bring files outside docs/ into the site.

Pages are written for readers of the repository. The hooks rewrite their links out of docs/ to the
place of the target in the site: README is a page, and other files are copied. The API reference is
made from each package's `__all__`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
README = "readme.md"  # its name in the site; index.md is another page
# pages outside docs/, at the same path in the site
OUTSIDE = ("benchmarks/results/README.md", "lab/README.md")
# packages of the API reference, and the folders that they lie in
PACKAGES = {"token2wav": ".", "token2wav_client": "client", "token2wav_server": "server"}

_LINK = re.compile(r"(?<=\]\()(?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README, files outside docs/ that pages link to, and the pages of the API reference."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, README, content=readme))
    texts = {"README.md": readme}
    texts |= {page: (ROOT / page).read_text(encoding="utf-8") for page in OUTSIDE}
    texts |= {
        f"docs/{file.src_uri}": file.content_string
        for file in files.documentation_pages()
        if file.abs_src_path
    }
    for path in sorted({target for page, text in texts.items() for target in _outside(page, text)}):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for package, folder in PACKAGES.items():
        content = _reference(package, folder)
        files.append(File.generated(config, f"api/{package}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between the repository's files into links between the site's."""
    source = page.file.src_uri
    name = {README: "README.md"}.get(source, source if source in OUTSIDE else f"docs/{source}")
    folder = posixpath.dirname(source)
    return _LINK.sub(
        lambda link: (
            posixpath.relpath(_in_site(name, link["path"]), folder or ".") + (link["anchor"] or "")
        ),
        markdown,
    )


def _outside(page: str, text: str) -> Iterator[str]:
    """Lists files of the repository, neither pages nor missing, that a page links to."""
    for link in _LINK.finditer(text):
        path = _in_repository(page, link["path"])
        if not path.startswith("docs/") and path != "README.md" and (ROOT / path).is_file():
            yield path


def _in_repository(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _in_site(page: str, link: str) -> str:
    path = _in_repository(page, link)
    return README if path == "README.md" else path.removeprefix("docs/")


def _reference(package: str, folder: str) -> str:
    """Writes a page for mkdocstrings with all public names of a package."""
    module = griffe.load(package, search_paths=[ROOT / folder], submodules=False)
    assert module.docstring is not None
    summary = module.docstring.value.partition("\n")[0]
    names = "".join(f"\n::: {package}.{name}\n" for name in module.exports or ())
    return f"# {package}\n\n{summary}\n{names}"
