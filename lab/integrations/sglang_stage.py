"""Codes through the vocoder stage of SGLang-Omni that decodes on a token2wav server.

python sglang_stage.py 127.0.0.1:8001 codes.npy speech.wav

The package `sglang-omni` has the scheduler, its messages and its base class. The program
is the talker: it sends a frame of codes at a time, as SGLang-Omni's talkers do.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import soundfile
import torch
from sglang_omni.config import StageConfig
from sglang_omni.pipeline.stage.stream_queue import StreamItem
from sglang_omni.proto import OmniRequest, StagePayload
from sglang_omni.scheduling.message import IncomingMessage

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "stages"))
import sglang_vocoder

SAMPLE_RATE, WAIT_S = 24_000, 30
REFERENCE = 20  # frames of the reference recording


def main(url: str, codes_file: str, out: str) -> None:
    # The stage of the head of sglang_vocoder.py.
    stage = StageConfig(
        name="vocoder",
        process="pipeline",
        factory_path="sglang_vocoder.create_vocoder",
        factory={"url": url, "sample_rate": SAMPLE_RATE},
        terminal=True,
        can_accept_stream_before_payload=True,
    )
    factory = getattr(sglang_vocoder, stage.factory_path.rpartition(".")[2])
    vocoder = factory(**stage.factory.model_dump(exclude_unset=True))
    serving = threading.Thread(target=vocoder.start)
    serving.start()
    try:
        codes = torch.from_numpy(np.load(codes_file))
        audio = spoken(vocoder, "spoken", codes)
        cloned = spoken(vocoder, "cloned", codes, REFERENCE)
        leave(vocoder, "left", codes)
        whole = at_once(vocoder, "whole", codes)
    finally:
        vocoder.stop()
        serving.join()
    difference = np.abs(audio - whole).max()
    print(f"{len(codes)} frames, {len(audio)} samples; streamed and whole differ by {difference:g}")
    assert difference < 1e-4, difference
    # Of a cloned voice the audio of the reference recording is not heard.
    assert len(audio) - len(cloned) == REFERENCE * len(audio) // len(codes)
    assert np.abs(audio[-len(cloned) :] - cloned).max() < 1e-4
    soundfile.write(out, audio, SAMPLE_RATE)


def spoken(vocoder: Any, request_id: str, codes: torch.Tensor, reference: int = 0) -> np.ndarray:
    """Streams the codes of a request before its payload; returns the audio of its messages."""
    pieces = [codes[: reference + 1], *codes[reference + 1 :]]
    for index, piece in enumerate(pieces):
        metadata = {"stream": True, "modality": "audio_codes"}
        if not index:
            metadata["ref_code_len"] = reference
        item = StreamItem(index, piece, "talker", metadata)
        vocoder.inbox.put(IncomingMessage(request_id, "stream_chunk", item))
    begin(vocoder, request_id, {"stream": True}, {})
    vocoder.inbox.put(IncomingMessage(request_id, "stream_done"))
    parts = []
    while (message := next_message(vocoder.outbox)).type == "stream":
        parts.append(waveform(message.data))
    assert message.data.data["sample_rate"] == SAMPLE_RATE, message
    return np.concatenate(parts)


def leave(vocoder: Any, request_id: str, codes: torch.Tensor) -> None:
    """Aborts a request that has begun."""
    begin(vocoder, request_id, {"stream": True}, {})
    item = StreamItem(0, codes[:25], "talker", {"stream": True, "modality": "audio_codes"})
    vocoder.inbox.put(IncomingMessage(request_id, "stream_chunk", item))
    assert next_message(vocoder.outbox).request_id == request_id
    vocoder.abort(request_id)
    assert request_id not in vocoder.stream_states


def at_once(vocoder: Any, request_id: str, codes: torch.Tensor) -> np.ndarray:
    """Decodes the codes of a request that does not stream."""
    begin(vocoder, request_id, {"stream": False}, {"audio_codes": codes.tolist()})
    message = next_message(vocoder.outbox)
    while message.request_id != request_id:  # a chunk of the request that left
        message = next_message(vocoder.outbox)
    assert message.type == "result", message
    return waveform(message.data.data)


def begin(
    vocoder: Any, request_id: str, parameters: dict[str, object], data: dict[str, Any]
) -> None:
    payload = StagePayload(request_id, OmniRequest(inputs="", params=parameters), data)
    vocoder.inbox.put(IncomingMessage(request_id, "new_request", payload))


def next_message(outbox: Queue[Any]) -> Any:
    message = outbox.get(timeout=WAIT_S)
    if message.type == "error":
        raise message.data
    return message


def waveform(data: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(data["audio_waveform"], np.float32)


if __name__ == "__main__":
    main(*sys.argv[1:])
