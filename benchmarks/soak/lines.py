"""Lines that the clients of a soak send, each with the library's audio for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.environment import ROOT
from token2wav import Token2Wav, Voice
from token2wav_client import ClientVoice

# float32: a batch of several streams sums in another order than one stream in the library.
TOLERANCE = 1e-4
# A stream that continued by recomputing, because the cache was full, rounds its mel in yet another
# way (1e-6), and the vocoder integrates F0 into phase: with the random weights of the tiny model up
# to 3e-2 in seconds, 57 to 82 dB below the signal for the lines below, at whichever chunk it
# begins. A single wrong frame is 44 dB below it, a chunk that is lost or comes twice 3 dB.
SAME_DB = 50.0
_INT16_STEP = 1 / 32767
_DEMO = ROOT / "tests" / "data" / "demo"


@dataclass(frozen=True, eq=False)
class Line:
    """Tokens in a voice, with the expected audio.

    Attributes:
        name: name for reports.
        tokens: (n,) int32.
        voice: voice of the line.
        audio: (960 n,) float32, computed by the library.
    """

    name: str
    tokens: NDArray[np.int32]
    voice: ClientVoice
    audio: NDArray[np.float32]

    def fault(self, heard: list[NDArray[np.generic]]) -> str | None:
        """Returns the fault of chunks that should be the whole line, or None.

        Args:
            heard: float32 or int16 chunks.
        """
        audio = np.concatenate(heard) if heard else np.zeros(0, np.float32)
        allowed = TOLERANCE
        if audio.dtype == np.int16:
            audio, allowed = audio * _INT16_STEP, TOLERANCE + _INT16_STEP / 2
        if audio.shape != self.audio.shape:
            return f"{audio.size} samples, expected {self.audio.size}"
        error = np.abs(audio.astype(np.float64) - self.audio)
        if (error <= allowed).all():
            return None
        ratio_db = 10 * np.log10(
            np.square(self.audio, dtype=np.float64).sum() / np.square(error).sum()
        )
        if ratio_db > SAME_DB:  # false for NaN
            return None
        first = int(np.argmin(error <= allowed))
        return (
            f"sample {first} of {audio.size} is off by {error[first]:.1e}, the worst by "
            f"{error.max():.1e}, "
            f"signal to error {ratio_db:.0f} dB"
        )


def make_lines(folder: Path) -> list[Line]:
    """Returns short and long utterances in several voices, computed with the model in a folder."""
    model = Token2Wav.load(folder)
    tokens = np.load(_DEMO / "tokens.npy").astype(np.int32)
    lines: list[Line] = []
    for name, voice in _voices().items():
        for count in (2, 45, 120) if name != "demo" else (2, 45, 250):
            said = np.resize(np.roll(tokens, -len(lines)), count)
            audio = model.synthesize(
                said, Voice(voice.prompt_tokens, voice.prompt_mel, voice.speaker_embedding)
            )
            lines.append(Line(f"{count} tokens, {name}", said, voice, audio))
    return lines


def _voices() -> dict[str, ClientVoice]:
    """Returns prompts of none, less and more than a block, and voices that differ in one field."""
    demo = ClientVoice.load(_DEMO / "voice.safetensors")
    tokens, mel, speaker = demo.prompt_tokens, demo.prompt_mel, demo.speaker_embedding
    return {
        "demo": demo,
        "another speaker": ClientVoice(tokens, mel, -speaker),
        "no prompt": ClientVoice(tokens[:0], mel[:0], speaker),
        "short prompt": ClientVoice(tokens[:11], mel[:22], speaker),
        "long prompt": ClientVoice(np.resize(tokens, 80), np.resize(mel, (160, 80)), speaker),
    }
