"""Listener to recordings, which the front end of a model folder turns into voices."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from token2wav_client import ClientVoice
from token2wav_gateway.errors import BusyError, GatewayError, RequestError, StorageError
from token2wav_gateway.voices.memory import Memory

log = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")
_MOST_VOICES = 256  # that are remembered


class Listener:
    """Listener to recordings, one at a time, because a recording takes all cores.

    The latest voices are remembered, by their recordings.

    Args:
        model: model folder with a speech tokenizer and `campplus.onnx`, or a name.
        longest_s: longest recording in seconds.
        most_waiting: largest number of recordings that are computed or wait.
    """

    def __init__(self, model: str | Path, longest_s: float, most_waiting: float) -> None:
        self._model = model
        self._longest_s = longest_s
        self._most_waiting = most_waiting
        self._waiting = 0
        self._front_end: Any = None
        self._free = asyncio.Lock()
        self._known = Memory[bytes, tuple[str, ClientVoice]](_MOST_VOICES)  # with their ids

    async def in_turn(self, work: Callable[[], _ResultT]) -> _ResultT:
        """Runs work that calls `voice_of` in a thread, after the work of earlier callers.

        A thread cannot be stopped. If a caller is cancelled while its work runs, the next work
        waits until that work ends.

        Raises:
            BusyError: too many recordings wait.
            StorageError: the work has failed because of a disk.
        """
        if self._waiting >= self._most_waiting:
            raise BusyError(f"voices: {self._waiting} recordings wait; try again later")
        self._waiting += 1
        try:
            await self._free.acquire()
            future = asyncio.get_running_loop().run_in_executor(None, work)
            future.add_done_callback(lambda _: self._free.release())
            return await asyncio.shield(future)
        except OSError as error:
            log.error("a recording cannot be stored: %s", error)
            raise StorageError(error) from None
        finally:
            self._waiting -= 1

    async def voice(self, recording: bytes, field: str) -> ClientVoice:
        """Returns the voice of a recording at once if it is remembered, or else as `in_turn`.

        Raises as `voice_of` and `in_turn` do.
        """
        # In a thread: the hash of 16 MiB takes 30 ms, in which no other stream would get audio.
        voice = self._voice(await asyncio.to_thread(_digest, recording))
        if voice is None:
            voice = await self.in_turn(lambda: self.voice_of(recording, field))
        return voice

    def _voice(self, digest: bytes) -> ClientVoice | None:
        known = self._known.get(digest)
        return known and known[1]

    def forget(self, voice: ClientVoice) -> None:
        """Forgets a voice, whichever recording it was computed from."""
        self._known.forget(lambda _, known: known[0] == voice.id)

    def voice_of(self, recording: bytes, field: str) -> ClientVoice:
        """Returns the voice of a recording, which is computed unless it is remembered.

        Args:
            recording: content of an audio file, in a format of `Recording.load`.
            field: name of the recording in the request, for messages.

        Raises:
            RequestError: the recording is unusable.
            GatewayError: the model folder is unusable.
        """
        digest = _digest(recording)
        voice = self._voice(digest)
        if voice is None:
            voice = self._computed(recording, field)
            self._known.put(digest, (voice.id, voice))
        return voice

    def _computed(self, recording: bytes, field: str) -> ClientVoice:
        from token2wav.errors import ConfigError
        from token2wav.hub import model_folder
        from token2wav_voice import FrontEnd, ModelError, Recording, RecordingError

        with tempfile.NamedTemporaryFile() as file:
            file.write(recording)
            file.flush()
            try:
                speech = Recording.load(file.name)
            except RecordingError as error:
                reason = str(error).replace(file.name, "the recording")
                raise RequestError(f"{field}: {reason}", param=field) from None
        if speech.seconds > self._longest_s:
            raise RequestError(
                f"{field}: {speech.seconds:.1f} s; at most {self._longest_s:g} s are allowed",
                param=field,
            )
        try:
            if self._front_end is None:
                self._front_end = FrontEnd(model_folder(self._model, "front_end"))
            return ClientVoice(**vars(self._front_end.voice(speech)))
        except (ConfigError, ModelError) as error:
            log.error("%s", error)
            raise GatewayError(f"{field}: the model cannot turn it into a voice") from None


def _digest(recording: bytes) -> bytes:
    return hashlib.sha256(recording).digest()
