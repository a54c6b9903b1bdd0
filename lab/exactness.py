"""Error and clicks of codecs that are decoded in windows, beside streams with a state.

A runtime without a state decodes a stream in windows, and joins the audio at hard seams. A window
needs as many frames around it as the decoder reads, its *reach*. With fewer frames, or none, the
audio near a seam is wrong, and jumps at the seam. All ways run the networks of this library, which
equal the public ones, and are compared with one decode of the whole sequence:

- Higgs Audio, published sizes, random weights and codes: windows of 128 frames
- VoxCPM2, published sizes, random weights and latents: patches of four latents
- the demo codec, trained, a sentence of speech: patches of four frames
- XY-Tokenizer, NeuCodec, X-Codec 2 and WavTokenizer, published sizes, random weights and codes,
  which have no state, so token2wav decodes windows too: with several contexts

    .venv/bin/python -m lab.exactness

A word after the command selects the cases whose names begin with it. The results of other cases
stay as they are, so each case has its environment. `lab.pictures` draws the errors.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.environment import RESULTS, ROOT, describe, save
from examples.demo_codec.codes import MODEL as DEMO_CODEC
from examples.demo_codec.encode import CodecEncoder
from testkit.models.codec_models import CODECS
from testkit.models.published_codecs import SIZES
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav_voice.recording import Recording

_SENTENCE = ROOT / "examples/demo_voice/recordings/sentence.wav"
CURVE_SECONDS = 0.02  # of audio behind each point of an error curve
_EXCERPT_SECONDS = 0.024
_MOST_FRAMES_PUSHED = 8

EXACT = StreamConfig(lookahead_frames=0)
Audio = NDArray[np.float32]
Tokens = NDArray[Any]


@dataclass(frozen=True)
class Windows:
    """Decoding without a state: `frames` at a time, with context that is decoded and cut off.

    Attributes:
        name: label in tables and pictures.
        frames: frames whose audio a window contributes.
        before, after: frames of context.
    """

    name: str
    frames: int
    before: int = 0
    after: int = 0

    def decode(self, model: Token2Wav, tokens: Tokens) -> Audio:
        """Decodes a sequence (frames, ...) window by window, and joins the audio (samples,)."""
        samples = model.config.samples_per_token
        parts = []
        for start in range(0, len(tokens), self.frames):
            first, stop = max(0, start - self.before), min(len(tokens), start + self.frames)
            audio = model.synthesize(tokens[first : stop + self.after])
            parts.append(audio[(start - first) * samples : (stop - first) * samples])
        return np.concatenate(parts)


@dataclass(frozen=True)
class Case:
    """A codec, its tokens, and the ways of other runtimes.

    Attributes:
        folder: function that writes the model into an empty folder, and returns its folder.
        tokens: (frames, ...).
        windows: ways of other runtimes.
        streams: names and settings of the ways of token2wav.
        excerpt: whether the result has the audio around a seam.
    """

    name: str
    folder: Callable[[Path], Path]
    tokens: Tokens
    windows: Sequence[Windows] = ()
    streams: Mapping[str, StreamConfig] = field(default_factory=lambda: {"token2wav": EXACT})
    excerpt: bool = False


def cases() -> list[Case]:
    random = np.random.default_rng(0)
    return [
        Case(
            "Higgs Audio, random weights",
            lambda folder: CODECS["higgs"].write(folder, SIZES["higgs"]),
            random.integers(0, 1024, (640, 8)).astype(np.int32),
            (Windows("8 frames before", 128, 8), Windows("32 on both sides", 128, 32, 32)),
            streams={"token2wav": EXACT, "token2wav, early audio": StreamConfig()},
        ),
        Case(
            "VoxCPM2, random weights",
            lambda folder: CODECS["voxcpm"].write(folder, SIZES["voxcpm"]),
            random.standard_normal((100, 64), np.float32),
            (Windows("each patch alone", 4), Windows("3 patches before", 4, 12)),
        ),
        Case(
            "demo codec, trained, a sentence",
            lambda _: DEMO_CODEC,
            CodecEncoder(DEMO_CODEC)(Recording.load(_SENTENCE).at(24000)),
            (Windows("each patch alone", 4), Windows("3 patches before", 4, 12)),
            excerpt=True,
        ),
        Case(
            "XY-Tokenizer, random weights",
            lambda folder: CODECS["xy_tokenizer"].write(folder, SIZES["xy_tokenizer"]),
            random.integers(0, 1024, (120, 8)).astype(np.int32),
            streams=_windows(10, ((20, 6), (50, 12), (50, 24), (110, 24))),
        ),
        Case(
            "NeuCodec, random weights",
            lambda folder: CODECS["neucodec"].write(folder, SIZES["neucodec"]),
            random.integers(0, 65536, (400, 1)).astype(np.int32),
            streams=_windows(25, ((50, 5), (100, 10), (200, 50))),
        ),
        Case(
            "X-Codec 2, random weights",
            lambda folder: CODECS["neucodec"].write(folder, {"model_type": "xcodec2"}),
            random.integers(0, 65536, (400, 1)).astype(np.int32),
            streams=_windows(25, ((50, 5), (100, 10), (200, 50))),
        ),
        Case(
            "WavTokenizer, random weights",
            lambda folder: CODECS["wavtokenizer"].write(folder, SIZES["wavtokenizer"]),
            random.integers(0, 4096, (400, 1)).astype(np.int32),
            streams=_windows(20, ((20, 5), (40, 10), (100, 20), (200, 50))),
        ),
    ]


def _windows(block: int, contexts: Sequence[tuple[int, int]]) -> dict[str, StreamConfig]:
    """Returns settings of windows by their names: tokens before and after each."""
    return {
        f"{left} before, {right} after": StreamConfig(
            left_blocks=left // block, lookahead_frames=right
        )
        for left, right in contexts
    }


def stream(model: Token2Wav, tokens: Tokens) -> tuple[Audio, NDArray[np.int64]]:
    """Streams a sequence in random portions.

    Returns:
        The audio (samples,), and the samples at which chunks begin, without the first.
    """
    random, start, chunks = np.random.default_rng(1), 0, list[Audio]()
    utterance = model.stream()
    while start < len(tokens):
        stop = start + int(random.integers(1, _MOST_FRAMES_PUSHED + 1))
        chunks += [chunk.audio for chunk in utterance.push(tokens[start:stop])]
        start = stop
    chunks += [chunk.audio for chunk in utterance.finish()]
    starts = np.cumsum([len(audio) for audio in chunks if len(audio)])
    return np.concatenate(chunks), starts[:-1]


def frames_to_first_audio(model: Token2Wav, tokens: Tokens) -> int:
    """Returns the number of frames that a stream needs before it gives audio."""
    utterance = model.stream()
    for index in range(len(tokens)):
        if utterance.push(tokens[index : index + 1]):
            utterance.cancel()
            return index + 1
    raise ValueError("tokens: the sequence is shorter than the first chunk")


def work(model: Token2Wav) -> float:
    """Returns the frames that are decoded for each frame of audio."""
    windows = getattr(model.config, "windows", None)
    return windows.longest / windows.block if windows else 1.0


def clicks(audio: Audio, whole: Audio, seams: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the jump of the error at each seam, in standard deviations of the whole audio."""
    error = audio.astype(np.float64) - whole
    jumps: NDArray[np.float64] = np.abs(error[seams] - error[seams - 1]) / whole.std()
    return jumps


