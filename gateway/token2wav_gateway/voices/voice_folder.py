"""Voices: a folder with a file for each voice, which a client chooses by its name.

A voice consists of two files: `NAME.safetensors`, which `token2wav voice create` also writes, and
`NAME.json` with its description. A voice of the operator needs no description.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Any

from pydantic import BaseModel, FiniteFloat
from safetensors.numpy import save

from token2wav_client import ClientVoice, VoiceError
from token2wav_client.voice import FIELDS
from token2wav_gateway.errors import (
    BusyError,
    GatewayError,
    NotAllowedError,
    NotFoundError,
    RequestError,
    StorageError,
    TooLargeError,
)
from token2wav_gateway.forms import check_length
from token2wav_gateway.settings import VoiceSettings
from token2wav_gateway.voices.listener import Listener
from token2wav_gateway.voices.memory import Memory

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
LONGEST_TEXT = 1000  # characters of the words of a recording
_LONGEST_CONSENT = 256
_LARGEST_DESCRIPTION = 1 << 16  # bytes
# Names of OpenAI's voices. Some clients send no other names.
_OPENAI_VOICES = frozenset(
    {"alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx"}
    | {"sage", "shimmer", "verse", "default"}  # the last one in requests of vLLM-Omni
)
_MOST_READ = 128  # voices that are remembered, with up to 0.5 MB each
_MOST_WAITING = 8


class Description(BaseModel):
    """Content of the file `NAME.json`; further fields of it are ignored.

    Attributes:
        text: words of the recording.
        created_at: time of creation, in seconds since 1970.
        holder: holder of the key that made the voice; None for a voice that was made without a key.
        consent: consent of the speaker, as the client named it; None if it named none.
    """

    text: str
    created_at: FiniteFloat
    holder: str | None = None
    consent: str | None = None

    @classmethod
    def of(cls, voice: Path) -> Description | None:
        """Reads the description of a voice; None if the voice has none."""
        path = voice.with_suffix(".json")
        try:
            status = path.stat()
            if not S_ISREG(status.st_mode) or status.st_size > _LARGEST_DESCRIPTION:
                raise ValueError
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise GatewayError(f"voice {voice.stem}: its description is damaged") from None


@dataclass(frozen=True, eq=False)
class Voice:
    """Voice that a client has chosen.

    Attributes:
        text: text of the recording; empty if it is unknown.
        tensors: voice as the speech server takes it; None for a model without voices.
        created: time of creation, in seconds since 1970.
        consent: consent of the speaker, as the client that made the voice named it.
    """

    name: str
    text: str = ""
    tensors: ClientVoice | None = None
    created: int = 0
    consent: str | None = None

    @property
    def summary(self) -> dict[str, Any]:
        """Description for clients."""
        fields = {
            "id": self.name,
            "name": self.name,
            "text": self.text,
            "created_at": self.created,
            "consent": self.consent,
        }
        return {name: value for name, value in fields.items() if value is not None}


class VoiceFolder:
    """Folder of voices.

    Args:
        settings: folder, and limits of new voices.
        most_waiting: largest number of recordings that are computed or wait. Each is in memory.
    """

    def __init__(self, settings: VoiceSettings, most_waiting: float = _MOST_WAITING) -> None:
        self._settings = settings
        self._listener: Listener | None = None
        if settings.model is not None:
            self._listener = Listener(settings.model, settings.longest_s, most_waiting)
        self._read = Memory[str, tuple[list[Any], Voice]](
            _MOST_READ
        )  # with stamps of its files, by name
        if settings.folder is not None:
            settings.folder.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """Returns the names of all voices, in alphabetical order.

        A file whose name no client can send is no voice.
        """
        return [path.stem for path in self._files()]

    def _files(self) -> list[Path]:
        folder = self._settings.folder
        if folder is None:
            return []
        return sorted(path for path in folder.glob("*.safetensors") if _NAME.fullmatch(path.stem))

    def get(self, name: str | None) -> Voice:
        """Reads a voice; the default voice for None and for an empty name.

        A model without voices takes every name, because its language model may have voices of its
        own. The name of an OpenAI voice selects the default voice, unless it has a file.

        Raises:
            NotFoundError: there is no voice with this name.
            RequestError: there is no default voice.
        """
        folder = self._settings.folder
        name = name or self._settings.default
        if folder is None:
            return Voice(name or "")
        if name is None:
            raise RequestError(
                "voice: missing; the gateway has no setting `voices.default`", param="voice"
            )
        path = folder / f"{name}.safetensors"
        if name in _OPENAI_VOICES and self._settings.default is not None and not _is_file(path):
            name = self._settings.default
            path = folder / f"{name}.safetensors"
        if not _NAME.fullmatch(name) or not _is_file(path):
            raise self._unknown(name)
        stamps = [_stamp(file) for file in _files(path)]
        if (known := self._read.get(name)) is None or known[0] != stamps:
            known = (stamps, self._load(path))
            self._read.put(name, known)
        return known[1]

    def _load(self, path: Path) -> Voice:
        try:
            return replace(_described(path), tensors=ClientVoice.load(path))
        except (VoiceError, OSError) as error:
            if not _is_file(path):  # deleted meanwhile
                raise self._unknown(path.stem) from None
            # The message contains the path, which is nothing for a caller.
            log.error("%s", error)
            raise GatewayError(f"voice {path.stem}: its file cannot be read") from None

    def _unknown(self, name: str) -> NotFoundError:
        known = ", ".join(self.names()[:10]) or "no voice yet"
        return NotFoundError(f"voice: {name[:64]!r} is not one of: {known}", param="voice")

    def list(self) -> list[Voice]:
        """Reads the descriptions of all voices, without their tensors.

        A voice that is damaged, or that another gateway has deleted meanwhile, is left out.
        """
        voices = []
        for path in self._files():
            with suppress(GatewayError, OSError):
                voices.append(_described(path))
        return voices

    async def create(
        self,
        name: str,
        text: str,
        recording: bytes,
        holder: str | None = None,
        consent: str | None = None,
    ) -> Voice:
        """Makes a voice of a recording and its text, and stores it.

        Args:
            name: 1 to 64 letters, digits, `-` or `_`.
            text: words of the recording.
            recording: content of an audio file, as `Recording.load` reads it.
            holder: holder of the key; None without keys.
            consent: consent of the speaker, such as the id of a document, at most 256 characters;
                None for none.

        Raises:
            RequestError: a field is invalid, the name is taken, or the recording is unusable.
            BusyError: the folder has too many voices, or too many recordings wait.
            StorageError: the disk is full, or the folder cannot be written.
        """
        folder = self._settings.folder
        if folder is None:
            raise RequestError("voices: this server creates no voices", param="audio_sample")
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"name: {name[:64]!r} must have 1 to 64 letters, digits, '-' or '_', and begin "
                "with a letter or digit",
                param="name",
            )
        _check_recording(recording, "audio_sample")
        check_length("ref_text", text, LONGEST_TEXT, TooLargeError)
        check_length("consent", consent or "", _LONGEST_CONSENT)
        path = folder / f"{name}.safetensors"
        description = Description(
            text=text, created_at=int(time.time()), holder=holder, consent=consent
        )
        listener = self._hearing("audio_sample")
        work = partial(self._create, listener, path, description, recording)
        return await listener.in_turn(work)

    async def of_recording(self, recording: bytes, text: str, field: str) -> Voice:
        """Makes a voice of a recording for one request, and writes nothing to disk.

        Args:
            recording: content of an audio file, as `Recording.load` reads it.
            text: words of the recording; empty if they are unknown.
            field: name of the recording in the request, for messages.

        Raises:
            RequestError: the recording is empty or unusable, or this gateway makes no voices.
            BusyError: too many recordings wait.
        """
        _check_recording(recording, field)
        return Voice("", text, await self._hearing(field).voice(recording, field))

    def _hearing(self, field: str) -> Listener:
        """Returns the listener. Raises RequestError if this gateway has none."""
        if self._listener is None:
            raise RequestError("voices: this server creates no voices", param=field)
        return self._listener

    def _create(
        self, listener: Listener, path: Path, description: Description, recording: bytes
    ) -> Voice:
        if path.stem in (names := self.names()):
            raise RequestError(f"name: a voice {path.stem!r} exists; delete it first", param="name")
        if len(names) >= self._settings.most:
            raise BusyError(f"voices: {len(names)} exist, and no more are allowed")
        voice = listener.voice_of(recording, "audio_sample")
        try:
            _write(path.with_suffix(".json"), description.model_dump_json().encode())
            # The voice exists from here on.
            _write(path, save({field: getattr(voice, field) for field in FIELDS}))
        except OSError as error:
            error.filename = str(path)  # for the log: a full disk names no file
            path.with_suffix(".json").unlink(missing_ok=True)
            raise
        return self.get(path.stem)

    def delete(self, name: str, holder: str | None = None) -> None:
        """Deletes a voice that was made by the same holder of a key, or by nobody without keys.

        The voice also leaves the memory of this gateway.

        The default voice, and a voice without a description, belong to the operator, who alone can
        delete their files.

        Raises:
            NotFoundError: there is no voice with this name.
            NotAllowedError: the voice was not made by this holder.
            StorageError: the folder cannot be written.
        """
        folder = self._settings.folder
        if folder is None or name not in self.names():
            raise NotFoundError(f"voice: there is no voice {name[:64]!r}", param="voice")
        path = folder / f"{name}.safetensors"
        if name == self._settings.default:
            raise NotAllowedError(
                f"voice: {name!r} is the default voice, which only the operator can delete",
                param="voice",
            )
        description = Description.of(path)
        if description is None or description.holder != holder:
            raise NotAllowedError(
                f"voice: {name!r} was not made by this client, which therefore cannot delete it",
                param="voice",
            )
        voice = None
        with suppress(GatewayError):  # a damaged file is in no memory
            voice = self.get(name).tensors
        try:
            for file in _files(path):
                file.unlink(missing_ok=True)
        except OSError as error:
            log.error("a voice cannot be deleted: %s", error)
            raise StorageError(error) from None
        self._read.forget(lambda known_name, _: known_name == name)
        if self._listener is not None and voice is not None:
            self._listener.forget(voice)


def _files(voice: Path) -> tuple[Path, Path]:
    return voice, voice.with_suffix(".json")


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Returns time, size and inode of a file, one of which changes with its content."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _check_recording(recording: bytes, field: str) -> None:
    """Raises RequestError for an empty recording, which need not wait for the listener."""
    if not recording:
        raise RequestError(f"{field}: empty; a recording is needed", param=field)


def _described(path: Path) -> Voice:
    """Reads a voice without its tensors."""
    if not _is_file(path):
        raise NotFoundError(f"voice: {path.stem!r} is no file", param="voice")
    if (description := Description.of(path)) is None:
        return Voice(path.stem, created=int(path.stat().st_mtime))
    return Voice(
        path.stem,
        description.text,
        created=int(description.created_at),
        consent=description.consent,
    )


def _is_file(path: Path) -> bool:
    """Returns whether a path is a file. `Path.is_file` raises for a folder that is closed to us."""
    with suppress(OSError):
        return path.is_file()
    return False


def _write(path: Path, content: bytes) -> None:
    """Writes a file that is complete whenever it exists."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(draft).replace(path)
    finally:
        Path(draft).unlink(missing_ok=True)
