"""Text to speech as a Triton model, with the inputs and the output of CosyVoice's Triton recipe.

A request has a text, and a recording with its words. The service turns the recording into a voice,
asks the language model server for speech tokens, and pushes each token into the model `token2wav`.
It runs in the process of a Triton Python model.

A decoupled model sends each chunk of audio as a response of its own, and then an empty final
response. Any other model returns the audio of the whole text.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import math
import os
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from token2wav_gateway.edge.tasks import first_of
from token2wav_gateway.encoding import FLOATS, Encoder
from token2wav_gateway.errors import GatewayError, RequestError
from token2wav_gateway.forms import check_length
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import Settings, SettingsError, check_plugin, read_settings
from token2wav_gateway.speech.content import Audio, Text
from token2wav_gateway.speech.servers import Servers
from token2wav_gateway.speech.turn import Turn
from token2wav_gateway.voices.voice_folder import Voice, VoiceFolder
from token2wav_gateway.words.normaliser_worker import NORMALISERS

_SETTINGS = "TOKEN2WAV_GATEWAY"  # variable that names the settings file of the gateway
# Variable that names the gRPC endpoint of this server. The command token2wav serve sets it.
_GRPC = "TOKEN2WAV_GRPC"
# Ends instructions in the text of a recording. They replace the default ones.
_INSTRUCTIONS_END = "<|endofprompt|>"
_RECORDING_HZ = 16_000
_NO_RECORDING = "default"  # name of the voice of requests without a recording
_POLL_S = 0.05  # time between two looks at whether a request was cancelled

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RecipeText:
    """Text of a request.

    Attributes:
        reference: words of the recording; empty if they are unknown.
        recording: (samples,) recording of the voice at 16 kHz; None for the default voice.
    """

    words: str
    reference: str
    recording: NDArray[np.float32] | None


class RecipeService:
    """Service behind a Triton model. It speaks all texts in one event loop.

    Raises:
        SettingsError: the settings name no model folder for voices, or the normaliser cannot be
            imported.
    """

    def __init__(self, settings: Settings, *, decoupled: bool) -> None:
        if settings.voices.model is None:
            raise SettingsError("voices.model: missing; recordings become voices by its front end")
        check_plugin("text.normalise", settings.text.normalise, NORMALISERS)
        self._decoupled = decoupled
        self._longest_text = settings.limits.text_characters
        self._voices = VoiceFolder(settings.voices, most_waiting=math.inf)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="recipe", daemon=True)
        self._thread.start()
        self._servers: Servers = self._submit(_servers(settings)).result()

    @classmethod
    def start(cls, model_config: str) -> RecipeService:
        """Starts the service of a Triton model, with the settings that `TOKEN2WAV_GATEWAY` names.

        If the settings have no `speech_server.url`, the service uses the server that runs it.

        Args:
            model_config: JSON of the model's configuration, as Triton gives it.
        """
        _require_strings()
        path = os.environ.get(_SETTINGS)
        settings = read_settings(Path(path) if path else None)
        url, server = os.environ.get(_GRPC), settings.speech_server
        if url and "url" not in server.model_fields_set:
            server = server.model_copy(update={"url": url})
            settings = settings.model_copy(update={"speech_server": server})
        policy = json.loads(model_config).get("model_transaction_policy", {})
        return cls(settings, decoupled=bool(policy.get("decoupled")))

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Answers requests.

        Returns:
            None for a decoupled model, which sends its responses later; else a response for each
            request.
        """
        # Read at once: Triton takes the memory of the inputs back when this method returns.
        texts = [self._read(request) for request in requests]
        if self._decoupled:
            for request, text in zip(requests, texts, strict=True):
                self._submit(self._send(text, request.get_response_sender()))
            return None
        answers = [self._submit(self._answer(text)) for text in texts]
        return [answer.result() for answer in answers]

    handle = execute  # its name in entry points that were copied from an earlier repository

    def close(self) -> None:
        self._submit(self._end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _read(self, request: Any) -> RecipeText | RequestError:
        """Reads the inputs of a request, or returns the error of an input."""
        try:
            return RecipeText(
                _text(request, "target_text", self._longest_text),
                _text(request, "reference_text", self._longest_text),
                _recording(request),
            )
        except RequestError as error:
            return error

    def _submit(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _end(self) -> None:
        current = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._servers.close()

    async def _send(self, text: RecipeText | RequestError, sender: Any) -> None:
        """Sends the responses of a decoupled request."""
        try:
            await first_of(self._send_audio(text, sender), _cancelled(sender))
        except Exception as error:
            sender.send(pb_utils.InferenceResponse(error=_error(error)))
        finally:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _send_audio(self, text: RecipeText | RequestError, sender: Any) -> None:
        async with aclosing(self._audio(text)) as pieces:
            async for piece in pieces:
                sender.send(_response(piece))

    async def _answer(self, text: RecipeText | RequestError) -> Any:
        """Returns the response of a request that is not decoupled."""
        try:
            async with aclosing(self._audio(text)) as pieces:
                audio = [piece async for piece in pieces]
        except Exception as error:
            return pb_utils.InferenceResponse(error=_error(error))
        return _response(np.concatenate(audio) if audio else np.zeros(0, np.float32))

    async def _audio(
        self, text: RecipeText | RequestError
    ) -> AsyncGenerator[NDArray[np.float32], None]:
        """Yields the audio (samples,) float32 of a text in pieces."""
        if isinstance(text, RequestError):
            raise text
        if not text.words.strip():
            raise RequestError("target_text: empty; a text is needed")
        voice = await self._voice(text)
        instructions = "" if _INSTRUCTIONS_END in text.reference else None
        turn = Turn(self._servers, Text(text.words, voice, instructions), Encoder(FLOATS))
        async with aclosing(turn.events()) as events:
            async for event in events:
                if isinstance(event, Audio):
                    yield np.frombuffer(event.content, np.float32)

    async def _voice(self, text: RecipeText) -> Voice:
        if text.recording is not None:
            file = await asyncio.to_thread(_file_of, text.recording)
            return await self._voices.of_recording(file, text.reference, "reference_wav")
        voice = self._voices.get(_NO_RECORDING)
        if voice.tensors is None:
            raise RequestError("reference_wav: missing; there is no default voice")
        return voice


def _require_strings() -> None:
    """Checks that this Triton can read strings.

    The Python backend of Triton 2.51 and older does not know the layout of NumPy 2. It loses the
    bytes of arrays, and an input of strings ends the model process.
    """
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return
    probe = np.array([7, 8, 9], np.uint8)
    copy = pb_utils.Tensor.from_dlpack("probe", probe).as_numpy()
    if not np.array_equal(copy, probe):
        raise SettingsError(
            f"numpy: version {np.__version__}, with which this Triton cannot read strings; "
            "numpy<2 or a newer Triton is needed (docs/recipe.md)"
        )


async def _servers(settings: Settings) -> Servers:
    """Connects to the servers in the event loop that uses them."""
    servers = Servers(settings, Metrics())
    await servers.normaliser.start()
    return servers


def _recording(request: Any) -> NDArray[np.float32] | None:
    """Reads the recording of a request, (samples,); None if it has none."""
    tensor = pb_utils.get_input_tensor_by_name(request, "reference_wav")
    if tensor is None:
        return None
    samples = tensor.as_numpy().reshape(-1)
    length = pb_utils.get_input_tensor_by_name(request, "reference_wav_len")
    count = len(samples) if length is None else int(length.as_numpy().reshape(-1)[0])
    if not 0 < count <= len(samples):
        raise RequestError(
            f"reference_wav_len: {count}, but reference_wav has {len(samples)} samples"
        )
    if not np.isfinite(samples[:count]).all():
        raise RequestError("reference_wav: has NaN or infinite samples")
    return samples[:count].copy()


def _file_of(recording: NDArray[np.float32]) -> bytes:
    """Returns a recording as an audio file."""
    file = io.BytesIO()
    # A WAV file of floats has the time at which it was written, so it is never the same again.
    soundfile.write(file, recording, _RECORDING_HZ, format="AU", subtype="FLOAT")
    return file.getvalue()


def _text(request: Any, name: str, longest: int) -> str:
    """Reads a text of a request; empty if it has none."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return ""
    content = tensor.as_numpy().reshape(-1)[0]
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else str(content)
    except UnicodeDecodeError:
        raise RequestError(f"{name}: expected UTF-8") from None
    check_length(name, text, longest)
    return text


async def _cancelled(sender: Any) -> None:
    while not sender.is_cancelled():
        await asyncio.sleep(_POLL_S)


def _response(audio: NDArray[np.float32]) -> Any:
    return pb_utils.InferenceResponse([pb_utils.Tensor("waveform", audio[None])])


def _error(error: Exception) -> Any:
    if not isinstance(error, GatewayError):
        log.error("a request failed", exc_info=error)
    return pb_utils.TritonError(str(error) if isinstance(error, GatewayError) else "internal error")
