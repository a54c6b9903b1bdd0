"""Speech of the gateway in a pipeline of Pipecat, with its service for OpenAI or for Riva.

python pipecat_speech.py http://127.0.0.1:8080/v1 "Hello." speech.wav
python pipecat_speech.py 127.0.0.1:50051 "Hello." speech.wav
"""

from __future__ import annotations

import asyncio
import sys
import wave
from pathlib import Path

from pipecat.frames.frames import EndFrame, Frame, TTSAudioRawFrame, TTSSpeakFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineTask
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor

RATE_HZ = 24_000


class Recorder(FrameProcessor):  # type: ignore[misc]
    """End of a pipeline, which keeps the audio."""

    def __init__(self) -> None:
        super().__init__()
        self.audio = bytearray()
        self.rate_hz = 0

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self.audio += frame.audio
            self.rate_hz = frame.sample_rate
        await self.push_frame(frame, direction)


def speaker(address: str) -> FrameProcessor:
    """Creates the service for a base URL of OpenAI's interface, or host:port of Riva's."""
    # Each service needs an extra of Pipecat, and here only one of them is installed.
    if address.startswith("http"):
        from pipecat.services.openai.tts import OpenAITTSService

        return OpenAITTSService(base_url=address, api_key="none", sample_rate=RATE_HZ)
    from pipecat.services.nvidia.tts import NvidiaTTSService

    voice = NvidiaTTSService.Settings(voice="joe")
    return NvidiaTTSService(server=address, use_ssl=False, sample_rate=RATE_HZ, settings=voice)


async def save(address: str, text: str, out: Path) -> None:
    """Speaks a text in a pipeline, and writes the speech to a file."""
    recorder = Recorder()
    task = PipelineTask(Pipeline([speaker(address), recorder]))
    await task.queue_frames([TTSSpeakFrame(text), EndFrame()])
    await PipelineRunner(handle_sigint=False).run(task)
    with wave.open(str(out), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(recorder.rate_hz)
        file.writeframes(recorder.audio)


if __name__ == "__main__":
    address, text, out = sys.argv[1:]
    asyncio.run(save(address, text, Path(out)))
