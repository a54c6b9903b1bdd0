"""CosyVoice1 (CosyVoice-300M) and the decoder of GLM-4-Voice: their folders. The flow is a
conformer, a length regulator and a U-Net, which is not causal; the vocoder is HiFT at 22.05 kHz.

Their configuration is read as data from `cosyvoice.yaml`, or from the `config.yaml` of GLM-4-Voice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from token2wav.config import StreamConfig
from token2wav.config.block_grid import BlockGrid
from token2wav.config.model_config import ENDINGS
from token2wav.config.token_format import TokenFormat
from token2wav.config.values import Bounds, check_bounds, prefixed
from token2wav.config.windows import Windows
from token2wav.errors import ConfigError, InputError
from token2wav.published import bounded
from token2wav.published.codec_sizes import CodecSizes
from token2wav.published.flow_config import (
    ENCODER_UNUSED,
    check_flow_used,
    conformer_from,
    hift_from,
    unet_from,
)
from token2wav.published.hyperyaml import HyperYaml, ModelNode, Tagged
from token2wav.published.registry import unfilled_network
from token2wav.published.sizes import ConformerConfig, HiFTConfig, UNetConfig
from token2wav.published.window_config import WindowCodecConfig

FILES = ("cosyvoice.yaml", "config.yaml")
FLOW = "MaskedDiffWithXvec"  # class of the flow; files of CosyVoice2 name another one
DOWNLOADS = ("|".join(FILES), "flow.safetensors|flow.pt", "hift.safetensors|hift.pt")

_STEPS = 10  # fixed in the public code
_AUDIO_RATE, _FRAME_SAMPLES = 22050, 256  # of the mel, fixed in the public code
_BLOCK_SIZE = 25  # attention block of an encoder, if the file does not set it
_PROMPT_SLACK = 4  # mel frames by which a prompt may be longer or shorter than its tokens
# Seconds of the windows of a stream: block, context before and after, and overlap.
_BLOCK, _LEFT, _RIGHT, _OVERLAP = 1.0, 2.0, 0.4, 0.2
_WHOLE_BLOCKS, _PART_BLOCKS = 60, 600  # blocks that are decoded at once, and blocks of a part


@dataclass(frozen=True, kw_only=True)
class CosyVoice1Sizes(CodecSizes):
    """Sizes of the flow and of the vocoder. Fields have the names of `cosyvoice.yaml`.

    Attributes:
        block_size: tokens of an attention block of the encoder of GLM-4-Voice, which repeats the
            nearest token in place of an interpolation; 0 for CosyVoice1.
    """

    vocab_size: bounded.Vocabulary
    spk_embed_dim: bounded.Width
    output_size: bounded.Width
    input_frame_rate: bounded.TokenRate
    inference_cfg_rate: bounded.Guidance
    regulator_layers: Annotated[int, Bounds(0, 16)]  # convolutions of the length regulator
    levels: bounded.Layers  # resolutions of the U-Net
    encoder: ConformerConfig
    estimator: UNetConfig
    hift: HiFTConfig
    block_size: Annotated[int, Bounds(0, 1000)] = 0

    def __post_init__(self) -> None:
        check_bounds(self, "flow")
        if self.output_size != self.hift.in_channels:
            raise ConfigError(
                f"hift.in_channels: {self.hift.in_channels} mel bands, but the flow makes "
                f"{self.output_size}"
            )
        if (rate := self.hift.sampling_rate) != _AUDIO_RATE:
            raise ConfigError(f"hift.sampling_rate: {rate}, but only {_AUDIO_RATE} is supported")
        if self.hift.samples_per_frame != _FRAME_SAMPLES:
            raise ConfigError(
                f"hift: {self.hift.samples_per_frame} samples per mel frame, but only "
                f"{_FRAME_SAMPLES} are supported"
            )
        if self.frame_samples < _FRAME_SAMPLES:
            raise ConfigError(
                f"flow.input_frame_rate: a token has {self.frame_samples} samples, fewer than the "
                f"{_FRAME_SAMPLES} of a mel frame"
            )
        if self.estimator.channels % 8:
            raise ConfigError(
                f"flow.decoder.estimator.channels: {self.estimator.channels} is not a multiple of "
                "8, the groups of a norm"
            )

    @property
    def tokens(self) -> TokenFormat:
        return TokenFormat.numbers(self.vocab_size)

    @property
    def audio_rate(self) -> int:
        return self.hift.sampling_rate

    @property
    def frame_samples(self) -> int:
        samples = self.hift.sampling_rate / self.input_frame_rate
        if not samples.is_integer():
            raise ConfigError(
                f"flow.input_frame_rate: {self.input_frame_rate:g} tokens per second have "
                f"{samples:.2f} samples each at {self.hift.sampling_rate} Hz, which is not a whole "
                "number"
            )
        return int(samples)

    def mel_frames(self, tokens: int) -> int:
        """Returns the mel frames of the first tokens of an utterance, rounded down as in the public
        code: 1 token has 441 samples, and a frame has 256.
        """
        return tokens * self.frame_samples // self.hift.samples_per_frame


@dataclass(frozen=True, kw_only=True)
class CosyVoice1Config(WindowCodecConfig):
    """Configuration of a CosyVoice1 model. Its flow computes windows of a stream; its vocoder
    continues the stream.
    """

    sizes: CosyVoice1Sizes
    weights: tuple[str, ...] = tuple(f"flow{ending}" for ending in ENDINGS)
    takes_prompt: bool = True
    ode_steps: int = _STEPS

    @property
    def mel_bands(self) -> int:
        return self.sizes.output_size

    @property
    def speaker_size(self) -> int:
        """Length of a speaker embedding; 0 for GLM-4-Voice, which has one voice."""
        return self.sizes.spk_embed_dim if self.takes_prompt else 0

    @property
    def stream_bytes(self) -> int:
        """Bytes that a stream keeps between its chunks: the state of the vocoder, tokens, and mel
        that fades.
        """
        fading = self.sizes.mel_frames(self.windows.overlap) + 1
        vocoder = int(unfilled_network(self, "decoder").vocoder_bytes)
        return vocoder + 4 * (self.windows.past + self.mel_bands * fading)

    def prompt_frames(self, tokens: int) -> range:
        frames = self.sizes.mel_frames(tokens)
        slack = _PROMPT_SLACK if tokens else 0
        return range(max(tokens > 0, frames - slack), frames + slack + 1)

    def grid(self, prompt_tokens: int, left_blocks: int = -1) -> BlockGrid:
        """Returns the block grid of a stream. Its blocks start at the end of the prompt."""
        return BlockGrid(
            self.block_tokens,
            prompt=prompt_tokens,
            prefix=prompt_tokens,
            prompt_padding=-prompt_tokens % self.block_tokens,
            left_blocks=left_blocks,
        )

    def with_stream_settings(self, stream: StreamConfig) -> WindowCodecConfig:
        """Applies the settings of windows. A window of GLM-4-Voice has whole attention blocks.

        The memory of attention grows with the square of a window. So a window and the blocks before
        it have at most as many tokens as a window of a whole utterance.
        """
        block, size = stream.block_tokens or self.block_tokens, self.sizes.block_size
        if size and block % size:
            raise ConfigError(
                f"stream.block_tokens: {block} is not a multiple of {size}, the attention block of "
                "the encoder"
            )
        left, most = stream.left_blocks, max(0, self.whole.block // block - 1)
        if left is not None and left > most:
            raise ConfigError(
                f"stream.left_blocks: {left}, expected -1 to {most} for windows of {block} tokens "
                "of this model"
            )
        if left == -1 and stream.lookahead_frames != 0:
            stream = replace(stream, left_blocks=most)
        return super().with_stream_settings(stream)

    def check_speed(self, speed: float) -> None:
        if speed != 1:
            raise InputError("speed", f"{speed:g}, but this model decodes windows; expected 1")


def read(folder: Path) -> CosyVoice1Config:
    path = next(path for name in FILES if (path := folder / name).is_file())
    document = HyperYaml.read(path)
    with prefixed(f"{path}: "):
        sizes = _sizes_from(document)
        windows, whole = _windows(sizes.input_frame_rate, sizes.block_size or 1)
        has_voices = not sizes.block_size
        return CosyVoice1Config.of(sizes, windows=windows, whole=whole, takes_prompt=has_voices)


def _windows(rate: float, step: int) -> tuple[Windows, Windows]:
    """Returns the windows of a stream, and of a whole utterance, at a token rate. Blocks and the
    context before them are multiples of `step` tokens.
    """
    block, left = (max(1, int(rate * seconds / step)) * step for seconds in (_BLOCK, _LEFT))
    right, overlap = (max(1, int(rate * seconds)) for seconds in (_RIGHT, _OVERLAP))
    part = _PART_BLOCKS * block
    whole = Windows(_WHOLE_BLOCKS * block, left, left, overlap, part)
    return Windows(block, left, right, overlap, part), whole


def _sizes_from(document: HyperYaml) -> CosyVoice1Sizes:
    flow = ModelNode.of(document.resolve("flow"), "flow", FLOW)
    bands = flow.get("output_size", bounded.Width)
    regulator = flow.child("length_regulator", "InterpolateRegulator")
    regulator.only({"channels": bands}, omitted=False)
    regulator.only({"out_channels": bands, "groups": 1})
    decoder = flow.child("decoder", "ConditionalCFM")
    solver = decoder.child("cfm_params", "DictConfig").child("content")
    solver.only({"solver": "euler", "t_scheduler": "cosine"}, omitted=False)
    estimator = decoder.child("estimator", "ConditionalDecoder")
    unet, levels = unet_from(estimator, bands)
    estimator.check_used("dropout")
    sizes = CosyVoice1Sizes(
        **flow.fields(CosyVoice1Sizes, "vocab_size", "spk_embed_dim", "input_frame_rate"),
        output_size=bands,
        inference_cfg_rate=solver.get("inference_cfg_rate", bounded.Guidance),
        regulator_layers=len(regulator.get("sampling_ratios", bounded.Rates)),
        levels=levels,
        **_encoder_from(flow),
        estimator=unet,
        hift=hift_from(document, causal=False),
    )
    regulator.check_used()
    check_flow_used(flow, decoder, solver)
    return sizes


def _encoder_from(flow: ModelNode) -> dict[str, Any]:
    """Reads the encoder, and the attention block of GLM-4-Voice."""
    section = flow.data.get("encoder")
    in_blocks = isinstance(section, Tagged) and section.target.endswith(".BlockConformerEncoder")
    encoder = flow.child("encoder", "BlockConformerEncoder" if in_blocks else "ConformerEncoder")
    attention = {"selfattention_layer_type": "block_rel_selfattn"} if in_blocks else {}
    config = conformer_from(flow, encoder, variant=attention)
    encoder.only({"static_chunk_size": 0, "use_dynamic_chunk": False})
    block = encoder.get_or("block_size", bounded.Tokens, _BLOCK_SIZE) if in_blocks else 0
    encoder.check_used(*ENCODER_UNUSED)
    return {"encoder": config, "block_size": block}
