"""Table of public decoders of codecs beside ours, at their published sizes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lab.golden import golden_causal_dac as public_causal_dac
from lab.golden import golden_codecs as public
from lab.golden import golden_dac as public_dac
from lab.golden import golden_ear_tts as public_ear_tts
from lab.golden import golden_moss as public_moss
from lab.golden import golden_vibevoice as public_vibevoice
from lab.golden import golden_voxcpm as public_voxcpm
from lab.peers import codec_cpp
from lab.peers.codec_contestants import Contestant, Moshi, MossLite, Recomputing, Stateful
from testkit.models.codec_models import CODECS, FORMATS
from testkit.models.published_codecs import PUBLISHED
from token2wav.config.values import from_mapping, known_fields
from token2wav.families.causal_dac import CausalDacSizes
from token2wav.families.snac import FORMAT, SnacSizes
from token2wav.families.snac.network import Snac
from token2wav.networks.symmetric_codec import SymmetricCodec
from token2wav.networks.waveform_network import WaveformNetwork
from token2wav.published.codec_sizes import SymmetricCodecSizes
from token2wav.published.registry import read_config

AUDIO8, DAC, DAC_24KHZ, EAR_TTS, HIGGS = (
    PUBLISHED[name] for name in ("Audio8", "DAC", "DAC 24 kHz", "EAR-TTS", "Higgs Audio")
)
MIMI, NANOCODEC, QWEN3_OMNI, QWEN3_TTS = (
    PUBLISHED[name] for name in ("Mimi", "NanoCodec", "Qwen3-Omni", "Qwen3-TTS")
)
SNAC_24KHZ, SNAC_44KHZ, VOXCPM2 = (PUBLISHED[name] for name in ("SNAC", "SNAC 44.1 kHz", "VoxCPM2"))
HIGGS_RATES = tuple(HIGGS["acoustic_model_config"]["upsampling_ratios"])
MOSHI: dict[str, Any] = {"quantizer": {"n_q": 8}}
VIBEVOICE: dict[str, Any] = {"hidden_size": 64}  # the published sizes are defaults
_CONTEXT = 25  # frames that streams of qwen-tts and vllm-omni decode again
_SNAC_CONTEXT = 5  # the reach of SNAC's decoder to both sides, in frames
_DAC_CONTEXT, _NANOCODEC_CONTEXT = 18, 29  # earlier frames that change the audio of a call
# With attention a chunk ends one token after a window of 4 tokens. The new audio of a call begins
# two windows before its tokens, and the first window depends on the window before it.
_SNAC_WINDOW, _SNAC_WINDOWS_BEFORE, _SNAC_PAST_WINDOW = 4, 3, 1

_EAR_TTS_LATE = 8  # whole hops of the inverse STFT for the 6 samples that windows overlap
_SNAC_FRAME = 2048  # samples of a frame of seven codes
_SNAC_44_FRAME = 3072  # samples of a frame of fifteen codes


@dataclass(frozen=True)
class Match:
    """A public decoder and ours.

    Attributes:
        family: codec name in tables.
        peer: name of the public code.
        sizes: sizes of the networks, with published names.
        codebooks, codebook_size: codes of a frame, and entries of a codebook; numbers of a latent,
            and 0.
        make: function from the codes to the public contestant.
        write_model: function that writes the same weights to a folder in the published layout.
        block: frames of a call.
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


def _held(make: Callable[[Any], WaveformNetwork], sizes: Any) -> int:
    """Returns the samples that a decoder of some sizes holds back."""
    with torch.device("meta"):
        return make(sizes).output_delay


