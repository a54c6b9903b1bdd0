"""A vocoder of SGLang-Omni that decodes on a token2wav server.

`create_vocoder` is the factory of the last stage of a pipeline, in place of a model's own vocoder:

    StageConfig(
        name="vocoder",
        factory="sglang_vocoder.create_vocoder",
        factory_args={"url": "127.0.0.1:8001", "sample_rate": 24000},
        terminal=True,
    )

The stage before it sends codes, shape (codebooks,) or (frames, codebooks), as it does to its own
vocoder. Codes in a delay pattern must be aligned first, with `token2wav_client.CodeAligner`.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from sglang_omni.proto import StagePayload
from sglang_omni.scheduling.streaming_vocoder import StreamingVocoderBase
from sglang_omni.utils.audio_payload import audio_waveform_payload

from token2wav_client import Client, ClientError, Utterance


def create_vocoder(url: str, sample_rate: int, voice: str | None = None) -> Token2WavVocoder:
    """Creates the stage.

    Args:
        url: host:port of the server's gRPC interface.
        sample_rate: samples per second of the model that the server has.
        voice: name or id of a voice of the server; None for a codec.
    """
    return Token2WavVocoder(url, sample_rate, voice)


class Token2WavVocoder(StreamingVocoderBase[Utterance, None]):  # type: ignore[misc]
    """Opens an utterance on the server for each request, and sends on the audio as it arrives.

    A thread for each request waits for the audio, so that a chunk leaves at once and not with the
    next codes.
    """

    def __init__(self, url: str, sample_rate: int, voice: str | None) -> None:
        self._client = Client(url)
        self._voice = voice
        super().__init__(self._whole, sample_rate=sample_rate, stream_source_hint="token2wav")

    def create_stream_state(self, request_id: str) -> Utterance:
        utterance = self._client.open(self._voice)
        # A daemon, so that a server that does not answer cannot keep the stage alive.
        threading.Thread(target=self._listen, args=(request_id, utterance), daemon=True).start()
        return utterance

    def validate_chunk(
        self, request_id: str, state: Utterance, codes: torch.Tensor
    ) -> torch.Tensor:
        if codes.ndim not in (1, 2):
            raise ValueError(f"codes of {request_id}: shape {tuple(codes.shape)}, expected (N, K)")
        return codes.reshape(-1, codes.shape[-1])

    def ingest(self, request_id: str, state: Utterance, codes: torch.Tensor) -> None:
        state.push(codes.to("cpu", torch.int32).numpy())

    def decode_delta(
        self, request_id: str, state: Utterance, *, is_final: bool
    ) -> torch.Tensor | None:
        return None  # the audio leaves in `_listen`

    def on_stream_done(self, request_id: str) -> None:
        """Ends the input. `_listen` completes the request after the last chunk."""
        if utterance := self.get_or_create_stream_state(request_id):
            utterance.finish()

    def final_result_data(
        self, request_id: str, payload: StagePayload, state: Utterance
    ) -> dict[str, object]:
        return {"modality": "audio", "sample_rate": self.sample_rate}

    def release_stream_resources(self, request_id: str, state: Utterance) -> None:
        state.cancel()

    def on_serving_stop(self) -> None:
        self._client.close()

    def _listen(self, request_id: str, utterance: Utterance) -> None:
        try:
            for chunk in utterance:
                with self.state_lock:
                    if not self.is_aborted(request_id):
                        self.mark_stream_emitted(request_id)
                        waveform = torch.from_numpy(chunk.audio)
                        self.outbox.put(self.stream_chunk_message(request_id, waveform))
        except ClientError as error:
            self.emit_error(request_id, error)
            self.abort(request_id)
            return
        with self.state_lock:
            if utterance.complete and not self.is_aborted(request_id):
                payload = self.stream_payloads[request_id]
                messages = self.terminal_messages(request_id, payload, utterance)
                self.complete_stream_request(request_id, messages)

    def _whole(self, payload: StagePayload) -> StagePayload:
        """Decodes a request that does not stream; `payload.data["codes"]` has all of its codes."""
        assert isinstance(payload.data, dict)
        chunks = self._client.synthesize([np.asarray(payload.data["codes"])], self._voice)
        audio = np.concatenate([chunk.audio for chunk in chunks])
        payload.data = audio_waveform_payload(
            audio, sample_rate=self.sample_rate, modality="audio", source_hint="token2wav"
        )
        return payload
