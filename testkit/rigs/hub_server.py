"""HTTP server on this machine that answers the real client `huggingface_hub` as the hub does.

Large files (LFS) are redirected to another host name, as to the hub's content network. A test can
make the server refuse ranges, drop connections, or answer with an error.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".pt", ".pth", ".onnx", ".nemo", ".bin")
COMMIT = "1" * 40


@dataclass
class HubServer:
    """Hub with the models in a folder, `ORG/NAME/...`.

    Attributes:
        token: access token that private and gated models need; a request with another is refused.
        private, gated: names of models.
        ranges: whether requests for ranges are answered with ranges.
        drop_after: bytes of a large file after which the connection is lost; None for never.
        status: error with which every request of the API is answered; 0 for none.
        corrupt: whether a byte of every large file is changed on its way.
        answer: fields that replace those of a hostile hub's answer about a model.
        raw: whole answer about a model, in place of the usual one.
        unlisted: fields that the answer lacks for every file.
        sent: bytes of files that were sent.
        tokens_at_storage: tokens that reached the host of large files.
    """

    root: Path
    token: str = "hf_good"
    private: frozenset[str] = frozenset()
    gated: frozenset[str] = frozenset()
    ranges: bool = True
    drop_after: int | None = None
    drops_left: int = 1
    status: int = 0
    corrupt: bool = False
    answer: dict[str, Any] = field(default_factory=dict)
    raw: bytes = b""
    unlisted: tuple[str, ...] = ()
    checksums: dict[str, str] = field(default_factory=dict)
    sent: int = 0
    requests: list[str] = field(default_factory=list)
    tokens_at_storage: list[str] = field(default_factory=list)

    @classmethod
    @contextmanager
    def start(cls, root: Path, **options: Any) -> Iterator[HubServer]:
        hub = cls(root, **options)
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
        server.daemon_threads = True
        hub.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    port: int = 0

    @cached_property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def storage(self) -> str:
        return f"http://localhost:{self.port}/storage"

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Returns the variables of a client of this hub, with its cache in a folder."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **more}

    def sha256(self, path: Path) -> str:
        """Returns the listed checksum of a file."""
        name = path.relative_to(self.root).as_posix()
        if name not in self.checksums:
            self.checksums[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return self.checksums[name]


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        kind, *parts = path.strip("/").split("/")
        if kind == "storage":
            self.hub.tokens_at_storage += filter(None, [self.headers.get("authorization")])
            self._content(self.hub.root / "/".join(parts), {})
        elif self.hub.status:
            self._error(self.hub.status, headers={"Retry-After": "0"})
        elif kind == "api":
            repo, revision = "/".join(parts[1:3]), parts[4] if len(parts) > 4 else "main"
            if self._allowed(repo, revision, api=True):
                self._json(self._info(repo), self.hub.raw)
        else:
            repo, revision, file = f"{kind}/{parts[0]}", parts[2], "/".join(parts[3:])
            if self._allowed(repo, revision, api=False):
                self._resolve(repo, file)

    def _allowed(self, repo: str, revision: str, *, api: bool) -> bool:
        token = self.headers.get("authorization")
        if token not in (None, f"Bearer {self.hub.token}"):
            self._error(401, message="Invalid credentials in Authorization header")
        elif not (self.hub.root / repo).is_dir() or (repo in self.hub.private and token is None):
            self._error(401 if token is None else 404, "RepoNotFound", "Repository not found")
        elif revision not in ("main", "v1", COMMIT):
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif repo in self.hub.gated and not api and token is None:
            self._error(401, "GatedRepo", f"Access to model {repo} is restricted")
        else:
            return True
        return False

    def _info(self, repo: str) -> dict[str, Any]:
        siblings = []
        for path in sorted((self.hub.root / repo).rglob("*")):
            if not path.is_file():
                continue
            name, size = path.relative_to(self.hub.root / repo).as_posix(), path.stat().st_size
            sibling: dict[str, Any] = {"rfilename": name, "size": size, "blobId": "0" * 40}
            if path.suffix in LARGE:
                sibling["lfs"] = {"sha256": self.hub.sha256(path), "size": size, "pointerSize": 130}
            else:
                sibling["blobId"] = _git_id(path)
            siblings.append(sibling)
        for sibling in siblings:
            for unlisted in self.hub.unlisted:
                sibling.pop(unlisted, None)
        info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}
        return info | self.hub.answer

    def _resolve(self, repo: str, file: str) -> None:
        path = self.hub.root / repo / file
        if not path.is_file():
            self._error(404, "EntryNotFound", f"{file} does not exist")
        elif path.suffix in LARGE:
            checksum = self.hub.sha256(path)
            self.send_response(302)
            self.send_header("Location", f"{self.hub.storage}/{repo}/{file}")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Linked-Size", str(path.stat().st_size))
            self.send_header("X-Linked-ETag", f'"{checksum}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._content(path, {"X-Repo-Commit": COMMIT, "ETag": f'"{_git_id(path)}"'})

    def _content(self, path: Path, headers: dict[str, str]) -> None:
        size = path.stat().st_size
        start, stop, status = 0, size, 200
        byte_range = self.headers.get("range")
        if byte_range and self.hub.ranges:
            first, _, last = byte_range.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), min(size, int(last) + 1) if last else size, 206
            headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(stop - start)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with path.open("rb") as file:
            file.seek(start)
            while start < stop:
                piece = file.read(min(1 << 18, stop - start))
                if self.hub.corrupt and path.suffix in LARGE:
                    piece = bytes([piece[0] ^ 1]) + piece[1:]
                after = self.hub.drop_after
                if after is not None and start >= after and self.hub.drops_left > 0:
                    self.hub.drops_left -= 1
                    self.close_connection = True
                    return
                self.wfile.write(piece)
                start += len(piece)
                self.hub.sent += len(piece)

    def _json(self, document: object, raw: bytes = b"") -> None:
        content = raw or json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _error(
        self, status: int, code: str = "", message: str = "", headers: dict[str, str] | None = None
    ) -> None:
        content = json.dumps({"error": message}).encode()
        self.send_response(status)
        for name, value in (("X-Error-Code", code), ("X-Error-Message", message)):
            if value:
                self.send_header(name, value)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _git_id(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
