"""Cost of a frame of codec decoders in public code and in this library, on the same weights, codes
and cores, in turns.

Every contestant streams frame by frame, as a language model that speaks does. Each call receives
one new frame of codes of every stream, or for DAC a block of 4 frames, and returns their audio.
Decoders with symmetric convolutions (DAC, Higgs Audio, SNAC) hold back the audio that later frames
change. Public decoders without a state recompute: `qwen-tts` decodes the last 25 frames again, as
its `chunked_decode` does; `snac` decodes the last 5, as few as give the same audio; `transformers`
and NeMo decode the whole prefix again. `moshi` and `moss-tts-lite` keep a state themselves. All
contestants compute their streams as one batch, except that `moss-tts-lite` computes them in turns.
For the others the comparison takes the public code's streams in turns where that is faster.
Sizes are the published ones, and weights are random: speed does not depend on training. The
measurement runs in the environment that `scripts/golden_codecs.py` describes, with this project's
requirements; the plot, in the environment of this project:

    public/bin/python -m benchmarks.codec_peers
    .venv/bin/python -m benchmarks.codec_peers --plot
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.codec_models import (
    DAC,
    HIGGS,
    HIGGS_RATES,
    MIMI,
    MOSHI,
    NANOCODEC,
    QWEN3_OMNI,
    QWEN3_TTS,
    SNAC,
    moss_sizes,
)
from benchmarks.environment import RESULTS, describe, save
from scripts import golden_codecs as public
from scripts import golden_dac as public_dac
from scripts import golden_moss as public_moss
from tests.support import (
    dac_model,
    mimi_model,
    moshi_model,
    moss_model,
    nanocodec_model,
    qwen3_model,
    snac_model,
)
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.families.dac.config import DacSizes, DecoderSizes
from token2wav.voice import voice_for

_PACKAGES = ("qwen-tts-compat", "transformers", "moshi", "nemo-toolkit", "snac", "moss-tts-lite")
_CONTEXT = 25  # frames that `chunked_decode` of qwen-tts decodes again
_SNAC_CONTEXT = 5  # the reach of SNAC's decoder to both sides, in frames
_PLOTS_PER_ROW = 4
_COMPARED = 30  # number of calls of which the audio is compared
_POSITIONS = {1: (0, 25, 125), 8: (0, 25), 32: (0, 25)}  # calls before the timed ones, by streams
_REPEATS = {1: 5, 8: 3, 32: 2}  # calls that are timed at a position, by streams

_MOSS_FRAME = 1920  # samples of a frame
_SNAC_FRAME = 2048  # samples of a frame of seven codes
_SNAC_ORDER = [[0], [1, 4], [2, 3, 5, 6]]  # codes of a frame, by codebook

Audio = NDArray[np.float32]
Row = dict[str, Any]


class Contestant(ABC):
    """Decoder with some streams, which all have the same codes."""

    every_frame = True  # whether frames before a measured one have to be computed

    @abstractmethod
    def start(self, streams: int) -> None:
        """Opens new streams, and closes older ones."""

    @abstractmethod
    def frame(self, index: int) -> Audio:
        """Decodes frame `index` of every stream, or a block of frames, and returns the new audio of
        the first stream.
        """


class Recomputing(Contestant):
    """Public decoder that keeps no state.

    Args:
        decode: function from codes (streams, codebooks, frames) to audio (streams, samples).
        codes: (frames, codebooks).
        context: number of earlier frames that each call decodes again; None for all frames.
        block: frames of a call.
        held: samples that later frames still change, which are not returned yet.
    """

    every_frame = False

    def __init__(
        self,
        decode: Callable[[torch.Tensor], torch.Tensor],
        codes: torch.Tensor,
        frame_samples: int,
        context: int | None = None,
        block: int = 1,
        held: int = 0,
    ) -> None:
        self._decode, self._codes, self._context = decode, codes, context
        self._frame_samples, self._streams = frame_samples, 1
        self._block, self._held = block, held

    def start(self, streams: int) -> None:
        self._streams = streams

    def frame(self, index: int) -> Audio:
        begin, end = index * self._block, (index + 1) * self._block
        first = 0 if self._context is None else max(0, begin - self._context)
        codes = self._codes[first:end].T.expand(self._streams, -1, -1)
        start, stop = (
            max(0, (frames - first) * self._frame_samples - self._held) for frames in (begin, end)
        )
        return self._decode(codes)[0, start:stop].numpy()


class Moshi(Contestant):
    """Mimi of `moshi`, which keeps a state."""

    def __init__(self, model: Any, codes: torch.Tensor) -> None:
        self._model, self._codes, self._streams = model, codes, 1
        self._open = contextlib.ExitStack()

    def start(self, streams: int) -> None:
        self._open.close()
        self._open.enter_context(self._model.streaming(streams))
        self._streams = streams

    def frame(self, index: int) -> Audio:
        codes = self._codes[index, :, None].expand(self._streams, -1, -1)
        audio: Audio = self._model.decode(codes)[0, 0].numpy()
        return audio


class MossLite(Contestant):
    """Streamers of `moss-tts-lite`, which keep a state. Each of them computes one stream.

    Args:
        decoder: decoder of the package. Its copies share the weights.
        codes: (frames, codebooks).
    """

    def __init__(self, decoder: Any, codes: torch.Tensor) -> None:
        self._decoder, self._codes, self._streamers = decoder, codes, list[Any]()

    def start(self, streams: int) -> None:
        from moss_tts_lite.codec import MossCodecStreamer  # type: ignore[import-not-found]

        self._streamers = []
        for _ in range(streams):
            decoder = copy.copy(self._decoder)
            decoder.stages = [copy.copy(stage) for stage in decoder.stages]
            self._streamers.append(MossCodecStreamer(decoder, chunk_duration=_MOSS_FRAME / 24000))

    def frame(self, index: int) -> Audio:
        codes = self._codes[index : index + 1]
        audio: list[Audio] = [streamer.push(codes) for streamer in self._streamers]
        return audio[0]


class Ours(Contestant):
    """Streams of the library.

    Args:
        folder: model folder.
        codes: (frames, codebooks).
        block: frames of a call.
    """

    def __init__(self, folder: Path, codes: torch.Tensor, block: int) -> None:
        stream = StreamConfig(max_hop_tokens=block, hold_frames=0)
        self._block = block
        self._model = Token2Wav.load(folder, stream=stream, runtime=RuntimeConfig(device="cpu"))
        self._codes, self._requests = codes.numpy().astype(np.int32), list[Any]()

    def start(self, streams: int) -> None:
        pipeline, nobody = self._model.pipeline, voice_for(self._model.config, None)
        for request in self._requests:
            pipeline.close(request)
        self._requests = [pipeline.request(nobody) for _ in range(streams)]
        for request in self._requests:
            pipeline.open(request)

    def frame(self, index: int) -> Audio:
        for request in self._requests:
            start = index * self._block
            request.chunker.push(self._codes[start : start + self._block], end=False)
        chunks = self._model.pipeline.advance(self._requests)
        for request in self._requests:
            request.chunker.computed()
        chunk = chunks[0]
        if isinstance(chunk, Exception):
            raise chunk
        return np.zeros(0, np.float32) if chunk is None else chunk.audio


@dataclass(frozen=True)
class Match:
    """A public decoder and ours.

    Attributes:
        family: name of the codec in tables.
        peer: name of the public code.
        sizes: sizes of the networks, with published names.
        codebooks, codebook_size: number of codes of a frame, and entries of a codebook.
        make: function from the codes to the public contestant.
        write_model: function that writes the same weights to a folder in the published layout.
        block: frames of a call.
        frame_seconds: duration of a frame.
    """

    family: str
    peer: str
    sizes: dict[str, Any]
    codebooks: int
    codebook_size: int
    make: Callable[[torch.Tensor], Contestant]
    write_model: Callable[[Path, Any], Path]
    block: int = 1
    frame_seconds: float = 0.08

    @property
    def call_seconds(self) -> float:
        """Seconds of audio of a call."""
        return self.block * self.frame_seconds


def matches() -> list[Match]:
    """Lists all matches."""

    def qwen3_tts(codes: torch.Tensor) -> Contestant:
        decoder = public.qwen3_tts_decoder(QWEN3_TTS, "sdpa")
        return Recomputing(lambda given: decoder(given)[:, 0], codes, 1920, _CONTEXT)

    def qwen3_omni(codes: torch.Tensor) -> Contestant:
        decoder = public.qwen3_omni_code2wav(QWEN3_OMNI, "sdpa")
        return Recomputing(lambda given: decoder(given)[:, 0], codes, 1920, _CONTEXT)

    def transformers_mimi(codes: torch.Tensor) -> Contestant:
        model = public.transformers_mimi(MIMI, "sdpa")
        return Recomputing(lambda given: model.decode(given).audio_values[:, 0], codes, 1920)

    def moshi_mimi(codes: torch.Tensor) -> Contestant:
        return Moshi(public.moshi_mimi(MOSHI), codes)

    def nanocodec(codes: torch.Tensor) -> Contestant:
        quantizer, decoder = public.nemo_modules(NANOCODEC)

        def decode(given: torch.Tensor) -> torch.Tensor:
            lengths = torch.full((given.shape[0],), given.shape[2])
            values = quantizer.decode(indices=given.transpose(0, 1), input_len=lengths)
            audio: torch.Tensor = decoder(inputs=values, input_len=lengths)[0]
            return audio

        return Recomputing(decode, codes, 1764)

    def dac(codes: torch.Tensor) -> Contestant:
        model = public_dac.transformers_dac(DAC)
        return Recomputing(
            lambda given: model.decode(audio_codes=given).audio_values,
            codes,
            512,
            block=4,
            held=DacSizes(sampling_rate=44100).output_delay,
        )

    def higgs(codes: torch.Tensor) -> Contestant:
        model = public_dac.transformers_higgs(HIGGS)
        held = DecoderSizes(downsampling_ratios=HIGGS_RATES, upsampling_ratios=HIGGS_RATES)
        return Recomputing(
            lambda given: model.decode(given).audio_values[:, 0],
            codes,
            960,
            held=held.output_delay,
        )

    def snac(codes: torch.Tensor) -> Contestant:
        model = public_dac.public_snac(SNAC)
        _silence_noise(model.state_dict())

        def decode(given: torch.Tensor) -> torch.Tensor:
            books = [given[:, places].transpose(1, 2).flatten(1) for places in _SNAC_ORDER]
            audio: torch.Tensor = model.decode(books)[:, 0]
            return audio

        held = DecoderSizes(downsampling_ratios=(2, 4, 8, 8)).output_delay
        return Recomputing(decode, codes, _SNAC_FRAME, _SNAC_CONTEXT, held=held)

    def moss(codes: torch.Tensor) -> Contestant:
        return MossLite(public_moss.public_decoder(moss_sizes()), codes)

    qwen3 = (16, 2048)
    mimi = (8, 2048)
    return [
        Match("Qwen3-TTS", "qwen-tts", QWEN3_TTS, *qwen3, qwen3_tts, qwen3_model.write_model),
        Match(
            "Qwen3-Omni", "transformers", QWEN3_OMNI, *qwen3, qwen3_omni, qwen3_model.write_model
        ),
        Match("Mimi", "transformers", MIMI, *mimi, transformers_mimi, mimi_model.write_model),
        Match("Mimi", "moshi", MOSHI, *mimi, moshi_mimi, moshi_model.write_model),
        Match("NanoCodec", "NeMo", NANOCODEC, 4, 4032, nanocodec, nanocodec_model.write_model),
        Match("DAC", "transformers", DAC, 9, 1024, dac, dac_model.write_dac, 4, 512 / 44100),
        Match(
            *("Higgs Audio", "transformers", HIGGS, 8, 1024),
            *(higgs, dac_model.write_higgs),
            frame_seconds=0.04,
        ),
        Match(
            *("SNAC", "snac", SNAC, 7, 4096),
            *(snac, _write_snac),
            frame_seconds=_SNAC_FRAME / 24000,
        ),
        Match(
            *("MOSS", "moss-tts-lite", moss_sizes(), 32, 1024),
            *(moss, moss_model.write_model),
        ),
    ]


def _write_snac(folder: Path, golden: Any) -> Path:
    """Writes a folder of SNAC whose noise is silent."""
    path = snac_model.write_snac(folder, golden) / "pytorch_model.bin"
    weights = torch.load(path)
    _silence_noise(weights)
    torch.save(weights, path)
    return folder


def _silence_noise(weights: dict[str, torch.Tensor]) -> None:
    """Makes the noise of SNAC silent, because the public code draws other noise in every call. Both
    contestants still compute it.
    """
    for name, value in weights.items():
        if ".linear." in name and name.endswith("original0"):
            value.zero_()


def difference_db(both: dict[str, Contestant]) -> float:
    """Compares the audio of the first frames of one stream.

    Returns:
        The root mean square of the public audio over that of the difference, in dB.
    """
    heard = {}
    for name, contestant in both.items():
        contestant.start(1)
        heard[name] = np.concatenate([contestant.frame(index) for index in range(_COMPARED)])
    signal, difference = heard["public"], heard["ours"] - heard["public"]
    return float(20 * np.log10(signal.std() / max(difference.std(), 1e-12)))


def rows(both: dict[str, Contestant], streams: int, call_seconds: float) -> Iterator[Row]:
    """Times the first calls of several streams, then calls after each position."""
    firsts: list[dict[str, float]] = []
    repeats = _REPEATS[streams]
    for turn in range(repeats + 1):  # one more for warm-up
        for contestant in both.values():
            contestant.start(streams)
        firsts.append(_seconds(both, 0, turn, measured=True))
    yield _row(firsts[1:], 0, streams, call_seconds)
    times: list[dict[str, float]] = []
    positions = _POSITIONS[streams][1:]
    for index in range(1, positions[-1] + repeats):
        start = next((p for p in positions if p <= index < p + repeats), None)
        found = _seconds(both, index, index, measured=start is not None)
        if start is not None:
            times.append(found)
            if index == start + repeats - 1:
                yield _row(times, start, streams, call_seconds)
                times = []


def _seconds(
    both: dict[str, Contestant], index: int, turn: int, *, measured: bool
) -> dict[str, float]:
    """Times a frame of one contestant after the other; the order alternates from turn to turn."""
    found = {}
    for name, contestant in sorted(both.items(), reverse=bool(turn % 2)):
        if measured or contestant.every_frame:
            begin = time.perf_counter()
            contestant.frame(index)
            found[name] = time.perf_counter() - begin
    return found


def _row(times: list[dict[str, float]], frames: int, streams: int, call_seconds: float) -> Row:
    row: Row = {"streams": streams, "frames_before": frames}
    for name in ("public", "ours"):
        own = [each[name] for each in times]
        median = statistics.median(own)
        row[f"{name}_ms"] = [round(1e3 * value, 2) for value in (median, min(own), max(own))]
        row[f"{name}_audio_seconds_per_second"] = round(streams * call_seconds / median, 2)
    return row


def compare(rows: list[Row]) -> None:
    """Adds two figures to each row of a run.

    `public_in_turns_ms` is the time of the public code for one stream after the other, which is
    shorter than that of a batch for some decoders. `times_faster` compares the shorter one.
    """
    alone = {row["frames_before"]: row["public_ms"][0] for row in rows if row["streams"] == 1}
    for row in rows:
        row["public_in_turns_ms"] = round(row["streams"] * alone[row["frames_before"]], 2)
        row["times_faster"] = round(public_ms(row) / row["ours_ms"][0], 2)


def public_ms(row: Row) -> float:
    """Returns the shorter time of the public code: of a batch, or of its streams in turns."""
    return float(min(row["public_ms"][0], row["public_in_turns_ms"]))


def measure(out: str, families: list[str]) -> None:
    """Measures matches one by one. The run of a match replaces its older run in the file."""
    path = RESULTS / f"{out}.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.is_file() else []
    for match in matches():
        if families and match.family not in families:
            continue
        drawn = np.random.default_rng(0).integers(
            0, match.codebook_size, (160 * match.block, match.codebooks)
        )
        codes = torch.from_numpy(drawn)
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            golden: Any = SimpleNamespace(sizes=match.sizes)
            model = match.write_model(Path(folder), golden)
            both = {"public": match.make(codes), "ours": Ours(model, codes, match.block)}
            run: dict[str, Any] = {
                "family": match.family,
                "peer": match.peer,
                "environment": describe(*_PACKAGES),
                "threads": torch.get_num_threads(),
                "call_seconds": match.call_seconds,
                "difference_db": round(difference_db(both), 1),
                "rows": [],
            }
            for streams in _POSITIONS:
                for row in rows(both, streams, match.call_seconds):
                    run["rows"].append(row)
                    print(match.family, match.peer, row, flush=True)
            compare(run["rows"])
        others = [each for each in runs if (each["family"], each["peer"]) != _key(match)]
        runs = sorted([*others, run], key=lambda each: (each["family"], each["peer"]))
        save(out, {"runs": runs})


def _key(match: Match) -> tuple[str, str]:
    return match.family, match.peer


def plot(out: str) -> None:
    """Draws the milliseconds of a call, by the number of streams."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    runs = json.loads((RESULTS / f"{out}.json").read_text())["runs"]
    rows = -(-len(runs) // _PLOTS_PER_ROW)
    size = (3 * _PLOTS_PER_ROW, 3.2 * rows)
    figure, axes = plt.subplots(rows, _PLOTS_PER_ROW, figsize=size, sharey=True, squeeze=False)
    for axis, run in zip(axes.flat, runs, strict=False):
        after = [row for row in run["rows"] if row["frames_before"] == 25]
        counts = [row["streams"] for row in after]
        for label, colour, times in (
            (run["peer"], "tab:red", [public_ms(row) for row in after]),
            ("token2wav", "tab:blue", [row["ours_ms"][0] for row in after]),
        ):
            each = [total / count for total, count in zip(times, counts, strict=True)]
            axis.plot(counts, each, color=colour, marker="o", label=label)
        # Runs without this value have calls of one frame of 80 ms.
        allowed = [1e3 * run.get("call_seconds", 0.08) / count for count in counts]
        axis.plot(counts, allowed, color="gray", linestyle=":", label="pace of speech")
        axis.set(title=run["family"], xlabel="streams", xscale="log", yscale="log")
        axis.set_xticks([1, 8, 32], labels=["1", "8", "32"])
        axis.legend(fontsize=7)
    for axis in axes[:, 0]:
        axis.set_ylabel("ms for a call of each stream")
    for axis in axes.flat[len(runs) :]:
        axis.remove()
    figure.tight_layout()
    figure.savefig(RESULTS / f"{out}.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted({match.family for match in matches()})
    parser.add_argument("--family", nargs="+", choices=names, default=[])
    parser.add_argument("--out", default="codec_peers", help="name of the result")
    parser.add_argument(
        "--plot", action="store_true", help="only draw the plot of an existing result"
    )
    options = parser.parse_args()
    if options.plot:
        plot(options.out)
    else:
        measure(options.out, options.family)


if __name__ == "__main__":
    main()
