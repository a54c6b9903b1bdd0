"""Material of the unit tests: the tiny model, its voice, and copies that differ in one thing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from testkit.batches import WHOLE_BLOCKS
from token2wav import Voice
from token2wav.config.model_config import ModelConfig
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import SourceNoise
from token2wav.serving.hops import HopSchedule
from token2wav.stages.stage import DEFAULT_OPTIONS, StreamOptions, VocoderInput
from token2wav.stages.waveform import WaveformStage

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
TINY = DATA / "tiny"
FULL_SIZE = DATA / "full_size"
STEMS = ("flow", "hift")
# Fewer steps than the 10 of the model folder, because the time of a test grows with the steps. Of 4
# steps, provisional chunks still take fewer than other chunks.
ODE_STEPS = 4
# timeout for events that may be slow on a busy machine; a passing test does not wait for it
WAIT_SECONDS = 60.0
# Loaded once, because `np.load` in several threads may fail in Python 3.11 (SystemError of `ast`).
_TOKENS = np.load(DATA / "demo" / "tokens.npy")


def demo_tokens(count: int) -> NDArray[np.int32]:
    """Returns (count,) tokens, which repeat the demo's tokens."""
    return np.resize(_TOKENS, count)


def demo_voice(prompt_tokens: int) -> Voice:
    """Returns a voice with a prompt of any length, which repeats the demo's prompt."""
    arrays = load_file(DATA / "demo" / "voice.safetensors")
    tokens = np.resize(arrays["prompt_tokens"].numpy(), prompt_tokens)
    mel = np.resize(arrays["prompt_mel"].numpy(), (2 * prompt_tokens, 80))
    return Voice(tokens, mel, arrays["speaker_embedding"].numpy())


def tiny_config(ode_steps: int = ODE_STEPS) -> CosyVoice3Config:
    """Returns the configuration of the tiny model with another number of ODE steps."""
    config = CosyVoice3Config.read(TINY)
    flow = replace(config.flow, n_timesteps=ode_steps)
    return CosyVoice3Config.of(flow, config.vocoder)


def schedule_of(config: ModelConfig) -> HopSchedule:
    return HopSchedule.of(WHOLE_BLOCKS, config)


def tiny_weights(stem: str) -> dict[str, torch.Tensor]:
    return load_file(TINY / f"{stem}.safetensors")


def tiny_copy(parent: Path) -> Path:
    """Copies the tiny model into a new folder, without its golden tensors."""
    folder = parent / "model"
    folder.mkdir()
    for name in ("cosyvoice3.yaml", "flow.safetensors", "hift.safetensors"):
        shutil.copy(TINY / name, folder / name)
    return folder


def replace_weights(folder: Path, stem: str, weights: object, suffix: str = ".safetensors") -> Path:
    """Writes the weights of one stage, and removes its other weight files."""
    for old in folder.glob(f"{stem}.*"):
        old.unlink()
    path = folder / (stem + suffix)
    if suffix == ".safetensors":
        assert isinstance(weights, dict)
        save_file(weights, path)
    else:
        torch.save(weights, path)
    return path


def one_line(error: BaseException) -> str:
    """Returns the message of an error, which must be one line for logs and clients."""
    message = str(error)
    assert message
    assert "\n" not in message
    assert len(message) < 1500
    return message


class FaultyVocoder(WaveformStage):
    """Vocoder stage that can be made to fail in its next calls.

    Attributes:
        fault: error that the next `advance` raises, or a number that it writes into its audio.
        open_fault: error that every `open` raises.
        meanwhile: functions that run during the next `open` or `advance`.
    """

    def __init__(self, hift: HiFT, noise: SourceNoise) -> None:
        super().__init__(hift, noise)
        self.fault: BaseException | float | None = None
        self.open_fault: BaseException | None = None
        self.meanwhile: dict[str, Callable[[], None]] = {}

    def open(self, voice: Voice | None = None, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        self._happen("open")
        if self.open_fault is not None:
            raise self.open_fault
        return super().open(voice, options)

    def advance(self, batch: Sequence[tuple[int, VocoderInput]]) -> list[torch.Tensor]:
        fault, self.fault = self.fault, None
        if isinstance(fault, BaseException):
            raise fault
        audio = super().advance(batch)
        if fault is not None:
            audio[0] = torch.cat((audio[0][:-1], torch.tensor([fault])))
        self._happen("advance")
        return audio

    def _happen(self, moment: str) -> None:
        self.meanwhile.pop(moment, lambda: None)()
