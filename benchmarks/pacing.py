"""Pacing of tokens: replays playback for tokens that arrive at many paces, in bursts, with stalls.

The library's own chunker and scheduler select the chunks on a simulated clock
(`testkit/simulation`), so the speed of the machine does not matter. In the simulation, a batch
takes 50 ms plus 1 ms for each token of its chunks, and a player starts 0.2 s after the first audio.
The vocoder holds back 80 ms (CosyVoice3), in one table also 402 ms (CosyVoice2) and 90 ms (the demo
voice). A token of a provisional chunk counts, and takes time, by its share of ODE steps: 3 of 10,
and 2 of 2 for the demo voice. Prints rows, and writes JSON.

    .venv/bin/python -m benchmarks.pacing
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.environment import ROOT, describe, save
from testkit.models.sized import public_configs
from testkit.simulation.listener import Listener
from testkit.simulation.server import Costs, Events, ServerKind, SimulatedServer
from token2wav import StreamConfig
from token2wav.assembly import withheld_samples
from token2wav.config import LimitConfig
from token2wav.config.model_config import ModelConfig
from token2wav.published.registry import read_config
from token2wav.serving.hops import HopSchedule

PACES = (15, 20, 25, 30, 35, 40, 50, 75, 100, 200)
PATTERNS = ("steady", "messages of 5", "bursts of 20", "stalls of 1 s")
# `first_tokens` and `provisional_lookahead_tokens` of a stream
FIRST_TOKENS = ((0, 3), (5, 1), (5, 2), (6, 1), (6, 2), (8, 1), (8, 2), (10, 2), (12, 2), (16, 2))
FIRST_PACES = (25, 30, 50, 100)  # at which `first_tokens` is compared
PROMPTS = (0, 75, 80, 90)  # of CosyVoice3; other models have `PROMPT`
CROWDS = (1, 2, 4, 6, 8, 12, 16)
TOKENS, PROMPT = 250, 75
BUFFER_S = 0.2
_RATE = 25.0
_FIXED_S, _TOKEN_S = 0.05, 0.001


@dataclass
class Heard:
    """Playback and cost of one utterance of 10 s."""

    first_s: float  # time of the first audio; the first token comes at 0
    underruns: int  # of the player
    silent_s: float  # sum of all silences
    chunks: int
    computed: float  # work of all chunks, in tokens, relative to the tokens of the utterance
    provisional: float  # share of the audio from provisional chunks


@cache
def held_back(config: ModelConfig) -> int:
    """Returns the samples that the vocoder holds back with default settings."""
    return withheld_samples(config, StreamConfig())


def policies(config: ModelConfig) -> dict[str, HopSchedule]:
    """Returns the schedules to compare; the last is the default."""
    first, longest = config.hops(StreamConfig())
    block = config.block_tokens
    return {
        "hops that grow": HopSchedule(first, longest, block, adaptive=False),
        "one block": HopSchedule(block, block, block, adaptive=False),
        "as the listener can wait": HopSchedule.of(StreamConfig(first_tokens=0), config),
        "the same, and provisional": HopSchedule.of(StreamConfig(), config, held_back(config)),
    }


def arrivals(
    pace: float, pattern: str = "steady", begins: float = 0.0
) -> Iterator[tuple[float, int]]:
    """Yields the arrival time and the tokens of each message."""
    size = {"messages of 5": 5, "bursts of 20": 20}.get(pattern, 1)
    for stop in range(size, TOKENS + size, size):
        stalled = stop // 60 if pattern == "stalls of 1 s" else 0
        yield begins + (stop - 1) / pace + stalled, min(size, TOKENS - stop + size)


def replay(
    schedule: HopSchedule,
    config: ModelConfig,
    pace: float,
    pattern: str = "steady",
    prompt: int = PROMPT,
) -> Heard:
    """Replays one utterance on a server without other load."""
    return run([list(arrivals(pace, pattern))], schedule, config, prompt)[0]


def crowd(schedule: HopSchedule, config: ModelConfig, count: int) -> list[Heard]:
    """Replays utterances at the pace of speech that begin within 3 s, on one server."""
    begins = np.random.default_rng(0).uniform(0, 3, count).tolist()
    return run([list(arrivals(_RATE, begins=at)) for at in begins], schedule, config)


def run(
    utterances: Sequence[Sequence[tuple[float, int]]],
    schedule: HopSchedule,
    config: ModelConfig,
    prompt: int = PROMPT,
) -> list[Heard]:
    """Replays utterances, each of which begins with its first token, on a simulated server."""
    events, kind = Events(), server_kind(config, prompt)
    server = SimulatedServer(kind, events, schedule)
    listeners = [Listener(coming, events, BUFFER_S) for coming in utterances]
    for listener in listeners:
        listener.connect(server)
        listener.feed()
    events.run()
    return [
        Heard(
            first_s=round(listener.playback.started or 0.0, 3),
            underruns=listener.playback.underruns,
            silent_s=round(listener.silent_s, 2),
            chunks=listener.chunks,
            computed=round(listener.work / listener.tokens, 2),
            provisional=round(listener.provisional / listener.tokens, 2),
        )
        for listener in listeners
    ]


@cache
def server_kind(config: ModelConfig, prompt: int) -> ServerKind:
    share = config.provisional_steps(StreamConfig(), config.ode_steps) / config.ode_steps
    costs = Costs(batch_s=_FIXED_S, token_s=_TOKEN_S, provisional_share=share)
    limits = LimitConfig(player_buffer_seconds=BUFFER_S)
    return ServerKind(config, costs, limits=limits, prompt_tokens=prompt)


def by_pace(config: ModelConfig) -> Iterator[dict[str, Any]]:
    """Yields a row for each pattern and pace of tokens, with the playback of every policy."""
    for pattern, pace in itertools.product(PATTERNS, PACES):
        playbacks = {
            name: asdict(replay(schedule, config, pace, pattern))
            for name, schedule in policies(config).items()
        }
        yield {"pattern": pattern, "pace": pace, **playbacks}


def by_first_tokens(configs: Mapping[str, ModelConfig]) -> Iterator[dict[str, Any]]:
    """Yields a row for each model, start of a stream, length of a prompt and pace of tokens."""
    for model, (count, lookahead) in itertools.product(configs, FIRST_TOKENS):
        stream = StreamConfig(first_tokens=count, provisional_lookahead_tokens=lookahead)
        schedule = HopSchedule.of(stream, configs[model], held_back(configs[model]))
        prompts = PROMPTS if model == "CosyVoice3" else (PROMPT,)
        for prompt, pace in itertools.product(prompts, FIRST_PACES):
            facts = {"first_tokens": count, "provisional_lookahead_tokens": lookahead}
            playback = replay(schedule, configs[model], pace, prompt=prompt)
            yield {"model": model, **facts, "prompt": prompt, "pace": pace, **asdict(playback)}


def by_streams(config: ModelConfig) -> Iterator[dict[str, Any]]:
    """Yields a row for each number of streams on one machine, with means of its utterances."""
    starts = {"whole blocks": 0, "provisional": StreamConfig().first_tokens}
    for count in CROWDS:
        row: dict[str, Any] = {"streams": count}
        for name, first_tokens in starts.items():
            stream = StreamConfig(first_tokens=first_tokens)
            playbacks = crowd(HopSchedule.of(stream, config, held_back(config)), config, count)
            row[name] = {
                figure: round(fmean(getattr(playback, figure) for playback in playbacks), 2)
                for figure in ("underruns", "silent_s", "computed")
            }
        yield row


def printed(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prints rows when they are known, and returns them."""
    known = []
    for row in rows:
        print(row, flush=True)
        known.append(row)
    return known


def main() -> None:
    configs = {name: public_configs()[name] for name in ("CosyVoice3", "CosyVoice2")}
    configs["demo voice"] = read_config(ROOT / "examples" / "demo_voice" / "model")
    config = configs["CosyVoice3"]
    save(
        "pacing",
        {
            **describe(),
            "rows": printed(by_pace(config)),
            "first_tokens": printed(by_first_tokens(configs)),
            "crowds": printed(by_streams(config)),
        },
    )


if __name__ == "__main__":
    main()
