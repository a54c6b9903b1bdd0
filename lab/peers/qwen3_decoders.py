"""Section qwen3_tts of the GPU report: the public decoders of Qwen3-TTS and Qwen3-Omni beside ours.

Both have the same random weights. The public decoders have no state: as their streams do, each call
decodes the last 25 frames again. The packages are those of `lab/golden/golden_codecs.py`. A decoder
whose package is missing is left out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.chunk_batch import spread_ms
from benchmarks.gpu.codecs import packets
from benchmarks.gpu.settings import LeftOut, Row, Rows, Settings
from lab.golden import golden_codecs as golden
from testkit.models.codec_models import CODECS
from testkit.models.published_codecs import SIXTEENTH, SIZES
from token2wav import RuntimeConfig, StreamConfig, Token2Wav

_CONTEXT = 25  # frames that a stream of a public decoder decodes again
_FRAME_SAMPLES = 1920
_COMPARED = 30  # frames of which the audio is compared
_PUBLIC: dict[str, Callable[..., Any]] = {
    "qwen3_tts": golden.qwen3_tts_decoder,  # of `qwen-tts`
    "qwen3_omni": golden.qwen3_omni_code2wav,  # of `transformers`
}


def qwen3_tts(folder: Path, settings: Settings) -> Rows:
    """Measures the difference of each public decoder from ours, and packets of a frame of both."""
    for name, make in _PUBLIC.items():
        sizes = (SIXTEENTH if settings.size == "tiny" else SIZES)[name]
        try:
            decoder = make(sizes, "sdpa").to(settings.device)
        except ImportError as error:
            yield f"{name}: public decoder", partial(_left_out, f"not installed: {error.name}")
            continue
        runtime = RuntimeConfig(settings.device, "torch")
        with tempfile.TemporaryDirectory() as temporary:
            path = CODECS[name].write(Path(temporary), sizes)
            stream = StreamConfig(max_hop_tokens=1, lookahead_frames=0)
            ours = Token2Wav.load(path, stream=stream, runtime=runtime)
        codes = golden.codes_of(_COMPARED, sizes["num_quantizers"], sizes["codebook_size"])
        yield f"{name}: difference", partial(_difference, decoder, ours, codes)
        public = {"public": decoder}
        if settings.on_gpu:  # on a CPU the compilation takes many minutes
            public["public, compiled"] = torch.compile(decoder, dynamic=True)
        for streams in settings.batches:
            for label, decode in public.items():
                batch = codes[: _CONTEXT + 1].T.repeat(streams, 1, 1).to(settings.device)
                yield (
                    f"{name}: {label}, {streams} streams",
                    partial(_decoded, decode, batch, settings.repeats),
                )
            yield f"{name}: ours, {streams} streams", partial(packets, ours, settings, streams)


def _left_out(reason: str) -> Row:
    raise LeftOut(reason)


@torch.inference_mode()
def _difference(decoder: Any, ours: Token2Wav, codes: torch.Tensor) -> Row:
    """Returns the root mean square of the public audio over that of the difference, in dB."""
    audio = ours.synthesize(codes.numpy().astype(ours.config.tokens.dtype))
    public = decoder(codes.T[None].to(next(decoder.parameters()).device))[0, 0].cpu().numpy()
    error = max(float(np.std(audio - public)), 1e-12)
    return {"difference_db": round(float(20 * np.log10(np.std(public) / error)), 1)}


@torch.inference_mode()
def _decoded(
    decode: Callable[[torch.Tensor], torch.Tensor], codes: torch.Tensor, repeats: int
) -> Row:
    """Times the last frame of codes (streams, codebooks, frames), with its audio on the host."""
    times = []
    for _ in range(repeats + 3):  # the first ones compile and warm up
        began = time.perf_counter()
        audio = decode(codes)
        audio[..., -_FRAME_SAMPLES:].cpu()
        times.append(time.perf_counter() - began)
    ms, packet_s = spread_ms(times[3:]), _FRAME_SAMPLES / 24000
    rate = round(len(codes) * packet_s * 1000 / ms[0], 1)
    return {"packet_s": round(packet_s, 4), "ms": ms, "times real time": rate}
