"""StreamFlow: its folder, and a flow under block-wise guided attention.

Its configuration is read from `streamflow.yaml`. The defaults are the published sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from token2wav.config import StreamConfig
from token2wav.config.settings import Steps
from token2wav.config.values import Bounds, check_bounds, from_mapping, prefixed
from token2wav.errors import ConfigError
from token2wav.families.cosyvoice3 import CosyVoice3Config, FlowConfig
from token2wav.published import bounded
from token2wav.published.hyperyaml import HyperYaml
from token2wav.published.relations import Multiple
from token2wav.published.sizes import EstimatorConfig, GuidedAttention, ScheduleConfig

MODEL_FILE = "streamflow.yaml"
FILES = (MODEL_FILE,)
DOWNLOADS = (*FILES, "flow.safetensors|flow.pt", "bigvgan/*")

Absent = Annotated[int, Bounds(0, 0)]  # size of a layer that this flow does not have


@dataclass(frozen=True)
class StreamFlowSection:
    """Section `flow` of the file: a DiT under block-wise guided attention. The defaults are the
    sizes of StreamFlow-SR.

    Attributes:
        t_scheduler, times: kind and times of `ScheduleConfig`. A list of times also sets the number
            of steps.
        dim, depth, heads, dim_head, ff_mult: sizes of the DiT; it has `depth` layers.
        chunk_blocks: blocks of a chunk, unless the settings of the server set another hop.
        backward_layers: layers, counted from 1, in which a block also attends to the block before
            it.
        forward_layers: layers, counted from 1, in which a block also attends to the block after it.
            In layers of neither list a block attends only to itself.
    """

    type: Literal["streamflow"] = "streamflow"
    vocab_size: bounded.Vocabulary = 6561
    spk_embed_dim: bounded.Width = 192
    input_frame_rate: bounded.TokenRate = 25.0  # tokens per second
    token_mel_ratio: bounded.Ratio = 4  # mel frames per token
    mel_bands: bounded.Width = 80  # width of mel, token embedding and projected speaker
    n_timesteps: Steps = 10  # ODE steps
    inference_cfg_rate: bounded.Guidance = 0.5  # strength of classifier-free guidance
    t_scheduler: Literal["cosine", "linear"] = "cosine"
    times: bounded.Times = ()
    dim: bounded.Width = 1024
    depth: bounded.Layers = 22
    heads: bounded.Heads = 16
    dim_head: bounded.Width = 64
    ff_mult: bounded.Ratio = 2
    # mel frames of an attention block
    block_frames: Annotated[
        bounded.Frames, Multiple("token_mel_ratio", "the frames of a token")
    ] = 24
    chunk_blocks: Annotated[int, Bounds(1, 1000)] = 2
    backward_layers: tuple[bounded.Layers, ...] = (7, 14)
    forward_layers: tuple[bounded.Layers, ...] = (1,)

    def __post_init__(self) -> None:
        check_bounds(self, "flow")

    def schedule(self) -> ScheduleConfig:
        with prefixed("flow."):
            return ScheduleConfig(self.t_scheduler, self.times)

    def flow(self) -> GuidedFlowConfig:
        bands, times = self.mel_bands, self.schedule().times
        with prefixed("flow."):
            guided = GuidedAttention.assigned(self.depth, self.backward_layers, self.forward_layers)
        return GuidedFlowConfig(
            vocab_size=self.vocab_size,
            input_size=bands,
            spk_embed_dim=self.spk_embed_dim,
            token_mel_ratio=self.token_mel_ratio,
            inference_cfg_rate=self.inference_cfg_rate,
            estimator=EstimatorConfig(
                dim=self.dim,
                depth=self.depth,
                heads=self.heads,
                dim_head=self.dim_head,
                ff_mult=self.ff_mult,
                mel_dim=bands,
                mu_dim=bands,
                spk_dim=bands,
                out_channels=bands,
                static_chunk_size=self.block_frames,
                guided=guided,
            ),
            n_timesteps=len(times) - 1 if times else self.n_timesteps,
            chunk_blocks=self.chunk_blocks,
        )


@dataclass(frozen=True, kw_only=True)
class GuidedFlowConfig(FlowConfig):
    """Configuration of a flow with guided attention. It has no look-ahead layer, because its
    attention reads later blocks.
    """

    pre_lookahead_len: Absent = 0
    pre_lookahead_channels: Absent = 0
    lookbehind_len: Absent = 0
    chunk_blocks: Annotated[int, Bounds(1, 1000)] = 1  # blocks of a chunk

    @property
    def guided(self) -> GuidedAttention:
        assert self.estimator.guided is not None
        return self.estimator.guided

    @property
    def lookahead_tokens(self) -> int:
        return self.guided.future_blocks * self.block_tokens

    @property
    def past_tokens(self) -> int:
        """Tokens before a chunk that one evaluation of the estimator reaches back to."""
        return self.guided.past_blocks * self.block_tokens

    @property
    def hop_blocks(self) -> tuple[int, int]:
        return self.chunk_blocks, self.chunk_blocks

    @staticmethod
    def check_stream(stream: StreamConfig) -> None:
        """Raises ConfigError if settings of streams cannot be combined with guided attention."""
        default = StreamConfig()
        for key in ("left_blocks", "reference"):
            if (value := getattr(stream, key)) != getattr(default, key):
                raise ConfigError(
                    f"stream.{key}: {value} cannot be combined with guided attention, whose "
                    "layers set their own attention masks"
                )


@dataclass(frozen=True, kw_only=True)
class StreamFlowConfig(CosyVoice3Config):
    """Configuration of a StreamFlow model. Each layer of its estimator has an attention mask."""

    FILE: ClassVar[str] = MODEL_FILE

    takes_prompt: bool = False
    provisional_chunks: bool = False
    fixed_hops: bool = True

    @classmethod
    def _flow_from(cls, document: HyperYaml) -> tuple[FlowConfig, float, ScheduleConfig]:
        section = from_mapping(StreamFlowSection, document.resolve("flow"), "flow")
        return section.flow(), section.input_frame_rate, section.schedule()

    def check(self, stream: StreamConfig) -> None:
        super().check(stream)
        GuidedFlowConfig.check_stream(stream)


read = StreamFlowConfig.read
