"""Precision of F0, and its effect on the audio: float64, float32 and TF32 with random and trained weights.

F0 is summed into phase, so a small error of it does not stay small. TF32, which GPUs use for convolutions unless told
not to, is emulated: inputs and weights are rounded to 10 bits of mantissa, sums are kept in float32. Prints a line for
each variant; writes JSON and a plot.

    .venv/bin/python -m benchmarks.f0_precision
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from benchmarks.environment import RESULTS, ROOT, describe, save
from examples.demo_voice.export import MODEL as DEMO
from examples.demo_voice.recordings import PROMPT, SENTENCE
from token2wav.families.cosyvoice3.weights import load_hift, load_source_noise
from token2wav.model_config import ModelConfig
from token2wav.networks.hift import HiFT
from token2wav.networks.source import Phase
from token2wav.networks.source_noise import SourceNoise
from token2wav_voice import Recording
from token2wav_voice.features import prompt_mel

mpl.use("Agg")
from matplotlib import pyplot as plt

TINY = ROOT / "tests" / "data" / "tiny"
SECONDS = (1, 10, 30, 60)
_FRAME_RATE = 50
_DROPPED_BITS = 13  # of float32's 23 bits of mantissa
_RANGE_DB = 80.0  # below the loudest bin nothing counts in a spectral distance


class TensorFloat32(TorchFunctionMode):
    """Convolutions of float32 as a GPU with TF32 computes them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (F.conv1d, F.conv_transpose1d) and args[0].dtype == torch.float32:
            args = (rounded(args[0]), rounded(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to the nearest number with 10 bits of mantissa, away from zero in the middle."""
    bits = x.contiguous().view(torch.int32) + (1 << (_DROPPED_BITS - 1))
    return (bits & -(1 << _DROPPED_BITS)).view(torch.float32)


@dataclass(frozen=True)
class Variant:
    """Variant of the computation.

    Attributes:
        name: name in the table.
        f0: number type of the predictor.
        f0_convolutions, other_convolutions: "float" as their type says, or "tf32".
        phase: rounding of the phase, as `StreamConfig.phase`.
        noise_seed: seed of the source's noise; None for the model's.
    """

    name: str
    f0: torch.dtype = torch.float64
    f0_convolutions: str = "float"
    other_convolutions: str = "float"
    phase: Phase = "exact"
    noise_seed: int | None = None


VARIANTS = (
    Variant("F0 in float32", f0=torch.float32),
    Variant("F0 in TF32", f0=torch.float32, f0_convolutions="tf32"),
    Variant("phase summed in float32", phase="reference"),
    Variant("other convolutions in TF32", other_convolutions="tf32"),
    Variant("all convolutions in TF32", f0=torch.float32, f0_convolutions="tf32", other_convolutions="tf32"),
    Variant("other noise, for comparison", noise_seed=1),
)


@dataclass(frozen=True, eq=False)
class Spoken:
    """Result of a mel: F0 in Hz of every frame, and audio."""

    f0: NDArray[np.float64]
    audio: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Subject:
    """Subject of the comparison: a vocoder and a mel (1, bands, frames) for it."""

    name: str
    hift: HiFT
    noise: SourceNoise
    mel: torch.Tensor

    @torch.inference_mode()
    def speak(self, variant: Variant) -> Spoken:
        predictor = copy.deepcopy(self.hift.f0_predictor).to(variant.f0)
        with _convolutions(variant.f0_convolutions):
            f0 = predictor(self.mel)
        samples = f0.shape[1] * self.hift.config.samples_per_frame
        noise = self.noise.window(0, samples)
        if variant.noise_seed is not None:
            noise = torch.rand(noise.shape, generator=torch.Generator().manual_seed(variant.noise_seed))
        source = self.hift.m_source(f0, self.hift.m_source.merged(noise), variant.phase)
        with _convolutions(variant.other_convolutions):
            audio = self.hift.decode(self.mel, source)
        return Spoken(f0[0].double().numpy(), audio[0].double().numpy())


def _convolutions(kind: str) -> AbstractContextManager[Any]:
    return TensorFloat32() if kind == "tf32" else nullcontext()


def subjects(seconds: int) -> list[Subject]:
    """Loads the model of the golden tests, and a trained voice with recordings; mels are repeated to that length."""
    golden = load_file(TINY / "golden.safetensors")["flow.mel.streaming"]
    spoken = np.concatenate([Recording.load(path).at(24000) for path in (PROMPT, SENTENCE)])
    recording = torch.from_numpy(prompt_mel(spoken).T.copy())[None]
    found = []
    for name, folder, mel in (("tiny, random weights", TINY, golden), ("demo voice, trained", DEMO, recording)):
        config, frames = ModelConfig.read(folder), seconds * _FRAME_RATE
        mel = mel.repeat(1, 1, -(-frames // mel.shape[2]))[..., :frames]
        found.append(Subject(name, load_hift(folder, config), load_source_noise(folder, config), mel))
    return found


def compared(variant: Spoken, exact: Spoken, hift: HiFT) -> tuple[dict[str, Any], NDArray[np.float64]]:
    """Computes figures of a variant, and the cycles by which F0 has brought its fundamental ahead at every frame."""
    config = hift.config
    voiced, also = (each.f0 > config.nsf_voiced_threshold for each in (exact, variant))
    both = voiced & also
    cents = 1200 * np.abs(np.log2(variant.f0[both] / exact.f0[both]))
    ahead = np.cumsum(variant.f0 - exact.f0) * config.samples_per_frame / config.sampling_rate
    row: dict[str, Any] = {
        "f0_cents_mean": _short(cents.mean()),
        "f0_cents_max": _short(cents.max()),
        "frames_voiced": int(voiced.sum()),
        "frames_voiced_otherwise": int((voiced != also).sum()),
    }
    row["after"] = {}
    for seconds in SECONDS:
        end = seconds * _FRAME_RATE
        last = slice((end - _FRAME_RATE) * config.samples_per_frame, end * config.samples_per_frame)
        row["after"][str(seconds)] = {
            "phase_degrees_by_f0": _short(360 * ahead[end - 1]),
            "phase_degrees_by_f0_highest_harmonic": _short(360 * (config.nb_harmonics + 1) * ahead[end - 1]),
            "snr_db_of_the_second": _short(snr_db(variant.audio[last], exact.audio[last])),
        }
    row["snr_db"] = _short(snr_db(variant.audio, exact.audio))
    row["log_spectral_distance_db"] = _short(log_spectral_distance_db(variant.audio, exact.audio))
    return row, ahead


def snr_db(value: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    error = np.square(value - reference).sum()
    return float(10 * np.log10(np.square(reference).sum() / error)) if error else float("inf")


def log_spectral_distance_db(value: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Averages, over windows of 1024 samples, the root mean square difference of their spectra in decibels."""
    window = torch.hann_window(1024, dtype=torch.float64)
    one, other = (
        torch.stft(torch.from_numpy(signal), 1024, 256, window=window, return_complex=True).abs()
        for signal in (value, reference)
    )
    floor = float(other.max()) * 10 ** (-_RANGE_DB / 20)
    decibels = 20 * (one.clamp(min=floor).log10() - other.clamp(min=floor).log10())
    return float(decibels.square().mean(dim=0).sqrt().mean())


def _short(value: float) -> float | None:
    """Rounds to four digits; None for what JSON has no number for."""
    return float(f"{value:.4g}") if np.isfinite(value) else None


def plot(curves: dict[str, dict[str, NDArray[np.float64]]], path: Path) -> None:
    figure, axes = plt.subplots(1, len(curves), figsize=(9, 3.2), layout="constrained", sharey=True)
    for axis, (name, lines) in zip(axes, curves.items(), strict=True):
        for label, ahead in lines.items():
            seconds = np.arange(1, len(ahead) + 1) / _FRAME_RATE
            axis.semilogy(seconds, np.maximum(360 * np.abs(ahead), 1e-6), label=label, linewidth=1)
        axis.axhline(360, color="grey", linewidth=0.5, linestyle="--")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("seconds of audio")
    axes[0].set_ylabel("phase of the fundamental, degrees off")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="f0_precision", help="of the result files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    curves: dict[str, dict[str, NDArray[np.float64]]] = {}
    for subject in subjects(max(SECONDS)):
        exact = subject.speak(Variant("exact"))
        rows[subject.name], curves[subject.name] = {}, {}
        for variant in VARIANTS:
            row, ahead = compared(subject.speak(variant), exact, subject.hift)
            rows[subject.name][variant.name] = row
            if variant.f0 == torch.float32 and variant.other_convolutions == "float":
                curves[subject.name][variant.name] = ahead
            print(subject.name, "|", variant.name, "|", row, flush=True)
    save(options.name, {"environment": describe(), "seconds": max(SECONDS), "subjects": rows})
    plot(curves, RESULTS / f"{options.name}.png")


if __name__ == "__main__":
    main()