def error_db(audio: Audio, whole: Audio, step: int) -> NDArray[np.float64]:
    """Returns the rms of the error of each `step` samples, in dB relative to the standard deviation
    of the whole audio; -160 for less.
    """
    error = audio.astype(np.float64) - whole
    parts = np.square(error[: len(error) // step * step]).reshape(-1, step).mean(axis=1)
    levels: NDArray[np.float64] = 10 * np.log10(np.maximum(parts / whole.var(), 1e-16))
    return levels


def measure(case: Case) -> dict[str, Any]:
    """Decodes the tokens of a case in all ways."""
    ways, decoded = list[dict[str, Any]](), list[Audio]()
    runtime = RuntimeConfig(device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        path = case.folder(Path(folder))
        exact = Token2Wav.load(path, stream=EXACT, runtime=runtime)
        whole = exact.synthesize(case.tokens)
        samples, rate = exact.config.samples_per_token, exact.config.sample_rate
        step = int(CURVE_SECONDS * rate)

        def add(name: str, audio: Audio, seams: NDArray[np.int64], **facts: float) -> None:
            jumps = clicks(audio, whole, seams)
            way = {
                "name": name,
                "error_db": round(float(error_db(audio, whole, len(whole))[0]), 1),
                "seams": len(seams),
                "click_median": float(f"{np.median(jumps):.2g}"),
                "click_max": float(f"{jumps.max():.2g}"),
                **facts,
            }
            print(case.name, way, flush=True)
            curve = [round(level) for level in error_db(audio, whole, step).tolist()]
            ways.append({**way, "error_curve_db": curve})
            decoded.append(audio)

        for windows in case.windows:
            size = windows.frames * samples
            add(
                windows.name,
                windows.decode(exact, case.tokens),
                np.arange(size, len(whole), size),
                work=(windows.before + windows.frames + windows.after) / windows.frames,
                first_audio_frames=windows.frames + windows.after,
            )
        for name, settings in case.streams.items():
            model = Token2Wav.load(path, stream=settings, runtime=runtime)
            add(
                name,
                *stream(model, case.tokens),
                work=work(model),
                first_audio_frames=frames_to_first_audio(model, case.tokens),
            )
    result = {
        "name": case.name,
        "environment": describe(),
        "frames": len(case.tokens),
        "frame_seconds": samples / rate,
        "sample_rate": rate,
        "ways": ways,
    }
    if case.excerpt:
        # the seam of the median click of the first way
        seams = np.arange(
            case.windows[0].frames * samples, len(whole), case.windows[0].frames * samples
        )
        jumps = clicks(decoded[0], whole, seams)
        seam, half = (
            int(seams[np.argsort(jumps)[len(jumps) // 2]]),
            int(_EXCERPT_SECONDS * rate) // 2,
        )
        result["excerpt"] = {
            "seam_seconds": round(seam / rate, 3),
            **{
                name: [round(float(value), 3) for value in audio[seam - half : seam + half]]
                for name, audio in (("whole", whole), ("alone", decoded[0]), ("ours", decoded[2]))
            },
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures error and clicks of windows.")
    parser.add_argument("case", nargs="?", default="", help="first letters of the cases to measure")
    chosen = parser.parse_args().case
    path = RESULTS / "exactness.json"
    results = {case["name"]: case for case in json.loads(path.read_text())["cases"]}
    for case in cases():
        if case.name.startswith(chosen):
            results[case.name] = measure(case)
    save("exactness", {"cases": [results[case.name] for case in cases()]})


if __name__ == "__main__":
    main()
