"""Voice package: makes voices and speech tokens from recordings.

    from token2wav_voice import FrontEnd, Recording

    voice = FrontEnd("CosyVoice3-folder").voice(Recording.load("ref.wav"))
    voice.save("voice.safetensors")

It runs the ONNX files of a CosyVoice3 folder. The commands `token2wav voice` and
`token2wav tokenize` use it. It needs no torch.
"""

from __future__ import annotations

from token2wav_voice.errors import FrontEndError, ModelError, OutputError, RecordingError
from token2wav_voice.front_end import FrontEnd, PromptVoice
from token2wav_voice.recording import Recording

__all__ = [
    "FrontEnd",
    "FrontEndError",
    "ModelError",
    "OutputError",
    "PromptVoice",
    "Recording",
    "RecordingError",
]