def matches() -> list[Match]:
    """Lists all matches."""

    def qwen3_tts(codes: torch.Tensor) -> Contestant:
        decoder = public.qwen3_tts_decoder(QWEN3_TTS, "sdpa")
        return Recomputing(lambda batch: decoder(batch)[:, 0], codes, 1920, _CONTEXT)

    def qwen3_omni(codes: torch.Tensor) -> Contestant:
        decoder = public.qwen3_omni_code2wav(QWEN3_OMNI, "sdpa")
        return Recomputing(lambda batch: decoder(batch)[:, 0], codes, 1920, _CONTEXT)

    def transformers_mimi(codes: torch.Tensor) -> Contestant:
        model = public.transformers_mimi(MIMI, "sdpa")
        return Recomputing(lambda batch: model.decode(batch).audio_values[:, 0], codes, 1920)

    def moshi_mimi(codes: torch.Tensor) -> Contestant:
        return Moshi(public.moshi_mimi(MOSHI), codes)

    def nanocodec(codes: torch.Tensor) -> Contestant:
        quantizer, decoder = public.nemo_modules(NANOCODEC)

        def decode(batch: torch.Tensor) -> torch.Tensor:
            lengths = torch.full((batch.shape[0],), batch.shape[2])
            values = quantizer.decode(indices=batch.transpose(0, 1), input_len=lengths)
            audio: torch.Tensor = decoder(inputs=values, input_len=lengths)[0]
            return audio

        return Recomputing(decode, codes, 1764)

    def dac(published: dict[str, Any], block: int) -> Callable[[torch.Tensor], Contestant]:
        sizes = from_mapping(SymmetricCodecSizes, published, "")

        def make(codes: torch.Tensor) -> Contestant:
            model = public_dac.transformers_dac(published)
            return Recomputing(
                lambda batch: model.decode(audio_codes=batch).audio_values,
                codes,
                sizes.frame_samples,
                block=block,
                held=_held(SymmetricCodec, sizes),
            )

        return make

    def higgs(codes: torch.Tensor) -> Contestant:
        model = public_dac.transformers_higgs(HIGGS)
        sizes = SymmetricCodecSizes(downsampling_ratios=HIGGS_RATES, upsampling_ratios=HIGGS_RATES)
        return Recomputing(
            lambda batch: model.decode(batch).audio_values[:, 0],
            codes,
            960,
            held=_held(SymmetricCodec, sizes),
        )

    def snac(codes: torch.Tensor) -> Contestant:
        held = _held(SymmetricCodec, SymmetricCodecSizes(downsampling_ratios=(2, 4, 8, 8)))
        return Recomputing(_public_snac(SNAC_24KHZ), codes, _SNAC_FRAME, _SNAC_CONTEXT, held=held)

    def snac_44(codes: torch.Tensor) -> Contestant:
        held = _held(Snac, FORMAT.read(SnacSizes, SNAC_44KHZ))
        held += (_SNAC_WINDOW - _SNAC_PAST_WINDOW) * _SNAC_44_FRAME
        return Recomputing(
            _public_snac(SNAC_44KHZ),
            codes,
            _SNAC_44_FRAME,
            _SNAC_WINDOWS_BEFORE * _SNAC_WINDOW,
            block=_SNAC_WINDOW,
            held=held,
        )

    def moss(codes: torch.Tensor) -> Contestant:
        return MossLite(public_moss.public_decoder(_moss_sizes()), codes)

    def vibevoice(latents: torch.Tensor) -> Contestant:
        model = public_vibevoice.tokenizer(VIBEVOICE)

        def begin(_: contextlib.ExitStack) -> Callable[[torch.Tensor], torch.Tensor]:
            cache = public_vibevoice.padding_cache()
            return lambda new: model.decode(new, padding_cache=cache, use_cache=True).audio[:, 0]

        return Stateful(begin, latents)

    def ear_tts(codes: torch.Tensor) -> Contestant:
        model = public_ear_tts.codec(EAR_TTS)

        def begin(_: contextlib.ExitStack) -> Callable[[torch.Tensor], torch.Tensor]:
            cache = public_ear_tts.public_module().CausalConv1dCache()
            return lambda new: model.decode(new, cache=cache)[0][:, 0]

        return Stateful(begin, codes, _EAR_TTS_LATE)

    def audio8(codes: torch.Tensor) -> Contestant:
        sizes = asdict(from_mapping(CausalDacSizes, known_fields(CausalDacSizes, AUDIO8), ""))
        quantizer, decoder = public_causal_dac.audio8_modules(sizes)
        return Recomputing(
            lambda batch: decoder(quantizer.decode(batch))[:, 0], codes, 2048, _CONTEXT
        )

    def voxcpm(latents: torch.Tensor) -> Contestant:
        model = public_voxcpm.audio_vae(VOXCPM2)

        def begin(streams: contextlib.ExitStack) -> Callable[[torch.Tensor], torch.Tensor]:
            decoder = streams.enter_context(model.streaming_decode())
            return lambda new: decoder.decode_chunk(new.transpose(1, 2))[:, 0]

        return Stateful(begin, latents)

    def cpp(
        kind: str,
        sizes: dict[str, Any],
        write_model: Callable[[Path, Any], Path],
        context: int | None = None,
        block: int = 1,
        held: int = 0,
    ) -> Callable[[torch.Tensor], Contestant]:
        def make(codes: torch.Tensor) -> Contestant:
            with TemporaryDirectory() as folder:
                model = write_model(Path(folder), sizes)
                samples = read_config(model).samples_per_token
                decode = codec_cpp.decoder(kind, model)
            return Recomputing(decode, codes, samples, context, block, held)

        return make

    write = {name: codec.write for name, codec in (CODECS | FORMATS).items()}
    qwen3 = (16, 2048)
    mimi = (8, 2048)
    dac_held = _held(SymmetricCodec, from_mapping(SymmetricCodecSizes, DAC, ""))
    snac_held = _held(SymmetricCodec, SymmetricCodecSizes(downsampling_ratios=(2, 4, 8, 8)))
    return [
        Match("Qwen3-TTS", "qwen-tts", QWEN3_TTS, *qwen3, qwen3_tts, write["qwen3_tts"]),
        Match("Qwen3-Omni", "transformers", QWEN3_OMNI, *qwen3, qwen3_omni, write["qwen3_omni"]),
        Match("Mimi", "transformers", MIMI, *mimi, transformers_mimi, write["mimi"]),
        Match("Mimi", "moshi", MOSHI, *mimi, moshi_mimi, write["mimi_of_moshi"]),
        Match("NanoCodec", "NeMo", NANOCODEC, 4, 4032, nanocodec, write["nanocodec"]),
        Match("DAC", "transformers", DAC, 9, 1024, dac(DAC, 4), write["dac"], 4, 512 / 44100),
        Match(
            *("DAC 24 kHz", "transformers", DAC_24KHZ, 32, 1024),
            *(dac(DAC_24KHZ, 3), write["dac"], 3, 320 / 24000),
        ),
        Match(
            *("Higgs Audio", "transformers", HIGGS, 8, 1024),
            *(higgs, write["higgs"]),
            frame_seconds=0.04,
        ),
        Match(
            *("SNAC", "snac", SNAC_24KHZ, 7, 4096),
            *(snac, _write_snac),
            frame_seconds=_SNAC_FRAME / 24000,
        ),
        Match(
            *("SNAC 44.1 kHz", "snac", SNAC_44KHZ, 15, 4096),
            *(snac_44, _write_snac),
            block=_SNAC_WINDOW,
            frame_seconds=_SNAC_44_FRAME / 44100,
        ),
        Match(
            *("MOSS", "moss-tts-lite", _moss_sizes(), 32, 1024),
            *(moss, write["moss"]),
        ),
        Match(
            *("VibeVoice", "transformers", VIBEVOICE, 64, 0),
            *(vibevoice, write["vibevoice"]),
            frame_seconds=3200 / 24000,
        ),
        Match("EAR-TTS", "NeMo", EAR_TTS, 31, 1024, ear_tts, write["ear_tts"]),
        Match(
            *("Audio8", "vllm-omni", AUDIO8, 10, 1024),
            *(audio8, write["causal_dac"]),
            frame_seconds=2048 / 44100,
        ),
        Match(
            *("VoxCPM2", "voxcpm", VOXCPM2, 64, 0),
            *(voxcpm, write["voxcpm"]),
            frame_seconds=0.04,
        ),
        Match(
            *("Qwen3-TTS", "codec.cpp", QWEN3_TTS, *qwen3),
            cpp("qwen3_tts_tokenizer", QWEN3_TTS, write["qwen3_tts"], _CONTEXT),
            write["qwen3_tts"],
        ),
        Match(
            *("Mimi", "codec.cpp", MIMI, *mimi),
            cpp("mimi", MIMI, write["mimi"]),
            write["mimi"],
        ),
        Match(
            *("NanoCodec", "codec.cpp", NANOCODEC, 4, 4032),
            cpp("nemo_nano_codec", NANOCODEC, write["nanocodec"], _NANOCODEC_CONTEXT),
            write["nanocodec"],
        ),
        Match(
            *("DAC", "codec.cpp", DAC, 9, 1024),
            cpp("dac", DAC, write["dac"], _DAC_CONTEXT, 4, dac_held),
            *(write["dac"], 4, 512 / 44100),
        ),
        Match(
            *("SNAC", "codec.cpp", SNAC_24KHZ, 7, 4096),
            cpp("snac", SNAC_24KHZ, _write_snac, _SNAC_CONTEXT, held=snac_held),
            _write_snac,
            frame_seconds=_SNAC_FRAME / 24000,
        ),
    ]


def _public_snac(sizes: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the public decoder of SNAC with silent noise."""
    model = public_dac.public_snac(sizes)
    _silence_noise(model.state_dict())

    def decode(codes: torch.Tensor) -> torch.Tensor:
        audio: torch.Tensor = model.decode(public_dac.by_codebook(codes, sizes["vq_strides"]))[:, 0]
        return audio

    return decode


def _moss_sizes() -> dict[str, Any]:
    """Returns the published sizes of the MOSS Audio Tokenizer, the defaults of the library."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({"model_type": "moss-audio-tokenizer"}))
        config: Any = read_config(path.parent)
    sizes = config.sizes
    parts = [
        {name: value for name, value in asdict(part).items() if value is not None}
        for part in sizes.parts
    ]
    return {
        "causal_transformer_context_duration": sizes.causal_transformer_context_duration,
        "quantizer_kwargs": asdict(sizes.quantizer),
        "decoder_kwargs": parts,
    }


def _write_snac(folder: Path, sizes: dict[str, Any]) -> Path:
    """Writes a folder of SNAC with silent noise."""
    path = CODECS["snac"].write(folder, sizes) / "pytorch_model.bin"
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
