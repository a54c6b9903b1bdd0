"""Speech synthesis of NVIDIA Riva: its gRPC messages become texts of the gateway.

The messages and the base class come from the package `nvidia-riva-client`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from typing import Any

import grpc
from riva.client.proto.riva_audio_pb2 import AudioEncoding
from riva.client.proto.riva_tts_pb2 import (
    RivaSynthesisConfigResponse,
    SynthesizeSpeechRequest,
    SynthesizeSpeechResponse,
)
from riva.client.proto.riva_tts_pb2_grpc import RivaSpeechSynthesisServicer

from token2wav_gateway.doors.requests import code_of_language, name_of_language
from token2wav_gateway.encoding import FORMATS, RATE_HZ
from token2wav_gateway.errors import RequestError, TooLargeError
from token2wav_gateway.gateway import Caller, Gateway
from token2wav_gateway.speech.content import Audio, Ended, Text, Words
from token2wav_gateway.voices.voice_folder import Voice

# Names of `encoding.FORMATS`. Riva's clients send LINEAR_PCM if their user chooses nothing.
_FORMATS = {
    AudioEncoding.ENCODING_UNSPECIFIED: "pcm",
    AudioEncoding.LINEAR_PCM: "pcm",
    AudioEncoding.OGGOPUS: "opus",
    AudioEncoding.MULAW: "pcmu",
    AudioEncoding.ALAW: "pcma",
}
_INSTRUCTIONS = "instructions"
_END_REASON = "end-reason"
_PROMPT = "zero_shot_data.audio_prompt"


def key_of(metadata: Any) -> str | None:
    """Returns the header `authorization` of a call; None if the call has none."""
    values = [value for name, value in metadata or () if name == "authorization"]
    return str(values[0]) if values else None


class RivaSpeech(RivaSpeechSynthesisServicer):  # type: ignore[misc]
    """Service `nvidia.riva.tts.RivaSpeechSynthesis` of a gateway.

    `riva_server.Guard` admits and bounds the calls, and turns errors of the gateway into gRPC
    statuses.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Synthesize(  # noqa: N802
        self, request: SynthesizeSpeechRequest, context: grpc.aio.ServicerContext
    ) -> SynthesizeSpeechResponse:
        """Says a text, and returns the audio as a whole."""
        whole = SynthesizeSpeechResponse()
        async with aclosing(self._say(request, context)) as responses:
            audio = []
            async for response in responses:
                audio.append(response.audio)
                response.audio = b""
                whole.MergeFrom(response)
        whole.audio = b"".join(audio)
        return whole

    async def SynthesizeOnline(  # noqa: N802
        self,
        requests: AsyncIterable[SynthesizeSpeechRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncGenerator[SynthesizeSpeechResponse, None]:
        """Says the texts of a stream one after the other, and yields the audio as it is made."""
        async for request in requests:
            async with aclosing(self._say(request, context)) as responses:
                async for response in responses:
                    yield response

    async def GetRivaSynthesisConfig(  # noqa: N802
        self, request: Any, context: grpc.aio.ServicerContext
    ) -> RivaSynthesisConfigResponse:
        """Lists the voices, in the form that Riva's clients read.

        Riva's clients and Pipecat send no key with this call. Without a key, it lists no voices.
        """
        gateway = self._gateway
        model = request.model_name or gateway.settings.models[0]
        gateway.check_model(model)
        known = not gateway.settings.keys or key_of(context.invocation_metadata()) is not None
        names = gateway.voices.names() if known else []
        response = RivaSynthesisConfigResponse()
        config = response.model_config.add(model_name=model)
        config.parameters["voice_name"] = gateway.settings.models[0]
        config.parameters["subvoices"] = ",".join(f"{n}:{i}" for i, n in enumerate(names))
        config.parameters["sample_rate"] = str(RATE_HZ)
        return response

    async def _say(
        self, request: SynthesizeSpeechRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[SynthesizeSpeechResponse, None]:
        """Yields the audio of a request; the first response repeats the text.

        If the client asks for the times of the words, responses without audio have them.
        If a limit of a server ends the speech, the trailing metadata of the call say so.
        """
        text, audio_format, rate_hz = await self._checked(request)
        metadata = dict(context.invocation_metadata() or ())
        caller = Caller(self._gateway, metadata, self._gateway.access.everybody)
        turn = caller.turn(
            text, audio_format, rate_hz, mono=True, words=request.enable_word_time_offsets
        )
        response = SynthesizeSpeechResponse()
        response.meta.text = request.text
        response.meta.processed_text = await turn.spoken_text()
        async with aclosing(turn.events()) as events:
            async for event in events:
                if isinstance(event, Audio):
                    response.audio = event.content
                elif isinstance(event, Words):
                    for word in event.times or ():
                        response.meta.words.add(
                            word=word["word"], start_time=word["start_ms"], end_time=word["end_ms"]
                        )
                else:
                    if isinstance(event, Ended) and event.reason is not None:
                        context.set_trailing_metadata(((_END_REASON, event.reason),))
                    continue
                if request.HasField("id"):
                    response.id.CopyFrom(request.id)
                yield response
                response = SynthesizeSpeechResponse()

    async def _checked(self, request: SynthesizeSpeechRequest) -> tuple[Text, str, int]:
        """Checks a request, before its text is spoken. Returns the text, and the
        format and the rate of its audio.
        """
        limits, recording = self._gateway.settings.limits, len(request.zero_shot_data.audio_prompt)
        if request.ByteSize() - recording > limits.body_bytes:
            raise TooLargeError(f"request: larger than {limits.body_bytes} bytes")
        if recording > limits.upload_bytes:
            raise TooLargeError(f"{_PROMPT}: larger than {limits.upload_bytes} bytes")
        audio_format = _FORMATS.get(request.encoding)
        if audio_format is None:
            names = {code: name for name, code in AudioEncoding.items()}
            raise RequestError(
                f"encoding: {names.get(request.encoding, request.encoding)} is not one of "
                "LINEAR_PCM, OGGOPUS, MULAW, ALAW",
                param="encoding",
            )
        rate_hz = request.sample_rate_hz or FORMATS[audio_format].rate_hz
        try:
            FORMATS[audio_format].check_rate(rate_hz)
        except ValueError as error:
            raise RequestError(f"sample_rate_hz: {error}", param="sample_rate_hz") from None
        if request.custom_dictionary:
            raise RequestError(
                "custom_dictionary: not supported; the language model decides the pronunciation",
                param="custom_dictionary",
            )
        for name in request.custom_configuration:
            if name != _INSTRUCTIONS:
                raise RequestError(
                    f"custom_configuration: {name[:64]!r} is not a known key; the only one is "
                    f"{_INSTRUCTIONS!r}",
                    param="custom_configuration",
                )
        try:
            code = code_of_language(request.language_code or "auto")
        except ValueError as error:
            raise RequestError(f"language_code: {error}", param="language_code") from None
        # Riva's clients send en-US if their user chooses nothing.
        language = name_of_language(None if code == "en" else code)
        instructions = dict(request.custom_configuration).get(_INSTRUCTIONS)
        if not request.text.strip():  # before a recording is heard
            raise RequestError("text: empty; a text is needed", param="text")
        voice = await self._voice_of(request)
        request.zero_shot_data.ClearField("audio_prompt")  # megabytes, while the text is spoken
        text = Text(request.text, voice, instructions, language=language)
        return text, audio_format, rate_hz

    async def _voice_of(self, request: SynthesizeSpeechRequest) -> Voice:
        settings, prompt = self._gateway.settings, request.zero_shot_data
        # Riva's clients list voices as MODEL.VOICE. No voice of a folder has a point in its name.
        name = request.voice_name.removeprefix(f"{settings.models[0]}.") or settings.voices.default
        if not (prompt.audio_prompt or name or settings.voices.folder is None):
            raise RequestError(
                "voice_name: empty, and the gateway has no setting `voices.default`",
                param="voice_name",
            )
        return await self._gateway.voice_of(
            name,
            prompt.audio_prompt or None,
            prompt.transcript,
            recording_field=_PROMPT,
            text_field="zero_shot_data.transcript",
        )
