"""Verification of a backend: compares its stages with torch in float32, as a stream runs them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.backends import LoadContext
from token2wav.config import RuntimeConfig
from token2wav.config.model_config import ModelConfig
from token2wav.execution.device import device_named
from token2wav.model import Token2Wav
from token2wav.serving.options import UtteranceOptions
from token2wav.stages.stage import BackendName, FrameChunk, StreamOptions
from token2wav.voice import MEL_BOUND, Voice

PROMPT_TOKENS = 75

# Bounds of the figures of a `Report`. In float32 a backend differs from torch only by the order of
# sums. In float16 it rounds every product to 11 bits, which is an error of -60 dB. The vocoder sums
# F0 to a phase, so the audio of two nearly equal mels need not agree sample by sample. The bound of
# the audio therefore applies only to float32.
BOUNDS: dict[str, dict[str, float]] = {
    "float32": {"mel_db": -90.0, "vocoder_max": 1e-3, "audio_snr_db": 35.0},
    "float16": {"mel_db": -45.0, "vocoder_max": 1e-3},
}


@dataclass(frozen=True)
class Report:
    """Comparison of a backend with torch in float32, on random tokens with a random voice.

    A codec has no mel. Its decoder is compared in place of a vocoder.

    Attributes:
        backend, precision, device: backend that was compared, its precision and its device.
        mel_max: largest difference of the mels, which are computed as in a stream; None for a
            codec.
        mel_db: standard deviation of that difference, relative to the standard deviation of the
            mel, in dB; None for a codec.
        vocoder_max: largest difference of the audio that both backends compute from the same mel,
            or with a codec from the same codes.
        audio_snr_db: signal-to-noise ratio of the audio of the whole utterance, from tokens.
        finite_when_large: whether a prompt mel of the largest accepted values gives a finite mel;
            None for a codec.
    """

    backend: str
    precision: str
    device: str
    seconds: float
    mel_max: float | None
    mel_db: float | None
    vocoder_max: float
    audio_snr_db: float
    finite_when_large: bool | None

    @property
    def failures(self) -> list[str]:
        """One sentence for each figure beyond its bound; empty if the backend passes."""
        failures = []
        for name, bound in BOUNDS[self.precision].items():
            value = getattr(self, name)
            if value is None:
                continue
            if not (value >= bound if name == "audio_snr_db" else value <= bound):
                failures.append(f"{name} is {value:.3g}, the bound is {bound:g}")
        if self.finite_when_large is False:
            failures.append("large inputs give NaN or infinite numbers")
        return failures

    def as_json(self) -> str:
        return json.dumps({**asdict(self), "failures": self.failures}, indent=1)

    def as_table(self) -> str:
        bounds = BOUNDS[self.precision]
        rows = []
        if self.mel_db is not None:
            rows += [
                ("mel, largest error", f"{self.mel_max:.1e}", ""),
                ("mel, error to spread (dB)", f"{self.mel_db:.1f}", f"<= {bounds['mel_db']:g}"),
            ]
        last_stage = "decoder" if self.mel_db is None else "vocoder"
        rows += [
            (
                f"{last_stage}, largest error",
                f"{self.vocoder_max:.1e}",
                f"<= {bounds['vocoder_max']:g}",
            ),
            (
                "audio, SNR (dB)",
                f"{self.audio_snr_db:.1f}",
                f">= {bounds.get('audio_snr_db', '-')}",
            ),
        ]
        if self.finite_when_large is not None:
            rows.append(("finite on large inputs", str(self.finite_when_large).lower(), "true"))
        head = (
            f"{self.backend}, {self.precision}, {self.device}, against torch, float32: "
            f"{self.seconds:g} s of audio"
        )
        return "\n".join(
            [head, *(f"  {name:28} {value:>10}  {bound}" for name, value, bound in rows)]
        )


def exported_runtime(folder: Path, runtime: RuntimeConfig) -> RuntimeConfig:
    """Returns runtime settings that run the graphs in a model's engine folder.

    The choice does not depend on the backend that a server would select. On a GPU, TensorRT is
    preferred to ONNX Runtime. If the precision is `auto` and only the other precision was exported,
    that precision is used. If there is no graph for the device, the backend is torch. Raises
    ArtifactError if a description in the engine folder is damaged.
    """
    host = LoadContext(folder, runtime, device_named(runtime.device))
    artifacts = [
        artifact
        for artifact in host.engines.artifacts()
        if artifact.graph in ("step", "vocoder", "decoder")
    ]
    backends: tuple[BackendName, ...] = (
        ("tensorrt", "onnx") if host.device.type == "cuda" else ("onnx",)
    )
    for backend in backends:
        exported = [artifact for artifact in artifacts if artifact.backend.startswith(backend)]
        if exported:
            precisions = {artifact.precision for artifact in exported if artifact.graph == "step"}
            if runtime.precision == "auto" and precisions and host.precision not in precisions:
                runtime = replace(runtime, precision=precisions.pop())
            return replace(runtime, backend=backend)
    return replace(runtime, backend="torch")


def verify(folder: Path, runtime: RuntimeConfig, seconds: float) -> Report:
    """Compares the backend of a configuration with torch in float32 on the same device. Raises
    Token2WavError if the model or the backend cannot be loaded.

    Args:
        runtime: settings that name the backend.
    """
    from tqdm import tqdm  # only here: the library alone is enough for the rest of this file

    reference = Token2Wav.load(
        folder, runtime=RuntimeConfig(device=runtime.device, backend="torch", precision="float32")
    )
    candidate = Token2Wav.load(folder, runtime=runtime)
    random, config, summary = np.random.default_rng(0), reference.config, candidate.summary
    tokens = config.tokens.draw(round(seconds * config.token_frame_rate), random)
    voice = _random_voice(config, random) if config.takes_voice else None
    report = partial(Report, summary.name, summary.precision, summary.device, seconds)
    models = reference, candidate
    if "decoder" in config.stages:
        audio, other_audio = (_stream_audio(model, tokens, voice) for model in models)
        error = float(np.abs(other_audio - audio).max())
        return report(
            mel_max=None,
            mel_db=None,
            vocoder_max=error,
            audio_snr_db=_snr_db(other_audio, audio),
            finite_when_large=None,
        )
    assert voice is not None
    bar = tqdm(total=4, desc="verify", unit="stage", leave=False)
    mel, other_mel = (stream_mel(model, tokens, voice) for model in models)
    bar.update()
    mel_audio, other_mel_audio = (vocode(model, mel) for model in models)
    bar.update()
    audio, other_audio = (model.synthesize(tokens, voice) for model in models)
    bar.update()
    loud_voice = replace(voice, prompt_mel=np.sign(voice.prompt_mel) * np.float32(MEL_BOUND))
    finite = bool(np.isfinite(stream_mel(candidate, tokens[:60], loud_voice)).all())
    bar.close()
    return report(
        mel_max=float(np.abs(other_mel - mel).max()),
        mel_db=-_snr_db(other_mel, mel),
        vocoder_max=float(np.abs(other_mel_audio - mel_audio).max()),
        audio_snr_db=_snr_db(other_audio, audio),
        finite_when_large=finite,
    )


def _random_voice(config: ModelConfig, random: np.random.Generator) -> Voice:
    return Voice(
        config.tokens.draw(PROMPT_TOKENS, random),
        random.standard_normal((config.prompt_frames(PROMPT_TOKENS)[-1], config.mel_bands)),
        random.standard_normal(config.speaker_size),
    )


def _stream_audio(
    model: Token2Wav, tokens: NDArray[Any], voice: Voice | None
) -> NDArray[np.float32]:
    """Computes the audio of a codec utterance in four parts.

    There are four because an exported decoder runs only the chunks between the first and the last
    one.
    """
    with model.stream(voice) as stream:
        chunks = [chunk for part in np.array_split(tokens, 4) for chunk in stream.push(part)]
        chunks += stream.finish()
    return np.concatenate([chunk.audio for chunk in chunks])


def stream_mel(
    model: Token2Wav, tokens: NDArray[np.int32], voice: Voice, steps: int = 0
) -> NDArray[np.float32]:
    """Computes the mel (bands, 2 * tokens) of an utterance as a stream does, chunk by chunk.

    Args:
        steps: ODE steps; 0 for the default number.
    """
    flow, config = model.pipeline.flow, model.config
    chunker = model.pipeline.utterance(voice, UtteranceOptions(steps)).chunker
    handle, mels = flow.open(voice, StreamOptions(steps)), list[torch.Tensor]()
    try:
        chunker.push(tokens, end=True)
        while (chunk := chunker.next_chunk) is not None:
            mels += flow.advance([(handle, chunk)])
            chunker.finish_chunk()
    finally:
        flow.close(handle)
    frames = config.token_mel_ratio * len(tokens)
    return torch.cat(mels, dim=1)[:, -frames:].cpu().numpy()


def vocode(model: Token2Wav, mel: NDArray[np.float32]) -> NDArray[np.float32]:
    """Computes the audio of a mel in four chunks of a stream.

    There are four because an exported vocoder runs only the chunks between the first and the last
    one.
    """
    vocoder, pieces = model.pipeline.vocoder, torch.tensor(mel).tensor_split(4, dim=1)
    handle = vocoder.open()
    try:
        chunks = [FrameChunk(piece, index == len(pieces) - 1) for index, piece in enumerate(pieces)]
        audio = [vocoder.advance([(handle, chunk)])[0] for chunk in chunks]
    finally:
        vocoder.close(handle)
    return torch.cat(audio).cpu().numpy()


def _snr_db(values: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Returns the spread of the expected values, relative to that of the difference, in dB."""
    return -float(20 * np.log10(max(np.std(values - expected) / np.std(expected), 1e-12)))
