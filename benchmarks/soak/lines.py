"""Models of a soak, and the lines that its clients send, each with the library's audio."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testkit.models.codec_models import CODECS
from testkit.models.folders import write_folder
from testkit.models.golden import DATA, TINY
from token2wav import Token2Wav, Voice
from token2wav_client import ClientVoice
from token2wav_client.voice import FIELDS

# float32: a batch of several streams sums in another order than one stream in the library.
TOLERANCE = 1e-4
# A stream whose chunks end elsewhere, or that continued by recomputing because the cache was full,
# rounds its mel in yet another way (1e-6), and the vocoder integrates F0 into phase. The random
# weights of the tiny model make this up to 3e-2 in seconds, 51 to 82 dB below the signal for the
# lines below and for one of 40 s. A single wrong frame is 44 dB below it, a chunk that is lost or
# comes twice 3 dB.
SAME_DB = 50.0
_INT16_STEP = 1 / 32767
# A flow model, and all codecs of codes.
MODELS = ("cosyvoice3", *(name for name in CODECS if name != "pocket_tts"))
DEMO = DATA / "demo"


@dataclass(frozen=True, eq=False)
class Line:
    """Tokens in a voice, with the expected audio."""

    name: str  # name for reports
    tokens: NDArray[np.int32]  # (n,) int32; (n, codebooks) for a codec
    voice: ClientVoice | None  # voice of the line; None for a codec
    audio: NDArray[np.float32]  # float32 samples, computed by the library
    sample_rate: int = 24_000  # samples per second

    @property
    def seconds(self) -> float:
        return len(self.audio) / self.sample_rate

    def fault(self, heard: list[NDArray[Any]], *, cut_short: bool = False) -> str | None:
        """Returns the fault of chunks that should be the whole line, or None.

        Args:
            heard: float32 or int16 chunks.
            cut_short: whether samples may be missing at the end, because the line has failed.
        """
        audio = np.concatenate(heard) if heard else np.zeros(0, np.float32)
        allowed, expected = TOLERANCE, self.audio[: len(audio) if cut_short else None]
        if audio.dtype == np.int16:
            audio, allowed = audio * _INT16_STEP, TOLERANCE + _INT16_STEP / 2
            expected = expected.clip(-1, 1)  # random weights may exceed the range of 16 bits
        if audio.shape != expected.shape:
            return f"{audio.size} samples, expected {self.audio.size}"
        error = np.abs(audio.astype(np.float64) - expected)
        if (error <= allowed).all():
            return None
        energy = np.square(expected, dtype=np.float64).sum()
        ratio_db = 10 * np.log10(energy / np.square(error).sum())
        if ratio_db > SAME_DB:  # false for NaN
            return None
        first = int(np.argmin(error <= allowed))
        return (
            f"sample {first} of {audio.size} is off by {error[first]:.1e}, the worst by "
            f"{error.max():.1e}, "
            f"signal to error {ratio_db:.0f} dB"
        )


def model_folder(name: str, parent: Path) -> Path:
    """Returns the folder of a model of `MODELS`, which may be written below `parent`."""
    if name == "cosyvoice3":
        return TINY
    folder = parent / name
    folder.mkdir()
    return write_folder(name, folder)


def make_lines(folder: Path) -> list[Line]:
    """Returns short and long utterances, in several voices or with several numbers of codebooks.
    The model in a folder computes their audio.
    """
    model = Token2Wav.load(folder)
    return _spoken_lines(model) if model.config.takes_prompt else _decoded_lines(model)


def spoken_line(model: Token2Wav, tokens: NDArray[np.int32], name: str, voice: ClientVoice) -> Line:
    """Returns tokens in a voice with the audio that a flow model computes for them."""
    audio = model.synthesize(tokens, Voice(*(getattr(voice, field) for field in FIELDS)))
    return Line(f"{len(tokens)} tokens, {name}", tokens, voice, audio)


def _decoded_lines(model: Token2Wav) -> list[Line]:
    """Returns lines for a codec. They have few codebooks, if a stream may send few, or all."""
    codebooks = model.config.tokens.codebooks
    random, lines = np.random.default_rng(0), list[Line]()
    few = {1, max(1, codebooks // 2)} if model.config.tokens.fewer_codebooks else set()
    for books in few | {codebooks}:
        for count in (2, 45, 250):
            codes = model.config.tokens.draw(count, random)[:, :books]
            name = f"{count} frames, {books} codebooks"
            audio = model.synthesize(codes)
            lines.append(Line(name, codes, None, audio, model.config.sample_rate))
    return lines


def _spoken_lines(model: Token2Wav) -> list[Line]:
    """Returns lines for a flow model. Voices have prompts of no block, part of one, and more."""
    demo = ClientVoice.load(DEMO / "voice.safetensors")
    prompt, mel, speaker = demo.prompt_tokens, demo.prompt_mel, demo.speaker_embedding
    voices = {
        "demo": demo,
        "another speaker": ClientVoice(prompt, mel, -speaker),
        "no prompt": ClientVoice(prompt[:0], mel[:0], speaker),
        "short prompt": ClientVoice(prompt[:11], mel[:22], speaker),
        "long prompt": ClientVoice(np.resize(prompt, 80), np.resize(mel, (160, 80)), speaker),
    }
    tokens = np.load(DEMO / "tokens.npy").astype(np.int32)
    lines: list[Line] = []
    for name, voice in voices.items():
        for count in (2, 45, 250 if name == "demo" else 120):
            line_tokens = np.resize(np.roll(tokens, -len(lines)), count)
            lines.append(spoken_line(model, line_tokens, name, voice))
    return lines
