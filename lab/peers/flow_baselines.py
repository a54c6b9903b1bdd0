"""Section baselines of the GPU report: ways to compute CosyVoice3 beside token2wav's, with the same
weights, on the same card and by the same call, and their errors.

The public loop computes the whole history again for every chunk, one request at a time, as the
servers of CosyVoice and vLLM-Omni do by default. The peers' algorithm is `PeerFlow`. Its vocoder is
token2wav's, so that only the flows differ. Layers are compiled with `torch.compile` where the name
says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.chunk_batch import chunk, chunk_key
from benchmarks.gpu.parity import MEL, Utterance, reference, speak
from benchmarks.gpu.settings import LOOP, OURS, PACE, PROMPT_TOKENS, Row, Rows, Settings
from lab.peers.peer_flow import PeerFlow, compile_layers
from token2wav import StreamConfig, Token2Wav
from token2wav.stages.stage import Stages

PEERS = "peers' algorithm, compiled"
SYSTEMS = (LOOP, f"{LOOP}, compiled", PEERS, OURS)
_SPOKEN_S = 13.0  # longest utterance of section parity
_EXACT = StreamConfig(first_tokens=0)

Make = Callable[[int, float], Token2Wav]  # makes a model for some streams of some seconds


def baselines(folder: Path, settings: Settings) -> Rows:
    """Measures each system: the error of one stream, and chunks after each history."""
    [expected], hop = reference(folder, settings, 1), settings.hops[0]
    for name in SYSTEMS:
        make, alone = system(name, folder, settings), name.startswith(LOOP)
        facts = {"system": name, "one at a time": alone}

        def timed(streams: int, spoken_s: float, make: Make = make, facts: Row = facts) -> Row:
            model = make(streams, spoken_s + 2 * hop / PACE)
            return facts | chunk(model, settings.repeats, streams, hop, spoken_s, settings.repeat_s)

        yield f"{name}: one stream", partial(_error, name, make, expected, settings)
        for streams in (1,) if alone else settings.batches:
            for spoken_s in settings.histories:
                yield (
                    f"{name}: {chunk_key(streams, hop, spoken_s)}",
                    partial(timed, streams, spoken_s),
                )


def system(name: str, folder: Path, settings: Settings) -> Make:
    """Loads a system. A name that ends in `compiled` compiles the layers of its estimator."""
    runtime = settings.runtime()
    if name == OURS:
        model = Token2Wav.load(folder, stream=_EXACT, runtime=runtime)
        return lambda streams, seconds: model
    loop = Token2Wav.load(folder, stream=StreamConfig(reference=True), runtime=runtime)
    if name.endswith("compiled"):
        compile_layers(loop.pipeline.flow)
    if name.startswith(LOOP):
        return lambda streams, seconds: loop
    vocoder = Token2Wav.load(folder, stream=_EXACT, runtime=runtime, stages=("vocoder",))
    ratio, rate = loop.config.token_mel_ratio, loop.config.token_frame_rate

    def make(streams: int, seconds: float) -> Token2Wav:
        frames = ratio * (PROMPT_TOKENS + round(rate * seconds))
        flow = PeerFlow(loop.pipeline.flow, streams, frames)
        stages = Stages({"flow": flow, "vocoder": vocoder.pipeline.vocoder}, loop.summary)
        return Token2Wav(loop.config, stages, _EXACT)

    return make


def _error(name: str, make: Make, expected: Utterance, settings: Settings) -> Row:
    """Compares the first half of a mel with torch in float32, because the public loop computes the
    last chunk of an utterance under full attention.
    """
    [heard] = speak(make(1, _SPOKEN_S), [expected])
    mels = [mel[:, : mel.shape[1] // 2].cpu() for mel in (heard.mel, expected.mel)]
    error = float((mels[0] - mels[1]).square().mean().sqrt() / mels[1].std())
    bound = MEL[settings.precision]
    problem = None if error <= bound else f"mel {error:.1e}, at most {bound:.1e}"
    return {"system": name, "mel_error": error, "problem": problem}
