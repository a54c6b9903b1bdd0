"""Voices: a folder with a file for each voice, which a client chooses by its name.

A voice consists of two files: `NAME.safetensors`, which `token2wav-voice create` also writes, and
`NAME.json` with the text of its recording and the time of its creation.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import re
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from token2wav_client import ClientVoice, VoiceError
from token2wav_gateway.errors import (
    BusyError,
    GatewayError,
    NotFoundError,
    RequestError,
    TooLargeError,
)
from token2wav_gateway.settings import VoiceSettings

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_LONGEST_TEXT = 1000
# Names of OpenAI's voices. Some clients send no other names.
_OPENAI_VOICES = frozenset(
    {"alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx"}
    | {"sage", "shimmer", "verse"}
)
_RECORDING_HZ = 16_000  # of recordings in requests of the recipe
_NO_RECORDING = "default"  # name of the voice of requests without a recording
_MOST_VOICES = 256  # that are remembered
_MOST_WAITING = 8  # recordings that clients have sent, each of which is in memory


@dataclass(frozen=True, eq=False)
class Voice:
    """Voice that a client has chosen.

    Attributes:
        name: name of the voice.
        text: text of the recording; empty if it is unknown.
        tensors: voice as the speech server takes it; None for a model without voices.
        created: time of creation, in seconds since 1970.
    """

    name: str
    text: str = ""
    tensors: ClientVoice | None = None
    created: int = 0

    @property
    def summary(self) -> dict[str, Any]:
        """Description for clients."""
        return {"id": self.name, "name": self.name, "text": self.text, "created_at": self.created}


class VoiceFolder:
    """Folder of voices.

    Args:
        settings: folder, and limits of new voices.
    """

    def __init__(self, settings: VoiceSettings) -> None:
        self._settings = settings
        self._listener = (
            Listener(settings.model, settings.longest_s) if settings.model is not None else None
        )
        self._creating = asyncio.Lock()  # one recording at a time: it takes all cores
        self._waiting = 0
        if settings.folder is not None:
            settings.folder.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """Returns the names of all voices, in alphabetical order.

        A file whose name no client can send is no voice.
        """
        folder = self._settings.folder
        if folder is None:
            return []
        stems = (path.stem for path in folder.glob("*.safetensors"))
        return sorted(stem for stem in stems if _NAME.fullmatch(stem))

    def get(self, name: str) -> Voice:
        """Reads a voice.

        A model without voices takes every name, because its language model may have voices of its
        own. The name of a voice of OpenAI selects the default voice, unless it has a file.

        Raises:
            NotFoundError: there is no voice with this name.
        """
        folder = self._settings.folder
        if folder is None:
            return Voice(name)
        path = folder / f"{name}.safetensors"
        if name in _OPENAI_VOICES and not path.is_file() and self._settings.default is not None:
            name = self._settings.default
            path = folder / f"{name}.safetensors"
        if not _NAME.fullmatch(name) or not path.is_file():
            known = ", ".join(self.names()[:10]) or "no voice yet"
            raise NotFoundError(f"voice: {name[:64]!r} is not one of: {known}", param="voice")
        try:
            tensors = ClientVoice.load(path)
        except VoiceError as error:
            # The message of the client contains the path, which is nothing for a caller.
            log.error("%s", error)
            raise GatewayError(f"voice {name}: its file cannot be read") from None
        return replace(self._described(path), tensors=tensors)

    def list(self) -> list[Voice]:
        """Reads the descriptions of all voices, without their tensors."""
        folder = self._settings.folder
        found = []
        for name in self.names():
            assert folder is not None
            # Another gateway may have deleted the voice meanwhile.
            with suppress(GatewayError, FileNotFoundError):
                found.append(self._described(folder / f"{name}.safetensors"))
        return found

    @staticmethod
    def _described(path: Path) -> Voice:
        """Reads the description of a voice, which a voice of `token2wav-voice` does not have.

        Raises:
            GatewayError: the description is damaged.
        """
        created = path.stat().st_mtime
        try:
            described = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            text, created = str(described["text"]), float(described["created_at"])
        except FileNotFoundError:
            text = ""
        except (ValueError, TypeError, LookupError, RecursionError):
            raise GatewayError(f"voice {path.stem}: its description is damaged") from None
        return Voice(path.stem, text, created=int(created))

    async def create(self, name: str, text: str, recording: bytes) -> Voice:
        """Makes a voice of a recording and its text, and stores it.

        Args:
            name: 1 to 64 letters, digits, `-` or `_`.
            text: words of the recording.
            recording: content of a WAV, FLAC, OGG or MP3 file.

        Raises:
            RequestError: a field is invalid, the name is taken, or the recording is unusable.
            BusyError: the folder is full, or too many recordings wait.
        """
        folder = self._settings.folder
        if folder is None or self._listener is None:
            raise RequestError("voices: this server creates no voices", param="audio_sample")
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"name: {name[:64]!r} must have 1 to 64 letters, digits, '-' or '_', and begin "
                "with a letter or digit",
                param="name",
            )
        if len(text) > _LONGEST_TEXT:
            raise TooLargeError(
                f"text: {len(text)} characters; at most {_LONGEST_TEXT} are allowed", param="text"
            )
        if self._waiting >= _MOST_WAITING:
            raise BusyError(f"voices: {_MOST_WAITING} recordings wait; try again later")
        self._waiting += 1
        try:
            async with self._creating:
                return await self._create(folder, name, text, recording)
        finally:
            self._waiting -= 1

    async def _create(self, folder: Path, name: str, text: str, recording: bytes) -> Voice:
        if name in (names := self.names()):
            raise RequestError(f"name: a voice {name!r} exists; delete it first", param="name")
        if len(names) >= self._settings.most:
            raise BusyError(f"voices: {len(names)} exist, and no more are allowed")
        tensors = await asyncio.to_thread(self._listen, recording)
        described = {"text": text, "created_at": int(time.time())}
        _write(folder / f"{name}.json", json.dumps(described).encode())
        # The voice exists from here on.
        _write(folder / f"{name}.safetensors", tensors)
        return self.get(name)

    def delete(self, name: str) -> None:
        """Deletes a voice.

        Raises:
            NotFoundError: there is no voice with this name.
        """
        folder = self._settings.folder
        if folder is None or not _NAME.fullmatch(name) or name not in self.names():
            raise NotFoundError(f"voice: there is no voice {name[:64]!r}", param="voice")
        for suffix in (".safetensors", ".json"):
            (folder / f"{name}{suffix}").unlink(missing_ok=True)

    def _listen(self, recording: bytes) -> bytes:
        """Computes the voice of a recording, and returns it as the content of a file."""
        assert self._listener is not None
        with self._listener.voice_of(recording, "audio_sample") as path:
            return path.read_bytes()


class Listener:
    """Listener to recordings, which turns them into voices by the front end of a model folder.

    Args:
        model: model folder with a speech tokenizer and `campplus.onnx`.
        longest_s: longest recording in seconds.
    """

    def __init__(self, model: Path, longest_s: float) -> None:
        self._model = model
        self._longest_s = longest_s
        self._front_end: Any = None

    @contextmanager
    def voice_of(self, recording: bytes, field: str) -> Iterator[Path]:
        """Computes the voice of a recording, and yields its file, which is deleted afterwards.

        Args:
            recording: content of a WAV, FLAC, OGG or MP3 file.
            field: name of the recording in the request, for messages.

        Raises:
            RequestError: the recording is unusable.
        """
        from token2wav_voice import FrontEnd, FrontEndError, Recording

        with tempfile.TemporaryDirectory() as folder:
            heard, made = Path(folder) / "recording", Path(folder) / "voice.safetensors"
            heard.write_bytes(recording)
            try:
                if self._front_end is None:
                    self._front_end = FrontEnd(self._model)
                loaded = Recording.load(heard)
                if loaded.seconds > self._longest_s:
                    raise RequestError(
                        f"{field}: {loaded.seconds:.1f} s; at most {self._longest_s:g} s are "
                        "allowed",
                        param=field,
                    )
                self._front_end.voice(loaded).save(made)
            except FrontEndError as error:
                reason = str(error).replace(str(heard), "the recording")
                raise RequestError(f"{field}: {reason}", param=field) from None
            yield made


class RecordedVoices:
    """Voices of recordings. The latest voices are remembered, by the samples of their recordings.

    Args:
        settings: settings of voices, which name a model folder.
    """

    def __init__(self, settings: VoiceSettings) -> None:
        assert settings.model is not None
        self._folder = VoiceFolder(settings)
        self._listener = Listener(settings.model, settings.longest_s)
        self._known: OrderedDict[str, ClientVoice] = OrderedDict()
        self._listening = asyncio.Lock()  # one recording at a time: it takes all cores

    async def of(self, recording: NDArray[np.float32] | None, text: str) -> Voice:
        """Returns the voice of a recording.

        Args:
            recording: (samples,) at 16 kHz; None for the voice `default` of the voice folder.
            text: words of the recording.

        Raises:
            RequestError: the recording is unusable, or there is neither a recording nor a default.
        """
        if recording is None:
            voice = self._folder.get(_NO_RECORDING)
            if voice.tensors is None:
                raise RequestError("reference_wav: missing; there is no default voice")
            return voice
        key = hashlib.sha256(recording.tobytes()).hexdigest()
        async with self._listening:
            if key not in self._known:
                self._known[key] = await asyncio.to_thread(self._listen, recording)
                if len(self._known) > _MOST_VOICES:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
        return Voice(key[:12], text, self._known[key])

    def _listen(self, recording: NDArray[np.float32]) -> ClientVoice:
        file = io.BytesIO()
        soundfile.write(file, recording, _RECORDING_HZ, format="WAV", subtype="FLOAT")
        with self._listener.voice_of(file.getvalue(), "reference_wav") as path:
            return ClientVoice.load(path)


def _write(path: Path, content: bytes) -> None:
    """Writes a file that is complete whenever it exists."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as draft:
        try:
            draft.write(content)
            draft.flush()
            Path(draft.name).replace(path)
        except OSError:  # for example, the disk is full
            Path(draft.name).unlink()
            raise
