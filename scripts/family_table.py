"""The table of `docs/models.md`: families at their published sizes.

    .venv/bin/python -m scripts.family_table

It has pace, waiting, memory and throughput. It is computed from the configurations, and from the
states that the networks declare; one column is measured, from `codec_peers.json` and
`flow_throughput.json` in `benchmarks/results`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from benchmarks.environment import RESULTS
from testkit.models import cosyvoice1_model
from testkit.models.published_codecs import codec_configs
from testkit.models.sized import public_configs
from token2wav.assembly import withheld_samples
from token2wav.config import StreamConfig
from token2wav.config.model_config import ModelConfig
from token2wav.serving.hops import HopSchedule
from token2wav_server.plan_memory import stream_needs

_TITLES = {"Step-Audio2": "Step-Audio2, MiniCPM-o"}
_SPEECH_SECONDS, _PROMPT_TOKENS = 30, 75
_STREAM = StreamConfig()
_HEADER = (
    "| | tokens a second | look-ahead, ms | first audio after | memory of a stream, MiB "
    "| seconds of audio a second, 2 cores |"
)


def configs() -> Iterator[tuple[str, ModelConfig]]:
    """Yields the name and the configuration of every family."""
    for name, config in public_configs().items():
        if name != "BigVGAN":  # a vocoder for the flow of CosyVoice3
            yield name, config
    yield "CosyVoice1", cosyvoice1_model.published_config()
    yield from codec_configs().items()


def row(name: str, config: ModelConfig) -> str:
    """Returns the row of a family."""
    rate = config.token_frame_rate
    tokens = first_tokens(config)
    needs = stream_needs(
        config,
        _STREAM,
        "float16",
        _PROMPT_TOKENS if config.takes_prompt else 0,
        round(_SPEECH_SECONDS * rate),
    )
    size = (needs.pages * needs.page_bytes + needs.context_bytes) / 2**20
    plural = "s" * (tokens > 1)
    cells = (
        *(_TITLES.get(name, name), f"{rate:.4g}", f"{1000 * lookahead_seconds(config):.0f}"),
        f"{tokens} token{plural}, {1000 * tokens / rate:.0f} ms",
        *(f"{size:,.0f}" if size >= 10 else f"{size:.1f}", streams_in_real_time(name)),
    )
    return f"| {' | '.join(cells)} |"


def first_tokens(config: ModelConfig) -> int:
    """Returns the number of tokens that must arrive before the first audio."""
    if "flow" not in config.stages:
        return config.hops(_STREAM)[0] + config.lookahead_tokens + config.grid(0).first_boundary
    schedule = HopSchedule.of(_STREAM, config, withheld_samples(config, _STREAM))
    if schedule.first_tokens:
        return schedule.first_tokens + schedule.provisional_lookahead
    return schedule.first + config.lookahead_tokens


def lookahead_seconds(config: ModelConfig) -> float:
    """Returns the time after a sample in which tokens change the sample: the look-ahead of all
    layers, without the rest of an attention block.
    """
    ahead = withheld_samples(config, StreamConfig(lookahead_frames=0))
    return config.lookahead_tokens / config.token_frame_rate + ahead / config.sample_rate


def streams_in_real_time(name: str) -> str:
    """Returns the measured number of streams that 2 cores keep at pace, from the batch with the
    highest throughput; a dash if the family was not measured.
    """
    codecs, flows = (
        [run for run in json.loads((RESULTS / file).read_text())["runs"] if run["family"] == name]
        for file in ("codec_peers.json", "flow_throughput.json")
    )
    rates = [
        row["ours_audio_seconds_per_second"]
        for run in codecs
        for row in run["rows"]
        if row["frames_before"]
    ]
    rates += [row["audio_seconds_per_second"][0] for run in flows for row in run["rows"]]
    return f"{max(rates):.3g}" if rates else "-"


def main() -> None:
    print(_HEADER)
    print("|---" * (_HEADER.count("|") - 1) + "|")
    for name, config in configs():
        print(row(name, config), flush=True)


if __name__ == "__main__":
    main()
