"""Stage code2wav of vLLM-Omni that decodes on a token2wav server.

`register` is a plug-in of vLLM-Omni. The plug-in replaces the code2wav model of Qwen3-TTS by
`Token2WavCode2Wav`. Name the plug-in in the pyproject.toml of your package:

    [project.entry-points."vllm_omni.general_plugins"]
    token2wav = "vllm_code2wav:register"

Set the variable TOKEN2WAV_URL to host:port of the server's gRPC interface. In the deploy file, set
`codec_chunk_frames` and `initial_codec_chunk_frames` to 1, so that codes leave the talker at once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from vllm_omni.model_executor.models.output_templates import OmniOutput

from token2wav_client import Client, ClientError, Utterance

ARCHITECTURE = "Qwen3TTSCode2Wav"
CODEBOOKS, SAMPLE_RATE = 16, 24_000  # of Qwen3-TTS

logger = logging.getLogger(__name__)


def register() -> None:
    """Replaces the code2wav model of Qwen3-TTS."""
    from vllm_omni.model_executor.models.registry import OmniModelRegistry

    OmniModelRegistry.register_model(ARCHITECTURE, "vllm_code2wav:Token2WavCode2Wav")


class Token2WavCode2Wav(nn.Module):
    """Model of the stage, without weights: an utterance on the server for each request.

    A step sends the new codes of all requests, and then takes the audio that has arrived. A step
    waits for the server only if a request ends with this step.
    """

    input_modalities = "audio"
    have_multimodal_outputs = True
    has_preprocess = False
    has_postprocess = False
    enable_update_additional_information = True
    requires_raw_input_tokens = True
    requires_request_ids = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self._client = Client(os.environ["TOKEN2WAV_URL"])
        self._streams: dict[str, _Stream] = {}

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        runtime_additional_information: list[dict[str, Any]] | None = None,
        model_intermediate_buffer: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> OmniOutput:
        """Returns the audio of each request of the step, float32 (samples,), often empty."""
        requests = runtime_additional_information or model_intermediate_buffer or []
        # vLLM reports the end of a request by these names; the names in `meta` differ. Version 2 of
        # vLLM's runner puts the name into the request. A request without a name measures memory.
        names = kwargs.get("request_ids") or [request.get("req_id") for request in requests]
        self._forget_ended(names)
        sent = [self._send(name, request) for name, request in zip(names, requests, strict=True)]
        audio = [stream.take(wait=last) if stream else torch.empty(0) for stream, last in sent]
        audio = audio or [torch.empty(0)]
        rate = torch.tensor(SAMPLE_RATE, dtype=torch.int32)
        outputs = {"model_outputs": audio, "sr": [rate] * len(audio)}
        return OmniOutput(text_hidden_states=None, multimodal_outputs=outputs)

    def on_requests_finished(self, finished_req_ids: Iterable[str]) -> None:
        """Cancels the utterances of requests that ended early."""
        for name in finished_req_ids:
            if stream := self._streams.pop(name, None):
                stream.utterance.cancel()

    def _forget_ended(self, names: Sequence[str | None]) -> None:
        """Drops the ended streams of requests that the runner no longer runs."""
        for name in [name for name, stream in self._streams.items() if stream.ended]:
            if name not in names:
                del self._streams[name]

    def _send(self, name: str | None, request: dict[str, Any]) -> tuple[_Stream | None, bool]:
        """Sends the new codes of a request.

        Returns:
            The stream of the request, or None without one, and whether the stream has all codes.
        """
        codes, meta = request.get("codes", {}).get("audio"), request.get("meta", {})
        last = bool(meta.get("finished", False))
        stream = self._streams.get(name) if name else None
        try:
            if codes is not None and codes.numel() and name:
                if stream is None:
                    # The codes begin with the frames of a reference recording.
                    stream = _Stream(self._client.open(), int(meta.get("left_context_size", 0)))
                    self._streams[name] = stream
                # All codes of the first codebook come first.
                frames = codes.reshape(CODEBOOKS, -1).T
                stream.utterance.push(frames.to("cpu", torch.int32).numpy())
            if last and stream and name:
                del self._streams[name]
                stream.utterance.finish()
        except ClientError as error:
            # An exception would end all requests of the stage. Only this request ends early.
            logger.error("token2wav: request %s: %s", name, error)
            if stream:
                stream.utterance.cancel()
        return stream, last

    def embed_input_ids(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), 1, device=input_ids.device)

    def compute_logits(self, hidden_states: Any, sampling_metadata: Any = None) -> None:
        return None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return set()  # the server has the weights


class _Stream:
    """Utterance on the server, with the audio that has arrived since the last `take`.

    Args:
        unheard_frames: number of frames at the start whose audio is dropped.
    """

    def __init__(self, utterance: Utterance, unheard_frames: int) -> None:
        self.utterance = utterance
        self._unheard_frames = unheard_frames
        self._audio: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def ended(self) -> bool:
        """Whether no more audio will arrive."""
        return not self._listener.is_alive()

    def take(self, wait: bool) -> torch.Tensor:
        """Returns the new audio, float32 (samples,).

        Args:
            wait: wait for the end of the utterance.
        """
        if wait:
            self._listener.join()
        with self._lock:
            audio, self._audio = self._audio, []
        return torch.cat([torch.empty(0), *audio])

    def _listen(self) -> None:
        unheard = None
        try:
            for chunk in self.utterance:
                if unheard is None:
                    unheard = self._unheard_frames * chunk.samples_per_token
                with self._lock:
                    self._audio.append(torch.from_numpy(chunk.audio[unheard:]))
                unheard = max(0, unheard - len(chunk.audio))
        except ClientError as error:
            logger.error("token2wav: utterance %s: %s", self.utterance.id, error)
