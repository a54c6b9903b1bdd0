"""Pages for a browser: one that speaks a text, and one with all requests."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

FOLDER = Path(__file__).parents[1] / "pages"
# Files by their paths. They need no key: the page asks for it.
PAGES = {
    "/": "index.html",
    "/docs": "docs.html",
    **{f"/{name}": name for name in ("docs.js", "page.js", "ring.js")},
}

router = APIRouter(include_in_schema=False)


def _serve(path: str, name: str) -> None:
    @router.get(path)
    async def page() -> FileResponse:
        return FileResponse(FOLDER / name, headers={"cache-control": "no-cache"})


for _path, _name in PAGES.items():
    _serve(_path, _name)
