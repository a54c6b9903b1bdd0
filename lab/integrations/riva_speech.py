"""Speech of the gateway with NVIDIA's client for Riva.

python riva_speech.py 127.0.0.1:50051 "Hello." speech.wav
"""

from __future__ import annotations

import sys
import wave
from pathlib import Path

import grpc
import riva.client
from riva.client.proto.riva_tts_pb2 import RivaSynthesisConfigRequest

RATE_HZ = 22_050  # of NVIDIA's client, if its user chooses none


def save(service: riva.client.SpeechSynthesisService, text: str, out: Path) -> None:
    """Writes the speech to a file while it arrives."""
    with wave.open(str(out), "wb") as file:
        file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        for piece in service.synthesize_online(text, sample_rate_hz=RATE_HZ):
            file.writeframes(piece.audio)


def interrupt(service: riva.client.SpeechSynthesisService, text: str) -> float:
    """Cancels a speech after its first audio, and returns the seconds that have arrived."""
    speech = service.synthesize_online(text, sample_rate_hz=RATE_HZ)
    samples = len(next(speech).audio) // 2
    speech.cancel()
    try:
        samples += sum(len(piece.audio) // 2 for piece in speech)
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.CANCELLED:
            raise
    return samples / RATE_HZ


def voices(service: riva.client.SpeechSynthesisService) -> list[str]:
    """Returns the names of the voices, as NVIDIA's example lists them."""
    [config] = service.stub.GetRivaSynthesisConfig(RivaSynthesisConfigRequest()).model_config
    subvoices = [entry.split(":")[0] for entry in config.parameters["subvoices"].split(",")]
    return [f"{config.parameters['voice_name']}.{subvoice}" for subvoice in subvoices]


if __name__ == "__main__":
    address, text, out = sys.argv[1:]
    service = riva.client.SpeechSynthesisService(riva.client.Auth(uri=address))
    [voice] = voices(service)
    save(service, text, Path(out))
    whole = service.synthesize(text[:100], voice, sample_rate_hz=RATE_HZ)
    print(
        f"voice {voice}; {len(whole.audio) // 2 / RATE_HZ:.1f} s in one message; interrupted after "
        f"{interrupt(service, text):.1f} s"
    )
