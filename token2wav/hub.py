"""Names of models in place of folders: `org/name`, `org/name@revision`, or an alias.

A name stands for a model on the Hugging Face Hub. Only the files that the decoder needs are
fetched, by the client `huggingface_hub` with its cache, token, endpoint and offline mode. Where the
decoder is a part of a larger `.safetensors` file, only its tensors are fetched, by ranges. The
folder of a pulled model is in `HF_HOME/token2wav`: links to the files in the cache of the client,
and files with the tensors of a decoder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from token2wav.config.transformers_json import CONFIG_JSON, INDEX
from token2wav.errors import ConfigError
from token2wav.families.registry import find_remote_family
from token2wav.known_models import known_models

_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_DEFAULT_FILES = (CONFIG_JSON, f"model.safetensors|{INDEX}|pytorch_model.bin|model.pth")
_FRONT_END_FILES = ("*.yaml", "campplus.onnx", "speech_tokenizer_v*.onnx")
_MOST_CONFIG_BYTES = 1 << 20
_CHUNK = 1 << 20  # bytes of a read of a file
_RECEIVED = 1 << 16  # bytes that a lost connection may cost
_HEADER_BYTES = 1 << 17  # first read of a safetensors file, which has the header of most files
_MOST_HEADER_BYTES = 100_000_000  # limit of the format
_TRIES = 5  # connections without a new byte, before a range is given up
_WHOLE = 0.8  # share of the needed bytes, above which a whole file is fetched, with its checksum


class HubError(ConfigError):
    """A model cannot be pulled. The message names the model, the reason and a remedy."""


Part = Literal["decoder", "front_end", "config"]
MODEL_HELP = "model folder, or a name: org/name, org/name@revision, or an alias"


def model_folder(model: str | Path, part: Part = "decoder") -> Path:
    """Returns the folder of a model, which is pulled first if `model` is a name.

    A folder that exists is preferred to a name. A text that can be no name is returned as a path.

    Args:
        model: path of a model folder, `org/name`, `org/name@revision`, or an alias.
        part: files that are needed: those of the decoder, those that make voices and tokens from
            recordings, or the configuration of the decoder.

    Raises:
        HubError: the model cannot be pulled.
    """
    text = str(model)
    if Path(model).is_dir() or not (name := _name(text)):
        return Path(model)
    return pull(*name, part)


def _name(text: str) -> tuple[str, str] | None:
    """Returns repository and revision of a name; None if the text can only be a path."""
    alias, _, revision = text.partition("@")
    for known in known_models():
        if known.alias == alias:
            return known.repo, revision or "main"
    match = _NAME.fullmatch(text)
    if match is None or text.startswith("."):
        return None
    return match["repo"], match["revision"] or "main"


def pull(repo: str, revision: str = "main", part: Part = "decoder") -> Path:
    """Fetches what is missing of a model, checks it, and returns its folder.

    Files of one commit are fetched once. If the hub cannot be reached, the commit that the revision
    had at the last pull is used.

    Args:
        repo: name on the hub, `org/name`.
        revision: branch, tag or commit.
        part: as in `model_folder`.

    Raises:
        HubError: the model cannot be pulled.
    """
    try:
        import huggingface_hub  # noqa: F401 - imported here, because paths need no hub
    except ModuleNotFoundError:
        raise HubError(
            f"{repo}: no such folder here, and a model of the hub needs huggingface_hub; run: "
            "pip install 'token2wav[hub]'"
        ) from None
    from filelock import FileLock
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    base = Path(constants.HF_HOME) / "token2wav" / repo.replace("/", "--")
    name = repo if revision == "main" else f"{repo}@{revision}"
    task = _Pull(repo, revision, name, base, part)
    with _sentences(name):
        if folder := task.pulled_folder():  # which may be on a volume that can only be read
            return folder
        if constants.HF_HUB_OFFLINE:
            raise OfflineModeIsEnabled
        base.mkdir(parents=True, exist_ok=True)
        with FileLock(base / ".lock"):  # a second process waits, and finds the files
            return task.run()


@dataclass
class _Pull:
    """One pull of a model, under the lock of its folder."""

    repo: str
    revision: str
    name: str
    base: Path
    part: Part
    commit: str = ""

    def run(self) -> Path:
        """Fetches what is missing, and returns the folder of the model."""
        files = self._listing()
        if folder := self._pulled(self.commit):
            return folder
        prefix, family = self._place(files)
        needed = self._needed(prefix, family, files)
        target = self.base / self.commit
        tensors = self._tensors(needed, family, files)
        size = sum(
            tensors[file].part_bytes if file in tensors else files[file].size for file in needed
        )
        _say(f"{self.name}: pulling {len(needed)} files, {_shown(size)}")
        for file in needed:
            path = target / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if file in tensors:
                tensors[file].save(path)
            else:
                self._link(file, files[file], path)
        (target / f".{self.part}").write_text(json.dumps([prefix, needed]))
        (self.base / f"ref-{self.revision.replace('/', '--')}").write_text(self.commit)
        return target / prefix

    def pulled_folder(self) -> Path | None:
        """Returns the folder of the model if it was pulled, and has not changed on the hub."""
        commit = self._commit_at_last_pull()
        return self._pulled(commit) if commit else None

    def _commit_at_last_pull(self) -> str | None:
        """Returns the commit to use without asking the hub; None if the hub is to be asked."""
        from huggingface_hub import HfApi, constants

        if re.fullmatch("[0-9a-f]{40}", self.revision):
            return self.revision
        file = self.base / f"ref-{self.revision.replace('/', '--')}"
        if not file.is_file():
            return None
        if not constants.HF_HUB_OFFLINE:
            try:
                return HfApi().model_info(self.repo, revision=self.revision, timeout=10).sha
            except Exception as error:
                if not _unreachable(error):
                    raise
        return file.read_text()

    def _pulled(self, commit: str) -> Path | None:
        """Returns the folder of a commit if all of its files are there."""
        marker = self.base / commit / f".{self.part}"
        if not marker.is_file():
            return None
        prefix, files = json.loads(marker.read_text())
        if not all((marker.parent / file).is_file() for file in files):
            return None  # the cache of the client was emptied
        return marker.parent / prefix

    def _listing(self) -> dict[str, _File]:
        """Returns the files of the revision, and sets its commit."""
        from huggingface_hub import HfApi

        info = HfApi().model_info(self.repo, revision=self.revision, files_metadata=True)
        self.commit = str(info.sha)
        return {
            file.rfilename: _File(
                file.size or 0, file.lfs.sha256 if file.lfs else None, file.blob_id or ""
            )
            for file in info.siblings or []
            if ".." not in Path(file.rfilename).parts and not file.rfilename.startswith("/")
        }

    def _place(self, files: Mapping[str, _File]) -> tuple[str, Any]:
        """Finds the folder of the model in the repository: the root, or else a subfolder.

        Returns:
            The folder, such as "" or "speech_tokenizer", and the package of its family.
        """
        folders = {os.path.dirname(file) for file in files}  # noqa: PTH120 - names, not paths
        for prefix in sorted(folders, key=lambda folder: (folder.count("/"), bool(folder), folder)):
            names = {file.removeprefix(f"{prefix}/") for file in files} if prefix else set(files)
            here = {name for name in names if "/" not in name}
            document: dict[str, Any] = {}
            config = str(Path(prefix) / CONFIG_JSON)
            if config in files and files[config].size <= _MOST_CONFIG_BYTES:
                try:
                    document = json.loads(self._download(config).read_text("utf-8"))
                except ValueError:
                    document = {}
            if (family := find_remote_family(here, document)) is not None:
                return prefix, family
        raise HubError(f"{self.name}: not a model of a family that this project reads")

    def _needed(self, prefix: str, family: Any, files: Mapping[str, _File]) -> list[str]:
        """Returns the files to fetch.

        Each pattern of a family is a list of alternatives in order of preference.
        """
        patterns = getattr(family, "DOWNLOADS", (*_DEFAULT_FILES, "|".join(family.FILES)))
        if self.part == "front_end":
            patterns = _FRONT_END_FILES
        needed: set[str] = set()
        for alternatives in patterns:
            for pattern in filter(None, alternatives.split("|")):
                full = str(Path(prefix) / pattern)
                if matches := [file for file in files if _matches(file, full)]:
                    needed |= set(matches)
                    break
        index = str(Path(prefix) / INDEX)
        if index in needed:
            needed |= self._shards(prefix, family, index, files)
        if self.part == "config":
            needed = {file for file in needed if files[file].size <= _MOST_CONFIG_BYTES}
        return sorted(needed)

    def _shards(self, prefix: str, family: Any, index: str, files: Mapping[str, _File]) -> set[str]:
        """Returns the shards with tensors of the decoder, by the index of the weights."""
        prefixes = tuple(getattr(family, "WEIGHT_PREFIXES", ("",)))
        try:
            document = json.loads(self._download(index).read_text("utf-8"))
            shards = {
                str(Path(prefix) / shard)
                for name, shard in document["weight_map"].items()
                if name.startswith(prefixes)
            }
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise HubError(f"{self.name}: {index} is not an index of weights") from None
        if missing := sorted(shards - files.keys()):
            raise HubError(f"{self.name}: {missing[0]} is missing, but {index} names it")
        return shards

    def _tensors(
        self, needed: Sequence[str], family: Any, files: Mapping[str, _File]
    ) -> dict[str, _Tensors]:
        """Returns the decoder's tensors in each file of which they are the smaller part."""
        from huggingface_hub import hf_hub_url

        tensors = {}
        for file in needed:
            prefixes = getattr(family, "WEIGHT_PREFIXES", ())
            if not prefixes or not file.endswith(".safetensors"):
                continue
            size = files[file].size
            url = hf_hub_url(self.repo, file, revision=self.commit)
            decoder = _Tensors(url, size, prefixes, f"{self.name}: {file}")
            try:
                if decoder.read_header() and decoder.part_bytes < _WHOLE * size:
                    tensors[file] = decoder
            except _NoRangesError:
                _say(
                    f"{self.name}: the hub's server allows no ranges, so the whole {file} is "
                    f"fetched, {_shown(size)}"
                )
        return tensors

    def _link(self, file: str, expected: _File, path: Path) -> None:
        """Fetches a file into the cache of the client, checks it, and makes a link to it."""
        source = self._download(file)
        if expected.sha256 is not None:
            digest, checksum = hashlib.sha256(), expected.sha256
        else:  # the id of a git blob
            digest, checksum = hashlib.sha1(b"blob %d\0" % source.stat().st_size), expected.blob_id
        with source.open("rb") as content:
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
        if checksum and digest.hexdigest() != checksum:
            source.resolve().unlink()
            raise HubError(f"{self.name}: {file} has another checksum than on the hub; pull again")
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.symlink_to(source)
        draft.replace(path)

    def _download(self, file: str) -> Path:
        """Fetches a file into the cache of the client, which goes on with an interrupted one."""
        from huggingface_hub import hf_hub_download

        for pause_s in range(_TRIES):
            try:
                return Path(hf_hub_download(self.repo, file, revision=self.commit))
            except Exception as error:
                if not _unreachable(error):
                    raise
                time.sleep(pause_s)
        raise HubError(f"{self.name}: the connection was lost at {file}; pull again to go on")


