"""Part of a `.safetensors` file on the hub: the tensors of a decoder, fetched by ranges."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from token2wav.hub.errors import TRIES, HubError, is_unreachable

_RECEIVED = 1 << 16  # bytes that a lost connection may cost
_HEADER_BYTES = 1 << 17  # first read of a safetensors file, which has the header of most files
_MOST_HEADER_BYTES = 100_000_000  # limit of the format


class NoRangesError(Exception):
    """The server answers a request for a range with the whole file."""


class RemoteTensors:
    """Tensors of a `.safetensors` file on the hub, selected by prefixes of their names.

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
            NoRangesError: the server sends no ranges.
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
        """Makes the header of the wanted tensors. Their bytes begin at `first` of the file."""
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
        """Writes the tensors as a file. An interrupted file continues at its end."""
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
        """Yields the bytes of a range. A lost connection is opened again at the next byte.

        Raises:
            NoRangesError: the server would send the whole file.
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
                        raise NoRangesError
                    total = response.headers.get("Content-Range", "").rpartition("/")[2]
                    if total != str(self._size):
                        raise HubError(
                            f"{self._name}: {total} bytes, but {self._size} are listed; pull again"
                        )
                    for chunk in response.iter_bytes(_RECEIVED):
                        start += len(chunk)
                        yield chunk
            except Exception as error:
                if not is_unreachable(error):
                    raise
                if failures >= TRIES:
                    raise HubError(
                        f"{self._name}: the connection was lost; pull again to go on"
                    ) from error
                time.sleep(failures)
            failures = failures + 1 if start == before else 0
