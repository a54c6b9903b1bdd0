"""Cost of a chunk in the decoders' public code and in this library, on the same weights and tokens.

Both use the same random weights, tokens and cores, and take turns. A chunk is one second of audio.
Public CosyVoice2 recomputes the whole utterance for each chunk. Step-Audio2 has its own caches.
Chatterbox has no streams, so its figure is for a whole utterance of the same length. Public code
computes several streams one after the other. The measurement runs in the environment that
`lab/golden/public_families.py` describes:

    public/bin/python -m lab.peers.peers

`--windows` compares our own streams of Chatterbox with its whole utterances instead, and needs no
public code.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.environment import describe, program_parser, save, saved_runs
from lab.golden import public_families as public
from testkit.models import chatterbox_model, cosyvoice2_model, stepaudio2_model
from testkit.models.random_weights import fill
from testkit.utterances import a_voice, some_tokens
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, Voice

_HOP, _LOOKAHEAD, _PROMPT = 25, 3, 75  # tokens
_OVERLAP_FRAMES, _FRAME_SAMPLES = 8, 480  # overlap and frame of chunks in public vocoders
_REPEATS = 3
_SIZES = {"public": public.Sizes(), "tiny": public.TINY}


class Contestant(ABC):
    """Decoder with some streams of one voice, which all have the same tokens."""

    every_chunk = True  # whether chunks before a measured one have to be computed

    @abstractmethod
    def start(self, streams: int) -> None:
        """Opens new streams, and computes everything that depends on the voice alone."""

    @abstractmethod
    def chunk(self, index: int) -> None:
        """Computes one second of audio for every stream."""

    def stream_bytes(self) -> int:
        """Returns the memory that a stream holds now, including the prompt."""
        return 0


@dataclass
class Material:
    """Networks of public code, and the tokens and prompt of the streams."""

    flow: Any
    hift: Any
    tokens: torch.Tensor  # (1, n)
    prompt: dict[str, torch.Tensor]

    def vocoded(self, mel: torch.Tensor, held: torch.Tensor | None) -> torch.Tensor:
        """Vocodes a chunk after the last frames of the previous chunk, as both public loops do.

        Returns:
            The last mel frames, which the next chunk overlaps.
        """
        source = torch.zeros(1, 1, 0)
        if held is not None:
            mel, source = (
                torch.cat((held, mel), dim=2),
                torch.zeros(1, 1, _OVERLAP_FRAMES * _FRAME_SAMPLES),
            )
        (getattr(self.hift, "inference", None) or self.hift)(mel, source)
        return mel[:, :, -_OVERLAP_FRAMES:]

    def lengths(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "token_len": torch.tensor([tokens.shape[1]]),
            "prompt_token_len": torch.tensor([_PROMPT]),
            "prompt_feat_len": torch.tensor([2 * _PROMPT]),
        }


class PublicCosyVoice2(Contestant):
    """Loop of the public `CosyVoice2Model`.

    All tokens so far go through the flow, and the new mel frames go through the vocoder.
    """

    every_chunk = False

    def __init__(self, material: Material) -> None:
        self._material, self._streams = material, 1

    def start(self, streams: int) -> None:
        self._streams = streams

    def chunk(self, index: int) -> None:
        material = self._material
        tokens = material.tokens[:, : _HOP * (index + 1) + _LOOKAHEAD]
        held = torch.zeros(1, 80, _OVERLAP_FRAMES) if index else None
        for _ in range(self._streams):
            call = {"token": tokens, **material.prompt, **material.lengths(tokens)}
            mel, _ = material.flow.inference(**call, streaming=True, finalize=False)
            material.vocoded(mel[:, :, 2 * _HOP * index :], held)


class PublicChatterbox(Contestant):
    """Public Chatterbox, which computes whole utterances."""

    every_chunk = False

    def __init__(self, material: Material) -> None:
        self._material, self._streams = material, 1

    def start(self, streams: int) -> None:
        self._streams = streams

    def chunk(self, index: int) -> None:
        tokens = self._material.tokens[:, : _HOP * (index + 1)]
        for _ in range(self._streams):
            call = {"token": tokens, **self._material.prompt, **self._material.lengths(tokens)}
            mel, _ = self._material.flow.inference(**call, finalize=True)
            self._material.vocoded(mel, None)


class PublicStepAudio2(Contestant):
    """Loop of the public `Token2wav.stream`, with its window.

    The public class itself requires a GPU.
    """

    def __init__(self, material: Material) -> None:
        self._material, self._caches = material, list[dict[str, torch.Tensor]]()
        self._held: torch.Tensor | None = None

    def start(self, streams: int) -> None:
        prompt = self._material.prompt
        tokens = torch.cat((prompt["prompt_token"], torch.full((1, _LOOKAHEAD), 4218)), dim=1)
        cache = self._material.flow.setup_cache(
            tokens, prompt["prompt_feat"], prompt["embedding"], 10
        )
        # The networks return views of buffers that the next call overwrites.
        self._caches = [
            {name: value.clone() for name, value in cache.items()} for _ in range(streams)
        ]
        self._held = None

    def chunk(self, index: int) -> None:
        material, frames = self._material, 2 * _PROMPT
        tokens = material.tokens[:, _HOP * index : _HOP * (index + 1) + _LOOKAHEAD]
        held = self._held
        for stream, cache in enumerate(self._caches):
            mel, cache = material.flow.inference_chunk(
                tokens, material.prompt["embedding"], cache, False, 10
            )
            for name, axis in (("estimator_att_cache", 4), ("conformer_att_cache", 3)):
                states = cache[name]
                if states.shape[axis] > frames + 100:
                    ends = (
                        states.narrow(axis, 0, frames),
                        states.narrow(axis, states.shape[axis] - 100, 100),
                    )
                    states = torch.cat(ends, dim=axis)
                cache[name] = states.clone() if len(self._caches) > 1 else states
            self._caches[stream] = cache
            self._held = material.vocoded(mel, held)

    def stream_bytes(self) -> int:
        return sum(value.nbytes for value in self._caches[0].values())


class Ours(Contestant):
    """Streams of the library, whose chunks are computed in one batch."""

    def __init__(self, folder: Path, material: Material, storage: str) -> None:
        runtime = RuntimeConfig(device="cpu", cache_storage=storage)  # type: ignore[arg-type]
        self._model = Token2Wav.load(
            folder, stream=StreamConfig(first_tokens=0, max_hop_tokens=_HOP), runtime=runtime
        )
        prompt, embedding = material.prompt, material.prompt["embedding"][0]
        self._voice = Voice(
            prompt["prompt_token"][0].numpy(), prompt["prompt_feat"][0].numpy(), embedding.numpy()
        )
        self._tokens, self._utterances = material.tokens[0].numpy(), list[Any]()

    def start(self, streams: int) -> None:
        pipeline = self._model.pipeline
        for utterance in self._utterances:
            pipeline.close(utterance)
        self._utterances = [pipeline.utterance(self._voice) for _ in range(streams)]
        for utterance in self._utterances:
            pipeline.open(utterance)

    def chunk(self, index: int) -> None:
        begin = _HOP * index + (_LOOKAHEAD if index else 0)
        for utterance in self._utterances:
            utterance.chunker.push(self._tokens[begin : _HOP * (index + 1) + _LOOKAHEAD], end=False)
        for chunk in self._model.pipeline.advance(self._utterances):
            if isinstance(chunk, Exception):
                raise chunk
        for utterance in self._utterances:
            utterance.chunker.finish_chunk()

    def stream_bytes(self) -> int:
        usage = self._model.pipeline.flow.usage()
        return usage.used * usage.page_bytes // len(self._utterances)


def material_of(flow: Any, hift: Any, chunks: int) -> Material:
    random = np.random.default_rng(0)
    prompt = {
        "prompt_token": torch.from_numpy(random.integers(0, 6561, (1, _PROMPT))),
        "prompt_feat": torch.from_numpy(random.standard_normal((1, 2 * _PROMPT, 80))).float(),
        "embedding": torch.from_numpy(random.standard_normal((1, 192))).float(),
    }
    tokens = torch.from_numpy(random.integers(0, 6561, (1, _HOP * (chunks + 1) + _LOOKAHEAD)))
    return Material(fill(flow), fill(hift), tokens, prompt)


def contestants(
    family: str, sizes: public.Sizes, folder: Path, chunks: int, storage: str
) -> dict[str, Contestant]:
    """Returns both decoders of a family.

    Our decoder reads the weights of the public one from a folder in the published layout.
    """
    if family == "chatterbox":
        sizes = (
            replace(sizes, heads=8, dim_head=sizes.channels // 8) if sizes is public.TINY else sizes
        )
        material = material_of(public.chatterbox_flow(sizes), public.chatterbox_hift(sizes), chunks)
        parts = {"flow": material.flow, "mel2wav": material.hift}
        state = {
            f"{part}.{name}": value
            for part, net in parts.items()
            for name, value in net.state_dict().items()
        }
        save_file(
            {name: value.contiguous() for name, value in state.items()},
            folder / "s3gen.safetensors",
        )
        return {"public": PublicChatterbox(material), "ours": Ours(folder, material, storage)}
    if family == "stepaudio2":
        sizes = replace(sizes, channels=512, layers=(16, 0)) if sizes is not public.TINY else sizes
        material = material_of(public.stepaudio2_flow(sizes), public.stepaudio2_hift(sizes), chunks)
    else:
        material = material_of(public.cosyvoice2_flow(sizes), public.cosyvoice2_hift(sizes), chunks)
    models: dict[str, Any] = {"cosyvoice2": cosyvoice2_model, "stepaudio2": stepaudio2_model}
    models[family].write_yaml(folder, SimpleNamespace(sizes=vars(sizes)))
    torch.save(material.flow.state_dict(), folder / "flow.pt")
    torch.save(material.hift.state_dict(), folder / "hift.pt")
    makers: dict[str, Callable[[Material], Contestant]] = {
        "cosyvoice2": PublicCosyVoice2,
        "stepaudio2": PublicStepAudio2,
    }
    return {"public": makers[family](material), "ours": Ours(folder, material, storage)}


def seconds_of(both: dict[str, Contestant], index: int, measured: bool) -> dict[str, float]:
    """Times a chunk of one decoder after the other; the order alternates from chunk to chunk.

    Before the measured chunk, only decoders with `every_chunk` compute their chunks.
    """
    seconds = {}
    for name, contestant in sorted(both.items(), reverse=bool(index % 2)):
        if measured or contestant.every_chunk:
            begin = time.perf_counter()
            contestant.chunk(index)
            seconds[name] = time.perf_counter() - begin
    return seconds


def rows(
    both: dict[str, Contestant], streams: int, seconds: list[int], repeats: int
) -> Iterator[dict[str, Any]]:
    """Times the first chunks of several streams, then consecutive chunks after each position.

    Args:
        seconds: positions in the utterance, in seconds.
        repeats: consecutive chunks at a position.
    """
    firsts = []
    for _ in range(_REPEATS + (streams == 1)):  # one more for warm-up
        for contestant in both.values():
            contestant.start(streams)
        firsts.append(seconds_of(both, 0, measured=True))
    yield row(firsts[-_REPEATS:], 0, streams, both)
    times: list[dict[str, float]] = []
    for index in range(1, max(seconds) + repeats if seconds else 0):
        position = next((second for second in seconds if second <= index < second + repeats), None)
        chunk_seconds = seconds_of(both, index, position is not None)
        if position is not None:
            times.append(chunk_seconds)
            if index == position + repeats - 1:
                yield row(times, position, streams, both)
                times = []


def row(
    times: list[dict[str, float]], position: int, streams: int, both: dict[str, Contestant]
) -> dict[str, Any]:
    figures: dict[str, Any] = {"streams": streams, "position_s": position}
    for name, contestant in both.items():
        seconds = [chunk[name] for chunk in times]
        figures[f"{name}_s"] = [
            round(value, 4) for value in (statistics.median(seconds), min(seconds), max(seconds))
        ]
        figures[f"{name}_stream_mib"] = round(contestant.stream_bytes() / 2**20, 1)
    figures["times_faster"] = round(figures["public_s"][0] / figures["ours_s"][0], 2)
    return figures


def measure(options: argparse.Namespace) -> None:
    """Measures families one by one; the run of a family replaces its older run in the file."""
    public.prepare_imports()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    runs = saved_runs(options.out)
    for family in options.family:
        run: dict[str, Any] = {
            "family": family,
            "environment": describe("cosyvoice-minicpmo", "stepaudio2-minicpmo", "chatterbox-tts"),
            "threads": torch.get_num_threads(),
            "prompt_tokens": _PROMPT,
            "sizes": options.sizes,
            "cache_storage": options.storage,
            "rows": [],
        }
        runs = sorted(
            [*(other for other in runs if other["family"] != family), run],
            key=lambda run: run["family"],
        )
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            chunks = max(options.seconds) + options.repeats
            both = contestants(family, _SIZES[options.sizes], Path(folder), chunks, options.storage)
            for streams, seconds in ((1, options.seconds), (4, options.seconds[: options.many])):
                for row in rows(both, streams, seconds, options.repeats):
                    run["rows"].append(row)
                    save(options.out, {"runs": runs})
                    print(family, row, flush=True)


def windows(*, mean_flow: bool) -> dict[str, dict[str, float]]:
    """Compares the mel of 6 s of Chatterbox, block by block and in windows, with whole computation.

    Returns:
        For each way of streaming, the root mean square of the difference relative to the whole
            mel's, and the largest difference.
    """
    with tempfile.TemporaryDirectory() as folder:
        published: Any = SimpleNamespace(sizes=vars(public.Sizes()))
        written = chatterbox_model.write_model(Path(folder), published, mean_flow=mean_flow)
        model = Token2Wav.load(written, runtime=RuntimeConfig(device="cpu", cache_mib=16))
        voice, tokens, starts = a_voice(_PROMPT), some_tokens(6 * _HOP), range(0, 6 * _HOP, _HOP)
        whole = model.mel(tokens, voice, streaming=False)
        seen = [model.mel(tokens[: start + 2 * _HOP], voice, streaming=False) for start in starts]
        cut = [
            mel[:, 2 * start : 2 * (start + _HOP)] for start, mel in zip(starts, seen, strict=True)
        ]
        ways = {"block mask": model.mel(tokens, voice), "windows": np.concatenate(cut, axis=1)}
    return {
        way: {
            "rms": float((mel - whole).std() / whole.std()),
            "largest": float(np.abs(mel - whole).max()),
        }
        for way, mel in ways.items()
    }


def main() -> None:
    parser = program_parser()
    parser.add_argument("--family", nargs="+", default=["cosyvoice2", "stepaudio2", "chatterbox"])
    parser.add_argument("--sizes", choices=_SIZES, default="public")
    parser.add_argument(
        "--seconds",
        type=int,
        nargs="+",
        default=[10, 30],
        help="positions of measured chunks after the first",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=_REPEATS,
        help="number of consecutive chunks that are timed at each position",
    )
    parser.add_argument(
        "--many",
        type=int,
        default=1,
        help="number of positions in --seconds that are also measured with four streams",
    )
    parser.add_argument(
        "--storage",
        default="float16",
        help="size of the cache of token2wav; four streams of CosyVoice2 take 0.5 GB per second",
    )
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", default="peers", help="name of the result")
    parser.add_argument(
        "--windows", action="store_true", help="only compare the methods of streaming Chatterbox"
    )
    options = parser.parse_args()
    if options.windows:
        kinds = {name: windows(mean_flow=name == "turbo") for name in ("chatterbox", "turbo")}
        save("chatterbox_windows", {"environment": describe(), **kinds})
    else:
        measure(options)


if __name__ == "__main__":
    main()
