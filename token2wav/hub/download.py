"""Pull of a model from the hub: the choice of its files, and their download into its folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from token2wav.config.values import shown
from token2wav.hub.errors import TRIES, HubError, is_unreachable, reading_answer, shown_size
from token2wav.hub.tensors import NoRangesError, RemoteTensors
from token2wav.published.checkpoint_files import INDEX_ENDING, PUBLISHED, file_patterns, is_shard
from token2wav.published.registry import find_remote_family
from token2wav.published.transformers_json import CONFIG_JSON, readable_json

_DEFAULT_FILES = (CONFIG_JSON, "|".join((*PUBLISHED, "model.pth")))
_FRONT_END_FILES = ("*.yaml", "campplus.onnx", "speech_tokenizer_v*.onnx")
_MOST_CONFIG_BYTES = 1 << 20
_COMMIT = re.compile("[0-9a-f]{40}")
_CHUNK = 1 << 20  # bytes of a read of a file
_WHOLE = 0.8  # share of the needed bytes, above which a whole file is fetched, with its checksum

Part = Literal["decoder", "front_end", "config"]


@dataclass
class Pull:
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
        _say(f"{self.name}: pulling {len(needed)} files, {shown_size(size)}")
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

        if _COMMIT.fullmatch(self.revision):
            return self.revision
        file = self.base / f"ref-{self.revision.replace('/', '--')}"
        if not file.is_file():
            return None
        if not constants.HF_HUB_OFFLINE:
            try:
                with reading_answer(self.name):
                    info = HfApi().model_info(self.repo, revision=self.revision, timeout=10)
                return self._checked_commit(info.sha)
            except Exception as error:
                if not is_unreachable(error):
                    raise
        commit = file.read_text()
        return commit if _COMMIT.fullmatch(commit) else None

    def _checked_commit(self, commit: object) -> str:
        """Returns a commit that may be the name of a folder."""
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise HubError(
                f"{self.name}: the hub names the commit {shown(commit)}, expected 40 hexadecimal "
                "digits; do not trust this hub"
            )
        return commit

    def _pulled(self, commit: str) -> Path | None:
        """Returns the folder of a commit if all of its files are there."""
        marker = self.base / commit / f".{self.part}"
        if not marker.is_file():
            return None
        try:
            prefix, files = json.loads(marker.read_text())
            if not all((marker.parent / file).is_file() for file in files):
                return None  # the cache of the client was emptied
            return marker.parent / prefix
        except (ValueError, TypeError):
            return None  # the marker was not written to its end

    def _listing(self) -> dict[str, _File]:
        """Returns the files of the revision, and sets its commit."""
        from huggingface_hub import HfApi

        with reading_answer(self.name):
            info = HfApi().model_info(self.repo, revision=self.revision, files_metadata=True)
            files = {
                file.rfilename: _File(
                    int(file.size or 0), file.lfs.sha256 if file.lfs else None, file.blob_id or ""
                )
                for file in info.siblings or []
                if _is_confined(file.rfilename)
            }
        self.commit = self._checked_commit(info.sha)
        return files

    def _place(self, files: Mapping[str, _File]) -> tuple[str, Any]:
        """Finds the folder of the model in the repository: the root, or else a subfolder.

        Returns:
            The folder, such as "" or "speech_tokenizer", and the package of its family.
        """
        folders = {os.path.dirname(file) for file in files}  # noqa: PTH120 - names, not paths
        for prefix in sorted(folders, key=lambda folder: (folder.count("/"), bool(folder), folder)):
            names = {file.removeprefix(f"{prefix}/") for file in files} if prefix else set(files)
            here = {name for name in names if "/" not in name}
            config, document = str(Path(prefix) / CONFIG_JSON), dict[str, Any]()
            if config in files and files[config].size <= _MOST_CONFIG_BYTES:
                document = readable_json(self._download(config))
            if (family := find_remote_family(here, document)) is not None:
                return prefix, family
        raise HubError(f"{self.name}: not a model of a family that this project reads")

    def _needed(self, prefix: str, family: Any, files: Mapping[str, _File]) -> list[str]:
        """Returns the files to fetch.

        Each pattern of a family is a list of alternatives in order of preference.
        """
        patterns = getattr(
            family, "DOWNLOADS", (*_DEFAULT_FILES, "|".join(getattr(family, "FILES", ())))
        )
        if self.part == "front_end":
            patterns = _FRONT_END_FILES
        needed: set[str] = set()
        for alternatives in patterns:
            for pattern in filter(None, alternatives.split("|")):
                if matches := _first_matches(files, prefix, pattern):
                    needed |= set(matches)
                    break
        if self.part == "front_end" and not any(file.endswith(".onnx") for file in needed):
            raise HubError(f"{self.name}: it has no networks that make voices, as codecs have none")
        for index in [file for file in needed if file.endswith(INDEX_ENDING)]:
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
    ) -> dict[str, RemoteTensors]:
        """Returns the decoder's tensors in each file of which they are the smaller part."""
        from huggingface_hub import hf_hub_url

        tensors = {}
        for file in needed:
            prefixes = getattr(family, "WEIGHT_PREFIXES", ())
            if not prefixes or not file.endswith(".safetensors"):
                continue
            size = files[file].size
            url = hf_hub_url(self.repo, file, revision=self.commit)
            decoder = RemoteTensors(url, size, prefixes, f"{self.name}: {file}")
            try:
                found = decoder.read_header() or is_shard(Path(file).name)
                if found and decoder.part_bytes < _WHOLE * size:
                    tensors[file] = decoder
            except NoRangesError:
                _say(
                    f"{self.name}: the hub's server allows no ranges, so the whole {file} is "
                    f"fetched, {shown_size(size)}"
                )
        return tensors

    def _link(self, file: str, expected: _File, path: Path) -> None:
        """Fetches a file into the cache of the client, checks it, and makes a link to it."""
        if not (expected.sha256 or expected.blob_id):
            raise HubError(
                f"{self.name}: the hub lists no checksum of {file}, so it cannot be checked; use "
                "another hub in HF_ENDPOINT, or name a folder"
            )
        source = self._download(file)
        if expected.sha256:
            digest, checksum = hashlib.sha256(), expected.sha256
        else:  # the id of a git blob
            digest, checksum = hashlib.sha1(b"blob %d\0" % source.stat().st_size), expected.blob_id
        with source.open("rb") as content:
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
        if digest.hexdigest() != checksum:
            source.resolve().unlink()
            raise HubError(f"{self.name}: {file} has another checksum than on the hub; pull again")
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.symlink_to(source)
        draft.replace(path)

    def _download(self, file: str) -> Path:
        """Fetches a file into the cache of the client, which goes on with an interrupted one."""
        from huggingface_hub import hf_hub_download

        for pause_s in range(TRIES):
            try:
                with reading_answer(self.name):
                    return Path(hf_hub_download(self.repo, file, revision=self.commit))
            except Exception as error:
                if not is_unreachable(error):
                    raise
                time.sleep(pause_s)
        raise HubError(f"{self.name}: the connection was lost at {file}; pull again to go on")


@dataclass(frozen=True)
class _File:
    """File on the hub: its size in bytes and its checksums."""

    size: int
    sha256: str | None
    blob_id: str


def _is_confined(file: str) -> bool:
    """Returns whether the name of a file can be a path, and cannot lead out of a folder."""
    parts = file.split("/")
    return file.isprintable() and "\\" not in file and not {"", ".", ".."}.intersection(parts)


def _first_matches(files: Mapping[str, _File], prefix: str, pattern: str) -> list[str]:
    """Returns the files in a folder that match a pattern; for weights, or else their shards."""
    weights = pattern.endswith((".safetensors", ".bin"))
    for name in file_patterns(pattern) if weights else (pattern,):
        full = str(Path(prefix) / name)
        if matches := [file for file in files if _matches(file, full)]:
            return matches
    return []


def _matches(file: str, pattern: str) -> bool:
    """Returns whether the name of a file matches a pattern, in which `*` does not match `/`."""
    return file.count("/") == pattern.count("/") and fnmatchcase(file, pattern)


def _say(line: str) -> None:
    print(f"token2wav: {line}", file=sys.stderr, flush=True)
