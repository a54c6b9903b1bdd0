"""Pacing of tokens: replays playback for tokens that arrive at many paces, in bursts, with stalls.

The library's own chunker and scheduler select the chunks on a simulated clock
(`testkit/simulation`), so the speed of the machine does not matter. In the simulation, a batch
takes 50 ms plus 1 ms for each token of its chunks, and a player starts 0.2 s after the first audio.
A token of a provisional chunk counts, and takes time, by its share of ODE steps: 3 of 10. Prints
rows, and writes JSON.

    .venv/bin/python -m benchmarks.pacing
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from benchmarks.environment import describe, program_parser, save
from testkit.models.sized import public_configs
from testkit.simulation.listener import Listener
from testkit.simulation.server import Costs, Events, ServerKind, SimulatedServer
from token2wav import StreamConfig
from token2wav.assembly import withheld_samples
from token2wav.config import LimitConfig
from token2wav.config.model_config import ModelConfig
from token2wav.serving.hops import HopSchedule

PACES = (15, 20, 25, 30, 35, 40, 50, 75, 100, 200)
PATTERNS = ("steady", "messages of 5", "bursts of 20", "stalls of 1 s")
TOKENS, PROMPT = 250, 75
BUFFER_S = 0.2
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


def policies(config: ModelConfig) -> dict[str, HopSchedule]:
    """Returns the schedules to compare; the last is the default."""
    first, longest = config.hops(StreamConfig())
    block = config.block_tokens
    return {
        "hops that grow": HopSchedule(first, longest, block, adaptive=False),
        "one block": HopSchedule(block, block, block, adaptive=False),
        "as the listener can wait": HopSchedule.of(StreamConfig(first_tokens=0), config),
        "the same, and provisional": HopSchedule.of(
            StreamConfig(), config, withheld_samples(config, StreamConfig())
        ),
    }


def arrivals(pace: float, pattern: str = "steady") -> Iterator[tuple[float, int]]:
    """Yields the arrival time and the tokens of each message."""
    size = {"messages of 5": 5, "bursts of 20": 20}.get(pattern, 1)
    for stop in range(size, TOKENS + size, size):
        stalled = stop // 60 if pattern == "stalls of 1 s" else 0
        yield (stop - 1) / pace + stalled, min(size, TOKENS - stop + size)


def replay(
    schedule: HopSchedule, config: ModelConfig, pace: float, pattern: str = "steady"
) -> Heard:
    """Replays an utterance, which begins with its first token, on a server without other load."""
    events = Events()
    listener = Listener(list(arrivals(pace, pattern)), events, BUFFER_S)
    listener.connect(SimulatedServer(server_kind(config), events, schedule))
    listener.feed()
    events.run()
    return Heard(
        first_s=round(listener.playback.started or 0.0, 3),
        underruns=listener.playback.underruns,
        silent_s=round(listener.silent_s, 2),
        chunks=listener.chunks,
        computed=round(listener.work / listener.tokens, 2),
        provisional=round(listener.provisional / listener.tokens, 2),
    )


@cache
def server_kind(config: ModelConfig) -> ServerKind:
    share = config.provisional_steps(StreamConfig(), config.ode_steps) / config.ode_steps
    costs = Costs(batch_s=_FIXED_S, token_s=_TOKEN_S, provisional_share=share)
    limits = LimitConfig(player_buffer_seconds=BUFFER_S)
    return ServerKind(config, costs, limits=limits, prompt_tokens=PROMPT)


def main() -> None:
    program_parser().parse_args()
    config, rows = public_configs()["CosyVoice3"], list[dict[str, Any]]()
    for pattern, pace in itertools.product(PATTERNS, PACES):
        playbacks = {
            name: asdict(replay(schedule, config, pace, pattern))
            for name, schedule in policies(config).items()
        }
        rows.append({"pattern": pattern, "pace": pace, **playbacks})
        print(rows[-1], flush=True)
    save("pacing", {**describe(), "rows": rows})


if __name__ == "__main__":
    main()
