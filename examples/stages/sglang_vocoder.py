"""Vocoder of SGLang-Omni's Qwen3-TTS that decodes on a token2wav server.

The last stage of the pipeline names `create_vocoder` as its factory:

    StageConfig(
        name="vocoder",
        process="pipeline",
        factory_path="sglang_vocoder.create_vocoder",
        factory={"url": "127.0.0.1:8001", "sample_rate": 24000},
        terminal=True,
        can_accept_stream_before_payload=True,
    )

The stage needs no GPU, so the configuration names no GPU. For another model, change
`latch_stream_contract` and `_whole`: these methods read the fields that the talker sends beside the
codes. Align codes in a delay pattern first, with `token2wav_client.CodeAligner`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang_omni.proto import StagePayload
from sglang_omni.scheduling.streaming_vocoder import StreamingVocoderBase
from sglang_omni.utils.audio_payload import audio_waveform_payload

from token2wav_client import Client, ClientError, Utterance, UtteranceClosedError


def create_vocoder(url: str, sample_rate: int, voice: str | None = None) -> Token2WavVocoder:
    """Creates the stage.

    Args:
        url: host:port of the server's gRPC interface.
        sample_rate: samples per second of the model on the server.
        voice: name or id of a voice of the server; None for a codec.
    """
    return Token2WavVocoder(url, sample_rate, voice)


@dataclass
class _Speech:
    """State of a request.

    Attributes:
        unheard_frames: number of frames of the reference recording. The codes of a request begin
            with these frames, and the stage drops their audio.
        heard: whether the last audio has arrived.
        ended: whether the last codes have arrived.
    """

    utterance: Utterance
    unheard_frames: int = 0
    heard: bool = False
    ended: bool = False


class Token2WavVocoder(StreamingVocoderBase[_Speech, None]):  # type: ignore[misc]
    """Stage that opens an utterance on the server for each request, and forwards the audio.

    A thread for each request waits for the audio, so that the stage forwards a chunk as soon as the
    chunk arrives, and not with the next codes.
    """

    def __init__(self, url: str, sample_rate: int, voice: str | None) -> None:
        self._client = Client(url)
        self._voice = voice
        super().__init__(self._whole, sample_rate=sample_rate, stream_source_hint="token2wav")

    def create_stream_state(self, request_id: str) -> _Speech:
        speech = _Speech(self._client.open(self._voice))
        # A daemon, so that a server that does not answer cannot keep the stage alive.
        threading.Thread(target=self._listen, args=(request_id, speech), daemon=True).start()
        return speech

    def latch_stream_contract(
        self,
        request_id: str,
        state: _Speech,
        source: StagePayload | Mapping[str, Any],
        *,
        origin: str,
    ) -> None:
        if origin == "stream metadata" and "ref_code_len" in source:
            state.unheard_frames = int(source["ref_code_len"])

    def validate_chunk(self, request_id: str, state: _Speech, codes: torch.Tensor) -> torch.Tensor:
        if codes.ndim not in (1, 2):
            raise ValueError(f"codes of {request_id}: shape {tuple(codes.shape)}, expected (N, K)")
        return codes.reshape(-1, codes.shape[-1])

    def ingest(self, request_id: str, state: _Speech, codes: torch.Tensor) -> None:
        # The server refuses codes after one of its limits has ended the utterance.
        if not state.utterance.complete:
            with suppress(UtteranceClosedError):
                state.utterance.push(codes.to("cpu", torch.int32).numpy())

    def decode_delta(
        self, request_id: str, state: _Speech, *, is_final: bool
    ) -> torch.Tensor | None:
        return None  # `_listen` forwards the audio

    def on_stream_done(self, request_id: str) -> list[object] | None:
        """Ends the input. `_listen` completes the request if audio is still to arrive."""
        state = self.get_or_create_stream_state(request_id)
        if state is None:
            return []
        state.ended = True
        if state.heard:
            return self.terminal_messages(request_id, self.stream_payloads[request_id], state)
        with suppress(UtteranceClosedError):
            state.utterance.finish()
        return None

    def final_result_data(
        self, request_id: str, payload: StagePayload, state: _Speech
    ) -> dict[str, object]:
        return {"modality": "audio", "sample_rate": self.sample_rate}

    def release_stream_resources(self, request_id: str, state: _Speech) -> None:
        state.utterance.cancel()

    def on_serving_stop(self) -> None:
        self._client.close()

    def _listen(self, request_id: str, state: _Speech) -> None:
        sent = 0
        try:
            for chunk in state.utterance:
                unheard = max(0, state.unheard_frames * chunk.samples_per_token - sent)
                sent += len(chunk.audio)
                with self.state_lock:
                    if len(chunk.audio) > unheard and not self.is_aborted(request_id):
                        self.mark_stream_emitted(request_id)
                        waveform = torch.from_numpy(chunk.audio[unheard:])
                        self.outbox.put(self.stream_chunk_message(request_id, waveform))
        except ClientError as error:
            if not self.is_aborted(request_id):
                self.emit_error(request_id, error)
                self.abort(request_id)
            return
        with self.state_lock:
            state.heard = True
            if state.ended and not self.is_aborted(request_id):
                payload = self.stream_payloads[request_id]
                messages = self.terminal_messages(request_id, payload, state)
                self.complete_stream_request(request_id, messages)

    def _whole(self, payload: StagePayload) -> StagePayload:
        """Decodes the payload of a request without streaming. The payload has all codes."""
        assert isinstance(payload.data, dict)
        codes = np.asarray(payload.data["audio_codes"])
        chunks = list(self._client.synthesize([codes], self._voice))
        unheard = int(payload.data.get("ref_code_len", 0)) * chunks[0].samples_per_token
        audio = np.concatenate([chunk.audio for chunk in chunks])[unheard:]
        payload.data = audio_waveform_payload(
            audio, sample_rate=self.sample_rate, modality="audio", source_hint="token2wav"
        )
        return payload
