"""Model under test, with the utterance that every client sends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import ROOT
from testkit.batches import Tokens
from testkit.models import sized
from testkit.models.codec_models import CODECS, drawn_tokens
from testkit.models.folders import write_folder
from testkit.models.golden import TINY
from testkit.models.published_codecs import SIXTEENTH, SIZES
from token2wav.config.model_config import ModelConfig
from token2wav.published.registry import read_config
from token2wav_client import ClientVoice

TRAINED = {
    "demo_voice": ROOT / "examples" / "demo_voice" / "model",
    "demo_codec": ROOT / "examples" / "demo_codec" / "model",
    "cosyvoice3": TINY,
}
# Names of the models for tables. A codec has its published size, unless the name says otherwise.
LABELS = {
    "demo_voice": "demo voice",
    "demo_codec": "demo codec",
    "cosyvoice3": "CosyVoice3, tiny",
    "cosyvoice2": "CosyVoice2, tiny",
    "stepaudio2": "Step-Audio2, MiniCPM-o, tiny",
    "chatterbox": "Chatterbox, tiny",
    "turbo": "Chatterbox Turbo, tiny",
    "streamflow": "StreamFlow, tiny",
    "bigvgan": "CosyVoice3 with BigVGAN at 16 kHz, tiny",
    "qwen3_tts": "Qwen3-TTS",
    "qwen3_omni": "Qwen3-Omni",
    "mimi": "Mimi",
    "pocket_tts": "Pocket TTS",
    "nanocodec": "NanoCodec",
    "dac": "DAC, a third of its width",
    "higgs": "Higgs Audio",
    "snac": "SNAC",
    "moss": "MOSS",
}
CHOICES = (
    f"a model folder; a size of CosyVoice3 ({', '.join(sized.SIZES)}); or one of "
    f"{', '.join(LABELS)}. NAME/16 is a codec with a sixteenth of its channels. Models that are "
    "not in the repository have random weights"
)
_SIXTEENTH = "/16"
_PROMPT_TOKENS = 50


def model_folder(name: str, parent: Path) -> Path:
    """Returns the folder of a model that `CHOICES` describes, and writes it if it does not exist.
    Raises ValueError if no model has this name.
    """
    if name in TRAINED:
        return TRAINED[name]
    folder = parent / name.replace("/", "-")
    if name in sized.SIZES:
        return sized.model_folder(parent, name)
    codec = name.removesuffix(_SIXTEENTH)
    if name.endswith(_SIXTEENTH) and codec in SIXTEENTH:
        folder.mkdir()
        return CODECS[codec].write(folder, SIXTEENTH[codec])
    if name in LABELS:
        folder.mkdir()
        if name not in SIZES:
            return write_folder(name, folder)
        # Two cores do not compute the published width of DAC, 1536, at the pace of speech.
        narrow = {"decoder_hidden_size": 512} if name == "dac" else {}
        return CODECS[name].write(folder, SIZES[name] | narrow)
    if not Path(name).is_dir():
        raise ValueError(f"{name} is no model; it must be {CHOICES}")
    return Path(name)


@dataclass(frozen=True)
class Subject:
    """Model under test, with the utterance that every client sends."""

    config: ModelConfig
    tokens: Tokens  # (N, *token_shape) tokens of the utterance
    voice: ClientVoice | None  # voice of the utterance; None for a codec

    @classmethod
    def of(cls, folder: Path, seconds: float) -> Subject:
        """Makes an utterance of some seconds for a model folder."""
        config = read_config(folder)
        tokens = drawn_tokens(config, max(1, round(seconds * config.token_frame_rate)))
        voice = None
        if config.takes_voice:
            drawn = sized.a_voice(config, prompt_tokens=_PROMPT_TOKENS)
            voice = ClientVoice(drawn.prompt_tokens, drawn.prompt_mel, drawn.speaker_embedding)
        return cls(config, tokens, voice)

    @property
    def audio_s(self) -> float:
        """Length of the audio of the utterance."""
        config = self.config
        samples = len(self.tokens) * config.samples_per_token - config.missing_samples
        return samples / config.sample_rate

    def portion_tokens(self, seconds: float) -> int:
        """Tokens of a message that has at least some seconds of audio."""
        return max(1, math.ceil(seconds * self.config.token_frame_rate))
