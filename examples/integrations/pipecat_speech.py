"""Speech of the gateway in a pipeline of Pipecat.

python pipecat_speech.py http://127.0.0.1:8080/v1 "Hello." speech.wav
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
from pipecat.services.openai.tts import OpenAITTSService


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


async def save(base_url: str, text: str, out: Path) -> None:
    """Speaks a text in a pipeline, and writes the speech to a file."""
    recorder = Recorder()
    speaker = OpenAITTSService(base_url=base_url, api_key="none", sample_rate=24_000)
    task = PipelineTask(Pipeline([speaker, recorder]))
    await task.queue_frames([TTSSpeakFrame(text), EndFrame()])
    await PipelineRunner(handle_sigint=False).run(task)
    with wave.open(str(out), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(recorder.rate_hz)
        file.writeframes(recorder.audio)


if __name__ == "__main__":
    base_url, text, out = sys.argv[1:]
    asyncio.run(save(base_url, text, Path(out)))