@dataclass(frozen=True)
class _File:
    """File on the hub: its size in bytes and its checksums."""

    size: int
    sha256: str | None
    blob_id: str


class _Tensors:
    """Tensors of a `.safetensors` file on the hub whose names begin with one of some prefixes.

    Args:
        size: size of the file on the hub, in bytes.
        name: name of the file, for messages.
    """

    def __init__(self, url: str, size: int, prefixes: Sequence[str], name: str) -> None:
        self._url, self._size, self._prefixes, self._name = url, size, tuple(prefixes), name
        self._header = b""
        self._spans: list[tuple[int, int]] = []  # in the file on the hub

    @property
    def part_bytes(self) -> int:
        """Size of a file with these tensors alone."""
        return len(self._header) + sum(stop - start for start, stop in self._spans)

    def read_header(self) -> bool:
        """Reads where the tensors are, and returns whether there are any.

        Raises:
            _NoRangesError: the server sends no ranges.
        """
        first = b"".join(self._range(0, min(self._size, _HEADER_BYTES)))
        length = int.from_bytes(first[:8], "little")
        no_header = HubError(f"{self._name}: not a safetensors file")
        if length > min(self._size - 8, _MOST_HEADER_BYTES):
            raise no_header
        if length + 8 > len(first):
            first += b"".join(self._range(len(first), length + 8))
        try:
            return self._choose(json.loads(first[8 : length + 8]), length + 8)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise no_header from None

    def _choose(self, header: dict[str, Any], first: int) -> bool:
        """Makes the header of the wanted tensors, whose bytes begin at `first` of the file."""
        entries = {
            name: entry
            for name, entry in header.items()
            if name.startswith(self._prefixes) and name != "__metadata__"
        }
        new, offset = {}, 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            if not 0 <= start <= stop <= self._size - first:
                raise ValueError(f"{name} is outside the file")
            new[name] = {**entry, "data_offsets": [offset, offset + stop - start]}
            offset += stop - start
            start, stop = start + first, stop + first
            if self._spans and self._spans[-1][1] == start:
                self._spans[-1] = (self._spans[-1][0], stop)
            else:
                self._spans.append((start, stop))
        text = json.dumps(new, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        return bool(entries)

    def save(self, path: Path) -> None:
        """Writes the tensors as a file. An interrupted one goes on where it ended."""
        from huggingface_hub.utils import tqdm

        if path.is_file() and not path.is_symlink() and path.stat().st_size == self.part_bytes:
            return
        draft = path.with_name(f"{path.name}.part")
        if not draft.is_file() or draft.stat().st_size < len(self._header):
            draft.write_bytes(self._header)
        done = draft.stat().st_size
        with (
            draft.open("ab") as file,
            tqdm(
                total=self.part_bytes, initial=done, unit="B", unit_scale=True, desc=path.name
            ) as bar,
        ):
            skipped = done - len(self._header)
            for start, stop in self._spans:
                if skipped >= stop - start:
                    skipped -= stop - start
                    continue
                for chunk in self._range(start + skipped, stop):
                    file.write(chunk)
                    bar.update(len(chunk))
                skipped = 0
        draft.replace(path)

    def _range(self, start: int, stop: int) -> Iterator[bytes]:
        """Yields the bytes of a range. A lost connection is opened again where it ended.

        Raises:
            _NoRangesError: the server would send the whole file.
        """
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        failures = 0
        while start < stop:
            before = start
            headers = build_hf_headers() | {"Range": f"bytes={start}-{stop - 1}"}
            try:
                # It must not repeat a request after a part of the answer has been used.
                with http_stream_backoff(
                    "GET", self._url, headers=headers, timeout=30, retry_on_exceptions=()
                ) as response:
                    hf_raise_for_status(response)
                    if response.status_code != 206:
                        raise _NoRangesError
                    total = response.headers.get("Content-Range", "").rpartition("/")[2]
                    if total != str(self._size):
                        raise HubError(
                            f"{self._name}: {total} bytes, but {self._size} are listed; pull again"
                        )
                    for chunk in response.iter_bytes(_RECEIVED):
                        start += len(chunk)
                        yield chunk
            except Exception as error:
                if not _unreachable(error):
                    raise
                if failures >= _TRIES:
                    raise HubError(
                        f"{self._name}: the connection was lost; pull again to go on"
                    ) from error
                time.sleep(failures)
            failures = failures + 1 if start == before else 0


class _NoRangesError(Exception):
    """The server answers a request for a range with the whole file."""


def _matches(file: str, pattern: str) -> bool:
    """Returns whether the name of a file matches a pattern, in which `*` does not match `/`."""
    return file.count("/") == pattern.count("/") and fnmatchcase(file, pattern)


def _unreachable(error: BaseException) -> bool:
    """Returns whether an error says that the connection failed, not that the hub refused."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return True
    transport = HfHubHTTPError.__bases__[0]  # the error of the HTTP library that the client uses
    return isinstance(error, transport) and not isinstance(error, HfHubHTTPError)


@contextmanager
def _sentences(name: str) -> Iterator[None]:
    """Turns the errors of the client into a HubError of one sentence."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    try:
        yield
    except HubError:
        raise
    except GatedRepoError as error:
        raise HubError(
            f"{name}: gated; ask for access at {hub}/{name.partition('@')[0]}, then set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(f"{name}: the model has no such revision") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"{name}: no such folder here, and no such model on {hub}, or a private one: then set "
            "HF_TOKEN"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reasons = {
            401: "the token was refused; correct HF_TOKEN, or unset it for a public model",
            403: "the token gives no access to this model; use another in HF_TOKEN",
            429: "too many requests; wait some minutes, or set HF_TOKEN for a higher limit",
        }
        reason = reasons.get(status, f"the hub answered with status {status}; try again later")
        raise HubError(f"{name}: {hub}: {reason}") from error
    except Exception as error:
        if _unreachable(error):
            offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "cannot be reached"
            raise HubError(
                f"{name}: not pulled yet, and {hub} {offline}; pull the model where there is a "
                "network, or name a folder"
            ) from error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(constants.HF_HOME).free
            raise HubError(
                f"{name}: the disk is full ({_shown(free)} free); make room, or set HF_HOME to "
                "another disk"
            ) from error
        if isinstance(error, OSError):
            reason = " ".join(str(error).split())[:200]
            raise HubError(f"{name}: cannot be pulled: {reason}") from error
        raise


def _shown(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _say(line: str) -> None:
    print(f"token2wav: {line}", file=sys.stderr, flush=True)
