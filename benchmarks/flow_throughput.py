"""Throughput of the flow decoders at their published sizes, with random weights.

Streams of one voice run in one batch, in chunks of whole attention blocks of about a second. The
first chunk is not timed. Three chunks are timed, or fewer if they take longer than a minute. Prints
the seconds of audio that are computed in a second, and writes JSON for `benchmarks.family_table`:

    .venv/bin/python -m benchmarks.flow_throughput
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.environment import describe, save, saved_runs
from testkit.models.random_weights import fill
from testkit.models.sized import a_voice, public_configs
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.assembly import Assembly
from token2wav.backends import LoadContext
from token2wav.config.model_config import ModelConfig, StageName
from token2wav.layers.streaming import WaveformNetwork

_STREAMS = (1, 4)
_REPEATS, _LONGEST_SECONDS = 3, 60


class _RandomAssembly(Assembly):
    """Assembly of a model with random weights, which needs no model folder."""

    def loaded(self, name: StageName) -> Any:
        network: Any = fill(self.family.network(self.config, name))
        if isinstance(network, WaveformNetwork):
            network.freeze()
        return network.eval().requires_grad_(False)


def random_model(config: ModelConfig) -> Token2Wav:
    """Makes a model with random weights on the CPU. Its chunks have about a second of audio."""
    block = config.block_tokens
    hop = block * max(1, round(config.token_frame_rate / block))
    stream = StreamConfig(first_tokens=0, max_hop_tokens=max(hop, config.hops(StreamConfig())[0]))
    context = LoadContext(Path("no folder"), RuntimeConfig("cpu", "torch"), torch.device("cpu"))
    return Token2Wav(config, _RandomAssembly(context, config, stream).stages(), stream)


@torch.inference_mode()
def throughput(model: Token2Wav, streams: int) -> dict[str, Any]:
    """Times chunks of several streams, which one batch computes."""
    config, pipeline = model.config, model.pipeline
    voice, random = a_voice(config), np.random.default_rng(0)
    requests = [pipeline.request(voice) for _ in range(streams)]
    for request in requests:
        pipeline.open(request)
    rates: list[float] = []
    end = time.perf_counter() + _LONGEST_SECONDS
    while len(rates) < 2 or (len(rates) <= _REPEATS and time.perf_counter() < end):
        while requests[0].chunker.next_chunk is None:
            tokens = config.tokens.draw(1, random)
            for request in requests:
                request.chunker.push(tokens)
        seconds = requests[0].next_tokens / config.token_frame_rate
        begin = time.perf_counter()
        for chunk in pipeline.advance(requests):
            if isinstance(chunk, Exception):
                raise chunk
        rates.append(streams * seconds / (time.perf_counter() - begin))
        for request in requests:
            request.chunker.finish_chunk()
    for request in requests:
        pipeline.close(request)
    timed = rates[1:]
    figures = (statistics.median(timed), min(timed), max(timed))
    return {
        "streams": streams,
        "chunk_seconds": round(seconds, 2),
        "audio_seconds_per_second": [round(rate, 3) for rate in figures],
    }


def main() -> None:
    configs = public_configs()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", nargs="*", choices=configs, default=list(configs))
    options = parser.parse_args()
    runs = saved_runs("flow_throughput")
    for family in tqdm(options.family, unit="family"):
        model = random_model(configs[family])
        rows = [throughput(model, streams) for streams in _STREAMS]
        tqdm.write(f"{family} {rows}")
        runs = [run for run in runs if run["family"] != family]
        runs.append({"family": family, "environment": describe(), "rows": rows})
        save("flow_throughput", {"runs": runs})
        del model


if __name__ == "__main__":
    main()
