"""Cost of a frame of codec decoders in public code and in this library, on the same weights, codes
and cores, in turns.

Every contestant (`codec_contestants.py`, in pairs of `codec_matches.py`) streams frame by frame, as
a language model that speaks does. DAC gets blocks of 4 frames, and SNAC with attention the 4 tokens
of a window. The comparison
takes the public code's streams in turns where that is faster than one batch. Sizes are the
published ones, and weights are random: speed does not depend on training. Run it in the environment
that `lab/golden/golden_codecs.py` describes, with this project's requirements:

    public/bin/python -m lab.peers.codec_peers
    CODEC_CPP=path/to/codec.cpp public/bin/python -m lab.peers.codec_peers --peer codec.cpp \\
        --streams 1 8

`lab.pictures` draws the results. `codec_cpp.py` tells how to build codec.cpp. Public code
without a state is also timed with all frames of a stream at once.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.environment import describe, program_parser, save, saved_runs
from lab.peers.codec_contestants import Contestant, Ours, Recomputing
from lab.peers.codec_matches import Match, matches

_PACKAGES = (
    *("qwen-tts-compat", "transformers", "moshi", "nemo-toolkit", "snac", "moss-tts-lite"),
    *("voxcpm", "vllm-omni"),
)
_COMPARED = 30  # number of calls of which the audio is compared
_POSITIONS = {1: (0, 25, 125), 8: (0, 25), 32: (0, 25)}  # calls before the timed ones, by streams
_REPEATS = {1: 5, 8: 3, 32: 2}  # calls that are timed at a position, by streams

Row = dict[str, Any]


def difference_db(both: dict[str, Contestant]) -> float:
    """Compares the audio of the first frames of one stream.

    Returns:
        The root mean square of the public audio over that of the difference, in dB.
    """
    heard = {}
    for name, contestant in both.items():
        contestant.start(1)
        heard[name] = np.concatenate([contestant.frame(index) for index in range(_COMPARED)])
    size = min(len(audio) for audio in heard.values())  # contestants may withhold samples
    signal, difference = heard["public"][:size], heard["ours"][:size] - heard["public"][:size]
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
        start = next(
            (position for position in positions if position <= index < position + repeats), None
        )
        seconds = _seconds(both, index, index, measured=start is not None)
        if start is not None:
            times.append(seconds)
            if index == start + repeats - 1:
                yield _row(times, start, streams, call_seconds)
                times = []


def _seconds(
    both: dict[str, Contestant], index: int, turn: int, *, measured: bool
) -> dict[str, float]:
    """Times a frame of one contestant after the other; the order alternates from turn to turn."""
    seconds = {}
    for name, contestant in sorted(both.items(), reverse=bool(turn % 2)):
        if measured or contestant.every_frame:
            begin = time.perf_counter()
            contestant.frame(index)
            seconds[name] = time.perf_counter() - begin
    return seconds


def _row(times: list[dict[str, float]], frames: int, streams: int, call_seconds: float) -> Row:
    row: Row = {"streams": streams, "frames_before": frames}
    for name in ("public", "ours"):
        seconds = [turn[name] for turn in times]
        row[f"{name}_ms"] = _milliseconds(seconds)
        rate = streams * call_seconds / statistics.median(seconds)
        row[f"{name}_audio_seconds_per_second"] = round(rate, 2)
    return row


def whole(both: dict[str, Contestant]) -> Row:
    """Times all frames of one stream at once: median, least and most, in ms."""
    times: list[dict[str, float]] = []
    for turn in range(_REPEATS[1] + 1):  # one more for warm-up
        seconds = {}
        for name, contestant in sorted(both.items(), reverse=bool(turn % 2)):
            assert isinstance(contestant, Recomputing | Ours)
            begin = time.perf_counter()
            contestant.whole()
            seconds[name] = time.perf_counter() - begin
        times.append(seconds)
    return {f"{name}_ms": _milliseconds([turn[name] for turn in times[1:]]) for name in both}


def _milliseconds(seconds: list[float]) -> list[float]:
    """Returns the median, the least and the most, in ms."""
    return [
        round(1e3 * value, 2) for value in (statistics.median(seconds), min(seconds), max(seconds))
    ]


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


def measure(out: str, families: list[str], peers: list[str], stream_counts: list[int]) -> None:
    """Measures matches one by one. The run of a match replaces its older run in the file."""
    runs = saved_runs(out)
    for match in matches():
        if (families and match.family not in families) or match.peer not in peers:
            continue
        random, shape = np.random.default_rng(0), (160 * match.block, match.codebooks)
        codes = torch.from_numpy(
            random.integers(0, match.codebook_size, shape)
            if match.codebook_size
            else random.standard_normal(shape, np.float32)
        )
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            model = match.write_model(Path(folder), match.sizes)
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
            for streams in stream_counts:
                for row in rows(both, streams, match.call_seconds):
                    run["rows"].append(row)
                    print(match.family, match.peer, row, flush=True)
            compare(run["rows"])
            if isinstance(both["public"], Recomputing):
                frames = len(codes)
                run["whole"] = {"seconds": frames * match.frame_seconds, **whole(both)}
                print(match.family, match.peer, "whole", run["whole"], flush=True)
        other_runs = [other for other in runs if (other["family"], other["peer"]) != _key(match)]
        runs = sorted([*other_runs, run], key=lambda run: (run["family"], run["peer"]))
        save(out, {"runs": runs})


def _key(match: Match) -> tuple[str, str]:
    return match.family, match.peer


def main() -> None:
    parser = program_parser()
    names = sorted({match.family for match in matches()})
    parser.add_argument("--family", nargs="+", choices=names, default=[])
    peers = sorted({match.peer for match in matches()})
    parser.add_argument(
        "--peer",
        nargs="+",
        choices=peers,
        default=[peer for peer in peers if peer != "codec.cpp"],
        help="public codes (default: all that are Python packages)",
    )
    counts = sorted(_POSITIONS)
    parser.add_argument("--streams", nargs="+", type=int, choices=counts, default=counts)
    parser.add_argument("--out", default="codec_peers", help="name of the result")
    options = parser.parse_args()
    measure(options.out, options.family, options.peer, options.streams)


if __name__ == "__main__":
    main()
