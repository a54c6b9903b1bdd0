"""Cost of batches: CPU time for a second of audio is measured, by the number of streams computed together.

CPU time and not time on the clock, of one thread as a worker of the server has it, and the least of several rounds: so
the figure hardly depends on who else uses the machine. The streams have the history of the middle of an utterance and
take hops of 25 tokens. Prints a line for each batch and writes JSON.

    .venv/bin/python -m benchmarks.batch_cost
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.environment import describe, save
from benchmarks.models import SIZES, random_model
from benchmarks.streaming_cost import prompt
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.execution.stages import MelChunk

HOP, LOOKAHEAD, RATE = 25, 3, 25.0
PROMPT_TOKENS = 75
_HISTORY_HOPS = 3


@dataclass
class Cost:
    """Cost in milliseconds of CPU time for a second of audio of one stream."""

    model: str
    streams: int
    flow_ms: float
    vocoder_ms: float


def measure(model: Token2Wav, name: str, streams: int, repeats: int) -> Cost:
    """Measures one batch, at the same place in the utterances again and again."""
    pipeline, voice = model.pipeline, prompt(PROMPT_TOKENS)
    flow_ms, vocoder_ms = [], []
    for _ in range(repeats):
        opened = [(pipeline.flow.open(voice), pipeline.vocoder.open()) for _ in range(streams)]
        chunker = pipeline.request(voice).chunker  # of all of them
        for number in range(_HISTORY_HOPS + 1):
            chunker.push(np.arange(HOP if number else HOP + LOOKAHEAD, dtype=np.int32))
            chunk = chunker.next_chunk
            assert chunk is not None
            start = time.thread_time()
            mels = pipeline.flow.advance([(flow, chunk) for flow, _ in opened])
            between = time.thread_time()
            pipeline.vocoder.advance(
                [(vocoder, MelChunk(mel, last=False)) for (_, vocoder), mel in zip(opened, mels, strict=True)]
            )
            end = time.thread_time()
            chunker.computed()
        per_second = 1000 / streams / (HOP / RATE)
        flow_ms.append((between - start) * per_second)
        vocoder_ms.append((end - between) * per_second)
        for flow, vocoder in opened:
            pipeline.flow.close(flow)
            pipeline.vocoder.close(vocoder)
    return Cost(name, streams, round(min(flow_ms), 2), round(min(vocoder_ms), 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["tiny", "small"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--name", default="batch_cost", help="of the result file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    costs = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.models:
            folder = random_model(Path(temporary) / name, SIZES[name])
            model = Token2Wav.load(folder, stream=StreamConfig(hop="fixed"), runtime=RuntimeConfig(device="cpu"))
            for streams in options.streams:
                cost = measure(model, name, streams, options.repeats)
                costs.append(cost)
                print(
                    f"{name:6} {streams:3} streams: flow {cost.flow_ms:7.2f} + vocoder {cost.vocoder_ms:7.2f} "
                    f"= {cost.flow_ms + cost.vocoder_ms:7.2f} ms for a second of audio",
                    flush=True,
                )
    save(options.name, {**describe(), "costs": [asdict(cost) for cost in costs]})


if __name__ == "__main__":
    main()
